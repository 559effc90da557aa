"""Roles, with a transport that only notes what is sent."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import (
    ACCEPT,
    ANSWER,
    DONE,
    FIRST,
    NO_SLOT,
    OFFER,
    QUERY,
    REQUEST,
    RESPONSE,
    WARM_UP,
    WINDOW,
    WORK,
    Batch,
    Refusal,
    ResponseFlag,
)
from mpillm.comms.tags import Tag
from mpillm.comms.transport import Envelope
from mpillm.cores.base import CoreConfig, Metrics
from mpillm.cores.dummy import DummyCore
from mpillm.data.dataset import Dataset
from mpillm.errors import RunError
from mpillm.loadgen.sut import Query
from mpillm.roles.context import ContextRole
from mpillm.roles.follower import FollowerRole
from mpillm.roles.generation import GenerationRole
from mpillm.roles.harness import Harness, SamplingOptions, Totals
from mpillm.roles.instance import InstanceRole
from mpillm.telemetry.recorder import Recorder
from tests.helpers.lone_mpi import run_program
from tests.helpers.support import ROOT


def test_the_leader_gets_no_reports_of_requests_before_the_test() -> None:
    """Nor of those answered before this rank begins the warm-up: a context instance may begin it earlier."""
    sent: list[Tag] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(tag))
    core = DummyCore(CoreConfig("dummy"))
    role = InstanceRole(core, route, leader=0, instance=0)
    role.load()
    core.enqueue(core.warm_up_requests())
    assert role.poll()
    role.warmup()
    assert role.poll()
    assert not sent
    role.ready()
    core.enqueue(core.warm_up_requests())
    assert role.poll()
    assert sent == [Tag.GRANT, Tag.DONE]


def test_an_instance_measures_itself_in_the_test(caplog: pytest.LogCaptureFixture) -> None:
    """Its leader measures twice a second, also in a long step. Its log has a line now and then."""
    now = [100.0]
    times: list[float] = []

    class Core(DummyCore):
        def metrics(self) -> Metrics:
            times.append(now[0])
            return Metrics(len(times), 2, 3, 4, 0.5)

    route: Any = SimpleNamespace(handlers={}, send=lambda *_: None)
    leading = InstanceRole(Core(CoreConfig("dummy")), route, leader=0, instance=0, clock=lambda: now[0])
    following = FollowerRole(Core(CoreConfig("dummy")))
    for role in (leading, following):
        role.load()
        role.poll()
        role.ready()
        assert role.measured() is None
        role.test()
    caplog.set_level("INFO")
    for now[0] in np.arange(100.0, 111.0, 0.125).tolist():
        leading.poll()
        following.poll()
    assert following.measured() is None and following.report() == {"compiled": []}
    assert times == np.arange(100.0, 111.0, 0.5).tolist()
    latest = Metrics(len(times), 2, 3, 4, 0.5)
    assert leading.measured() == (times[-1] - 100, latest)
    now[0] = 150.0  # it is in a step that takes long
    assert leading.measured() == (50, latest)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("2 answer tokens computed, 3 requests running, 4 waiting, KV cache 50% full")


def test_a_core_is_stopped_once() -> None:
    """In the phase of that name, and not again where another rank is lost in it and ends the run."""
    stopped: list[str] = []

    class Core(DummyCore):
        def notify_stop(self) -> None:
            stopped.append("stopped")

    route: Any = SimpleNamespace(handlers={}, send=lambda *_: None)
    core = Core(CoreConfig("dummy"))
    for role in (FollowerRole(core), InstanceRole(core, route, leader=0, instance=0)):
        role.stop()
        role.stop()
        assert stopped == ["stopped"]
        stopped.clear()


def test_an_instance_that_slept_until_a_request_came_was_not_busy() -> None:
    """A rank without work sleeps: what lies before a request is not the request's time."""
    now = [100.0]

    class Core(DummyCore):
        def poll_responses(self) -> None:
            """Answer nothing: the test says when it has."""

    core = Core(CoreConfig("dummy"))
    route: Any = SimpleNamespace(handlers={}, send=lambda *_: None)
    role = InstanceRole(core, route, leader=0, instance=0, clock=lambda: now[0])
    recorder = Recorder(lambda: now[0])
    role.load()
    role.record(recorder)
    role.ready()
    role.test()
    for at in (110.0, 130.0):
        now[0] = at
        role._on_work(0, core.warm_up_requests())
        role.poll()
        now[0] = at + 2
        role.poll()
        role._ended(role._n_outstanding)
        role.poll()
    now[0] = 140.0
    role.poll()
    assert sum(recorder.to_json(100.0, 1)["steps"]["busy_s"]) == 4.0


