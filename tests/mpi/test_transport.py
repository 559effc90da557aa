"""Messages over one communicator."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

from mpillm.comms import wakeup_socket, yielding
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import BEAT, STOP, Beat, Stop
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope, Transport

pytestmark = pytest.mark.mpi(min_size=2)
LARGE = 5_000_000  # bytes: no MPI sends that without the receiver


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """Yield a communicator of the test's own, so that nothing of another test arrives in it."""
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Barrier()
    made.Free()


def test_a_loop_keeps_the_core_where_open_mpi_would_give_way() -> None:
    gives_way = yielding._set()
    if "Open MPI" not in MPI.Get_library_version():
        assert not gives_way(True)
        assert not gives_way(False), "nothing was set"
        return
    usual, seen = gives_way(True), []

    def look() -> bool:
        seen.append(gives_way(False))
        with yielding.yielding_while_waiting():
            seen.append(gives_way(True))
        seen.append(gives_way(False))
        return True

    loop = EventLoop(cast("Any", SimpleNamespace(tick=lambda: None)), wakeup_socket.WakeupSocket())
    loop.pollers.append(look)
    loop.run_until(lambda: bool(seen))
    assert seen == [False, True, False]
    assert gives_way(usual), "as before, for what waits in MPI elsewhere"


