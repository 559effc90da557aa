"""The handoff between rank 0 (context) and the other ranks (generation), with a core that has little room."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpillm.comms.handoff import HandoffReceiver, HandoffSender
from mpillm.comms.transport import Transport
from mpillm.messages import REQUEST, Batch

pytestmark = pytest.mark.mpi(min_size=2)


def kv_of(id_: int) -> np.ndarray:
    """The KV cache of a request: of many sizes, some too large to be sent eagerly."""
    return np.full(1 + (id_ * 7919) % 200_000, id_ % 251, np.uint8)


class ContextCore:
    """Counts what it still holds."""

    def __init__(self, ids: range) -> None:
        self.held = set(ids)
        self.exported: list[int] = []

    def export_kv(self, id_: int) -> np.ndarray:
        assert id_ in self.held
        self.exported.append(id_)
        return kv_of(id_)

    def release_kv(self, id_: int) -> None:
        self.held.remove(id_)


class GenerationCore:
    """Has room for `room` requests, which leave when the test says so."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.reserved: dict[int, np.ndarray] = {}
        self.admitted: list[tuple[int, list[int], int]] = []
        self.most = 0

    def reserve_kv(self, row: Any) -> np.ndarray | None:
        if len(self.reserved) >= self.room:
            return None
        id_ = int(row["id"])
        assert id_ not in self.reserved
        self.reserved[id_] = np.zeros_like(kv_of(id_))
        self.most = max(self.most, len(self.reserved))
        return self.reserved[id_]

    def admit(self, request: Batch, first_token: int) -> None:
        id_ = int(request.rows["id"][0])
        assert np.array_equal(self.reserved[id_], kv_of(id_)), f"the KV cache of request {id_} is another's"
        self.admitted.append((id_, request.tokens.tolist(), first_token))

    def finish_one(self) -> None:
        """A request that was admitted ends and makes room."""
        ended = [id_ for id_, _, _ in self.admitted if id_ in self.reserved]
        if ended:
            del self.reserved[ended[0]]


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Barrier()
    made.Free()


def request(id_: int) -> Batch:
    rows = np.zeros(1, REQUEST)
    rows["id"], rows["n_tokens"] = id_, 3
    return Batch(rows, np.array([id_, 1, 2], np.int32))


@pytest.mark.parametrize(("room", "n_requests"), [(1, 40), (3, 60), (1000, 600)])
def test_every_request_arrives_once_with_its_own_cache(comm: MPI.Intracomm, room: int, n_requests: int) -> None:
    """With room for one, for a few, and for more than there are slots for caches under way."""
    transport = Transport(comm)
    n = n_requests * (comm.size - 1)
    end = time.monotonic() + 40
    if comm.rank == 0:
        context = ContextCore(range(n))
        sender = HandoffSender(transport, context)  # type: ignore[arg-type]
        for id_ in range(n):
            sender.offer(1 + id_ % (comm.size - 1), request(id_), 1000 + id_)
        left: list[int] = []
        while len(left) < n:
            assert time.monotonic() < end
            done = sender.poll()
            assert not set(done) & context.held  # released before it is told
            left += done
        assert sorted(left) == list(range(n))
        assert sorted(context.exported) == list(range(n))
        assert sender.kv_bytes == sum(kv_of(id_).nbytes for id_ in range(n))
        while not transport.idle:
            transport.poll()
    else:
        mine = [id_ for id_ in range(n) if 1 + id_ % (comm.size - 1) == comm.rank]
        generation = GenerationCore(room)
        receiver = HandoffReceiver(transport, generation)  # type: ignore[arg-type]
        while len(generation.admitted) < len(mine):
            assert time.monotonic() < end
            receiver.poll()
            generation.finish_one()
        # In any order: a small cache may overtake a large one.
        assert sorted(generation.admitted) == [(id_, [id_, 1, 2], 1000 + id_) for id_ in mine]
        assert generation.most <= room
        while not transport.idle:
            transport.poll()


def test_a_cache_without_room_stays_where_it_is(comm: MPI.Intracomm) -> None:
    """Nothing moves, and nobody waits, until there is room."""
    transport = Transport(comm)
    if comm.rank == 0:
        context = ContextCore(range(3))
        sender = HandoffSender(transport, context)  # type: ignore[arg-type]
        for id_ in range(3):
            sender.offer(1, request(id_), 5)
        seen = MPI.COMM_WORLD.Irecv(bytearray(1), 1)  # the receiver has seen all offers, and has no room
        while not seen.Test():
            assert sender.poll() == []
        assert context.exported == []
        MPI.COMM_WORLD.Send(b"1", 1)
        left: list[int] = []
        end = time.monotonic() + 20
        while len(left) < 3:
            assert time.monotonic() < end
            left += sender.poll()
        assert left == [0, 1, 2]
    elif comm.rank == 1:
        generation = GenerationCore(0)
        receiver = HandoffReceiver(transport, generation)  # type: ignore[arg-type]
        end = time.monotonic() + 20
        while len(receiver._offers) < 3:
            assert time.monotonic() < end
            receiver.poll()
        for _ in range(50):
            receiver.poll()
        assert generation.admitted == []
        MPI.COMM_WORLD.Send(b"1", 0)
        MPI.COMM_WORLD.Recv(bytearray(1), 0)
        generation.room = 1
        while len(generation.admitted) < 3:
            assert time.monotonic() < end
            receiver.poll()
            generation.finish_one()
        while not transport.idle:
            transport.poll()