def test_a_test_that_is_stopped_counts_what_was_open_until_then() -> None:
    """Its page said 0 %: only a tracker that had ended was a span."""
    now = [100.0]
    recorder = Recorder(lambda: now[0])
    tracker = recorder.track(partial(recorder.busy, "busy"))
    tracker.update(True, 100.0)
    for at, busy in ((103.0, 3.0), (105.0, 5.0)):  # also where it is asked twice
        now[0] = at
        assert sum(recorder.to_json(100.0, 1)["steps"]["busy_s"]) == busy


def test_a_core_that_has_stopped_is_not_measured() -> None:
    """Its engine is gone, and phase stop may last until the next measurement is due."""
    now = [100.0]

    class Core(DummyCore):
        stopped = False

        def notify_stop(self) -> None:
            self.stopped = True

        def metrics(self) -> Metrics:
            assert not self.stopped
            return Metrics(1, 2, 3, 4, 0.5)

    route: Any = SimpleNamespace(handlers={}, send=lambda *_: None)
    role = InstanceRole(Core(CoreConfig("dummy")), route, leader=0, instance=0, clock=lambda: now[0])
    role.load()
    role.ready()
    role.test()
    role.stop()
    now[0] += 10
    role.poll()


class HandoffCore(DummyCore):
    """Gives the responses that the test gives it, and moves KV caches at once."""

    def __init__(self) -> None:
        super().__init__(CoreConfig("dummy"))
        self.load()
        self.ready: list[Batch] = []
        self.offered: list[int] = []
        self.moved: list[int] = []

    def has_work(self) -> bool:
        return bool(self.ready)

    def poll_responses(self) -> Batch | None:
        return self.ready.pop()

    def enqueue(self, requests: Batch) -> None:
        self.offered += requests.rows["id"].tolist()

    def started(self) -> list[int]:
        started, self.offered = self.offered, []
        return started

    def poll_kv(self) -> list[int]:
        moved, self.moved = self.moved, []
        return moved

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        self.moved.append(request_id)

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        self.moved += request.rows["id"].tolist()
        return True

    def release_kv(self, request_id: int) -> None: ...
    def admit(self, request: Batch, token: int) -> None: ...


def answered(*rows: tuple[int, int, int]) -> Batch:
    """Return responses of (id, tokens, flags)."""
    made = np.array(list(rows), RESPONSE)
    return Batch(made, np.zeros(made["n_tokens"].sum(), np.int32))


def one_token_requests(*ids: int) -> Batch:
    """Return requests of one token each, for generation instance 1."""
    rows = np.zeros(len(ids), REQUEST)
    rows["id"], rows["n_tokens"], rows["max_output"], rows["generation"] = ids, 1, 9, 1
    return Batch(rows, np.zeros(len(ids), np.int32))


def counted(role: InstanceRole) -> tuple[int, int, int]:
    """Return the requests that are open and that were answered, and the tokens."""
    report = role.report()
    return role._n_outstanding, report["samples"], report["tokens"]


FIRST_AND_FINAL = ResponseFlag.FIRST | ResponseFlag.FINAL