def until(condition: Callable[[], bool], step: Callable[[], object], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        step()


def bytes_of(value: int, size: int = 8) -> np.ndarray:
    made = np.full(size, value % 251, np.uint8)
    made[:8] = np.array([value], np.int64).view(np.uint8)
    return made


def value_of(received: Envelope) -> int:
    return int(received.buffer[:8].view(np.int64)[0])


def test_order_of_each_source(comm: MPI.Intracomm) -> None:
    """Small and large messages from all to all, itself included, arrive unharmed in the order of each
    source."""
    transport = Transport(comm)
    got: dict[int, list[int]] = {source: [] for source in range(comm.size)}

    def take(received: Envelope) -> None:
        assert len(received.buffer) == (300_000 if value_of(received) % 10 == 0 else 8)
        assert (received.buffer[8:] == value_of(received) % 251).all()
        got[received.source].append(value_of(received))

    transport.handlers[Tag.WORK] = take
    for i in range(50):
        for dest in range(comm.size):
            transport.send(dest, Tag.WORK, bytes_of(i, 300_000 if i % 10 == 0 else 8))
    until(lambda: all(len(values) == 50 for values in got.values()), transport.dispatch)
    transport.flush(300)
    assert got == {source: list(range(50)) for source in range(comm.size)}
    assert transport.sent_messages == 50 * comm.size
    assert transport.sent_bytes == comm.size * (45 * 8 + 5 * 300_000)


def test_nothing_waits_for_a_busy_receiver(comm: MPI.Intracomm) -> None:
    """Rank 1 does not look for messages while rank 0 sends; rank 0 is not held up."""
    transport = Transport(comm)
    if comm.rank == 0:
        start = time.monotonic()
        for i in range(20):
            transport.send(1, Tag.WORK, bytes_of(i, LARGE))
        assert time.monotonic() - start < 300
        comm.send("sent", 1, 99)  # rank 1 begins to look only now
        transport.flush(300)
    if comm.rank == 1:
        assert comm.recv(source=0, tag=99) == "sent"
        got: list[int] = []
        transport.handlers[Tag.WORK] = lambda received: got.append(value_of(received))
        until(lambda: len(got) == 20, transport.dispatch)
        assert got == list(range(20))


def test_a_late_large_message_does_not_hold_up_the_receiver(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """While its sender is busy, `poll` keeps returning at once, and what was sent later stays behind it."""
    # a file, because waiting in MPI would help the message along
    looked = Path(comm.bcast(str(tmp_path), 1)) / "looked"
    transport = Transport(comm)
    if comm.rank == 0:
        transport.send(1, Tag.WORK, bytes_of(7, LARGE))
        transport.send(1, Tag.WORK, bytes_of(8))
        until(looked.exists, lambda: None)
        transport.flush(300)
    elif comm.rank == 1:
        got: list[Envelope] = []
        transport.handlers[Tag.WORK] = got.append
        for _ in range(100):
            start = time.monotonic()
            transport.dispatch()
            assert time.monotonic() - start < 300
        looked.touch()
        until(lambda: len(got) == 2, transport.dispatch)
        assert [value_of(received) for received in got] == [7, 8]


def test_messages_to_itself(comm: MPI.Intracomm) -> None:
    transport = Transport(comm)
    assert transport.poll() is None
    transport.send(comm.rank, Tag.WORK, bytes_of(1))
    STOP.send(transport, comm.rank, Stop(3, True))
    first, second = transport.poll(), transport.poll()
    assert first is not None
    assert second is not None
    assert (first.source, first.tag, value_of(first)) == (comm.rank, Tag.WORK, 1)
    assert (second.tag, STOP.read(second.buffer)) == (Tag.STOP, Stop(3, True))
    assert transport.poll() is None


def test_messages_to_itself_alone(comm: MPI.Intracomm) -> None:
    """What comes from others waits for `dispatch`."""
    transport = Transport(comm)
    got: list[int] = []
    transport.handlers[Tag.WORK] = lambda received: got.append(received.source)
    transport.send((comm.rank + 1) % comm.size, Tag.WORK, bytes_of(1))
    comm.Barrier()
    transport.send(comm.rank, Tag.WORK, bytes_of(2))
    transport.dispatch_own()
    assert got == [comm.rank]
    until(lambda: len(got) == 2, transport.dispatch)
    transport.flush(300)


def test_take_is_out_of_turn(comm: MPI.Intracomm) -> None:
    transport = Transport(comm)
    if comm.rank == 0:
        BEAT.send(transport, 1, Beat("load", 0.0, ""))
        STOP.send(transport, 1, Stop(5, False))
        transport.flush(300)
    if comm.rank == 1:
        taken: list[Stop] = []
        until(lambda: bool(taken), lambda: taken.extend(filter(None, [STOP.take(transport, 0)])))
        assert taken == [Stop(5, False)]
        assert STOP.take(transport, 0) is None
        left: list[Envelope] = []
        until(lambda: bool(left), lambda: left.extend(filter(None, [transport.poll()])))
        assert (left[0].tag, BEAT.read(left[0].buffer)) == (Tag.BEAT, Beat("load", 0.0, ""))


def test_dispatch_is_bounded(comm: MPI.Intracomm) -> None:
    transport = Transport(comm)
    got: list[int] = []
    transport.handlers[Tag.WORK] = lambda received: got.append(value_of(received))
    for i in range(100):
        transport.send(comm.rank, Tag.WORK, bytes_of(i))
    assert transport.dispatch()
    assert 0 < len(got) < 100
    until(lambda: len(got) == 100, transport.dispatch)
    assert got == list(range(100))
    assert not transport.dispatch()


def test_a_message_wakes_a_rank_that_sleeps(comm: MPI.Intracomm) -> None:
    """Each rank sleeps until the one before it has sent something, small or large."""
    n_rounds = 20
    wakeup = wakeup_socket.WakeupSocket()
    wakeup.short_sleep_s = wakeup.long_sleep_s = 20.0
    wakeup.open(comm.bcast(secrets.token_hex(8)), comm.rank, range(comm.size))
    comm.Barrier()
    wakeup.probe_peers(range(comm.size))
    assert wakeup.is_reliable
    transport = Transport(comm, wakeup)
    got: list[int] = []
    transport.handlers[Tag.WORK] = lambda received: got.append(value_of(received))
    watch: Any = QuietWatch()
    loop = EventLoop(watch, wakeup)
    loop.pollers.append(transport.dispatch)
    loop.quiet_s.append(transport.quiet_s)
    end = time.monotonic() + 15
    for i in range(n_rounds):
        message = bytes_of(i, 300_000 if i % 2 else 8)
        if comm.rank == 0:
            transport.send(1, Tag.WORK, message)
        loop.run_until(lambda: len(got) > i or time.monotonic() > end)  # noqa: B023 - called at once
        if comm.rank:
            transport.send((comm.rank + 1) % comm.size, Tag.WORK, message)
    transport.flush(300)
    assert time.monotonic() < end
    assert got == list(range(n_rounds))


def test_only_a_large_message_keeps_its_sender_awake(comm: MPI.Intracomm) -> None:
    """A small one lies in shared memory, whether or not it was taken; a large one needs both ends."""
    transport = Transport(comm)
    if comm.rank == 0:
        transport.send(1, Tag.WORK, bytes_of(0))
        assert transport.quiet_s() > 0
        transport.send(1, Tag.WORK, bytes_of(1, 3_000_000))
        assert transport.quiet_s() == 0
    got: list[int] = []
    transport.handlers[Tag.WORK] = lambda received: got.append(value_of(received))
    until(lambda: comm.rank != 1 or len(got) == 2, transport.dispatch)
    transport.flush(300)
    assert transport.quiet_s() == math.inf


class QuietWatch:
    def tick(self) -> None: ...


class Wounded:
    """A receive that ULFM interrupts once: another rank was lost."""

    def __init__(self, request: MPI.Request, error: int) -> None:
        self._request, self._error = request, error

    def Test(self) -> bool:
        if self._error:
            error, self._error = self._error, 0
            raise MPI.Exception(error)
        return bool(self._request.Test())


@pytest.mark.parametrize("outlives", [False, True])
def test_a_message_that_a_loss_interrupts_still_arrives(comm: MPI.Intracomm, outlives: bool) -> None:
    """Whoever sent it: what `Improbe` has found from any source is interrupted by any loss."""
    if MPI.ERR_PROC_FAILED == MPI.ERR_PROC_FAILED_PENDING:
        pytest.skip("this MPI has no ULFM")
    transport = Transport(comm)
    transport.outlives_others = outlives
    if comm.rank == 0:
        for dest in range(1, comm.size):
            transport.send(dest, Tag.BYE, np.full(1 << 16, dest, np.uint8))
        transport.flush(10)
        return
    while not transport._arriving:
        message = comm.Improbe(0, Tag.BYE)
        if message is not None:
            buffer = np.empty(1 << 16, np.uint8)
            request = Wounded(message.Irecv((buffer, MPI.BYTE)), MPI.ERR_PROC_FAILED_PENDING)
            transport._arriving.append((cast("MPI.Request", request), Envelope(0, Tag.BYE, buffer)))
    if not outlives:
        with pytest.raises(MPI.Exception):
            transport.poll()
    while (received := transport.poll()) is None:
        pass
    assert (received.source, received.buffer[-1]) == (0, comm.rank)
