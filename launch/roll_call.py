"""The roll call: ranks of several hosts are heard by `mpillm mpirun` until MPI has started on them.

MPI_Init waits for every rank, and says of none that it is missing; rank 0 sees the processes of its own host
only. When a process ends, however it does, its kernel closes its connection. So the launcher can name a rank
that is lost before anybody else could hear of it. It is told nothing else here: a connection that can't be
made, or fails otherwise, means nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from launch.launcher import find_launcher

ROLL_CALL = "MPILLM_ROLL_CALL"
"""Where the launcher listens: host names and addresses, best first, the port, and a key, between slashes."""

_KEY_BYTES = 16
_HELLO = struct.Struct(f"!{_KEY_BYTES}sII64s")  # the key, rank, process id, host
_JOINED = b"."
_CONNECT_S = 5.0
_SOON_S = 0.5
_PAUSE_S = 0.1
_NAMED = 8  # ranks, at most
_READ = 1  # selectors.EVENT_READ
_PATIENCE_S = 5.0
"""A rank that has ended may have a reason, which rank 0 reports by then: `let_rank_0_report`."""


class _Ended(NamedTuple):
    rank: int
    host: str
    pid: int
    at: float  # time.monotonic


class RollCall:
    """The launcher's end. A thread waits for the ranks in the kernel."""

    def __init__(self, size: int) -> None:
        """Open a port for so many ranks. Raises OSError if none can be."""
        import secrets  # as selectors and hmac: ranks do without, whose start they would delay
        import selectors

        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6
        )
        self._key = secrets.token_bytes(_KEY_BYTES)
        port = self._listener.getsockname()[1]
        self.address = f"{','.join(own_addresses())}/{port}/{self._key.hex()}"
        self._size = size
        self._answered: frozenset[int] = frozenset()  # as the next one
        self._ended: tuple[_Ended, ...] = ()  # replaced, never changed: another thread reads it
        self._events = selectors.DefaultSelector()
        self._events.register(self._listener, _READ)
        threading.Thread(target=self._run, name="mpillm-roll-call", daemon=True).start()

    def lost(self) -> str:
        """Name the ranks that ended some seconds ago without having started MPI; "" if there are none."""
        late = time.monotonic() - _PATIENCE_S
        if not any(one.at < late for one in self._ended):
            return ""
        return ", ".join(f"rank {one.rank} on {one.host} (pid {one.pid})" for one in sorted(self._ended))

    def absent(self) -> str:
        """Name the ranks that have not answered, though others have; "" if there are none."""
        answered = self._answered
        missing = sorted(set(range(self._size)) - answered) if answered else []
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return ", ".join(f"rank {rank}" for rank in missing[:_NAMED]) + more

    def _run(self) -> None:
        while True:
            for key, _ in self._events.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                else:
                    self._hear(connection, key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone by now, or no file descriptor is left: then select returns at once
            time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        self._events.register(connection, _READ)

    def _hear(self, connection: socket.socket, known: _Ended | None) -> None:
        try:
            said = connection.recv(1 if known else _HELLO.size)
        except BlockingIOError:
            return
        except OSError:  # the network's failure, not the rank's
            said = _JOINED
        if known is None and len(said) == _HELLO.size:
            import hmac

            key, rank, pid, host = _HELLO.unpack(said)
            if hmac.compare_digest(key, self._key):
                name = host.rstrip(b"\0").decode(errors="replace")
                self._answered |= {rank}
                self._events.modify(connection, _READ, _Ended(rank, name, pid, 0.0))
                return
        if known is not None and said == b"":
            self._ended += (known._replace(at=time.monotonic()),)
        self._events.unregister(connection)
        connection.close()


class _Answer:
    """A rank's end."""

    def __init__(self, hosts: list[str], port: int, hello: bytes) -> None:
        self._lock = threading.Lock()
        self._joined = False
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._connect, args=(hosts, port, hello), daemon=True)
        self._thread.start()

    def wait(self, seconds: float = _CONNECT_S) -> None:
        """Wait until the launcher is reached, or can't be."""
        self._thread.join(seconds)

    def _connect(self, hosts: list[str], port: int, hello: bytes) -> None:
        for host in hosts:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), _CONNECT_S)
                connection.sendall(hello)
                with self._lock:
                    self._connection = connection
                    if self._joined:
                        self._leave()
                return

    def joined(self) -> None:
        with self._lock:
            self._joined = True
            self._leave()

    def _leave(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(_JOINED)
            self.let_go()

    def let_go(self) -> None:
        """Close it without a word: in a child process, which is not the rank."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_answer: _Answer | None = None


def answer(env: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher, if it asked, that this rank's process is there."""
    global _answer
    launcher = find_launcher(env)
    if ROLL_CALL not in env or launcher is None or launcher.rank is None or _answer is not None:
        return
    hosts, port, key = env[ROLL_CALL].split("/")
    host = socket.gethostname().encode()[:64]
    hello = _HELLO.pack(bytes.fromhex(key), launcher.rank, os.getpid(), host)
    _answer = _Answer(hosts.split(","), int(port), hello)
    _answer.wait(_SOON_S)  # a millisecond, as a rule; a rank that is lost at once shall be known
    os.register_at_fork(after_in_child=_answer.let_go)


def fails() -> None:
    """See that the launcher has heard of this rank, which is about to end by mistake."""
    if _answer is not None:
        _answer.wait()


def joined() -> None:
    """Tell the launcher that MPI has started on this rank, or that it ends in an orderly way without MPI."""
    if _answer is not None:
        _answer.joined()


def own_addresses() -> tuple[str, ...]:
    """Return this host's addresses that others may reach, the one behind its name first."""
    import psutil

    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        own.sort(key=lambda address: address != named)
    return tuple(own)
