"""The order of sends and receives between GPUs, over a link without GPUs: it matches by order alone, and
fails where NCCL would hang."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from mpillm.comms.mover import Peer
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.handoff import nccl_mover
from mpillm.engine.handoff.nccl_mover import NcclMover
from mpillm.engine.handoff.transfers import Transfers
from mpillm.engine.schedule.engine_messages import Notice
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.tensors.staging import StreamEvent
from tests.helpers.loopback import Mark


@dataclass
class Wire:
    """Connects both ends of a link."""

    notices_under_way: deque[list[Notice]] = field(default_factory=deque)
    sent: deque[tuple[list[torch.Tensor], Mark]] = field(default_factory=deque)
    marks: list[Mark] = field(default_factory=list)
    log: list[list[int]] = field(default_factory=list)  # first bytes of what went together
    computes_at_once: bool = True

    def mark(self) -> Mark:
        self.marks.append(Mark(self.computes_at_once))
        return self.marks[-1]

    def notify(self, together: list[Notice]) -> None:
        self.notices_under_way.append(together)

    def notices(self) -> list[list[Notice]]:
        came = list(self.notices_under_way)
        self.notices_under_way.clear()
        return came

    def send(self, buffers: list[torch.Tensor]) -> Mark:
        self.log.append([int(buffer[0]) for buffer in buffers])
        self.sent.append((buffers, Mark(over=False)))
        return self.sent[-1][1]

    @torch.inference_mode()
    def receive(self, buffers: list[torch.Tensor], ready: list[StreamEvent]) -> Mark:
        sent, event = self.sent.popleft()
        assert len(ready) == len(buffers) == len(sent), "both ends group alike"
        for mine, theirs in zip(buffers, sent, strict=True):
            assert mine.nbytes == theirs.nbytes
            mine.copy_(theirs)
        event.over = True
        return Mark()


def buffer(first: int, n_bytes: int = 8) -> torch.Tensor:
    return torch.full((n_bytes,), first, dtype=torch.uint8)


def movers(wire: Wire) -> tuple[NcclMover, NcclMover]:
    return NcclMover({1: wire}), NcclMover({0: wire})


def test_receives_come_in_the_order_of_sends() -> None:
    wire = Wire()
    sender, receiver = movers(wire)
    # Accepted in one order, computed in another, and two pieces under one tag.
    into = {tag: [buffer(0), buffer(0)] for tag in (40, 41, 42)}
    moving = {tag: [receiver.receive(0, tag, piece) for piece in pieces] for tag, pieces in into.items()}
    for tag in (42, 40, 41):
        for piece in (0, 1):
            sender.send(1, tag, buffer(2 * tag + piece))
            receiver.poll()
    sender.poll()
    receiver.poll()
    for tag, pieces in into.items():
        assert [int(piece[0]) for piece in pieces] == [2 * tag, 2 * tag + 1]
        assert all(one.done() for one in moving[tag])


def test_a_notice_waits_for_its_receive() -> None:
    wire = Wire()
    sender, receiver = movers(wire)
    leaving = [sender.send(1, tag, buffer(tag)) for tag in (40, 41)]
    sender.poll()
    second = buffer(0)
    arriving = receiver.receive(0, 41, second)
    receiver.poll()
    assert not arriving.done()
    assert not any(one.done() for one in leaving)
    first = buffer(0)
    receiver.receive(0, 40, first)
    receiver.poll()
    assert arriving.done()
    assert all(one.done() for one in leaving)
    assert (int(first[0]), int(second[0])) == (40, 41)


def test_nothing_is_launched_before_it_is_computed() -> None:
    wire = Wire(computes_at_once=False)
    sender, _ = movers(wire)
    for tag in (40, 41, 42):
        sender.send(1, tag, buffer(tag))
    sender.poll()
    assert not wire.sent
    wire.marks[0].over = True
    wire.marks[2].over = True  # but the second is not
    sender.poll()
    assert wire.log == [[40]]
    wire.marks[1].over = True
    sender.poll()
    assert wire.log == [[40], [41, 42]]


def test_small_buffers_go_together() -> None:
    wire = Wire(computes_at_once=False)
    sender, _ = movers(wire)
    for i, share in enumerate((0.4, 0.4, 0.4, 2, 0.4)):  # of what is launched together
        memory = torch.empty(int(share * nccl_mover._MAX_LAUNCH_BYTES), dtype=torch.uint8)
        memory[0] = i
        sender.send(1, 40 + i, memory)
    for mark in wire.marks:
        mark.over = True
    sender.poll()
    assert wire.log == [[0, 1, 2], [3], [4]]


def test_another_size_is_an_error() -> None:
    wire = Wire()
    sender, receiver = movers(wire)
    receiver.receive(0, 40, buffer(0, 4))
    sender.send(1, 40, buffer(1, 8))
    sender.poll()
    with pytest.raises(RuntimeError, match="tag 40: 4 bytes expected, 8 sent"):
        receiver.poll()


def test_transfers_in_pieces_within_their_memory() -> None:
    """Many caches arrive, accepted in another order than they are sent in.

    The sender's buffers never exceed what it may use.
    """
    config, rng = load_model_config("tiny-llama"), np.random.default_rng(7)
    wire = Wire()
    n, n_tokens = 12, 11
    caches = [
        KVCache(config.n_layers, 40, config.n_kv_heads, 4, config.head_dim, torch.float32) for _ in range(2)
    ]
    caches[0].keys.normal_()
    caches[0].values.normal_()
    n_bytes = caches[0].piece_bytes(n_tokens, slice(0, config.n_layers), slice(0, config.n_kv_heads))
    ends = []
    for cache, mover, peer in zip(caches, movers(wire), (1, 0), strict=True):
        sends = peer == 1
        ends.append(
            Transfers(
                cache,
                config,
                RankLayout(),
                mover,
                {9: Peer(peer, 1, 1)},
                sends=sends,
                max_bytes=3 * n_bytes if sends else None,
            )
        )
    blocks = [(1 + rng.permutation(40))[: 3 * n].reshape(n, 3).tolist() for _ in range(2)]
    ends[1].start([Transfer(Kind.RECEIVE, i, 9, i, n_tokens, blocks[1][i]) for i in range(n)])
    ends[0].start([Transfer(Kind.SEND, i, 9, i, n_tokens, blocks[0][i]) for i in rng.permutation(n).tolist()])
    done: list[list[int]] = [[], []]
    for _ in range(4 * n):
        done[0] += ends[0].poll()
        assert sum(piece.nbytes for pieces, _ in wire.sent for piece in pieces) <= 3 * n_bytes
        done[1] += ends[1].poll()
    assert sorted(done[0]) == sorted(done[1]) == list(range(n))
    for there, here in zip(*blocks, strict=True):
        for a, b in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
            held, got = (
                pool[:, ids].transpose(1, 2).flatten(2, 3)[:, :, :n_tokens]
                for pool, ids in ((a, there), (b, here))
            )
            assert torch.equal(held, got)


def test_a_small_cache_goes_in_one_piece() -> None:
    config = load_model_config("tiny-llama")
    for min_split_bytes, n_sent in ((0, 4), (1 << 20, 1)):
        wire = Wire()
        mover, _ = movers(wire)
        mover.min_split_bytes = min_split_bytes
        cache = KVCache(config.n_layers, 4, config.n_kv_heads, 4, config.head_dim, torch.float32)
        transfers = Transfers(cache, config, RankLayout(), mover, {9: Peer(1, 1, 1)}, sends=True)
        transfers.start([Transfer(Kind.SEND, 1, 9, 0, 5, [1, 2])])
        transfers.poll()
        assert sum(map(len, wire.log)) == min(n_sent, config.n_layers)
