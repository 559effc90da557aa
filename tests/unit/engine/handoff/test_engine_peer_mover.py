"""Handoffs from blocks to blocks: who may write when, and that all arrives, between caches on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpillm.comms.mover import Peer
from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache
from mpillm.engine.handoff import peer_mover
from mpillm.engine.handoff.peer_mover import PeerMover, PutLink, SliceTransfer
from mpillm.engine.handoff.transfers import Transfers, partners
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.shape.layout import RankLayout
from tests.helpers.handoff_instances import Instance, model
from tests.helpers.loopback import PeerWire
from tests.helpers.loopback import Wire as BufferWire

N_TOKENS = 11
SIZES = [(1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (8, 3)]


def connect(context: Instance, generation: Instance) -> list[bool]:
    """Give both instances' transfers links between their ranks' caches.

    Return which ranks of the first have something to send: of those with the same heads, not all may.
    """
    wires: dict[tuple[int, int], PeerWire] = {}
    for one in (context, generation):
        for i, layout in enumerate(one.layouts):
            links: dict[int, PutLink] = {}
            for rank in partners(one.config, layout, [one.peer], sends=one.sends):
                j = rank - one.peer.rank
                pair = (i, j) if one.sends else (j, i)
                wire = PeerWire(context.caches[pair[0]], generation.caches[pair[1]])
                links[rank] = wires.setdefault(pair, wire)
            one.transfers[i] = Transfers(
                one.caches[i],
                one.config,
                layout,
                BufferWire().mover(0),  # which nothing takes
                {9: one.peer},
                sends=one.sends,
                block_mover=PeerMover(links, sends=one.sends),
            )
    return [any(i == source for source, _ in wires) for i in range(len(context.caches))]


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.SEND_LAYERS])
@pytest.mark.parametrize(("sender", "receiver"), list(itertools.product(SIZES, SIZES)), ids=str)
def test_a_cache_arrives_in_another_layout(
    sender: tuple[int, int], receiver: tuple[int, int], kind: Kind
) -> None:
    """Whether room is there before the cache or after it, in blocks of another size."""
    config, first = model(5), sender[0] * sender[1]
    context = Instance(BufferWire(), config, sender, 0, Peer(first, *receiver), 4, True)
    generation = Instance(BufferWire(), config, receiver, first, Peer(0, *sender), 8, False)
    has_pieces = connect(context, generation)
    there, here = [3, 1, 7], [2, 5]
    expect = [Transfer(Kind.RECEIVE, 1, 9, 6, N_TOKENS, here)]
    if kind == Kind.SEND_LAYERS:
        for transfers in generation.transfers:
            transfers.start(expect)
    for i, transfers in enumerate(context.transfers):
        layers = range(len(context.layouts[i].layers(config)))
        if kind == Kind.SEND:
            for layer in layers:
                context.store(i, layer, there, N_TOKENS)
        transfers.start([Transfer(kind, 4, 9, 6, N_TOKENS, there)])
        for layer in layers if kind == Kind.SEND_LAYERS else ():
            context.store(i, layer, there, N_TOKENS)
            transfers.layer_stored(layer)
    done = [one.poll() for one in context.transfers]
    if kind == Kind.SEND:
        assert [4] not in [tickets for tickets, has in zip(done, has_pieces, strict=True) if has], (
            "nobody has room yet"
        )
        for transfers in generation.transfers:
            transfers.start(expect)
    done = [[*tickets, *one.poll()] for tickets, one in zip(done, context.transfers, strict=True)]
    assert done == [[4]] * len(context.transfers)
    assert [one.poll() for one in generation.transfers] == [[1]] * len(generation.transfers)
    generation.check(here, N_TOKENS)


class Pair:
    """A sender and a receiver of two caches with 9 blocks."""

    def __init__(self, is_idle: bool = True) -> None:
        self.caches = [KVCache(2, 9, 3, 4, 8, torch.float32) for _ in range(2)]
        self.caches[0].keys.normal_()
        self.caches[0].values.normal_()
        self.wire = PeerWire(self.caches[0], self.caches[1], is_idle)
        self.sender, self.receiver = (
            PeerMover({1: self.wire}, sends=True),
            PeerMover({0: self.wire}, sends=False),
        )

    def send(self, tag: int, blocks: list[int], n_tokens: int = 4) -> SliceTransfer:
        return self.sender.move(1, tag, CachedBlocks(blocks, n_tokens), slice(0, 2), slice(0, 3))

    def receive(self, tag: int, blocks: list[int], n_tokens: int = 4) -> SliceTransfer:
        return self.receiver.move(0, tag, CachedBlocks(blocks, n_tokens), slice(0, 2), slice(0, 3))

    def poll(self) -> None:
        for mover in (self.receiver, self.sender, self.receiver):
            mover.poll()


def test_caches_of_any_order_find_their_rooms() -> None:
    """Two have one tag; those go in the order posted."""
    pair = Pair()
    arriving = [pair.receive(tag, [block]) for tag, block in ((40, 1), (41, 2), (40, 3))]
    leaving = [pair.send(tag, [block]) for tag, block in ((40, 7), (40, 8), (41, 9))]
    pair.poll()
    assert all(moving.done() for moving in (*arriving, *leaving))
    assert [tags for tags, _ in pair.wire.puts] == [[40, 40, 41]], "one launch"
    for here, there in ((1, 7), (2, 9), (3, 8)):
        assert torch.equal(pair.caches[1].keys[:, here, :, :4], pair.caches[0].keys[:, there, :, :4])


def test_much_is_launched_in_parts() -> None:
    """So that the first are done, and others can follow, while the rest is under way."""
    pair = Pair()
    pair.wire.n_bytes_each = peer_mover._MAX_LAUNCH_BYTES // 2
    for tag in range(40, 45):
        pair.send(tag, [2])
    for tag in range(40, 45):
        pair.receive(tag, [3])
    pair.poll()
    assert [tags for tags, _ in pair.wire.puts] == [[40, 41], [42, 43], [44]]


def test_targets_with_blocks_in_use_are_not_sent() -> None:
    """A receiver's GPU may still write to the blocks of a sequence that has ended."""
    pair = Pair(is_idle=False)
    pair.receive(40, [1])
    pair.poll()
    pair.receive(41, [2])
    pair.poll()
    assert not pair.wire.targets_in_flight
    first, second = pair.wire.marks
    first.over = True
    pair.receiver.poll()
    assert [target.tag for target in pair.wire.targets_in_flight] == [40]
    second.over = True
    pair.receiver.poll()
    assert [target.tag for target in pair.wire.targets_in_flight] == [40, 41]


