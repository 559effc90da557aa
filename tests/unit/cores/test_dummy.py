"""The dummy core: its answers, its clock, its faults and its handoff, without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag
from mpillm.comms.mover import Peer
from mpillm.comms.tags import Tag
from mpillm.cores.base import CoreConfig, Metrics
from mpillm.cores.dummy import VOCAB_SIZE, DummyCore, answer_tokens
from tests.helpers.engine_configs import engine_config
from tests.helpers.loopback import Wire

FIRST, FINAL = ResponseFlag.FIRST, ResponseFlag.FINAL


def requests(
    prompts: list[list[int]], max_output: int = 4, generation: int = NO_INSTANCE, first_id: int = 0
) -> Batch:
    """Return a batch of greedy requests."""
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = np.arange(first_id, first_id + len(prompts))
    rows["n_tokens"] = [len(prompt) for prompt in prompts]
    rows["max_output"], rows["min_output"], rows["top_p"], rows["generation"] = max_output, 1, 1, generation
    rows["seed"] = np.arange(len(prompts))
    return Batch(rows, np.array([token for prompt in prompts for token in prompt], np.int32))


def expected(prompt: list[int], n: int) -> list[int]:
    seed = sum(token * (2 * i + 1) for i, token in enumerate(prompt))
    return [(seed + j) % VOCAB_SIZE for j in range(n)]


def core(
    clock: Callable[[], float] = time.perf_counter,
    role: str = "executor",
    max_batch_size: int = 64,
    **options: Any,
) -> DummyCore:
    config = engine_config(role=role, max_batch_size=max_batch_size, core_options=options)
    made = DummyCore(CoreConfig("dummy", config), clock=clock)
    made.load()
    made.run_health_check()
    made.start_test()
    return made


def responses(made: DummyCore, n_final: int, seconds: float = 60.0) -> list[tuple[int, int, list[int]]]:
    """Return (id, flags, tokens) of all rows as soon as so many are final."""
    got: list[tuple[int, int, list[int]]] = []
    end = time.monotonic() + seconds
    while sum(bool(flags & FINAL) for _, flags, _ in got) < n_final:
        assert time.monotonic() < end
        if not made.has_work():
            continue
        batch = made.poll_responses()
        if batch is not None:
            offsets = batch.offsets()
            rows = batch.rows.tolist()
            got += [
                (row[0], row[2], batch.tokens[offsets[i] : offsets[i + 1]].tolist())
                for i, row in enumerate(rows)
            ]
    assert not made.has_work()
    return got


def test_importing_it_needs_no_mpi() -> None:
    """The import alone would start MPI in every rank and every test."""
    code = "import sys, mpillm.cores.dummy; sys.exit('mpi4py.MPI' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=300).returncode == 0


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9), st.integers(1, 5)),
        max_size=6,
    )
)
def test_answers(cases: list[tuple[list[int], int]]) -> None:
    made = answer_tokens(requests([prompt for prompt, _ in cases]), np.array([n for _, n in cases], np.int64))
    assert made.tolist() == [token for prompt, n in cases for token in expected(prompt, n)]


def test_long_prompts_do_not_overflow() -> None:
    prompt = [VOCAB_SIZE - 1] * 50_000
    assert answer_tokens(requests([prompt]), np.array([3])).tolist() == expected(prompt, 3)


@pytest.mark.parametrize("options", [{}, {"ttft_ms": 1.0, "tpot_ms": 0.1}])
@pytest.mark.parametrize("max_output", [1, 4])
def test_every_request_is_answered_once(options: dict[str, Any], max_output: int) -> None:
    prompts = [[i, i + 1] for i in range(10)]
    made = core(**options, max_batch_size=3)
    made.enqueue(requests(prompts[:6], max_output))
    made.enqueue(requests(prompts[6:], max_output, first_id=6))
    got = responses(made, 10)
    finals = {id_: tokens for id_, flags, tokens in got if flags & FINAL}
    assert finals == {i: expected(prompt, max_output) for i, prompt in enumerate(prompts)}
    firsts = [(id_, tokens[0]) for id_, flags, tokens in got if flags & FIRST]
    assert sorted(firsts) == [(i, expected(prompt, 1)[0]) for i, prompt in enumerate(prompts)]
    for i in range(10):  # the first token never comes after the whole answer
        flags = [flags for id_, flags, _ in got if id_ == i]
        assert flags in ([FIRST, FINAL], [FIRST | FINAL])


def test_the_clock() -> None:
    """The first token after the TTFT, each further one after the TPOT; who looks late finds both at once."""
    now = [0.0]
    made = core(lambda: now[0], ttft_ms=20.0, tpot_ms=10.0)
    made.enqueue(requests([[1], [2]], max_output=4))

    def due_at(when: float) -> list[tuple[int, int]]:
        now[0] = when
        if not made.has_work():
            return []
        batch = made.poll_responses()
        return [] if batch is None else [(row["id"], row["flags"]) for row in batch.rows]

    assert due_at(0.0) == due_at(0.0199) == []
    assert due_at(0.0201) == [(0, FIRST), (1, FIRST)]
    assert due_at(0.0499) == []
    made.enqueue(requests([[3]], max_output=4, first_id=2))
    assert due_at(0.0501) == [(0, FINAL), (1, FINAL)]
    assert due_at(0.2) == [(2, FIRST), (2, FINAL)]
    assert not made.has_work()


def test_metrics_while_an_answer_is_generated() -> None:
    """Tokens count by the clock, before their answer ends, and only after the test's start."""
    now = [0.0]
    made = core(lambda: now[0], ttft_ms=1000.0, tpot_ms=100.0, max_batch_size=2)
    made.enqueue(requests([[1, 2], [3], [4, 5, 6]], max_output=11))
    seen = []
    for now[0] in (0.0, 0.99, 1.01, 1.55, 1.999, 2.01, 4.01):
        made.poll_responses()
        seen.append(tuple(made.metrics()))
    assert seen == [
        (0, 0, 2, 1, None),
        (0, 0, 2, 1, None),
        (3, 2, 2, 1, None),
        (3, 12, 2, 1, None),
        (3, 20, 2, 1, None),
        (3, 22, 0, 1, None),
        (3, 22, 1, 0, None),  # the third starts when somebody looks
    ]
    made.start_test()
    assert made.metrics()[:2] == (0, 0)


