"""The load of conversations: which request is issued when, on a clock that the tests move."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.comms.messages import Refusal
from mpillm.data.conversations import Branch, Conversation, Turn
from mpillm.data.dataset import PromptTooLong, Turns
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
    conversations = [conversation(f"c{i}:", n_turns) for i, n_turns in enumerate(counts)]
    return Turns(conversations, np.cumsum([0, *counts]), delay_s, stamps)


class Driven:
    """A load, whose responses come after a fixed time, or one by sample."""

    def __init__(self, load: ConversationLoad, clock: Clock, response_s: float | list[int]) -> None:
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
                    took = self.response_s[index] if isinstance(self.response_s, list) else self.response_s
                    responses.append((clock.now + took, id_, index))
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


def test_without_a_time_between_ramp_up_and_drain_the_rest_of_the_test_counts(clock: Clock) -> None:
    load = ConversationLoad(turns([1] * 4), LoadShape(4, concurrency=4, ramp_up_s=2.0))
    Driven(load, clock, 0.1).run()
    assert load.window_s == (2.0, math.inf)
    together = ConversationLoad(turns([3, 1], at=[5.0] * 4), LoadShape(2, max_s=60.0))
    Driven(together, clock, 1.0)
    assert together.window_s == (0.0, 60.0)


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

    def __init__(self, error: ConfigError | None = None) -> None:
        self.error = error  # of each third prompt

    def message(self, tokens: Any) -> dict[str, Any]:
        return {"content": tokens.tolist()}

    def prompt(self, number: int, responses: list[dict[str, Any]]) -> Any:
        if len(responses) == 2 and self.error is not None:
            raise self.error
        return np.array([number, *(token for one in responses for token in one["content"])], np.int32)


def test_prompts_of_generated_responses(clock: Clock) -> None:
    woken = threading.Semaphore(0)
    shape = LoadShape(2, concurrency=2)
    too_long = PromptTooLong("f.jsonl:9: the prompt does not fit")
    load = ConversationLoad(turns([2, 3], {1: 1.5}), shape, cast("Any", Echo(too_long)), woken.release)
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
    assert load.problem == "" and len(load.cut_sessions) == 1
    assert load.outgrown_at == ["c1:2"], "the turn whose prompt is too long"


def test_a_prompt_that_a_server_refuses_as_too_long_has_outgrown_the_model(clock: Clock) -> None:
    load = ConversationLoad(turns([2] * 8), LoadShape(8, concurrency=1))
    load.start()
    for id_ in range(1, 15):
        load.poll()
        is_second = id_ % 2 == 0 and id_ < 14
        if is_second:
            load.refused(id_, Refusal(400, "too long", is_too_long=True))
        elif id_ == 13:
            load.refused(id_, Refusal(422, "no such tool"))
        load.complete([id_], NONE, [0], [0], is_second or id_ == 13)
    assert (load.n_ended, load.n_failed, load.n_outgrown, load.n_too_long) == (7, 1, 6, 6)
    assert load.outgrown_at == ["c0:1", "c1:1", "c2:1"], "the first ones"
    assert load.first_failed == "c6:0: no such tool"


def test_a_prompt_that_the_template_refuses_is_not_too_long(clock: Clock) -> None:
    woken = threading.Semaphore(0)
    echo = Echo(ConfigError("f.jsonl:9: the chat template fails"))
    load = ConversationLoad(turns([3]), LoadShape(1, concurrency=1), cast("Any", echo), woken.release)
    load.start()
    for id_ in (1, 2):
        load.poll()
        load.complete([id_], np.zeros(1, np.int32), [0], [1], False)
        assert woken.acquire(timeout=60)
    load.poll()
    assert load.finished and (load.n_ended, load.n_failed, load.n_outgrown, load.n_skipped) == (1, 1, 0, 1)
    assert (load.n_unmade, load.problem) == (1, "f.jsonl:9: the chat template fails")


def conversation(name: str, n_turns: int, *branches: tuple[Conversation, int, int | None]) -> Conversation:
    """Return a conversation with branches: each with the turn before it, and the turn that waits for it."""
    one = Conversation(name, [Turn(f"{name}{i}", []) for i in range(n_turns)])
    for child, after, join in branches:
        child.parent = one
        one.branches.append(Branch(child, after, join))
    return one


def forked(name: str, n_turns: int, n_inherited: int) -> Conversation:
    (one := conversation(name, n_turns)).n_inherited = n_inherited
    return one


def trees(*roots: Conversation, delays: dict[str, float] | None = None) -> Turns:
    flat = [one for root in roots for one in root.tree()]
    wheres = [turn.where for one in flat for turn in one.turns]
    delay_s = np.array([(delays or {}).get(where, 0.0) for where in wheres])
    first = np.cumsum([0, *(len(one.turns) for one in flat)])
    return Turns(flat, first, delay_s, np.full(len(wheres), np.nan))


def sent(load: ConversationLoad, clock: Clock, data: Turns, failing: str = "") -> list[tuple[float, str]]:
    """Return when each request is sent; responses take a second."""
    wheres = [turn.where for one in data.conversations for turn in one.turns]
    driven = Driven(load, clock, 1.0).run(frozenset(i for i, where in enumerate(wheres) if where == failing))
    return [(at, wheres[sample]) for at, sample in driven.issued]


def test_a_turn_waits_for_its_branches_and_its_delay_counts_from_there(clock: Clock) -> None:
    """The next turn waits for `s`, the one after that for `d`, and none for `b`."""
    children = [(conversation("s", 2), 0, 1), (conversation("d", 4), 0, 2), (conversation("b", 9), 0, None)]
    data = trees(conversation("r", 3, *children), delays={"r1": 0.5, "s0": 0.25})
    load = ConversationLoad(data, LoadShape(1, concurrency=1))
    requests = sent(load, clock, data)
    assert [one for one in requests if one[1][0] in "rs"] == [
        *((0.0, "r0"), (1.25, "s0"), (2.25, "s1"), (3.75, "r1")),
        (5.0, "r2"),  # d ended at 5 s, r1 at 4.75 s
    ]
    assert (1.0, "d0") in requests and (9.0, "b8") in requests
    assert (load.n_started, load.n_ended, load.n_branches, load.n_skipped) == (1, 1, 3, 0)


def test_limits_count_trees(clock: Clock) -> None:
    """The second conversation starts when the branches of the first one have ended."""
    data = trees(conversation("r", 1, (conversation("b", 3), 0, None)), conversation("q", 1))
    load = ConversationLoad(data, LoadShape(3, concurrency=1))
    requests = sent(load, clock, data)
    assert requests[:6] == [(0, "r0"), (1, "b0"), (2, "b1"), (3, "b2"), (4, "q0"), (5, "r0")]
    assert (load.n_started, load.n_ended, load.n_branches) == (3, 3, 2) and load.window_s == (0.0, 9.0)


def test_a_branch_that_fails_has_ended_for_its_parent(clock: Clock) -> None:
    """Of a parent that fails, no later branch begins; those that have begun continue."""
    data = trees(conversation("r", 2, (conversation("s", 3), 0, 1)))
    load = ConversationLoad(data, LoadShape(1, concurrency=1))
    assert sent(load, clock, data, "s1") == [(0.0, "r0"), (1.0, "s0"), (2.0, "s1"), (3.0, "r1")]
    assert (load.n_failed, load.n_ended, load.n_skipped) == (1, 1, 1)
    late = conversation("t", 4, (conversation("u", 5), 0, None))
    data = trees(conversation("r", 3, (conversation("s", 3), 0, 2), (late, 1, None)))
    load = ConversationLoad(data, LoadShape(1, concurrency=1))
    assert [where for _, where in sent(load, clock, data, "r1")] == ["r0", "s0", "r1", "s1", "s2"]
    assert (load.n_failed, load.n_ended, load.n_skipped) == (1, 1, 1 + 4 + 5)


def test_requests_after_the_end_are_skipped_with_their_branches(clock: Clock) -> None:
    """A turn that waits for a branch cut off is skipped also, though another branch ended before."""
    children = [(conversation("s", 2), 0, 1), (conversation("d", 5), 0, 1)]
    data = trees(conversation("r", 2, *children, (conversation("t", 7), 1, None)), delays={"s1": 9.0})
    load = ConversationLoad(data, LoadShape(1, concurrency=1, max_s=6.5))
    assert [where for _, where in sent(load, clock, data)] == ["r0", "s0", "d0", "d1", "d2", "d3", "d4"]
    assert load.n_skipped == 1 + 1 + 7 and load.n_ended == 0


def test_the_choice_of_requests_to_cancel_does_not_depend_on_times(clock: Clock) -> None:
    def chosen(delay: float) -> list[int]:
        data = trees(
            conversation("r", 3, (conversation("a", 9), 0, None), (conversation("b", 9), 0, None)),
            delays={"a0": delay},
        )
        load = ConversationLoad(data, LoadShape(1, concurrency=1, cancel_share=0.5, cancel_after_s=0.1))
        found: list[int] = []
        load.start()
        while not load.finished:
            load.poll()
            while load.issued:
                query = load.issued.popleft()
                assert query.cancel_after is not None
                found += query.indices[query.cancel_after == 0.1].tolist()
                load.complete(query.ids.tolist(), NONE, [0] * len(query.ids), [0] * len(query.ids), False)
            clock.now += min(1.0, load.quiet_s())
        return sorted(found)

    of_a = [sample - 3 for sample in chosen(0.0) if 3 <= sample < 12]
    of_b = [sample - 12 for sample in chosen(0.0) if sample >= 12]
    assert chosen(0.0) == chosen(5.0) and of_a != of_b


def test_a_fork_begins_with_the_responses_so_far(clock: Clock) -> None:
    """Each branch has a session of its own."""
    root = conversation("r", 1, (forked("f", 2, 1), 0, None), (conversation("s", 1), 0, None))
    load = ConversationLoad(
        trees(conversation("q", 1), root), LoadShape(2, concurrency=1), cast("Any", Echo())
    )
    load.start()
    prompts: dict[int, Any] = {}
    sessions: dict[int, int] = {}
    while not load.finished:
        load.poll()
        while load.issued:
            query = load.issued.popleft()
            assert query.prompts is not None and query.sessions is not None
            for row in zip(
                query.ids.tolist(), query.indices.tolist(), query.prompts, query.sessions, strict=True
            ):
                id_, sample, prompt, session = row
                prompts[sample] = prompt if prompt is None else prompt.tolist()
                sessions[sample] = int(session)
                load.complete([id_], np.array([10 + sample], np.int32), [0], [1], False)
    assert prompts == {0: None, 1: None, 2: [2, 11], 3: [2, 11, 12], 4: None}
    assert sessions[2] == sessions[3] and len({*sessions.values()}) == 4


@st.composite
def random_tree(draw: st.DrawFn, depth: int = 3) -> Conversation:
    n_turns = draw(st.integers(1, 4))
    one = conversation("c", n_turns)
    for _ in range(draw(st.integers(0, 3)) if depth else 0):
        child, after = draw(random_tree(depth - 1)), draw(st.integers(0, n_turns - 1))
        child.parent = one
        one.branches.append(Branch(child, after, draw(st.sampled_from([None, *range(after + 1, n_turns)]))))
    return one


@settings(max_examples=25, deadline=None)
@given(st.lists(random_tree(), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_every_turn_of_random_trees_is_sent_once(
    roots: list[Conversation], concurrency: int, data: st.DataObject
) -> None:
    """None before its previous turn, its parent's turn, or the end of a branch for which it waits."""
    turns = trees(*roots)
    flat = [*turns.conversations]
    n = int(turns.first[-1])
    took = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    clock = Clock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(conversation_load.__dict__, "time", clock)
        load = ConversationLoad(turns, LoadShape(len(roots), concurrency=concurrency))
        driven = Driven(load, clock, took).run()
    began = {sample: at for at, sample in driven.issued}
    assert sorted(sample for _, sample in driven.issued) == [*range(n)]
    ended = {sample: at + took[sample] for sample, at in began.items()}
    first = {id(one): int(turns.first[i]) for i, one in enumerate(flat)}
    for one in flat:
        for i in range(1, len(one.turns)):
            assert began[first[id(one)] + i] >= ended[first[id(one)] + i - 1]
        for branch in one.branches:
            child = first[id(branch.conversation)]
            assert began[child] == ended[first[id(one)] + branch.after]
            if branch.join is not None:
                assert (
                    began[first[id(one)] + branch.join] >= ended[child + len(branch.conversation.turns) - 1]
                )
    assert (load.n_ended, load.n_branches) == (len(roots), len(flat) - len(roots)) and not load.n_skipped
    spans = [
        [s for one in root.tree() for s in range(first[id(one)], first[id(one)] + len(one.turns))]
        for root in roots
    ]
    lives = [(min(began[s] for s in span), max(ended[s] for s in span)) for span in spans]
    assert max(sum(a <= at < b for a, b in lives) for at, _ in lives) <= concurrency