def test_a_context_instance_counts_what_it_hands_over_once() -> None:
    """Only the test's requests count; an answer of one token is complete although its KV cache may still be
    moving."""
    core, sent = HandoffCore(), []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append((tag, buffer)))
    role = ContextRole(core, route, leader=0, instance=0, receivers={1: 5}, warm_up_receivers=[])

    def receive(tag: Tag, buffer: Any) -> None:
        route.handlers[tag](Envelope(5, tag, buffer))

    role.ready()
    receive(Tag.WORK, WORK.write(one_token_requests(7, 8)))
    assert counted(role) == (2, 0, 0)
    role.poll()
    assert [tag for tag, _ in sent] == [Tag.GRANT, Tag.OFFER]
    receive(Tag.ACCEPT, ACCEPT.write([(7, 0), (8, 1)]))
    core.ready = [answered((7, 1, ResponseFlag.FIRST), (8, 1, FIRST_AND_FINAL))]
    role.poll()
    assert counted(role) == (0, 2, 2)
    flags = {
        int(row["id"]): int(row["flags"])
        for tag, buffer in sent
        if tag == Tag.DONE
        for row in DONE.read(buffer).rows[:1]
    }
    assert flags[7] == ResponseFlag.CONTEXT_DONE
    assert not role.done("drain")  # the receiver has not let go of the second
    receive(Tag.ACCEPT, ACCEPT.write([(8, NO_SLOT)]))
    role.poll()
    assert counted(role) == (0, 2, 2) and role.done("drain")


def test_a_generation_instance_sends_prompt_counts_before_the_end() -> None:
    """The context instance's response may come later."""
    core, sent = HandoffCore(), list[Any]()
    route: Any = SimpleNamespace(handlers={}, send=lambda *message: sent.append(message))
    role = GenerationRole(core, route, leader=0, instance=1, senders={5: 0}, warm_up_senders=0)
    role.ready()
    route.handlers[Tag.OFFER](Envelope(5, Tag.OFFER, OFFER.write(one_token_requests(7, 8))))
    route.handlers[Tag.FIRST](Envelope(5, Tag.FIRST, FIRST.write([(7, 3, 2), (8, 3, -1)])))
    role.poll()
    sent.clear()
    core.ready = [answered((7, 6, ResponseFlag.FINAL), (8, 6, ResponseFlag.FINAL))]
    role.poll()
    ((_, _, buffer),) = sent
    rows = DONE.read(buffer).rows
    n_prompt = int(one_token_requests(7).rows["n_tokens"][0])
    assert rows["id"].tolist() == [7, 7, 8]
    assert rows["flags"].tolist() == [ResponseFlag.PROMPT_COUNTS, ResponseFlag.FINAL, ResponseFlag.FINAL]
    assert DONE.read(buffer).tokens[:2].tolist() == [n_prompt, 2]


def test_a_generation_instance_counts_all_but_first_tokens() -> None:
    """The warm-up does not count, and a failed answer counts no tokens."""
    core = HandoffCore()
    route: Any = SimpleNamespace(handlers={}, send=lambda *_: None)
    role = GenerationRole(core, route, leader=0, instance=1, senders={5: 0}, warm_up_senders=1)

    def receive(tag: Tag, buffer: Any) -> None:
        route.handlers[tag](Envelope(5, tag, buffer))

    def hands_off(*ids: int) -> None:
        receive(Tag.OFFER, OFFER.write(one_token_requests(*ids)))
        receive(Tag.FIRST, FIRST.write([(id_, 3, -1) for id_ in ids]))
        role.poll()

    receive(Tag.WARM_UP, WARM_UP.write(1))
    hands_off(1)
    role.poll()
    assert not role.done("warmup")
    core.ready = [answered((1, 6, ResponseFlag.FINAL))]
    role.poll()
    assert role.done("warmup") and counted(role) == (0, 0, 0)
    role.ready()
    hands_off(7, 8)
    role.poll()
    assert counted(role) == (2, 0, 0)
    core.ready = [answered((7, 6, ResponseFlag.FINAL), (8, 0, ResponseFlag.FINAL | ResponseFlag.ERROR))]
    role.poll()
    assert counted(role) == (0, 2, 5) and role.done("drain")


