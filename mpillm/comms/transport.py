"""Non-blocking messages of bytes over one communicator, a rank's messages to itself included."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpillm.comms.doorbell import Doorbell
from mpillm.comms.tags import Tag

Buffer = NDArray[np.uint8]
_MANY = 32  # messages that may not have left yet
# As a rule a small message leaves without the sender's help: the receiver finds all of it in shared memory.
_SMALL_BYTES = 3072
_SMALL_LEAVES_S = 0.005  # how long it is left alone
_TAKES_S = 0.05  # of looks for one message


class Received(NamedTuple):
    source: int  # rank in the transport's communicator
    tag: Tag
    buffer: Buffer


_LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


def is_loss(error: MPI.Exception) -> bool:
    """Return whether MPI (ULFM) says that a process has ended."""
    return error.Get_error_class() in _LOSSES


class Transport:
    """Neither sends nor receives wait: progress happens only in `poll`.

    Messages from one rank are delivered in the order sent. The counters are for the benchmarks.
    """

    def __init__(self, comm: MPI.Intracomm, doorbell: Doorbell | None = None) -> None:
        """`doorbell`: wakes the ranks for which there is a message."""
        self.comm = comm
        self.rank = comm.rank
        self._local: deque[Received] = deque()
        self._sending: deque[tuple[MPI.Request, Buffer, int]] = deque()  # the last: to whom
        self._arriving: deque[tuple[MPI.Request, Received]] = deque()
        self._status = MPI.Status()
        self.handlers: dict[Tag, Callable[[Received], None]] = {}
        self._ring = doorbell.ringer(comm) if doorbell else None
        self.outlives_others = False
        """Whether an error of MPI about a lost rank is passed over: rank 0 decides what follows."""
        self._lost: frozenset[int] = frozenset()
        self._never_done: list[object] = []  # messages from and to lost ranks, which MPI may still hold
        self.sent_messages = 0
        self.sent_bytes = 0

    def send(self, dest: int, tag: Tag, buffer: Buffer) -> None:
        """Send; `buffer` belongs to the transport from here on."""
        self.sent_messages += 1
        self.sent_bytes += buffer.nbytes
        if dest == self.rank:
            self._local.append(Received(dest, tag, buffer))
            return
        if dest in self._lost:
            return
        if len(self._sending) >= _MANY:  # of who never polls; else `poll` does it
            self.reap()
        try:
            request = self.comm.Isend((buffer, MPI.BYTE), dest, tag)
        except MPI.Exception as error:
            self._pass_over(error)
            return
        if self._ring:
            self._ring(dest)
        # Not tested here: unless it has left already, Open MPI would yield the CPU.
        self._sending.append((request, buffer, dest))

    def reap(self) -> None:
        """Release the messages that have left."""
        while self._sending and self._is_done(self._sending[0][0]):
            self._sending.popleft()

    def forget(self, world_ranks: Iterable[int]) -> None:
        """Send nothing to these ranks, and take nothing from them, from now on, alive or not."""
        group, world = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        found = world.Translate_ranks(list(world_ranks), group)
        group.Free()
        world.Free()
        self._lost |= {rank for rank in found if rank != MPI.UNDEFINED}
        self._never_done += [sent for sent in self._sending if sent[2] in self._lost]
        self._never_done += [came for came in self._arriving if came[1].source in self._lost]
        self._sending = deque(sent for sent in self._sending if sent[2] not in self._lost)
        self._arriving = deque(came for came in self._arriving if came[1].source not in self._lost)

    def _is_done(self, request: MPI.Request) -> bool:
        """Return whether the request is done, or never will be because its rank is lost."""
        try:
            return request.Test()
        except MPI.Exception as error:
            self._pass_over(error)
            return True

    def _pass_over(self, error: MPI.Exception) -> None:
        if not (self.outlives_others and is_loss(error)):
            raise error

    def ring_with(self, doorbell: Doorbell) -> None:
        """Wake the ranks for which there is a message, from now on."""
        self._ring = doorbell.ringer(self.comm)

    def quiet_s(self) -> float:
        """Return for how many seconds `poll` finds nothing unless somebody rings; 0: a message moves."""
        if self._arriving or self._local or any(sent[1].nbytes > _SMALL_BYTES for sent in self._sending):
            return 0.0
        return _SMALL_LEAVES_S if self._sending else math.inf

    def flush(self, seconds: float) -> None:
        """Wait, at most `seconds`, until all messages have left."""
        end = time.monotonic() + seconds
        while self._sending and time.monotonic() < end:
            self.reap()

    def poll(self) -> Received | None:
        """Return the next message, or None."""
        self.reap()
        if self._local:
            return self._local.popleft()
        # Bounded, so that a flood of large messages cannot exhaust memory before anybody reads them.
        if len(self._arriving) < 64:
            # Open MPI and MPICH may only fetch, in one look, what the next one returns.
            message = self._probe() or self._probe()
            if message is not None:
                status = self._status
                buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                # Not Mrecv: a large message needs its sender's help, and the sender may be in the middle of
                # an engine step.
                request = message.Irecv((buffer, MPI.BYTE))
                came = request, Received(status.source, Tag(status.tag), buffer)
                (self._never_done if status.source in self._lost else self._arriving).append(came)
        while self._arriving:
            request, received = self._arriving[0]
            try:
                if not request.Test():
                    return None
            except MPI.Exception as error:
                self._pass_over(error)
                if error.Get_error_class() == MPI.ERR_PROC_FAILED_PENDING:
                    # Any loss, until it is acknowledged, stops what `_probe` has found, whoever sent it.
                    self.acknowledge_losses()
                    return None
                self._arriving.popleft()  # its sender has ended in the middle of it
                continue
            self._arriving.popleft()
            return received
        return None

    def _probe(self) -> MPI.Message | None:
        try:
            return self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
        except MPI.Exception as error:
            self._pass_over(error)
            self.acknowledge_losses()
            return None

    def take(self, source: int, tag: Tag, tries: int = 32) -> Received | None:
        """Return a small waiting message of this source and tag, out of turn; None if there is none.

        MPICH advances by one waiting message per try, which is enough for a caller that asks again soon.
        Open MPI may give the core away at each: where others compute, that takes many times as long.
        """
        end = time.monotonic() + _TAKES_S
        for _ in range(tries):
            message = self.comm.Improbe(source, tag, self._status)
            if message is not None:
                buffer = np.empty(self._status.Get_count(MPI.BYTE), np.uint8)
                message.Recv((buffer, MPI.BYTE))
                return Received(source, tag, buffer)
            if time.monotonic() > end:
                break
        return None

    def dispatch(self) -> bool:
        """Pass waiting messages, at most 32, to their handlers; return whether there were any."""
        for count in range(32):
            received = self.poll()
            if received is None:
                return count > 0
            self.handlers[received.tag](received)
        return True

    def dispatch_own(self) -> None:
        """Pass this rank's messages to itself to their handlers, without a look at MPI."""
        while self._local:
            received = self._local.popleft()
            self.handlers[received.tag](received)

    def dispatch_whoever_is_lost(self) -> None:
        """Dispatch, or sleep shortly, ignoring lost ranks: for the end of a run."""
        try:
            if not self.dispatch():
                time.sleep(0.001)
        except MPI.Exception:
            self.acknowledge_losses()

    def known_losses(self) -> frozenset[int]:
        """Return the members of which MPI (ULFM) knows that their process has ended; none without ULFM."""
        try:
            failed = self.comm.Get_failed()
        except (MPI.Exception, NotImplementedError):  # built without ULFM, or by an MPI that has none
            return frozenset()
        group = self.comm.Get_group()
        ranks = failed.Translate_ranks(None, group)
        group.Free()
        failed.Free()
        return frozenset(ranks)

    def acknowledge_losses(self) -> None:
        """Stop ULFM from reporting the lost members: it does so at every call until they are acknowledged."""
        self.comm.Ack_failed()
