"""The handoff between contexts (the first ranks) and generation instances (the others): its protocol, with
cores that have little room;
and KV caches that are re-cut between the layouts of two instances."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from mpi4py import MPI

from mpillm.comms.messages import REQUEST, Batch
from mpillm.comms.mover import MpiMover, Peer, TransferHandle
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Transport
from mpillm.roles.handoff import HandoffReceiver, HandoffSender

pytestmark = pytest.mark.mpi(min_size=2)


def kv_of(id_: int) -> np.ndarray:
    """Return the KV cache of a request: of many sizes, some too large to be sent eagerly."""
    return np.full(1 + (id_ * 7919) % 200_000, id_ % 251, np.uint8)


def first_token(id_: int) -> int | None:
    """Return None: the answer ends with it."""
    return None if id_ % 7 == 3 else 1000 + id_


@dataclass
class ContextCore:
    """Counts what it still holds."""

    mover: MpiMover
    held: set[int]
    moving: dict[int, TransferHandle] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)

    def send_kv(self, id_: int, receiver: int, slot: int) -> None:
        assert id_ in self.held
        assert id_ not in self.sent
        self.sent.append(id_)
        self.moving[id_] = self.mover.send(receiver, Tag.KV + slot, kv_of(id_))

    def poll_kv(self) -> list[int]:
        return take_done(self.moving)

    def release_kv(self, id_: int) -> None:
        assert id_ not in self.moving
        self.held.remove(id_)


@dataclass
class GenerationCore:
    """Has room for `room` requests, which leave when the test says so."""

    mover: MpiMover
    room: int
    reserved: dict[int, np.ndarray] = field(default_factory=dict)
    moving: dict[int, TransferHandle] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    admitted: list[tuple[int, list[int], int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    most: int = 0

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        if len(self.reserved) >= self.room:
            return False
        id_ = int(request.rows["id"][0])
        assert id_ not in self.reserved
        assert id_ not in self.accepted
        self.accepted.append(id_)
        self.reserved[id_] = np.zeros_like(kv_of(id_))
        self.most = max(self.most, len(self.reserved))
        self.moving[id_] = self.mover.receive(sender, Tag.KV + slot, self.reserved[id_])
        return True

    def poll_kv(self) -> list[int]:
        return take_done(self.moving)

    def admit(self, request: Batch, token: int) -> None:
        id_ = int(request.rows["id"][0])
        assert id_ not in self.moving
        assert np.array_equal(self.reserved[id_], kv_of(id_)), f"the KV cache of request {id_} is another's"
        self.admitted.append((id_, request.tokens.tolist(), token))

    def release_kv(self, id_: int) -> None:
        assert id_ not in self.moving
        self.released.append(id_)
        del self.reserved[id_]

    def finish_one(self) -> None:
        """End a request that was admitted, which makes room."""
        ended = [id_ for id_, _, _ in self.admitted if id_ in self.reserved]
        if ended:
            del self.reserved[ended[0]]


def take_done(moving: dict[int, TransferHandle]) -> list[int]:
    done = [id_ for id_, one in moving.items() if one.done()]
    for id_ in done:
        del moving[id_]
    return done


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Barrier()
    made.Free()


@pytest.fixture
def mover() -> Iterator[MpiMover]:
    made = MPI.COMM_WORLD.Dup()
    yield MpiMover(made)
    made.Barrier()
    made.Free()


def request(id_: int, instance: int) -> Batch:
    rows = np.zeros(1, REQUEST)
    rows["id"], rows["n_tokens"], rows["generation"] = id_, 3, instance
    return Batch(rows, np.array([id_, 1, 2], np.int32))


@pytest.mark.parametrize(("room", "n_requests"), [(1, 40), (3, 60), (1000, 400)])
def test_every_request_arrives_once_with_its_own_cache(
    comm: MPI.Intracomm, mover: MpiMover, room: int, n_requests: int
) -> None:
    """With room for one, for a few, or for more than there are slots, from one context or two, every request
    arrives once. First tokens are sent in another order than requests are offered, so some before they are
    accepted; one in seven ends there."""
    transport = Transport(comm)
    n_contexts = 1 if comm.size == 2 else 2
    generations = list(range(n_contexts, comm.size))
    n = n_requests * len(generations)
    receiver_of = {id_: generations[id_ // n_contexts % len(generations)] for id_ in range(n)}
    end = time.monotonic() + 60
    if comm.rank < n_contexts:
        mine = [id_ for id_ in range(n) if id_ % n_contexts == comm.rank]
        context = ContextCore(mover, set(mine))
        sender = HandoffSender(transport, context, {rank: rank for rank in generations})
        random = np.random.default_rng(comm.rank)
        to_offer = mine[:]
        to_send: list[int] = []
        left: list[int] = []
        while len(left) < len(mine):
            assert time.monotonic() < end
            offered, to_offer = to_offer[:5], to_offer[5:]
            sender.offer([request(id_, receiver_of[id_]) for id_ in offered])
            to_send = random.permutation(to_send + offered).tolist()
            sent, to_send = to_send[:4], to_send[4:]
            sender.send_first_tokens({id_: first_token(id_) for id_ in sent})
            transport.dispatch()
            done = [one.id for one in sender.poll()]
            assert not set(done) & context.held  # released before it is reported
            left += done
        assert sorted(left) == mine
        assert sender.idle
        assert not context.held
        assert {id_ for id_ in mine if first_token(id_) is not None} <= set(context.sent)
    else:
        mine = [id_ for id_ in range(n) if receiver_of[id_] == comm.rank]
        expected = [(id_, [id_, 1, 2], 1000 + id_) for id_ in mine if first_token(id_) is not None]
        generation = GenerationCore(mover, room)
        receiver = HandoffReceiver(transport, generation, {rank: rank for rank in range(n_contexts)})  # type: ignore[arg-type]
        while len(generation.admitted) < len(expected) or not receiver.idle:
            assert time.monotonic() < end
            transport.dispatch()
            receiver.poll()
            generation.finish_one()
        # In any order: a small cache may overtake a large one.
        assert sorted(generation.admitted) == expected
        assert receiver.admitted == len(expected)
        assert generation.most <= room
        assert sorted(generation.released + [id_ for id_, _, _ in generation.admitted]) == sorted(
            generation.accepted
        )
        for source in range(n_contexts):  # first come, first served
            accepted = [id_ for id_ in generation.accepted if id_ % n_contexts == source]
            assert accepted == sorted(accepted)
    transport.flush(300)


def test_a_cache_without_room_stays_where_it_is(comm: MPI.Intracomm, mover: MpiMover) -> None:
    """Nothing moves, and nobody waits, until there is room.

    Instances with room are served meanwhile, and requests that need none leave.
    """
    transport = Transport(comm)
    full, roomy = 1, 2 if comm.size > 2 else None
    end = time.monotonic() + 30
    if comm.rank == 0:
        context = ContextCore(mover, set(range(5)))
        sender = HandoffSender(transport, context, {rank: rank for rank in range(1, comm.size)})
        sender.offer([request(id_, full) for id_ in range(4)])
        sender.send_first_tokens({0: 5, 1: 5, 2: None, 3: 5})
        waiting = {0, 1, 3}
        if roomy:
            sender.offer([request(4, roomy)])
            sender.send_first_tokens({4: 5})
        left: list[int] = []
        while not set(left) >= {2} | ({4} if roomy else set()):
            assert time.monotonic() < end
            transport.dispatch()
            left += [one.id for one in sender.poll()]
        assert not waiting & set(left)
        assert context.sent == ([4] if roomy else [])
        quiet = comm.Ibarrier()
        while len(left) < (5 if roomy else 4):
            assert time.monotonic() < end
            transport.dispatch()
            left += [one.id for one in sender.poll()]
        assert [id_ for id_ in left if id_ in waiting] == [0, 1, 3]
        assert context.sent == ([4] if roomy else []) + [0, 1, 3]
        quiet.Wait()
    else:
        generation = GenerationCore(mover, 1 if comm.rank != full else 0)
        receiver = HandoffReceiver(transport, generation, {0: 0})  # type: ignore[arg-type]
        wanted = {full: 3, roomy: 1}.get(comm.rank, 0)
        quiet = comm.Ibarrier()
        while len(generation.admitted) < wanted or not quiet.Test():
            assert time.monotonic() < end
            transport.dispatch()
            receiver.poll()
            generation.finish_one()
            # rank 0 has seen that nothing moves
            if comm.rank == full and generation.room == 0 and quiet.Test():
                assert generation.accepted == []
                generation.room = 1
        assert receiver.idle
    transport.flush(300)


@pytest.mark.parametrize("sender", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("receiver", [(1, 1), (2, 1), (1, 3), (3, 1)], ids=str)
def test_caches_are_cut_again(mover: MpiMover, sender: tuple[int, int], receiver: tuple[int, int]) -> None:
    """Going from one (TP, PP) to another, every rank of the receiver holds its layers and heads of the
    senders' caches."""
    torch = pytest.importorskip("torch")
    from mpillm.engine.cache.kv_cache import KVCache
    from mpillm.engine.handoff.transfers import Transfers
    from mpillm.engine.schedule.transfer import Kind, Transfer
    from mpillm.engine.shape.layout import RankLayout
    from mpillm.engine.shape.read_config import load_model_config

    world = MPI.COMM_WORLD
    n_senders, n_receivers = sender[0] * sender[1], receiver[0] * receiver[1]
    if n_senders + n_receivers > world.size:
        pytest.skip("needs more ranks")
    if world.rank >= n_senders + n_receivers:
        return
    sends = world.rank < n_senders
    me, (tp, pp), other = (
        (world.rank, sender, Peer(n_senders, *receiver))
        if sends
        else (world.rank - n_senders, receiver, Peer(0, *sender))
    )
    config = replace(load_model_config("tiny-llama"), n_layers=5, n_kv_heads=6, n_heads=6, head_dim=64)
    layout = RankLayout(tp, pp, tp_rank=me % tp, pp_rank=me // tp)
    layers, heads = layout.layers(config), range(6)[layout.kv_heads(config)]
    cache = KVCache(len(layers), 40, len(heads), 8, 64, torch.float32)
    transfers = Transfers(cache, config, layout, mover, {5: other}, sends=sends)
    # Three caches: a token, some, and pieces that no MPI sends eagerly. [layer, kv, head, token, 64] of the
    # whole model.
    tables = [[40], [7, 6, 9], [block for block in range(39, 0, -1) if block not in (7, 6, 9)]]
    lengths = [1, 20, 8 * 36 - 3]
    wholes = [
        torch.arange(5 * 2 * 6 * n * 64).view(5, 2, 6, n, 64).float() + 0.25 * i
        for i, n in enumerate(lengths)
    ]
    mine = [whole[layers.start : layers.stop, :, heads.start : heads.stop] for whole in wholes]
    kind = Kind.SEND if sends else Kind.RECEIVE
    order = [2, 0, 1] if sends else [0, 1, 2]  # by slot, whatever the order
    for i in range(3) if sends else ():
        for token in range(lengths[i]):
            block, at = tables[i][token // 8], token % 8
            cache.keys[:, block, :, at] = mine[i][:, 0, :, token]
            cache.values[:, block, :, at] = mine[i][:, 1, :, token]
    transfers.start([Transfer(kind, i, 5, 10 + i, lengths[i], tables[i]) for i in order])
    done: list[int] = []
    end = time.monotonic() + 30
    while len(done) < 3:
        assert time.monotonic() < end
        done += transfers.poll()
    assert sorted(done) == [0, 1, 2]
    for i, table in enumerate(tables) if not sends else ():
        for pool, part in ((cache.keys, mine[i][:, 0]), (cache.values, mine[i][:, 1])):
            found = pool[:, table].transpose(1, 2).flatten(2, 3)[:, :, : lengths[i]]
            assert torch.equal(found, part)
