"""How a KV cache is re-cut between layouts, and what each rank sends and receives when.

The runs are in tests/e2e.
"""

from __future__ import annotations

import itertools

import pytest

from mpillm.comms.mover import Peer
from mpillm.comms.tags import Tag
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.shape.layout import RankLayout, cuts
from mpillm.engine.shape.model_config import ModelConfig
from tests.helpers.handoff_instances import Instance, layouts, model
from tests.helpers.loopback import Wire

SIZES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (8, 3)]  # TP, PP; 4 KV heads, 6 or 5 layers
PAIRS = list(itertools.product(SIZES, SIZES))


def held(layout: RankLayout, config: ModelConfig) -> set[tuple[int, int]]:
    """Return each (layer, KV head) that a rank holds."""
    return set(itertools.product(layout.layers(config), range(config.n_kv_heads)[layout.kv_heads(config)]))


@pytest.mark.parametrize("n_layers", [6, 5])
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=str)
def test_each_receiver_gets_all_that_it_holds_once(
    sender: tuple[int, int], receiver: tuple[int, int], n_layers: int
) -> None:
    config = model(n_layers)
    made = cuts(config, sender, receiver)
    sources, dests = layouts(sender), layouts(receiver)
    for dest, layout in enumerate(dests):
        got = [
            piece for cut in made if cut.dest == dest for piece in itertools.product(cut.layers, cut.heads)
        ]
        assert len(got) == len(set(got))
        assert set(got) == held(layout, config)
    for cut in made:
        assert set(itertools.product(cut.layers, cut.heads)) <= held(sources[cut.source], config)
    for pair in itertools.product(range(len(sources)), range(len(dests))):
        between = [cut.layers.start for cut in made if (cut.source, cut.dest) == pair]
        assert len(between) <= 4
        assert between == sorted(between)
    # Those that hold the same share the work: none sends twice as much as another, but for what does not
    # divide.
    loads = [
        sum(len(cut.layers) * len(cut.heads) for cut in made if cut.source == source)
        for source in range(sender[0])
    ]
    assert max(loads) <= 2 * max(1, min(loads)) or receiver[0] < sender[0]


def test_cuts_of_equal_layouts() -> None:
    """Each rank sends to one, also if each KV head is on two ranks."""
    config = model(6)
    for size in ((2, 1), (2, 2), (8, 1)):
        assert {(cut.source, cut.dest) for cut in cuts(config, size, size)} == {
            (rank, rank) for rank in range(size[0] * size[1])
        }


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.SEND_LAYERS])
@pytest.mark.parametrize(("sender", "receiver"), PAIRS, ids=str)
def test_a_cache_arrives_in_another_layout(
    sender: tuple[int, int], receiver: tuple[int, int], kind: Kind
) -> None:
    """Caches arrive whole whether receives are posted before or after the sends, in blocks of other sizes.

    There are five layers, so stages differ.
    """
    config, wire, n_tokens = model(5), Wire(), 11
    first = sender[0] * sender[1]
    context = Instance(wire, config, sender, 0, Peer(first, *receiver), 4, True)
    generation = Instance(wire, config, receiver, first, Peer(0, *sender), 8, False)
    there, here = [3, 1, 7], [2, 5]
    expect = [Transfer(Kind.RECEIVE, 1, 9, 6, n_tokens, here)]
    if kind == Kind.SEND_LAYERS:
        for transfers in generation.transfers:
            transfers.start(expect)
    for i, transfers in enumerate(context.transfers):
        n_layers = len(context.layouts[i].layers(config))
        if kind == Kind.SEND:
            for layer in range(n_layers):
                context.store(i, layer, there, n_tokens)
        transfers.start([Transfer(kind, 4, 9, 6, n_tokens, there)])
        n_sent = len(wire.sent)
        for layer in range(n_layers if kind == Kind.SEND_LAYERS else 0):
            context.store(i, layer, there, n_tokens)
            transfers.layer_stored(layer)
            if layer == 0 and n_layers > 1 and sender[0] <= config.n_kv_heads:
                assert len(wire.sent) > n_sent, "nothing has left when the first of the layers was computed"
        assert transfers.poll() == [4]
        assert transfers.poll() == []
    if kind == Kind.SEND:
        for transfers in generation.transfers:
            transfers.start(expect)
    for transfers in generation.transfers:
        assert transfers.poll() == [1]
    assert {tag for _, _, tag, _ in wire.sent} == {Tag.KV + 6}
    assert not any(wire.under_way.values())
    generation.check(here, n_tokens)


def test_a_transfer_is_done_when_all_its_pieces_are() -> None:
    config, wire = model(6), Wire()
    generation = Instance(wire, config, (1, 1), 2, Peer(0, 2, 1), 8, False)
    (transfers,) = generation.transfers
    transfers.start([Transfer(Kind.RECEIVE, 1, 9, 0, 5, [1]), Transfer(Kind.RECEIVE, 2, 9, 1, 5, [2])])
    contexts = Instance(wire, config, (2, 1), 0, Peer(2, 1, 1), 8, True)
    contexts.transfers[0].start([Transfer(Kind.SEND, 1, 9, 0, 5, [1])])
    assert transfers.poll() == []
    for other in contexts.transfers[::-1]:
        other.start([Transfer(Kind.SEND, 2, 9, 1, 5, [1])])
    assert transfers.poll() == [2]
    contexts.transfers[1].start([Transfer(Kind.SEND, 1, 9, 0, 5, [1])])
    assert transfers.poll() == [1]
