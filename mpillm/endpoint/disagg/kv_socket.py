"""KV caches between two runs, over TCP: a context server keeps them, a generation server fetches them.

A connection fetches one cache. The client sends the 16 bytes of its key. When the cache is complete, the
server answers with its size (int64, little-endian; -1: no cache under this key), its checksum and its bytes.
The client confirms with one byte, and the server frees the cache. A cache that is not fetched is dropped
after a timeout. Each fetch has a thread, so that neither the engine's steps nor HTTP wait for a socket. A
client without a valid key gets no thread (`launch.handshake_listener`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from launch.handshake_listener import HandshakeListener
from mpillm.cores.capabilities import Cache

_log = logging.getLogger(__name__)
KEY_BYTES = 16
_HEAD = struct.Struct("<qI")  # size, checksum
_NOTHING = _HEAD.pack(-1, 0)
_FETCHED = b"\x01"
_BACKLOG = 256
TOO_LATE = "its KV cache did not come in time (--kv_transfer_timeout_ms)"
_CONNECT_S = 5.0
_CALLERS = 4  # clients of one cache: the store may not have detected a broken connection yet
_CHUNK = 1 << 23  # bytes of one call
_TIMEVAL = struct.Struct("@ll")
_PIECE = 1 << 13  # 64-bit words of one sum


class CacheLost(Exception):
    """A cache cannot be fetched; the message has the cause."""


@dataclass
class _StoredCache:
    id: int
    key: bytes
    until: float  # deadline, time.monotonic()
    cache: Cache | None = None
    ready: threading.Event = field(default_factory=threading.Event)  # set when the cache is stored or dropped
    callers: int = 0


class KvStore:
    """The caches of requests until they are fetched, by request id. Shared by threads."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen at a free port of `host`. A cache is kept for `timeout_s` at most.

        Raises OSError if there is no such host.
        """
        self._timeout_s = timeout_s
        self.max_open = 1
        """Limit of open context-only requests, because other requests also need credits."""
        self._lock = threading.Lock()
        self._stored: dict[int, _StoredCache] = {}
        self._by_key: dict[bytes, _StoredCache] = {}
        self._fetched: list[int] = []
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.port: int = listener.getsockname()[1]
        self._listener = HandshakeListener("mpillm-kv", listener, KEY_BYTES, self._admit)

    def open(self, id_: int) -> None:
        """Accept fetches of the request's cache from now on. A fetch waits until the cache is stored."""
        stored = _StoredCache(id_, secrets.token_bytes(KEY_BYTES), time.monotonic() + self._timeout_s)
        with self._lock:
            self._stored[id_] = self._by_key[stored.key] = stored

    def key(self, id_: int) -> bytes | None:
        """Return the key of an open request; None if it is not open."""
        with self._lock:
            return stored.key if (stored := self._stored.get(id_)) else None

    def put(self, id_: int, cache: Cache) -> None:
        """Store the complete cache of an open request."""
        with self._lock:
            stored = self._stored[id_]
            stored.cache = cache
        stored.ready.set()

    def drop(self, id_: int) -> None:
        """Forget the request, even a completed fetch, because its id may be used again."""
        with self._lock:
            if id_ in self._fetched:
                self._fetched.remove(id_)
            if (stored := self._stored.pop(id_, None)) is None:
                return
            del self._by_key[stored.key]
        stored.ready.set()

    def take_fetched(self) -> list[int]:
        """Return the requests whose caches have been fetched since the last call, and forget them."""
        if not self._fetched:
            return []
        with self._lock:
            fetched, self._fetched = self._fetched, []
        return fetched

    def overdue(self) -> list[int]:
        """Return the open requests whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            return [id_ for id_, stored in self._stored.items() if now > stored.until]

    def close(self) -> None:
        self._listener.close()

    # --- threads ---

    def _admit(self, connection: socket.socket, key: bytes) -> None:
        """Start a thread for a client with a cache's key, within a limit per cache."""
        with self._lock:
            stored = self._by_key.get(key)
            if stored is not None and stored.callers < _CALLERS:
                stored.callers += 1
                threading.Thread(target=self._serve, args=(connection, stored), daemon=True).start()
                return
        with connection, contextlib.suppress(OSError):
            connection.send(_NOTHING)

    def _serve(self, connection: socket.socket, stored: _StoredCache) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            stored.ready.wait(max(0.0, stored.until - time.monotonic()))
            connection.settimeout(self._timeout_s)
            if (cache := stored.cache) is None:
                connection.sendall(_NOTHING)
                return
            connection.sendall(_HEAD.pack(cache.nbytes, checksum(cache)))
            end = time.monotonic() + self._timeout_s
            _move(connection, connection.send, cache, end)
            if bytes(_received(connection, plain_memory(1), end)) == _FETCHED:
                self._note_fetched(stored)
        with self._lock:
            stored.callers -= 1

    def _note_fetched(self, stored: _StoredCache) -> None:
        with self._lock:
            if self._by_key.pop(stored.key, None) is not None:  # otherwise it was dropped in the meantime
                del self._stored[stored.id]
                self._fetched.append(stored.id)


