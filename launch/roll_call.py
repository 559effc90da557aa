"""Rank registry: ranks of several hosts keep a liveness connection to `mpillm mpirun`.

MPI_Init waits for every rank, and does not name a missing rank. Rank 0 sees only the processes of its own
host. So ranks connect to the launcher (`launch.callers`). It names a rank that is lost before all have
joined. Later, it names the rank that exited first, if mpirun leaves rank 0 no time to report it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping

from disagg import rank_list
from launch.callers import KEY, Callers, call
from launch.exits import RankExit
from launch.interfaces import interfaces, own_addresses
from launch.launcher import find_launcher
from launch.mpi_ports import FIREWALL, Port, listen_as_mpi

ROLL_CALL = "MPILLM_ROLL_CALL"
"""Where the launcher listens: host names and addresses, best first, the port, and a key, between slashes."""

_MAX_INTERFACES = 512  # bytes of their names and addresses
_HELLO = struct.Struct(f"!{KEY}IIH64s{_MAX_INTERFACES}s")  # the key, rank, process id, port, host, interfaces
_JOINED, _LEAVES = b"+", b"."
_HERE = re.compile(r"\x1b_mpillm-here:([0-9]{1,9}) (\S+)\x1b")  # a terminal ignores it
_SOON_S = 0.5
_SURE_S = 5.0  # by then the launcher has been reached, or can't be
_NAMED = 8  # ranks, at most
_THEN_S = 3.0  # whoever ended longer before rank 0 is not why
_TOGETHER_S = 0.005  # somebody who kills several ranks takes less, Open MPI that aborts others more
_PATIENCE_S = 5.0
"""A rank that has ended may have a reason, which rank 0 reports by then: `let_rank_0_report`."""


_Hello = tuple[int, int, int, bytes, bytes]  # rank, process id, port, host, interfaces


class RollCall:
    """The launcher's side."""

    def __init__(self, size: int) -> None:
        """Open a port for so many ranks. Raises OSError if none can be."""
        self._size = size
        # Replaced, never changed: another thread reads them.
        self._hosts: dict[int, str] = {}  # of the ranks that have answered
        self._ports: dict[int, Port] = {}
        self._cut_off: dict[int, str] = {}  # hosts of ranks that are there, but do not reach this one
        self._joined: frozenset[int] = frozenset()
        self._left: frozenset[int] = frozenset()
        self._ended: tuple[RankExit, ...] = ()
        callers = Callers("mpillm-roll-call", _HELLO, self._note_end, self._note_call, self._note_join)
        own = own_addresses()
        self._where = f"{own[0] if own else 'any address'} port {callers.port}"
        self.address = f"{','.join(own)}/{callers.port}/{callers.key.hex()}"

    def _note_call(self, fields: _Hello, address: str) -> None:
        rank, _, port, host, own = fields
        name, addresses = (text.rstrip(b"\0").decode(errors="replace") for text in (host, own))
        self._ports = self._ports | {rank: Port(rank, name, address, port, addresses)}
        self._hosts = self._hosts | {rank: name}

    def _note_join(self, fields: _Hello, word: bytes) -> bool:
        self._joined |= {fields[0]}
        if word != _JOINED:
            self._left |= {fields[0]}
        return word == _JOINED

    def _note_end(self, fields: _Hello) -> None:
        rank, pid, *_ = fields
        self._ended += (RankExit(rank, self._hosts[rank], pid, at=time.monotonic()),)

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the ranks that have answered, in the ranks' order."""
        return dict(sorted(self._hosts.items()))

    def lost(self) -> list[RankExit]:
        """Return `first`, if rank 0 has had time to report these ranks, or cannot.

        Once all have joined, it can.
        """
        late = time.monotonic() - _PATIENCE_S
        return self.first() if any(one.at < late or one.rank == 0 for one in self._early()) else []

    def first(self) -> list[RankExit]:
        """Return the ranks that ended first, before all had joined; others may have ended because of them."""
        return _together(self._early())

    def before_rank_0(self) -> list[RankExit]:
        """Return the ranks that ended first, within 3 s before rank 0; none if rank 0 is among them."""
        ended = {one.rank: one for one in self._ended}
        if 0 not in ended:
            return []
        first = _together([one for one in ended.values() if one.at > ended[0].at - _THEN_S])
        return [] if ended[0] in first else first

    def silent_hosts(self) -> list[str]:
        """Return the hosts of which no rank has ended or left, as far as this process has heard."""
        heard = {self._hosts[rank] for rank in {*self._left, *(one.rank for one in self._ended)}}
        return [host for host in dict.fromkeys(self.hosts().values()) if host not in heard]

    def _early(self) -> list[RankExit]:
        """Return those that ended before they had joined."""
        return [one for one in self._ended if one.rank not in self._joined]

    def note_cut_off(self, line: str) -> bool:
        """Take a line that a rank has printed; return whether it was for this process: it has started."""
        match = _HERE.search(line)
        if match:
            self._cut_off = self._cut_off | {int(match[1]): match[2]}
        return match is not None

    def absent(self) -> str:
        """Say which ranks have not answered, though others have, and whether they have started.

        "" if there are none.
        """
        answered = self._hosts.keys()
        missing = sorted(set(range(self._size)) - answered) if answered or self._cut_off else []
        here = [rank for rank in missing if rank in self._cut_off]
        gone = [rank for rank in missing if rank not in self._cut_off]
        told = []
        if gone:
            more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
            names = ", ".join(f"rank {rank}" for rank in gone[:_NAMED]) + more
            told.append(f"{names} has not started, or was lost before that")
        if here:
            who = rank_list(here, {**self._hosts, **self._cut_off})
            has = "has" if len(here) == 1 else "have"
            told.append(f"{who} {has} started, but can't reach `mpillm mpirun` at {self._where}: {FIREWALL}")
        return "; ".join(told)

    def waits(self) -> bool:
        """Return whether all ranks have answered, and some have not joined yet."""
        return len(self._hosts) == self._size > len(self._joined)

    def ports(self) -> list[Port]:
        """Return where all ranks listen while MPI starts, once all have answered; nothing before."""
        ports = self._ports
        return [ports[rank] for rank in sorted(ports)] if len(ports) == self._size else []


