"""KV caches between a GPU's blocks and host memory: they come out as they went in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.comms.mover import Peer
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.handoff.host_end import HostEnd
from mpillm.engine.handoff.host_mover import CopyStream, HostMover
from mpillm.engine.handoff.pinned import PinnedMemory
from mpillm.engine.handoff.transfers import Transfers
from mpillm.engine.run.gpu_steps import use_gpu
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.shape.layout import RankLayout
from tests.helpers.handoff_instances import model
from tests.helpers.loopback import Wire

N_TOKENS = (4100, 3, 16)  # by slot
T = TypeVar("T")
BLOCKS = [[*range(1, 258)], [300], [301]]  # as the sender, of the smaller blocks, needs them


def collect(poll: Callable[[], Iterable[T]]) -> list[T]:
    """Poll until something has come of each slot."""
    end, found = time.monotonic() + 10, list[T]()
    while len(found) < len(N_TOKENS):
        assert time.monotonic() < end
        found += poll()
    return found


def filled(cache: KVCache) -> KVCache:
    for pool in cache.pools:
        pool.random_()
    return cache


@pytest.mark.parametrize("max_bytes", [None, 1], ids=["", "piece by piece"])
@pytest.mark.parametrize("rank", [0, 1], ids=["", "of another rank"])
@pytest.mark.parametrize("pinned_bytes", [1 << 26, 0], ids=["", "nothing pinned"])
def test_a_cache_goes_in_and_out(rank: int, max_bytes: int | None, pinned_bytes: int) -> None:
    """Three at once; the blocks are written to again as soon as they have left."""
    use_gpu("cuda:0")
    config, pinned = model(6), PinnedMemory(pinned_bytes)
    wire, kv_bytes = Wire(), config.kv_bytes_per_token("float32")
    layers, n_heads, width = config.n_layers, config.n_kv_heads, config.head_dim
    sender, receiver = (KVCache(layers, 400, n_heads, n, width, torch.float32, "cuda") for n in (16, 32))
    before = [pool.clone() for pool in filled(sender).pools]
    here = {0: Peer(0, 1, 1)}
    mover = HostMover(wire.mover(rank), rank, pinned, CopyStream())
    leaving = Transfers(sender, config, RankLayout(), mover, here, sends=True, max_bytes=max_bytes)
    at_end = mover.host_end if rank == 0 else wire.mover(0)
    end = HostEnd(config, kv_bytes, at_end, Peer(rank, 1, 1), takes=True, new=pinned.new)
    for slot, n in enumerate(N_TOKENS):
        end.take(slot, slot, n)
    leaving.start([Transfer(Kind.SEND, i, 0, i, n, BLOCKS[i]) for i, n in enumerate(N_TOKENS)])
    collect(leaving.poll)
    filled(sender)
    taken = dict(collect(lambda: end.poll().items()))

    mover = HostMover(wire.mover(rank), rank, pinned, CopyStream())
    coming = Transfers(receiver, config, RankLayout(), mover, here, sends=False)
    at_end = mover.host_end if rank == 0 else wire.mover(0)
    end = HostEnd(config, kv_bytes, at_end, Peer(rank, 1, 1), takes=False, new=pinned.new)
    coming.start([Transfer(Kind.RECEIVE, i, 0, i, n, BLOCKS[i]) for i, n in enumerate(N_TOKENS)])
    for slot, n in enumerate(N_TOKENS):
        end.give(slot, slot, n, taken[slot])
    collect(coming.poll)
    for there, pool in zip(before, receiver.pools, strict=True):
        for blocks, n in zip(BLOCKS, N_TOKENS, strict=True):
            sent = there[:, blocks].transpose(2, 3).flatten(1, 2)[:, :n]
            got = pool[:, blocks].transpose(2, 3).flatten(1, 2)[:, :n]
            assert torch.equal(sent, got)
