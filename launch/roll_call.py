"""The roll call: ranks of several hosts are heard by `mpillm mpirun` until all have joined.

MPI_Init waits for every rank, and says of none that it is missing; rank 0 sees the processes of its own host
only. So ranks call the launcher (`launch.callers`), which can name one that is lost before others could.
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

from launch.callers import KEY, Callers, call, own_addresses
from launch.launcher import find_launcher

ROLL_CALL = "MPILLM_ROLL_CALL"
"""Where the launcher listens: host names and addresses, best first, the port, and a key, between slashes."""

_HELLO = struct.Struct(f"!{KEY}II64s")  # the key, rank, process id, host
_JOINED = b"."
_SOON_S = 0.5
_SURE_S = 5.0  # by then the launcher has been reached, or can't be
_NAMED = 8  # ranks, at most
_TOGETHER_S = 0.005  # somebody who kills several ranks takes less, Open MPI that aborts others more
_PATIENCE_S = 5.0
"""A rank that has ended may have a reason, which rank 0 reports by then: `let_rank_0_report`."""


class _Ended(NamedTuple):
    rank: int
    host: str
    pid: int
    at: float  # time.monotonic


class RollCall:
    """The launcher's end."""

    def __init__(self, size: int) -> None:
        """Open a port for so many ranks. Raises OSError if none can be."""
        self._size = size
        self._answered: frozenset[int] = frozenset()  # as the next one
        self._ended: tuple[_Ended, ...] = ()  # replaced, never changed: another thread reads it
        callers = Callers("mpillm-roll-call", _HELLO, self._note_end, self._note_call)
        self.address = f"{','.join(own_addresses())}/{callers.port}/{callers.key.hex()}"

    def _note_call(self, fields: tuple[int, int, bytes]) -> None:
        self._answered |= {fields[0]}

    def _note_end(self, fields: tuple[int, int, bytes]) -> None:
        rank, pid, host = fields
        name = host.rstrip(b"\0").decode(errors="replace")
        self._ended += (_Ended(rank, name, pid, time.monotonic()),)

    def lost(self) -> str:
        """Name the ranks that rank 0 has had time to report, or can't; "" if there are none."""
        ended = self._ended
        late = time.monotonic() - _PATIENCE_S
        return self.first() if any(one.at < late or one.rank == 0 for one in ended) else ""

    def first(self) -> str:
        """Name the ranks that ended first; others may have ended because of them; "" if none has."""
        return ", ".join(f"rank {one.rank} on {one.host} (pid {one.pid})" for one in sorted(self._first()))

    def first_ranks(self) -> list[int]:
        """The ranks that `first` names."""
        return sorted(one.rank for one in self._first())

    def _first(self) -> list[_Ended]:
        ended = self._ended
        together = min((one.at for one in ended), default=0.0) + _TOGETHER_S
        return [one for one in ended if one.at <= together]

    def absent(self) -> str:
        """Name the ranks that have not answered, though others have; "" if there are none."""
        answered = self._answered
        missing = sorted(set(range(self._size)) - answered) if answered else []
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return ", ".join(f"rank {rank}" for rank in missing[:_NAMED]) + more


class _Answer:
    """A rank's end."""

    def __init__(self, hosts: list[str], port: int, hello: bytes) -> None:
        self._lock = threading.Lock()
        self._joined = False
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._connect, args=(hosts, port, hello), daemon=True)
        self._thread.start()

    def wait(self, seconds: float = _SURE_S) -> None:
        """Wait until the launcher is reached, or can't be."""
        self._thread.join(seconds)

    def _connect(self, hosts: list[str], port: int, hello: bytes) -> None:
        connection, _ = call(hosts, port, hello)
        with self._lock:
            self._connection = connection
            if self._joined:
                self._leave()

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
    """Tell the launcher that rank 0 knows this rank, or that it ends in an orderly way before that."""
    if _answer is not None:
        _answer.joined()