@pytest.mark.parametrize("options", [{}, {"ttft_ms": 1.0, "tpot_ms": 0.1}, {"ttft_ms": 1.0}])
def test_metrics_at_the_end(options: dict[str, Any]) -> None:
    made = core(**options)
    made.enqueue(requests([[1, 2], [3], [4, 5, 6]], max_output=5))
    responses(made, 3)
    assert made.metrics() == Metrics(6, 15, 0, 0)


def test_max_batch_size_bounds_what_runs() -> None:
    made = core(ttft_ms=5.0, max_batch_size=2)
    start = time.perf_counter()
    made.enqueue(requests([[i] for i in range(6)], max_output=1))
    responses(made, 6)
    assert time.perf_counter() - start >= 0.015  # three rounds


def test_lengths_by_distribution() -> None:
    made = core(output_mean=20.0, output_stdev=5.0)
    prompts = [[i] for i in range(300)]
    batch = requests(prompts, max_output=30)
    batch.rows["min_output"] = 12
    made.enqueue(batch)
    lengths = [len(tokens) for _, flags, tokens in responses(made, 300) if flags & FINAL]
    assert 18 < np.mean(lengths) < 22
    assert (min(lengths), max(lengths)) == (12, 30)
    again = core(output_mean=20.0, output_stdev=5.0)
    again.enqueue(batch)
    assert [len(tokens) for _, _, tokens in responses(again, 300)] == lengths


def pair(**options: Any) -> tuple[DummyCore, DummyCore]:
    """Return a context and a generation core, instances 0 and 1, that can hand over."""
    wire = Wire()
    made = core(role="context", **options), core(role="generation", **options)
    for rank, one in enumerate(made):
        one.connect(wire.mover(rank), {1 - rank: Peer(1 - rank, 1, 1)})
    return made


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("options", [{}, {"ttft_ms": 0.5, "tpot_ms": 0.1}])
def test_handoff(options: dict[str, float], early: bool) -> None:
    """A request goes from a context to a generation core as comms/handoff.py does it, accepted before its
    context is computed or later."""
    context, generation = pair(**options, kv_bytes_per_token=10)
    prompts = [[i, 7] for i in range(5)]
    batch = requests(prompts, generation=1)
    context.enqueue(batch)
    firsts: dict[int, int] = {}
    started: list[int] = []
    end = time.monotonic() + 60
    while len(firsts) < 5:
        assert time.monotonic() < end
        new = context.started()
        started += new
        for id_ in new if early else ():
            context.send_kv(id_, 1, 10 + id_)
        if context.has_work() and (made := context.poll_responses()) is not None:
            assert (made.rows["flags"] == FIRST).all()
            firsts |= zip(made.rows["id"].tolist(), made.tokens.tolist(), strict=True)
    assert started == list(range(5))
    for id_, request in enumerate(batch.split()):
        assert firsts[id_] == expected(prompts[id_], 1)[0]
        if not early:
            context.send_kv(id_, 1, 10 + id_)
        assert generation.receive_kv(request, 0, 10 + id_)
        assert generation.poll_kv() == [id_]
        generation.admit(request, firsts[id_])
    assert context.poll_kv() == list(range(5))
    for id_ in range(5):
        context.release_kv(id_)
    assert context.statistics()["kv_bytes"] == 5 * 20
    got = responses(generation, 5)
    assert {id_: (flags, tokens) for id_, flags, tokens in got} == {
        i: (FINAL, expected(p, 4)) for i, p in enumerate(prompts)
    }