def _together(ended: list[RankExit]) -> list[RankExit]:
    """Return who ended first, at the same time."""
    together = min((one.at for one in ended), default=0.0) + _TOGETHER_S
    return [one for one in ended if one.at <= together]


class _Answer:
    """A rank's side."""

    def __init__(self, hosts: list[str], port: int, hello: bytes, listener: socket.socket | None) -> None:
        self._lock = threading.Lock()
        self._listener = listener  # until all have joined
        self._unsaid = b""  # while there is no connection yet
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._connect, args=(hosts, port, hello), daemon=True)
        self._thread.start()

    def wait(self, seconds: float = _SURE_S) -> bool:
        """Wait until the launcher is reached, or can't be; return whether it is."""
        self._thread.join(seconds)
        return self._connection is not None

    def _connect(self, hosts: list[str], port: int, hello: bytes) -> None:
        connection = call(hosts, port, hello)
        with self._lock:
            self._connection = connection
            self._say(self._unsaid)

    def say(self, word: bytes) -> None:
        """Say that this rank has joined, or that it leaves: its last word."""
        with self._lock:
            self._say(word)

    def _say(self, word: bytes) -> None:
        if self._connection is None:
            self._unsaid = word
        elif word:
            with contextlib.suppress(OSError):
                self._connection.sendall(word)
            if word == _LEAVES:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stop_listening(self) -> None:
        """Close the port: all have joined."""
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def let_go(self) -> None:
        """Close all without a word: in a child process, which is not the rank."""
        if self._listener is not None:
            self._listener.close()
        self._hang_up()


_answer: _Answer | None = None


def answer(env: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher, if it asked, that this rank's process is there."""
    global _answer
    launcher = find_launcher(env)
    if ROLL_CALL not in env or launcher is None or launcher.rank is None or _answer is not None:
        return
    hosts, port, key = env[ROLL_CALL].split("/")
    host = socket.gethostname()
    listener = listen_as_mpi(env)
    own_port = listener.getsockname()[1] if listener is not None else 0
    own = ",".join("=".join(one) for one in interfaces())
    fields = (launcher.rank, os.getpid(), own_port, host.encode()[:64], own.encode()[:_MAX_INTERFACES])
    hello = _HELLO.pack(bytes.fromhex(key), *fields)
    _answer = _Answer(hosts.split(","), int(port), hello, listener)
    # Usually a millisecond, so that a rank that is lost at once is known.
    if not _answer.wait(_SOON_S):
        # Later no thread of this process may speak: MPI_Init keeps the interpreter to itself.
        with contextlib.suppress(OSError):
            os.write(2, f"\x1b_mpillm-here:{launcher.rank} {host}\x1b\\\n".encode())
    os.register_at_fork(after_in_child=_answer.let_go)


def fails() -> None:
    """See that the launcher has heard of this rank, which is about to end by mistake."""
    if _answer is not None:
        _answer.wait()


def joined() -> None:
    """Tell the launcher that rank 0 knows this rank."""
    if _answer is not None:
        _answer.stop_listening()
        _answer.say(_JOINED)


def leaves(still_listens: bool = False) -> None:
    """Tell the launcher that this rank ends in an orderly way, or that nobody will miss it.

    `still_listens`: until it ends, for those who look for whom MPI did not reach.
    """
    if _answer is not None:
        if not still_listens:
            _answer.stop_listening()
        _answer.say(_LEAVES)
