"""Handoffs from blocks to blocks, between two ranks: the messages, and ends that do not reach each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from mpi4py import MPI

pytest.importorskip("torch")

import torch

from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache
from mpillm.engine.handoff import peer_mover
from mpillm.engine.handoff.notes import Notes
from mpillm.engine.handoff.peer_mover import CacheSlice, PeerMover, PutLink
from mpillm.engine.parallel.peer_memory import ExportedMemory
from mpillm.engine.schedule.engine_messages import PUT, TARGETS, PutTarget
from mpillm.engine.tensors.staging import StreamEvent
from tests.helpers.loopback import Mark

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def pair() -> Iterator[Any]:
    """The first two ranks; the others have nothing to do."""
    world = MPI.COMM_WORLD
    comm = world.Split(0 if world.rank < 2 else MPI.UNDEFINED, world.rank)
    if comm == MPI.COMM_NULL:
        pytest.skip("of two ranks")
    yield comm
    comm.Free()


class MpiLink:
    """Its messages go over MPI; nothing is copied."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._targets, self._puts = (Notes(comm, 1 - comm.rank, message) for message in (TARGETS, PUT))
        self.put_targets: list[PutTarget] = []

    def mark(self) -> Mark:
        return Mark()

    def send_targets(self, targets: list[PutTarget]) -> None:
        self._targets.send(targets)

    def targets(self) -> list[PutTarget]:
        return [target for targets in self._targets.take() for target in targets]

    def n_bytes(self, part: CacheSlice) -> int:
        return part.cached.n_tokens

    def put(self, parts: list[tuple[CacheSlice, PutTarget]], ready: list[StreamEvent]) -> Mark:
        self.put_targets += [target for _, target in parts]
        return Mark()

    def send_put(self, tags: list[int]) -> None:
        self._puts.send(tags)

    def arrived(self) -> list[int]:
        return [tag for tags in self._puts.take() for tag in tags]


def test_package_layers_and_puts(pair: MPI.Intracomm) -> None:
    """Each part is put into the target of its tag, whichever end is first, and both ends hear of it."""
    link = MpiLink(pair)
    links: dict[int, PutLink] = {1 - pair.rank: link}
    mover = PeerMover(links, sends=pair.rank == 0)
    moving = []
    for i in range(40):
        tag = 40 + (i if pair.rank == 0 else 39 - i)
        blocks = [tag] if pair.rank == 0 else [100 + tag]
        moving.append(mover.move(1 - pair.rank, tag, CachedBlocks(blocks, tag), slice(0, 2), slice(1, 3)))
        mover.poll()
    end = time.monotonic() + 30
    while not all(one.done() for one in moving):
        assert time.monotonic() < end
        mover.poll()
    if pair.rank == 0:
        assert sorted(target.tag for target in link.put_targets) == list(range(40, 80))
        assert all(
            target == PutTarget(target.tag, 0, 1, target.tag, [100 + target.tag])
            for target in link.put_targets
        )
    pair.Barrier()


@pytest.mark.parametrize("refuses", ["the receiver's driver", "the sender's driver", "nobody"])
def test_ends_agree_whether_they_reach_each_other(
    pair: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """If not, the caches go over NCCL."""

    def export(tensor: torch.Tensor) -> ExportedMemory:
        if refuses == "the receiver's driver":
            raise RuntimeError("refused")
        return ExportedMemory("host", b"bus", b"handle", tensor.shape[0])

    def reach(exported: list[ExportedMemory]) -> list[int]:
        if refuses == "the sender's driver":
            raise RuntimeError("refused")
        return [one.offset for one in exported]

    monkeypatch.setattr(peer_mover, "export", export)
    monkeypatch.setattr(peer_mover, "reach", reach)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: None)
    cache = KVCache(2 + pair.rank, 3, 1, 4, 8, torch.float32)
    mover = PeerMover.connected(pair, [1 - pair.rank], cache, sends=pair.rank == 0)
    assert mover.ranks == ({1 - pair.rank} if refuses == "nobody" else set())
