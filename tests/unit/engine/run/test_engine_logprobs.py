"""Log probabilities of the torch core against those of transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mpillm.comms.messages import RequestFlag, ResponseFlag
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from tests.helpers.gpu_steps_on_cpu import make_engine
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import make_batch, make_core

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9], [8, 8, 8, 8]]
WANTS = [1, 4, 0, 3]  # 1 + how many of the likeliest tokens
N_OUTPUT = 9


def answers(core: TorchCore, **fields: object) -> tuple[dict[int, list[int]], dict[int, list[list[int]]]]:
    """Return tokens, and the numbers of their log probabilities, by id; check that log probabilities come
    before their tokens."""
    core.enqueue(make_batch(PROMPTS, max_output=N_OUTPUT, logprobs=WANTS, **fields))
    whole: dict[int, list[int]] = {}
    numbers: dict[int, list[list[int]]] = {i: [] for i in range(len(PROMPTS))}
    n_tokens = dict.fromkeys(range(len(PROMPTS)), 0)
    while len(whole) < len(PROMPTS):
        for row in (core.poll_responses() or make_batch([])).split():
            id_, flags, values = int(row.rows["id"][0]), int(row.rows["flags"][0]), row.tokens.tolist()
            if flags & ResponseFlag.LOGPROBS:
                width = 2 * WANTS[id_] - 1
                assert values[0] == len(numbers[id_]) and len(values) % width == 1 % width
                numbers[id_] += [values[at : at + width] for at in range(1, len(values), width)]
                continue
            n_tokens[id_] = len(values) if flags & ResponseFlag.FINAL else n_tokens[id_] + len(values)
            assert len(numbers[id_]) == (n_tokens[id_] if WANTS[id_] else 0)
            if flags & ResponseFlag.FINAL:
                whole[id_] = values
    return whole, numbers


def check(oracle: Oracle, tokens: dict[int, list[int]], numbers: dict[int, list[list[int]]]) -> None:
    for id_, (prompt, wants) in enumerate(zip(PROMPTS, WANTS, strict=True)):
        if not wants:
            assert not numbers[id_]
            continue
        expected = oracle.logprobs(prompt, tokens[id_])
        for place, (token, row) in enumerate(zip(tokens[id_], numbers[id_], strict=True)):
            k = wants - 1
            values = np.array([row[0], *row[1 + k :]], np.int32).view(np.float32)
            assert values[0] == pytest.approx(float(expected[place, token]), abs=1e-4)
            best = expected[place].topk(k) if k else None
            if best is not None:
                assert values[1:] == pytest.approx(best.values.numpy(), abs=1e-4)
                assert expected[place][torch.tensor(row[1 : 1 + k])].tolist() == pytest.approx(
                    best.values.tolist(), abs=1e-4
                )


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_answers_side_by_side_with_one_that_wants_none(
    folder: Path, oracle: Oracle, stream: bool
) -> None:
    core = make_core(folder, max_num_tokens=16)
    tokens, numbers = answers(core, flags=RequestFlag.STREAM * stream)
    check(oracle, tokens, numbers)
    plain = make_core(folder)
    plain.enqueue(make_batch(PROMPTS, max_output=N_OUTPUT))
    without: dict[int, list[int]] = {}
    while len(without) < len(PROMPTS):
        for row in (plain.poll_responses() or make_batch([])).split():
            assert not row.rows["flags"][0] & ResponseFlag.LOGPROBS
            if row.rows["flags"][0] & ResponseFlag.FINAL:
                without[int(row.rows["id"][0])] = row.tokens.tolist()
    assert tokens == without, "the tokens are the same"


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_sampled_answers_and_forbidden_end_tokens_have_the_models_own(
    folder: Path, oracle: Oracle, at_once: int
) -> None:
    """Temperature, top-k and forbidden tokens change the choice, not the log probabilities that are
    reported."""
    core = make_core(folder, end_ids=tuple(range(0, 512, 2)))
    core.engine.worker.chooser.max_rows = at_once
    tokens, numbers = answers(core, temperature=2.0, top_k=50, seed=[1, 2, 3, 4], min_output=N_OUTPUT)
    assert all(token % 2 for answer in tokens.values() for token in answer[:-1])
    check(oracle, tokens, numbers)


def test_answers_that_were_evicted_in_the_middle(folder: Path, oracle: Oracle) -> None:
    core = make_core(folder, max_seq_len=56, kv_cache_tokens=56, max_batch_size=4)
    tokens, numbers = answers(core)
    assert core.statistics()["preemptions"] > 0
    check(oracle, tokens, numbers)


def test_steps_that_run_ahead_of_the_host(folder: Path, oracle: Oracle) -> None:
    """A step's log probabilities are read after the next step has started, as on a GPU; plain kernels
    compute."""
    engine = make_engine(folder, max_batch_size=3)
    sequences = [
        Sequence(i, prompt, N_OUTPUT, 0, SamplingParams(), wants_logprobs=wants)
        for i, (prompt, wants) in enumerate(zip(PROMPTS, WANTS, strict=True))
    ]
    for sequence in sequences:
        engine.add(sequence)
    most = 0
    while not engine.is_idle():
        engine.step()
        most = max(most, len(engine._in_flight))
    assert most == 2
    check(oracle, {s.id: s.output for s in sequences}, {s.id: s.logprobs for s in sequences})
