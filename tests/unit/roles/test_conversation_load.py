"""The load of conversations: which request is issued when, on a clock that the tests move."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.conversations import Conversation
from mpillm.data.dataset import Turns
from mpillm.roles import conversation_load
from mpillm.roles.conversation_load import ConversationLoad, LoadShape, arrival_times

NONE = np.zeros(0, np.int32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(conversation_load, "time", clock)
    yield clock


def turns(counts: list[int], delays: dict[int, float] | None = None, at: Any = None) -> Turns:
    n = sum(counts)
    delay_s = np.zeros(n)
    for sample, delay in (delays or {}).items():
        delay_s[sample] = delay
    stamps = np.full(n, np.nan) if at is None else np.array(at, np.float64)
    return Turns(
        [Conversation(f"c{i}") for i in range(len(counts))], np.cumsum([0, *counts]), delay_s, stamps
    )


class Driven:
    """A load, whose responses come after a fixed time."""

    def __init__(self, load: ConversationLoad, clock: Clock, response_s: float) -> None:
        self.load, self.clock, self.response_s = load, clock, response_s
        self.issued: list[tuple[float, int]] = []  # seconds of the test, and sample
        self.most_open = 0

    def run(self, failing: frozenset[int] = frozenset()) -> Driven:
        load, clock = self.load, self.clock
        load.start()
        responses: list[tuple[float, int, int]] = []
        while not load.finished:
            load.poll()
            while load.issued:
                query = load.issued.popleft()
                for id_, index in zip(query.ids.tolist(), query.indices.tolist(), strict=True):
                    self.issued.append((round(clock.now - 100.0, 6), index))
                    responses.append((clock.now + self.response_s, id_, index))
            self.most_open = max(self.most_open, len(responses))
            responses.sort()
            next_response = responses[0][0] if responses else math.inf
            due = clock.now + load.quiet_s()
            clock.now = min(next_response, due)
            while responses and responses[0][0] <= clock.now:
                _, id_, index = responses.pop(0)
                load.complete([id_], NONE, [0], [0], index in failing)
        return self


def test_a_request_follows_the_response_after_its_delay(clock: Clock) -> None:
    load = ConversationLoad(turns([3], {1: 0.25, 2: 2.0}), LoadShape(1, concurrency=1))
    driven = Driven(load, clock, 1.0).run()
    assert driven.issued == [(0.0, 0), (1.25, 1), (4.25, 2)]
    assert (load.n_started, load.n_ended, load.n_skipped) == (1, 1, 0)


def test_the_start_of_a_test_takes_no_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversations exist before. Otherwise, the first ones of many would be late."""
    load = ConversationLoad(turns([1] * 3, at=[0.0, 1.0, 2.0]), LoadShape(3))
    assert not load.poll() and load.quiet_s() == math.inf and not load.finished
    monkeypatch.setattr(load, "_start_conversation", None)
    assert Driven(load, clock, 0.1).run().issued == [(0.0, 0), (1.0, 1), (2.0, 2)]


def test_a_conversation_follows_another_at_its_end_and_the_data_set_begins_again(clock: Clock) -> None:
    load = ConversationLoad(turns([2, 1, 1]), LoadShape(5, concurrency=2))
    driven = Driven(load, clock, 1.0).run()
    # c0 and c1 start; c1 ends at 1 s: c2; c0 ends at 2 s, as c2 does: c0 and c1 again
    assert driven.issued == [(0.0, 0), (0.0, 2), (1.0, 1), (1.0, 3), (2.0, 0), (2.0, 2), (3.0, 1)]
    assert driven.most_open == 2 and load.n_ended == 5
    assert load.window_s == (0.0, 3.0), "until the first conversation ends that no other one follows"


def test_conversations_start_evenly_over_the_ramp_up(clock: Clock) -> None:
    load = ConversationLoad(turns([1] * 4), LoadShape(4, concurrency=4, ramp_up_s=2.0))
    assert Driven(load, clock, 10.0).run().issued == [(0.0, 0), (0.5, 1), (1.0, 2), (1.5, 3)]
    assert load.window_s[0] == 2.0


def test_arrivals_at_a_rate_do_not_wait_for_responses(clock: Clock) -> None:
    n, rate = 2000, 50.0
    load = ConversationLoad(turns([1] * 10), LoadShape(n, rate=rate, seed=3))
    driven = Driven(load, clock, 5.0).run()
    gaps = np.diff([at for at, _ in driven.issued])
    assert driven.most_open > 10 and len(driven.issued) == n
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.1) and gaps.std() == pytest.approx(1 / rate, rel=0.1)