def test_a_wrong_handoff_is_noticed() -> None:
    for kv, token, word in ((5, 3, "KV cache"), (0, 4, "first token")):
        wire = Wire()
        generation = core(role="generation")
        generation.connect(wire.mover(1), {0: Peer(0, 1, 1)})
        batch = requests([[3]], generation=1)
        assert generation.receive_kv(batch, 0, 2)
        wire.mover(0).send(1, Tag.KV + 2, np.full(8, kv, np.uint8))
        assert generation.poll_kv() == [0]
        with pytest.raises(RuntimeError, match=word):
            generation.admit(batch, token)
            generation.poll_responses()


def test_a_full_generation_core_takes_no_more() -> None:
    _, generation = pair(ttft_ms=1.0, max_batch_size=2)
    assert [
        generation.receive_kv(request, 0, i)
        for i, request in enumerate(requests([[1], [2], [3]], generation=1).split())
    ] == [
        True,
        True,
        False,
    ]


def test_an_answer_of_one_token_is_not_handed_over() -> None:
    context = core(role="context")
    context.enqueue(requests([[9]], max_output=1, generation=1))
    assert context.started() == []
    assert responses(context, 1) == [(0, FIRST | FINAL, [9])]


def test_silent_drops_one_request() -> None:
    made = core(fault="silent", fault_at=3)
    made.enqueue(requests([[i] for i in range(2)]))
    made.enqueue(requests([[i] for i in range(2, 5)], first_id=2))
    assert sorted(id_ for id_, flags, _ in responses(made, 4) if flags & FINAL) == [0, 1, 3, 4]


def test_raise_at_the_nth_request_of_the_test() -> None:
    made = DummyCore(CoreConfig("dummy", engine_config(core_options={"fault": "raise", "fault_at": 3})))
    made.enqueue(requests([[1]] * 5))  # the warm-up's do not count
    made.start_test()
    made.enqueue(requests([[1]] * 2))
    with pytest.raises(RuntimeError, match="injected fault in the test, at request 3"):
        made.enqueue(requests([[1]]))


def test_faults_are_of_one_rank() -> None:
    DummyCore(
        CoreConfig(
            "dummy",
            engine_config(core_options={"fault": "raise", "fault_phase": "load", "fault_rank": 3}),
            rank=2,
        )
    ).load()
    with pytest.raises(RuntimeError, match="injected fault in load"):
        DummyCore(
            CoreConfig(
                "dummy",
                engine_config(core_options={"fault": "raise", "fault_phase": "load", "fault_rank": 3}),
                rank=3,
            )
        ).load()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"falt": "raise"}, ["falt", "did you mean 'fault'?"]),
        ({"fault": "rase"}, ["fault:rase", "did you mean 'raise'?"]),
        ({"fault_phase": "lode"}, ["fault_phase:lode", "did you mean 'load'?"]),
        ({"ttft_ms": "soon"}, ["ttft_ms:soon"]),
        ({"fault_at": "x"}, ["fault_at:x"]),
        ({"ttft_ms": "nan"}, ["--core_options ttft_ms:nan: not a number of at least 0"]),
        ({"tpot_ms": -5}, ["--core_options tpot_ms:-5: not a number of at least 0"]),
        ({"fault_rank": -2}, ["--core_options fault_rank:-2: not a number"]),
    ],
)
def test_bad_options(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        DummyCore.check(CoreConfig("dummy", engine_config(core_options=options)))
    assert all(word in str(error.value) for word in words)


def test_its_kv_cache_bounds_a_sequence() -> None:
    limits = DummyCore.check(CoreConfig("dummy", engine_config(kv_cache_tokens=64)))
    assert limits is not None and limits.max_seq_len == 64, "or a longer one would wait for room for ever"
    with pytest.raises(
        ConfigError, match="--kv_cache_tokens 64: does not hold one sequence of --max_seq_len 65"
    ):
        DummyCore.check(CoreConfig("dummy", engine_config(kv_cache_tokens=64, max_seq_len=65)))