@pytest.mark.parametrize(
    "messages",
    [
        [[(1, ResponseFlag.FIRST)], [(4, ResponseFlag.FINAL)]],
        [[(1, ResponseFlag.FIRST), (4, ResponseFlag.FINAL)]],  # a busy instance looks at both at once
        # the last one overtook the first
        [[(4, ResponseFlag.FINAL)], [(1, ResponseFlag.FIRST | ResponseFlag.CONTEXT_DONE)]],
        [[(1, ResponseFlag.FIRST | ResponseFlag.FINAL)]],
    ],
)
def test_loadgen_gets_a_first_token_once(messages: list[list[tuple[int, int]]]) -> None:
    reported: dict[str, list[Any]] = {"first": [], "complete": []}
    test: Any = SimpleNamespace(
        issued=deque([Query(np.array([77], np.uint64), np.array([0]), 0.0)]),
        use_token_latencies=True,
        request_flags=0,
        first_tokens=lambda ids, *_: reported["first"].extend(ids),
        complete=lambda ids, *_: reported["complete"].extend(ids),
        start=lambda: None,
    )
    sent: list[Batch] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(QUERY.read(buffer)))
    dataset = Dataset.packed("three tokens", np.array([5, 6, 7], np.int32), np.array([3]))
    totals = Totals()
    harness = Harness(route, 1, dataset, SamplingOptions(8), test, None, len(messages) == 2, totals)
    route.handlers[Tag.WINDOW](Envelope(1, Tag.WINDOW, WINDOW.write(10)))
    harness.test()
    assert harness.poll()
    id_ = sent[0].rows["id"][0]
    for message in messages:
        rows = np.array([(id_, n_tokens, flags) for n_tokens, flags in message], RESPONSE)
        tokens = np.arange(sum(n_tokens for n_tokens, _ in message), dtype=np.int32)
        route.handlers[Tag.ANSWER](Envelope(1, Tag.ANSWER, ANSWER.write(Batch(rows, tokens))))
    assert reported["first"] == reported["complete"] == [77]
    assert (totals.samples, totals.issued) == (1, 1)


@pytest.mark.parametrize("n", [1, 2])
def test_a_servers_reason_comes_before_the_error(n: int) -> None:
    received: list[Any] = []
    test: Any = SimpleNamespace(
        issued=deque([Query(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64), 0.0)]),
        use_token_latencies=False,
        request_flags=0,
        refused=lambda *row: received.append(row),
        complete=lambda ids, *_: received.extend(ids),
        start=lambda: None,
    )
    sent: list[Batch] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(QUERY.read(buffer)))
    dataset = Dataset.packed("a token", np.array([5], np.int32), np.array([1]))
    harness = Harness(route, 1, dataset, SamplingOptions(8), test, None, False, Totals())
    route.handlers[Tag.WINDOW](Envelope(1, Tag.WINDOW, WINDOW.write(10)))
    harness.poll()
    refusal = Refusal(400, "too long", is_too_long=True)
    numbers, is_error = refusal.numbers(), ResponseFlag.FINAL | ResponseFlag.ERROR
    rows: list[tuple[int, int, int]] = []
    for id_ in sent[0].rows["id"].tolist():
        rows += [(id_, len(numbers), ResponseFlag.REFUSED), (id_, 0, is_error)]
    answers = Batch(np.array(rows, RESPONSE), np.array(numbers * n, np.int32))
    route.handlers[Tag.ANSWER](Envelope(1, Tag.ANSWER, ANSWER.write(answers)))
    assert received == [*((id_, refusal) for id_ in range(n)), *range(n)]