def test_a_copy_waits_for_what_it_copies() -> None:
    """On the GPU; and neither end reports it before it is done."""
    pair = Pair()
    arriving = pair.receive(40, [1])
    pair.receiver.poll()
    pair.wire.is_idle = False
    leaving = pair.send(40, [7])
    pair.sender.poll()
    ((_, ready),) = pair.wire.puts
    computed, copied = pair.wire.marks[-2:]
    assert ready == [computed]
    computed.over = True
    pair.poll()
    assert not leaving.done() and not arriving.done()
    copied.over = True
    pair.poll()
    assert leaving.done() and arriving.done()


def test_another_length_is_an_error() -> None:
    pair = Pair()
    pair.receive(40, [1], 3)
    pair.send(40, [7], 4)
    with pytest.raises(RuntimeError, match="tag 40: 3 tokens expected, 4 sent"):
        pair.poll()


def test_a_lost_instance_ends_its_transfers() -> None:
    pair, config = Pair(), model(2)
    peers = {9: Peer(1, 1, 1)}
    cache = KVCache(2, 9, config.n_kv_heads, 4, config.head_dim, torch.float32)
    transfers = Transfers(
        cache, config, RankLayout(), BufferWire().mover(0), peers, sends=True, block_mover=pair.sender
    )
    transfers.start([Transfer(Kind.SEND, 1, 9, 0, 6, [1, 2])])
    assert transfers.poll() == []
    transfers.lose(9)
    assert transfers.poll() == [1]
    assert transfers.is_done()
