"""KV caches through the memory of one rank, from any layout to any other."""

from __future__ import annotations

import pytest

from mpillm.comms.mover import Peer
from mpillm.endpoint.disagg.kv_socket import plain_memory
from mpillm.engine.handoff.host_end import HostEnd
from mpillm.engine.schedule.transfer import Kind, Transfer
from tests.helpers.handoff_instances import Instance, model
from tests.helpers.loopback import Wire

N_TOKENS = 11
SENT, RECEIVED = [3, 1, 7], [2, 5]  # blocks of 4 and of 8 tokens


@pytest.mark.parametrize("sender", [(1, 1), (2, 1), (8, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("receiver", [(1, 1), (4, 1), (1, 2)], ids=str)
def test_a_cache_goes_in_and_out(sender: tuple[int, int], receiver: tuple[int, int]) -> None:
    """A cache comes out as it went in, whoever put it in."""
    config = model(6)
    kv_bytes = config.kv_bytes_per_token("float32")
    into, out = Wire(), Wire()  # of two runs
    contexts = Instance(into, config, sender, 0, Peer(0, 1, 1), 4, sends=True)
    for i, layout in enumerate(contexts.layouts):
        for layer in range(len(layout.layers(config))):
            contexts.store(i, layer, SENT, N_TOKENS)
    end = HostEnd(config, kv_bytes, into.mover(0), Peer(0, *sender), takes=True, new=plain_memory)
    end.take(17, 4, N_TOKENS)
    for transfers in contexts.transfers:
        transfers.start([Transfer(Kind.SEND, 1, 9, 4, N_TOKENS, SENT)])
        assert transfers.poll() == [1]
    caches = end.poll()
    assert list(caches) == [17] and caches[17].nbytes == N_TOKENS * kv_bytes

    generations = Instance(out, config, receiver, 0, Peer(0, 1, 1), 8, sends=False)
    for transfers in generations.transfers:
        transfers.start([Transfer(Kind.RECEIVE, 1, 9, 6, N_TOKENS, RECEIVED)])
    end = HostEnd(config, kv_bytes, out.mover(0), Peer(0, *receiver), takes=False, new=plain_memory)
    end.give(18, 6, N_TOKENS, caches[17])
    assert list(end.poll()) == [18] and end.poll() == {}
    assert all(transfers.poll() == [1] for transfers in generations.transfers)
    generations.check(RECEIVED, N_TOKENS)