def test_answers_import_nothing() -> None:
    """An import in the test would delay all requests that are due meanwhile."""
    program = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import tests.unit.roles.test_roles as roles\nbefore = set(sys.modules)\n"
        "roles.test_loadgen_gets_a_first_token_once([[(1, 1), (4, 2)]])\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = run_program(program)
    assert done.stdout.strip() == "[]", done.stderr


def test_queries_that_loadgen_has_no_memory_for_name_the_options() -> None:
    test: Any = SimpleNamespace(error=MemoryError("std::bad_alloc"), start=lambda: None, request_flags=0)
    dataset = Dataset.packed("one token", np.array([5], np.int32), np.array([1]))
    route: Any = SimpleNamespace(handlers={})
    harness = Harness(route, 1, dataset, SamplingOptions(8), test, None, False, Totals())
    harness.test()
    with pytest.raises(
        RunError, match=r"LoadGen: out of memory: .* --min_query_count.*--offline_expected_qps"
    ):
        harness.done("test")


@pytest.mark.parametrize("ignores", [None, np.array([True, False, True])])
# the largest that options take
@pytest.mark.parametrize(
    "sampling", [SamplingOptions(8), SamplingOptions(8, top_k=2**31 - 1, seed=2**31 - 1)]
)
def test_only_some_samples_have_stop_words(ignores: Any, sampling: SamplingOptions) -> None:
    sent: list[Batch] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(QUERY.read(buffer)))
    dataset = Dataset.packed(
        "three samples", np.arange(3, dtype=np.int32), np.ones(3, np.int64), ignores_stop=ignores
    )
    issued = deque([Query(np.arange(4, dtype=np.uint64), np.array([2, 1, 1, 0]), 0.0)])
    test: Any = SimpleNamespace(issued=issued, request_flags=0)
    harness = Harness(route, 1, dataset, sampling, test, None, False, Totals())
    route.handlers[Tag.WINDOW](Envelope(1, Tag.WINDOW, WINDOW.write(10)))
    assert harness.poll()
    assert sent[0].rows["flags"].tolist() == ([0] * 4 if ignores is None else [1, 0, 0, 1])
    assert sent[0].tokens.tolist() == [2, 1, 1, 0]
    assert np.diff(np.sort(sent[0].rows["seed"])).tolist() == [1, 0, 1]


def test_samples_with_sampling_options_of_their_own() -> None:
    sent: list[Batch] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(QUERY.read(buffer)))
    nan = np.nan
    sampling = {"temperature": np.array([nan, 0.5]), "seed": np.array([nan, 2.0**32 - 1])}
    sampling |= {"min_output": np.array([2, np.inf]), "top_k": np.array([nan, 3])}
    dataset = Dataset.packed(
        "two samples", np.arange(2, dtype=np.int32), np.ones(2, np.int64), sampling=sampling
    )
    test: Any = SimpleNamespace(
        issued=deque([Query(np.arange(2, dtype=np.uint64), np.array([0, 1]), 0.0)]), request_flags=0
    )
    options = SamplingOptions(8, min_output_len=1, temperature=1.0, top_k=9, seed=0)
    harness = Harness(route, 1, dataset, options, test, None, False, Totals())
    route.handlers[Tag.WINDOW](Envelope(1, Tag.WINDOW, WINDOW.write(10)))
    assert harness.poll()
    names = ["temperature", "seed", "min_output", "top_k", "top_p"]
    assert [[row[name] for name in names] for row in sent[0].rows] == [
        [1, 0, 2, 9, 1],
        [0.5, 2**32 - 1, 8, 3, 1],
    ]


def test_a_test_without_an_answer_lasted_no_time() -> None:
    assert Totals(started=4176.0).lasted_s == 0.0
    assert Totals(started=4176.0, ended=4178.5).lasted_s == 2.5