def plain_memory(n_bytes: int) -> Cache:
    return np.empty(n_bytes, np.uint8)


def fetch(
    host: str,
    port: int,
    key: bytes,
    n_bytes: int,
    end: float,
    new: Callable[[int], Cache] = plain_memory,
) -> Cache:
    """Wait for a cache of `n_bytes`, and fetch it into memory that `new` returns.

    Raises CacheLost if the cache does not arrive until `end`, time.monotonic().
    """
    try:
        connect_s = max(0.001, min(end - time.monotonic(), _CONNECT_S))
        with socket.create_connection((host, port), connect_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(key)
            size, expected = _HEAD.unpack(_received(connection, plain_memory(_HEAD.size), end).tobytes())
            if size < 0:
                raise CacheLost("it has dropped the KV cache")
            if size != n_bytes:
                raise CacheLost(f"its KV cache has {size} bytes, not {n_bytes}: another model or data type")
            cache = _received(connection, new(n_bytes), end)
            if checksum(cache) != expected:
                raise CacheLost("its KV cache arrived with another checksum")
            connection.sendall(_FETCHED)
            return cache
    except TimeoutError:
        raise CacheLost(TOO_LATE) from None
    except EOFError:
        raise CacheLost("it closed the connection before its KV cache was here") from None
    except OSError as error:
        raise CacheLost(f"its KV cache can't be fetched: {error.strerror or error}") from error


def checksum(cache: Cache) -> int:
    """Return the CRC of sums over a cache's pieces. It takes a tenth of the time of a CRC of all bytes."""
    integers = cache[: len(cache) // 8 * 8].view(np.uint64)
    n_in_pieces = len(integers) // _PIECE * _PIECE
    # One NumPy call sums all pieces, because it releases Python's lock.
    sums = integers[:n_in_pieces].reshape(-1, _PIECE).sum(axis=1, dtype=np.uint64)
    if n_in_pieces < len(integers):
        sums = np.append(sums, integers[n_in_pieces:].sum(dtype=np.uint64))
    return zlib.crc32(cache[8 * len(integers) :].tobytes(), zlib.crc32(sums.tobytes()))


def _received(connection: socket.socket, into: Cache, end: float) -> Cache:
    """Fill `into`; `end`: deadline, time.monotonic()."""
    _move(connection, lambda part: connection.recv_into(part, 0, socket.MSG_WAITALL), into, end)
    return into


def _move(connection: socket.socket, call: Callable[[memoryview], int], cache: Cache, end: float) -> None:
    """Send or receive a complete cache with `call`; `end`: deadline, time.monotonic().

    Each call waits in the kernel for many bytes: after a call, this thread needs Python's lock, which the
    main thread rarely releases. Raises TimeoutError, and EOFError if the connection is closed.
    """
    connection.settimeout(None)
    view, at = cache.data, 0
    while at < len(cache):
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        seconds, fraction = divmod(max(0.001, left), 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(fraction * 1e6)))
        try:
            n = call(view[at : at + _CHUNK])
        except BlockingIOError:
            raise TimeoutError from None
        if n == 0:
            raise EOFError
        at += n
