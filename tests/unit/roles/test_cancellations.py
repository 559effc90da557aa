"""Cancellation of requests by the harness, a time after it has sent them."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import ANSWER, CANCEL, QUERY, RESPONSE, WINDOW, Batch, ResponseFlag
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.cores.histogram import Histogram
from mpillm.data.dataset import Dataset
from mpillm.loadgen.sut import Query
from mpillm.roles.cancellations import Cancellations
from mpillm.roles.harness import Harness, SamplingOptions, Totals

FIRST, FINAL = ResponseFlag.FIRST, ResponseFlag.FINAL
CANCELLED, DONE = ResponseFlag.CANCELLED, ResponseFlag.CANCEL_DONE


def test_requests_are_due_in_the_order_of_their_times() -> None:
    now = [10.0]
    open_ = Cancellations(lambda: now[0])
    open_.add([1, 2, 3], [2.0, math.nan, 1.0])
    assert 1 in open_ and 2 not in open_ and open_.quiet_s() == 1.0 and open_.due() == []
    now[0] = 11.5
    assert open_.due() == [3] and open_.unconfirmed
    open_.ended(1)  # its response came first
    open_.add([1], [9.0])  # another request with this slot
    now[0] = 12.5
    assert open_.due() == [] and open_.quiet_s() == 8.0
    open_.confirmed(3)
    assert not open_.unconfirmed


def n_of(histogram: Histogram) -> int:
    histogram.summary_ms()  # counts what has been added
    return int(histogram._counts.sum())


class Source:
    """Issues its queries when the test begins, and notes the responses."""

    error = None
    use_token_latencies = False
    request_flags = 0

    def __init__(self, *queries: Query) -> None:
        self.issued = deque(queries)
        self.completed: list[tuple[int, int]] = []  # id, tokens
        self.finished = False

    def start(self) -> None: ...

    def first_tokens(self, ids: Any, tokens: Any, starts: Any) -> None: ...

    def message(self, id_: int, text: bytes) -> None: ...

    def refused(self, id_: int, refusal: Any) -> None: ...

    def complete(self, ids: list[int], tokens: Any, starts: Any, lengths: list[int], is_error: bool) -> None:
        assert not is_error
        self.completed += zip(ids, lengths, strict=True)


class Driven:
    """A harness without other roles."""

    def __init__(self, n: int, cancel_after: list[float], has_handoff: bool) -> None:
        self.sent: list[tuple[Tag, Any]] = []
        route: Any = SimpleNamespace(
            handlers={}, send=lambda dest, tag, buffer: self.sent.append((tag, buffer))
        )
        dataset = Dataset.packed("", np.arange(2 * n, dtype=np.int32), np.full(n, 2))
        ids = np.arange(n, dtype=np.uint64) + 100
        self.source = Source(Query(ids, np.arange(n), 0.0, None, None, np.array(cancel_after)))
        self.totals = Totals()
        source: Any = self.source
        sampling = SamplingOptions(9)
        self.harness = Harness(route, 0, dataset, sampling, source, None, has_handoff, self.totals)
        self._route = route
        self.harness.test()
        route.handlers[WINDOW.tag](Envelope(0, WINDOW.tag, WINDOW.write(2 * n)))
        self.harness.poll()
        (query,) = [buffer for tag, buffer in self.sent if tag == QUERY.tag]
        self.slots = QUERY.read(query).rows["id"].tolist()

    def cancelled(self) -> list[int]:
        self.harness.poll()
        return [id_ for tag, buffer in self.sent if tag == CANCEL.tag for id_ in CANCEL.read(buffer)]

    def answer(self, *rows: tuple[int, int, int]) -> None:
        """Deliver rows: position of the request, tokens, flags."""
        values = np.array([(self.slots[i], n, int(flags)) for i, n, flags in rows], RESPONSE)
        batch = Batch(values, np.zeros(sum(n for _, n, _ in rows), np.int32))
        self._route.handlers[ANSWER.tag](Envelope(0, ANSWER.tag, ANSWER.write(batch)))

    @property
    def free(self) -> int:
        return self.harness._n_free


@pytest.mark.parametrize("has_handoff", [False, True])
def test_a_cancelled_request_is_in_no_figure_and_frees_its_slot(has_handoff: bool) -> None:
    driven = Driven(4, [0.0, 0.0, 0.0, math.nan], has_handoff)
    free = driven.free
    assert sorted(driven.cancelled()) == sorted(driven.slots[:3])
    driven.answer((0, 1, FIRST), (0, 0, FIRST | FINAL | CANCELLED), (1, 3, FIRST | FINAL))
    assert driven.free == free, "CANCEL_DONE is outstanding"
    driven.answer((0, 0, DONE), (1, 0, DONE), (2, 0, FIRST | FINAL | CANCELLED | DONE))
    driven.source.finished = True
    assert driven.free == free + 3 and driven.harness.done("test")
    driven.answer((3, 5, FIRST | FINAL))
    totals = driven.totals
    assert (totals.issued, totals.samples, totals.cancelled, totals.tokens, totals.errors) == (4, 2, 2, 8, 0)
    assert n_of(totals.ttft) == n_of(totals.latency) == 2
    assert sorted(driven.source.completed) == [(100, 0), (101, 3), (102, 0), (103, 5)]


def test_the_test_ends_after_the_last_confirmation() -> None:
    """A handed-off request ends in both instances, in any order."""
    driven = Driven(1, [0.0], True)
    free = driven.free
    assert driven.cancelled() == driven.slots
    driven.answer((0, 0, FINAL | CANCELLED))
    driven.source.finished = True
    assert not driven.harness.done("test")
    driven.answer((0, 0, DONE), (0, 0, ResponseFlag.CONTEXT_DONE))
    assert driven.harness.done("test") and driven.free == free + 1
