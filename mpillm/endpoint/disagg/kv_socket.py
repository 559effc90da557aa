"""KV caches between two runs, over TCP: a context server keeps them, a generation server fetches them.

A connection fetches one cache. The client sends the 16 bytes of its key; the server answers with the cache's
size (int64, little-endian; -1: there is none under this key) and checksum, then its bytes, once all of them
are there, and takes one byte in return, after which nothing of the cache is kept. A cache that nobody fetches
is dropped after a time. Each cache that is fetched has a thread, so neither the engine's steps nor HTTP wait
for a socket; a client without the key gets none (`launch.handshake_listener`).
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
_CONNECT_S = 5.0
_CALLERS = 4  # of one cache: who has broken off may not be noticed yet
_CHUNK = 1 << 23  # bytes of one call
_TIMEVAL = struct.Struct("@ll")
_PIECE = 1 << 13  # words of one sum


class CacheLost(Exception):
    """A cache can't be fetched, and why."""


@dataclass
class _Kept:
    id: int
    key: bytes
    until: float  # time.monotonic()
    cache: Cache | None = None
    there: threading.Event = field(default_factory=threading.Event)  # or dropped
    callers: int = 0


class KvStore:
    """The caches of requests until they are fetched. The threads share it; ids are those of requests."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen at a free port of `host`. A cache is kept for `timeout_s` at most.

        Raises OSError if there is no such host.
        """
        self._timeout_s = timeout_s
        self.most_open = 1
        """How many requests of the kind may be open at once: others want a share."""
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}
        self._by_key: dict[bytes, _Kept] = {}
        self._fetched: list[int] = []
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.port: int = listener.getsockname()[1]
        self._listener = HandshakeListener("mpillm-kv", listener, KEY_BYTES, self._admit)

    def open(self, id_: int) -> None:
        """Let the request's cache be asked for from now on; whoever asks waits until it is there."""
        kept = _Kept(id_, secrets.token_bytes(KEY_BYTES), time.monotonic() + self._timeout_s)
        with self._lock:
            self._kept[id_] = self._by_key[kept.key] = kept

    def key(self, id_: int) -> bytes | None:
        """Return the key of an open request; None if it is not open."""
        with self._lock:
            return kept.key if (kept := self._kept.get(id_)) else None

    def put(self, id_: int, cache: Cache) -> None:
        """Store the whole cache of an open request."""
        with self._lock:
            kept = self._kept[id_]
            kept.cache = cache
        kept.there.set()

    def drop(self, id_: int) -> None:
        """Keep nothing of the request, nor the word that it was fetched: its id may be used again."""
        with self._lock:
            if id_ in self._fetched:
                self._fetched.remove(id_)
            if (kept := self._kept.pop(id_, None)) is None:
                return
            del self._by_key[kept.key]
        kept.there.set()

    def take_fetched(self) -> list[int]:
        """Return the requests whose caches have been fetched since the last call; they are dropped."""
        if not self._fetched:
            return []
        with self._lock:
            fetched, self._fetched = self._fetched, []
        return fetched

    def overdue(self) -> list[int]:
        """Return the open requests whose time is over."""
        now = time.monotonic()
        with self._lock:
            return [id_ for id_, kept in self._kept.items() if now > kept.until]

    def close(self) -> None:
        self._listener.close()

    # --- threads ---

    def _admit(self, connection: socket.socket, key: bytes) -> None:
        """Give a thread to who has a cache's key, but not to everybody at once."""
        with self._lock:
            kept = self._by_key.get(key)
            if kept is not None and kept.callers < _CALLERS:
                kept.callers += 1
                threading.Thread(target=self._serve, args=(connection, kept), daemon=True).start()
                return
        with connection, contextlib.suppress(OSError):
            connection.send(_NOTHING)

    def _serve(self, connection: socket.socket, kept: _Kept) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            kept.there.wait(max(0.0, kept.until - time.monotonic()))
            connection.settimeout(self._timeout_s)
            if (cache := kept.cache) is None:
                connection.sendall(_NOTHING)
                return
            connection.sendall(_HEAD.pack(cache.nbytes, checksum(cache)))
            end = time.monotonic() + self._timeout_s
            _move(connection, connection.send, cache, end)
            if bytes(_received(connection, plain_memory(1), end)) == _FETCHED:
                self._note_fetched(kept)
        with self._lock:
            kept.callers -= 1

    def _note_fetched(self, kept: _Kept) -> None:
        with self._lock:
            if self._by_key.pop(kept.key, None) is not None:  # else it was dropped in the meantime
                del self._kept[kept.id]
                self._fetched.append(kept.id)


def plain_memory(n_bytes: int) -> Cache:
    return np.empty(n_bytes, np.uint8)


def fetch(
    host: str,
    port: int,
    key: bytes,
    n_bytes: int,
    timeout_s: float,
    new: Callable[[int], Cache] = plain_memory,
) -> Cache:
    """Fetch a cache of `n_bytes` into `new` memory, waiting for it.

    Raises CacheLost if it does not come within `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), min(timeout_s, _CONNECT_S)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(key)
            size, expected = _HEAD.unpack(_received(connection, plain_memory(_HEAD.size), end).tobytes())
            if size < 0:
                raise CacheLost("it does not have the KV cache any more")
            if size != n_bytes:
                raise CacheLost(f"its KV cache has {size} bytes, not {n_bytes}: another model or data type")
            cache = _received(connection, new(n_bytes), end)
            if checksum(cache) != expected:
                raise CacheLost("its KV cache arrived with another checksum")
            connection.sendall(_FETCHED)
            return cache
    except TimeoutError:
        raise CacheLost(f"its KV cache did not come within {timeout_s:g} s") from None
    except EOFError:
        raise CacheLost("it closed the connection before its KV cache was here") from None
    except OSError as error:
        raise CacheLost(f"its KV cache can't be fetched: {error.strerror or error}") from error


def checksum(cache: Cache) -> int:
    """Return the CRC of the sums of its pieces: it costs a tenth of the CRC of all bytes."""
    words = cache[: len(cache) // 8 * 8].view(np.uint64)
    whole = len(words) // _PIECE * _PIECE
    # All in one call, in which other threads have Python's lock.
    sums = words[:whole].reshape(-1, _PIECE).sum(axis=1, dtype=np.uint64)
    if whole < len(words):
        sums = np.append(sums, words[whole:].sum(dtype=np.uint64))
    return zlib.crc32(cache[8 * len(words) :].tobytes(), zlib.crc32(sums.tobytes()))


def _received(connection: socket.socket, into: Cache, end: float) -> Cache:
    """Fill `into`, until `end` (time.monotonic())."""
    _move(connection, lambda part: connection.recv_into(part, 0, socket.MSG_WAITALL), into, end)
    return into


def _move(connection: socket.socket, call: Callable[[memoryview], int], cache: Cache, end: float) -> None:
    """Have `call` send or receive all of a cache, until `end` (time.monotonic()).

    The kernel waits, for many bytes at a time: Python needs its lock after each call, and the main thread
    rarely gives it away. Raises TimeoutError, and EOFError if the connection is closed.
    """
    connection.settimeout(None)
    view, at = cache.data, 0
    while at < len(cache):
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        whole, part = divmod(max(0.001, left), 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(part * 1e6)))
        try:
            n = call(view[at : at + _CHUNK])
        except BlockingIOError:
            raise TimeoutError from None
        if n == 0:
            raise EOFError
        at += n
