"""Roles, with a transport that only notes what is sent."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpillm.comms.tags import Tag
from mpillm.cores.base import CoreConfig
from mpillm.cores.dummy import DummyCore
from mpillm.dataset import Dataset
from mpillm.errors import RunError
from mpillm.loadgen.sut import Query
from mpillm.messages import RESPONSE, Batch, ResponseFlag
from mpillm.roles.harness import Harness, Sampling
from mpillm.roles.instance import InstanceRole


def test_the_leader_is_not_told_of_requests_before_the_test() -> None:
    """Not even of those that are answered before this rank knows that the warm-up has begun: a context instance may know it earlier."""
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


@pytest.mark.parametrize(
    "messages",
    [
        [[(1, ResponseFlag.FIRST)], [(4, ResponseFlag.FINAL)]],
        [[(1, ResponseFlag.FIRST), (4, ResponseFlag.FINAL)]],  # a busy instance looks at both at once
        [[(4, ResponseFlag.FINAL)], [(1, ResponseFlag.FIRST | ResponseFlag.CONTEXT_DONE)]],  # the last one overtook the first
        [[(1, ResponseFlag.FIRST | ResponseFlag.FINAL)]],
    ],
)
def test_loadgen_is_told_of_a_first_token_once(messages: list[list[tuple[int, int]]]) -> None:
    told: dict[str, list[Any]] = {"first": [], "complete": []}
    test: Any = SimpleNamespace(
        issued=deque([Query(np.array([77], np.uint64), np.array([0]), 0.0)]),
        use_token_latencies=True,
        first_tokens=told["first"].extend,
        complete=told["complete"].extend,
        start=lambda: None,
    )
    sent: list[Batch] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(Batch.unpack(buffer)[0]))
    dataset = Dataset("three tokens", np.array([5, 6, 7], np.int32), np.array([0, 3]))
    harness = Harness(route, 1, dataset, Sampling(8), lambda: test, None, hands_over=len(messages) == 2)
    harness.ready()
    route.handlers[Tag.WINDOW](SimpleNamespace(buffer=np.array([10], np.int64).view(np.uint8)))
    harness.test()
    assert harness.poll()
    id_ = sent[0].rows["id"][0]
    for message in messages:
        rows = np.array([(id_, n_tokens, flags) for n_tokens, flags in message], RESPONSE)
        tokens = np.arange(sum(n_tokens for n_tokens, _ in message), dtype=np.int32)
        route.handlers[Tag.ANSWER](SimpleNamespace(buffer=Batch(rows, tokens).pack()))
    assert [response.id for response in told["first"]] == [response.id for response in told["complete"]] == [77]
    assert (harness.totals.samples, harness.in_flight) == (1, 0)


def test_queries_that_loadgen_has_no_memory_for_name_the_options() -> None:
    test: Any = SimpleNamespace(error=MemoryError("std::bad_alloc"), start=lambda: None)
    dataset = Dataset("one token", np.array([5], np.int32), np.array([0, 1]))
    harness = Harness(SimpleNamespace(handlers={}), 1, dataset, Sampling(8), lambda: test, None, hands_over=False)  # type: ignore[arg-type]
    harness.ready()
    harness.test()
    with pytest.raises(RunError, match=r"LoadGen: its queries do not fit the memory: .* --min_query_count .*--offline_expected_qps"):
        harness.done("test")


@pytest.mark.parametrize("ignores", [None, np.array([True, False, True])])
@pytest.mark.parametrize("sampling", [Sampling(8), Sampling(8, top_k=2**31 - 1, seed=2**31 - 1)])  # the largest that options take
def test_only_some_samples_have_stop_words(ignores: Any, sampling: Sampling) -> None:
    sent: list[Batch] = []
    route: Any = SimpleNamespace(handlers={}, send=lambda dest, tag, buffer: sent.append(Batch.unpack(buffer)[0]))
    dataset = Dataset("three samples", np.arange(3, dtype=np.int32), np.arange(4), ignores_stop=ignores)
    issued = deque([Query(np.arange(4, dtype=np.uint64), np.array([2, 1, 1, 0]), 0.0)])
    test: Any = SimpleNamespace(issued=issued)
    harness = Harness(route, 1, dataset, sampling, lambda: test, None, hands_over=False)
    harness.ready()
    route.handlers[Tag.WINDOW](SimpleNamespace(buffer=np.array([10], np.int64).view(np.uint8)))
    assert harness.poll()
    assert sent[0].rows["ignore_stop"].tolist() == ([0] * 4 if ignores is None else [1, 0, 0, 1])
    assert sent[0].tokens.tolist() == [2, 1, 1, 0]
    assert np.diff(np.sort(sent[0].rows["seed"])).tolist() == [1, 0, 1]
