"""Wake-ups: an idle rank sleeps in the kernel until the sender of a message wakes it.

MPI carries every message; a wake-up has no content. The socket is a datagram socket in Linux's abstract
namespace: it leaves no file. Ranks reach each other if they share a network namespace, as the ranks of a node
do unless containers separate them. A rank that one of its peers cannot reach polls instead. With pidfds
(Linux 5.3), the exit of a process also wakes a rank.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from launch.exits import Exits
from launch.readable import readable

if TYPE_CHECKING:
    from mpi4py import MPI

_WAKE, _BEAT = b"!", b"-"
_MAX_READS = 1024  # wake-ups read at a time; the kernel holds about ten (net.unix.max_dgram_qlen)


class WakeupSocket:
    """Wakes this rank, and reaches the other ranks' sockets. Inactive until `open`. Any thread may wake."""

    # Longest sleep: MPI may need the sender's help for a message, and deliver it long after its wake-up.
    short_sleep_s = 0.1
    long_sleep_s = 0.25  # if `may_sleep_long`, process exits are watched, and no wake-up came for `awake_s`
    awake_s = 1.0

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._run = ""
        self._rank = -1
        self._within_reach: frozenset[int] = frozenset()
        self._exits: Exits[int] | None = None
        self._on_exit: Callable[[], None] = lambda: None
        self._awake_until = 0.0
        self.is_reliable = False
        """Whether every sender of messages to this rank wakes it."""
        self.may_sleep_long = False
        """Whether messages without a wake-up (heartbeats) may wait for `long_sleep_s`."""

    def open(self, run: str, rank: int, within_reach: Iterable[int]) -> None:
        """Create the socket. `run`: unique to the run; `within_reach`: the ranks of this rank's node."""
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._run, self._rank = run, rank
        try:
            own.bind(self._name(rank))
        except OSError:  # not Linux, or a sandbox: poll
            own.close()
            return
        self._socket, self._within_reach = own, frozenset(within_reach) - {rank}

    def probe_peers(self, peers: Iterable[int]) -> None:
        """Determine whether this rank and all `peers`, which send messages to it, can wake each other.

        Every rank must have called `open` before. One direction is enough: ranks that share a namespace reach
        each other.
        """
        if self._socket is not None:
            peers = set(peers) - {self._rank}
            self.is_reliable = peers <= self._within_reach and all(self._reaches(peer) for peer in peers)

    def watch_exits(self, pids: Iterable[int], on_exit: Callable[[], None]) -> None:
        """Also wake from `sleep` when one of these processes exits, and then call `on_exit`.

        If a process cannot be watched, sleeps stay short, so that the caller can check the processes often.
        """
        if self._socket is None:
            return
        exits = Exits[int]()
        if all(exits.watch(pid, pid) for pid in pids):
            self._exits, self._on_exit = exits, on_exit
        else:
            exits.close()

    def waker(self, comm: MPI.Intracomm) -> Callable[[int], None]:
        """Return a function that wakes a rank of `comm`."""
        from mpi4py import MPI

        own = self._socket
        if own is None:
            return lambda dest: None
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = group.Translate_ranks(None, world)
        group.Free()
        world.Free()
        names = [self._name(rank) if rank in self._within_reach else None for rank in ranks]

        def wake(dest: int) -> None:
            if (name := names[dest]) is not None:
                # The receiver's socket is full of wake-ups, or the receiver has exited.
                with contextlib.suppress(OSError):
                    own.sendto(_WAKE, name)

        return wake

    def wake_own(self, *, beat: bool = False) -> None:
        """Wake this rank's main thread: there is work for it.

        `beat`: there is no work, but the heartbeat's thread was inside MPI, which can hide a message from the
        main thread.
        """
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                self._socket.sendto(_BEAT if beat else _WAKE, self._name(self._rank))

    def sleep(self, seconds: float) -> bool:
        """Sleep until a wake-up, at most `seconds`; return whether there was one.

        Then look for messages: a message that is sent from now on causes another wake-up.
        """
        if self._socket is None:
            time.sleep(min(seconds, self.short_sleep_s))
            return False
        sources: list[socket.socket | Exits[int]] = [self._socket]
        limit_s = self.short_sleep_s
        if self._exits is not None:
            sources.append(self._exits)
            if self.may_sleep_long and time.monotonic() > self._awake_until:
                limit_s = self.long_sleep_s
        ready = readable(sources, min(seconds, limit_s))
        if self._socket in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(
                    _MAX_READS
                ):  # any process of the node may send wake-ups as fast as they are read
                    if self._socket.recv(1) == _WAKE:
                        self._awake_until = time.monotonic() + self.awake_s
        if self._exits is not None and self._exits in ready:
            self._exits.look()
            self._on_exit()
        return bool(ready)

    def _name(self, rank: int) -> bytes:
        return f"\0mpillm-{self._run}-{rank}".encode()

    def _reaches(self, rank: int) -> bool:
        assert self._socket is not None
        try:
            self._socket.sendto(_WAKE, self._name(rank))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
