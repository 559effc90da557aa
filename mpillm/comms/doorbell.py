"""Doorbells: a rank with nothing to do sleeps in the kernel until somebody who has sent it something rings.

MPI carries every message; a bell only says "look". It is a datagram socket in Linux's abstract namespace: it
leaves no file, and ranks hear each other if they share a network namespace, as those of one node do unless
containers separate them. A rank that one of its peers cannot reach polls instead. The end of a process rings,
too, where Linux has pidfds (5.3).
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from launch.exits import Exits

if TYPE_CHECKING:
    from mpi4py import MPI

_RING, _BEAT = b"!", b"-"
_MOST_RINGS = 1024  # taken at a time; the kernel holds some ten (net.unix.max_dgram_qlen)


class Doorbell:
    """This rank's bell, and the way to the others'. It does nothing until `hang`. Any thread may ring."""

    # What a bell that nobody rang can cost: MPI may need its sender's help for a message, and show it late.
    short_sleep_s = 0.1
    long_sleep_s = 0.25  # of a rank that may rest, hears the ends of processes, and was not rung for awake_s
    awake_s = 1.0

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._run = ""
        self._rank = -1
        self._within_reach: frozenset[int] = frozenset()
        self._exits: Exits[int] | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._awake_until = 0.0
        self.heard = False
        """Whether everybody who sends something to this rank rings its bell."""
        self.may_rest = False
        """Whether what comes without a ring, heartbeats, is looked for less often."""

    def hang(self, run: str, rank: int, within_reach: Iterable[int]) -> None:
        """Listen from now on. `run`: unique to the run; `within_reach`: the ranks of this rank's node."""
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._run, self._rank = run, rank
        try:
            bell.bind(self._name(rank))
        except OSError:  # not Linux, or a sandbox: poll
            bell.close()
            return
        self._socket, self._within_reach = bell, frozenset(within_reach) - {rank}

    def try_all(self, peers: Iterable[int]) -> None:
        """Find out whether all of `peers`, who send something to this rank, hear and are heard.

        Every rank's bell must hang by now. Reach is mutual: the namespace is shared, or it is not.
        """
        if self._socket is not None:
            peers = set(peers) - {self._rank}
            self.heard = peers <= self._within_reach and all(self._reaches(peer) for peer in peers)

    def hear_ends(self, pids: Iterable[int], on_end: Callable[[], None]) -> None:
        """Wake from `sleep` when one of these processes ends, too, and call `on_end` then.

        Where the system can't tell, sleeps stay short, so that somebody can look whether they run.
        """
        if self._socket is None:
            return
        exits = Exits[int]()
        if all(exits.watch(pid, pid) for pid in pids):
            self._exits, self._on_end = exits, on_end
        else:
            exits.close()

    def ringer(self, comm: MPI.Intracomm) -> Callable[[int], None]:
        """Return a function that rings by rank of `comm`."""
        from mpi4py import MPI

        bell = self._socket
        if bell is None:
            return lambda dest: None
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = group.Translate_ranks(None, world)
        group.Free()
        world.Free()
        names = [self._name(rank) if rank in self._within_reach else None for rank in ranks]

        def ring(dest: int) -> None:
            if (name := names[dest]) is not None:
                # It rings already: as many bells wait there as fit. Or its rank has gone.
                with contextlib.suppress(OSError):
                    bell.sendto(_RING, name)

        return ring

    def ring_own(self, *, beat: bool = False) -> None:
        """Wake this rank's main thread: there is work for it.

        `beat`: or only this, that the thread of the heartbeat has been inside MPI, which can keep a look from
        seeing a message.
        """
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                self._socket.sendto(_BEAT if beat else _RING, self._name(self._rank))

    def sleep(self, seconds: float) -> bool:
        """Sleep until the bell rings, at most `seconds`; return whether it rang.

        Then look for messages: one that is sent from now on rings again.
        """
        if self._socket is None:
            time.sleep(min(seconds, self.short_sleep_s))
            return False
        bells: list[socket.socket | Exits[int]] = [self._socket]
        longest_s = self.short_sleep_s
        if self._exits is not None:
            bells.append(self._exits)
            if self.may_rest and time.monotonic() > self._awake_until:
                longest_s = self.long_sleep_s
        rung = select.select(bells, [], [], min(seconds, longest_s))[0]
        if self._socket in rung:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_MOST_RINGS):  # any process of the node may ring, as fast as this is read
                    if self._socket.recv(1) == _RING:
                        self._awake_until = time.monotonic() + self.awake_s
        if self._exits is not None and self._exits in rung:
            self._exits.look()
            self._on_end()
        return bool(rung)

    def _name(self, rank: int) -> bytes:
        return f"\0mpillm-{self._run}-{rank}".encode()

    def _reaches(self, rank: int) -> bool:
        assert self._socket is not None
        try:
            self._socket.sendto(_RING, self._name(rank))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
