"""Non-blocking messages of bytes over one communicator, including a rank's messages to itself."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpillm.comms.tags import Tag
from mpillm.comms.wakeup_socket import WakeupSocket

Buffer = NDArray[np.uint8]
_MAX_UNREAPED = 32  # unfinished sends, after which `send` looks for finished ones
# Usually a small message leaves without the sender's help: the receiver reads it from shared memory.
_SMALL_BYTES = 3072
_SMALL_LEAVES_S = 0.005  # after this time, the sender polls anyway
_TAKE_S = 0.05  # longest time to look for one message


class Envelope(NamedTuple):
    """A received message."""

    source: int  # rank in the transport's communicator
    tag: Tag
    buffer: Buffer


_LOSSES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


def is_loss(error: MPI.Exception) -> bool:
    """Return whether MPI (ULFM) reports the exit of a process."""
    return error.Get_error_class() in _LOSSES


class Transport:
    """Sends and receives messages without waiting; only `poll` makes progress.

    Messages from one rank are delivered in the order sent. The counters are for the run's report.
    """

    def __init__(self, comm: MPI.Intracomm, wakeup: WakeupSocket | None = None) -> None:
        """`wakeup`: wakes the receiver of each message."""
        self.comm = comm
        self.rank = comm.rank
        self._local: deque[Envelope] = deque()
        self._sending: deque[tuple[MPI.Request, Buffer, int]] = deque()  # the last: the receiver
        self._arriving: deque[tuple[MPI.Request, Envelope]] = deque()
        self._status = MPI.Status()
        self.handlers: dict[Tag, Callable[[Envelope], None]] = {}
        self._wake = wakeup.waker(comm) if wakeup else None
        self.outlives_others = False
        """Whether to ignore MPI's errors about lost ranks. Rank 0 then decides whether the run continues."""
        self._lost: frozenset[int] = frozenset()
        self._never_done: list[
            object
        ] = []  # messages from and to lost ranks: MPI may still use their buffers
        self.sent_messages = 0
        self.sent_bytes = 0

    def send(self, dest: int, tag: Tag, buffer: Buffer) -> None:
        """Send `buffer`, which must not change afterwards."""
        self.sent_messages += 1
        self.sent_bytes += buffer.nbytes
        if dest == self.rank:
            self._local.append(Envelope(dest, tag, buffer))
            return
        if dest in self._lost:
            return
        if len(self._sending) >= _MAX_UNREAPED:  # for callers that do not poll
            self.reap()
        try:
            request = self.comm.Isend((buffer, MPI.BYTE), dest, tag)
        except MPI.Exception as error:
            self._raise_unless_lost(error)
            return
        if self._wake:
            self._wake(dest)
        # Do not test the request here: if the message has not left yet, Open MPI would yield the CPU.
        self._sending.append((request, buffer, dest))

    def reap(self) -> None:
        """Release the messages that have left."""
        while self._sending and self._is_done(self._sending[0][0]):
            self._sending.popleft()

    def forget(self, world_ranks: Iterable[int]) -> None:
        """From now on, send nothing to these ranks, and drop their messages."""
        group, world = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        members = world.Translate_ranks(list(world_ranks), group)
        group.Free()
        world.Free()
        self._lost |= {rank for rank in members if rank != MPI.UNDEFINED}
        self._never_done += [sent for sent in self._sending if sent[2] in self._lost]
        self._never_done += [came for came in self._arriving if came[1].source in self._lost]
        self._sending = deque(sent for sent in self._sending if sent[2] not in self._lost)
        self._arriving = deque(came for came in self._arriving if came[1].source not in self._lost)

    def _is_done(self, request: MPI.Request) -> bool:
        """Return whether the request is done, or never will be because its rank is lost."""
        try:
            return request.Test()
        except MPI.Exception as error:
            self._raise_unless_lost(error)
            return True

    def _raise_unless_lost(self, error: MPI.Exception) -> None:
        if not (self.outlives_others and is_loss(error)):
            raise error

    def wake_with(self, wakeup: WakeupSocket) -> None:
        """From now on, wake the receiver of each message."""
        self._wake = wakeup.waker(self.comm)

    def quiet_s(self) -> float:
        """Return the seconds for which `poll` has no work unless a wake-up arrives; 0 during a transfer."""
        if self._arriving or self._local or any(sent[1].nbytes > _SMALL_BYTES for sent in self._sending):
            return 0.0
        return _SMALL_LEAVES_S if self._sending else math.inf

    def flush(self, seconds: float) -> None:
        """Wait, at most `seconds`, until all messages have left."""
        end = time.monotonic() + seconds
        while self._sending and time.monotonic() < end:
            self.reap()

    def poll(self) -> Envelope | None:
        """Return the next message, or None."""
        self.reap()
        if self._local:
            return self._local.popleft()
        # Limited, so that large messages cannot exhaust memory before they are read.
        if len(self._arriving) < 64:
            # In Open MPI and MPICH, a probe may fetch a message that only the next probe returns.
            message = self._probe() or self._probe()
            if message is not None:
                status = self._status
                buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                # Not Mrecv: a large message needs the sender's help, and the sender may be in an engine step.
                request = message.Irecv((buffer, MPI.BYTE))
                came = request, Envelope(status.source, Tag(status.tag), buffer)
                (self._never_done if status.source in self._lost else self._arriving).append(came)
        while self._arriving:
            request, received = self._arriving[0]
            try:
                if not request.Test():
                    return None
            except MPI.Exception as error:
                self._raise_unless_lost(error)
                if error.Get_error_class() == MPI.ERR_PROC_FAILED_PENDING:
                    # A loss that is not acknowledged blocks all messages that `_probe` has matched.
                    self.acknowledge_losses()
                    return None
                self._arriving.popleft()  # its sender has exited during the transfer
                continue
            self._arriving.popleft()
            return received
        return None

    def _probe(self) -> MPI.Message | None:
        try:
            return self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)
        except MPI.Exception as error:
            self._raise_unless_lost(error)
            self.acknowledge_losses()
            return None

    def take(self, source: int, tag: Tag, tries: int = 32) -> Envelope | None:
        """Return a small waiting message of this source and tag, out of order; None if there is none.

        MPICH advances by one waiting message per try, which is enough for a caller that tries again soon.
        Open MPI may yield the CPU core at each try, which takes much longer if other processes compute.
        """
        end = time.monotonic() + _TAKE_S
        for _ in range(tries):
            message = self.comm.Improbe(source, tag, self._status)
            if message is not None:
                buffer = np.empty(self._status.Get_count(MPI.BYTE), np.uint8)
                message.Recv((buffer, MPI.BYTE))
                return Envelope(source, tag, buffer)
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
        """Pass this rank's messages to itself to their handlers, without calling MPI."""
        while self._local:
            received = self._local.popleft()
            self.handlers[received.tag](received)

    def dispatch_despite_losses(self) -> None:
        """Dispatch waiting messages, or sleep 1 ms if there are none. Ignore lost ranks: for a run's end."""
        try:
            if not self.dispatch():
                time.sleep(0.001)
        except MPI.Exception:
            self.acknowledge_losses()

    def known_losses(self) -> frozenset[int]:
        """Return the members whose exit MPI (ULFM) has detected; none without ULFM."""
        try:
            failed = self.comm.Get_failed()
        except (MPI.Exception, NotImplementedError):  # mpi4py or the MPI library has no ULFM
            return frozenset()
        group = self.comm.Get_group()
        ranks = failed.Translate_ranks(None, group)
        group.Free()
        failed.Free()
        return frozenset(ranks)

    def acknowledge_losses(self) -> None:
        """Acknowledge the lost members. Until then, ULFM reports them at every call."""
        self.comm.Ack_failed()