@pytest.mark.parametrize(("burstiness", "deviation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (math.inf, 0.0)])
def test_burstiness_is_the_shape_of_intervals(burstiness: float, deviation: float) -> None:
    """Their mean is 1 / rate, and their standard deviation that divided by the root of the shape."""
    times = arrival_times(20_000, 5.0, LoadShape(20_000, burstiness=burstiness))
    intervals = np.diff(times, prepend=0)
    assert intervals.mean() == pytest.approx(0.2, rel=0.05)
    assert intervals.std() == pytest.approx(0.2 * deviation, rel=0.05, abs=1e-9)


def test_the_rate_grows_over_the_ramp_up() -> None:
    times = arrival_times(100, 10.0, LoadShape(100, burstiness=math.inf, ramp_up_s=4.0))
    # 10 per second, growing from 0 over 4 s, are 20 arrivals; a quarter of them are in the first half.
    assert [int((times <= end + 1e-9).sum()) for end in (2.0, 4.0, 5.0, 6.0)] == [5, 20, 30, 40]
    assert (np.diff(times) > 0).all()


def test_a_trace_is_replayed_by_its_time_stamps(clock: Clock) -> None:
    """Later requests of a session wait for their time stamps and for the responses."""
    stamps = [10.0, np.nan, 12.0, 11.0, 30.0]  # c0: three requests, c1: two
    load = ConversationLoad(turns([3, 2], {1: 0.5}, stamps), LoadShape(2, speed=2.0))
    driven = Driven(load, clock, 1.0).run()
    assert driven.issued == [(0.0, 0), (0.5, 3), (1.25, 1), (2.25, 2), (10.0, 4)]


def test_a_repeated_trace_goes_on_where_it_ended(clock: Clock) -> None:
    load = ConversationLoad(turns([1] * 3, at=[0.0, 1.0, 2.0]), LoadShape(5))
    assert [at for at, _ in Driven(load, clock, 0.1).run().issued] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_error_ends_its_conversation_only(clock: Clock) -> None:
    load = ConversationLoad(turns([3, 2]), LoadShape(2, concurrency=2))
    driven = Driven(load, clock, 1.0).run(failing=frozenset({1}))
    assert [sample for _, sample in driven.issued] == [0, 3, 1, 4]
    assert (load.n_failed, load.n_skipped, load.n_ended) == (1, 1, 2)


def test_requests_to_cancel_are_chosen_by_the_seed_and_their_conversations_continue(clock: Clock) -> None:
    """The choice depends on the conversation and the turn, not on the order of responses."""

    def chosen(order: int, share: float = 0.3, seed: int = 5) -> list[int]:
        shape = LoadShape(200, concurrency=3, seed=seed, cancel_share=share, cancel_after_s=0.5)
        load = ConversationLoad(turns([4] * 200), shape)
        load.start()
        found = []
        while not load.finished:
            load.poll()
            queries = [load.issued.popleft() for _ in range(len(load.issued))]
            for query in queries[::order]:
                assert query.cancel_after is not None
                found += query.indices[query.cancel_after == 0.5].tolist()
                for id_ in query.ids.tolist()[::order]:
                    load.complete([id_], NONE, [0], [0], False)
        assert (load.n_ended, load.n_skipped, load.n_failed) == (200, 0, 0)
        return sorted(found)

    first = chosen(1)
    assert len(first) == pytest.approx(0.3 * 800, rel=0.2)
    assert chosen(-1) == first != chosen(1, seed=6) and chosen(1, share=1.0) == [*range(800)]


def test_no_request_is_issued_after_the_end(clock: Clock) -> None:
    load = ConversationLoad(turns([4] * 3), LoadShape(3, concurrency=1, max_s=4.5))
    driven = Driven(load, clock, 1.0).run()
    assert driven.issued == [(float(i), i) for i in range(4)] + [(4.0, 4)]
    assert (load.n_skipped, load.n_started, load.n_ended) == (3, 2, 1)
    assert load.window_s == (0.0, 4.5)


def test_conversations_that_arrive_after_the_end_do_not_start(clock: Clock) -> None:
    shape = LoadShape(10, rate=1.0, burstiness=math.inf, max_s=3.5)  # they arrive at 1 s, 2 s, …
    load = ConversationLoad(turns([2] * 10), shape)
    driven = Driven(load, clock, 1.0).run()
    assert sorted(driven.issued) == [(1.0, 0), (2.0, 1), (2.0, 2), (3.0, 3), (3.0, 4)]
    assert (load.n_started, load.n_ended, load.n_skipped) == (3, 2, 1)
    assert load.window_s == (0.0, 3.5)


class Echo:
    """A history whose prompts are the number of the conversation and of the responses before."""

    def message(self, tokens: Any) -> dict[str, Any]:
        return {"content": tokens.tolist()}

    def prompt(self, number: int, responses: list[dict[str, Any]]) -> Any:
        if number == 1 and len(responses) == 2:
            raise ConfigError("f.jsonl:9: the prompt does not fit")
        return np.array([number, *(token for one in responses for token in one["content"])], np.int32)


def test_prompts_of_generated_responses(clock: Clock) -> None:
    woken = threading.Semaphore(0)
    shape = LoadShape(2, concurrency=2)
    load = ConversationLoad(turns([2, 3], {1: 1.5}), shape, cast("Any", Echo()), woken.release)
    load.start()

    def issued() -> dict[int, tuple[int, list[int] | None]]:
        """Return sample and prompt of each request, by id."""
        load.poll()
        found = {}
        while load.issued:
            query = load.issued.popleft()
            assert query.prompts is not None
            for id_, index, prompt in zip(
                query.ids.tolist(), query.indices.tolist(), query.prompts, strict=True
            ):
                found[id_] = (index, None if prompt is None else prompt.tolist())
        return found

    def respond(id_: int, tokens: list[int]) -> None:
        load.complete([id_], np.array([0, *tokens], np.int32), [1], [len(tokens)], False)
        assert woken.acquire(timeout=60)  # the prompt is complete

    assert issued() == {1: (0, None), 2: (2, None)}
    respond(1, [7, 8])
    load.message(2, b'{"content": [5]}')  # of a chat endpoint
    respond(2, [0])
    assert issued() == {3: (3, [1, 5])}  # the other conversation has a delay
    clock.now += 1.5
    assert issued() == {4: (1, [0, 7, 8])}
    respond(3, [6])
    assert issued() == {} and not load.finished
    load.complete([4], NONE, [0], [0], False)
    assert load.finished and (load.n_ended, load.n_failed, load.n_outgrown, load.n_skipped) == (2, 0, 1, 1)
    assert load.outgrown == "f.jsonl:9: the prompt does not fit"
