"""The leader's queue, and requests that are cancelled there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import ANSWER, CANCEL, DROP, GRANT, REQUEST, WORK, Batch, Grant, ResponseFlag
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.roles.leader import Leader

HARNESS, WORKER = 0, 1
CANCELLED = int(ResponseFlag.CANCELLED)


class WatchedBatch(Batch):
    """Counts how often its rows are read."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "rows":
            object.__setattr__(self, "reads", self.reads + 1)
        return super().__getattribute__(name)


def requests(*ids: int) -> WatchedBatch:
    rows: NDArray[np.void] = np.zeros(len(ids), REQUEST)
    rows["id"], rows["n_tokens"], rows["max_output"] = ids, 2, 8
    return WatchedBatch(rows, np.repeat(np.array(ids, np.int32), 2))


class Driven:
    """A leader without other roles."""

    def __init__(self, free: int) -> None:
        self.sent: list[tuple[Tag, Any]] = []
        route: Any = SimpleNamespace(
            handlers={}, send=lambda dest, tag, buffer: self.sent.append((tag, buffer))
        )
        one = SimpleNamespace(index=0, role="executor", root_rank=WORKER)
        plan: Any = SimpleNamespace(instances=[one], harness_rank=HARNESS, leader_rank=HARNESS)
        self.route = route
        self.leader = Leader(route, plan, "load_balancing", "round_robin", 300.0, lambda failure: None)
        self.grant(free)

    def grant(self, n: int) -> None:
        buffer = GRANT.write(Grant(n, 10 * n))
        self.route.handlers[GRANT.tag](Envelope(WORKER, GRANT.tag, buffer))

    def cancel(self, *ids: int) -> None:
        self.sent.clear()
        self.route.handlers[CANCEL.tag](Envelope(HARNESS, CANCEL.tag, CANCEL.write([*ids])))

    def ended(self) -> dict[int, bool]:
        """Return the ids of the rows that the harness got, and whether each was cancelled in the queue."""
        (buffer,) = [buffer for tag, buffer in self.sent if tag == ANSWER.tag]
        return {int(row["id"]): bool(row["flags"] & CANCELLED) for row in ANSWER.read(buffer).rows}

    def work(self) -> list[tuple[int, list[int]]]:
        """Return the id and the tokens of each request that is sent to the worker."""
        self.sent.clear()
        self.leader.poll()
        batches = [WORK.read(buffer) for tag, buffer in self.sent if tag == WORK.tag]
        return [(int(one.rows["id"][0]), one.tokens.tolist()) for batch in batches for one in batch.split()]


def test_a_cancellation_reads_only_the_batches_of_its_requests() -> None:
    """With thousands of queued requests, each cancellation would delay rank 0."""
    driven = Driven(free=1)
    batches = [requests(0), *(requests(2 * i, 2 * i + 1) for i in range(1, 50))]
    for batch in batches:
        driven.leader._on_query(HARNESS, batch)
    assert driven.work() == [(0, [0, 0])]
    before = [batch.reads for batch in batches]
    driven.cancel(0)
    assert [DROP.read(buffer) for _, buffer in driven.sent] == [[0]]
    assert [batch.reads for batch in batches] == before, "the request is not queued"
    driven.cancel(20, 21, 41)
    assert driven.ended() == {20: True, 21: True, 41: True}
    assert [i for i, batch in enumerate(batches) if batch.reads > before[i]] == [10, 20]
    driven.grant(200)
    left = [i for i in range(2, 100) if i not in (20, 21, 41)]
    assert driven.work() == [(i, [i, i]) for i in left], "the order, and each prompt"


def test_an_id_that_is_used_again_is_not_the_cancelled_one() -> None:
    driven = Driven(free=0)
    driven.leader._on_query(HARNESS, requests(1, 2))
    driven.cancel(2)
    assert driven.ended() == {2: True}
    driven.cancel(2)
    assert driven.ended() == {2: False}, "it has ended"
    driven.leader._on_query(HARNESS, requests(2))
    driven.leader._on_query(HARNESS, requests(3))
    driven.grant(2)
    assert driven.work() == [(1, [1, 1]), (2, [2, 2])]
    driven.cancel(3)
    assert driven.ended() == {3: True} and not driven.leader._waiting
