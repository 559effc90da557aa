"""Greedy tokens of the torch core equal those of transformers, whatever the batching and the memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.comms.messages import Batch, RequestFlag, ResponseFlag
from mpillm.cores.base import Metrics
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.model.attention import StepAttention
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.step_parts import Steps
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.tensors.staging import SampledTokens
from mpillm.errors import RunError
from tests.helpers.oracle import Tokens, expected_tokens
from tests.helpers.torch_cores import N_OUTPUT, Answers, answer, hands_off, make_batch, make_core, make_pair


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_size": 1},
        {"max_batch_size": 5, "max_num_tokens": 7},
        {"max_num_tokens": 33},
        {"max_num_tokens": 96, "enable_chunked_context": False},
        {"tokens_per_block": 1, "kv_cache_tokens": 300, "max_num_tokens": 40},
        {"tokens_per_block": 64},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(
    folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]
) -> None:
    assert answer(make_core(folder, **options), make_batch(prompts)) == expected


class NotedWorker(Worker):
    """Notes the tokens of prompts in each step."""

    def __init__(self, part: ModelPart, steps: Steps) -> None:
        super().__init__(part, steps)
        self.pieces: list[int] = []

    def run(self, step: Step) -> SampledTokens | None:
        self.pieces.append(sum(span.n_new for span in step.spans if span.n_new > 1))
        return super().run(step)


class SlowBeyond64(TorchCore):
    """A prompt of more than 64 tokens does not pay."""

    measured: list[int]

    def _make_worker(self) -> Worker:
        return NotedWorker.on_cpu(self.config.engine, self.info, Groups())

    def _first_token_s(self, n: int) -> float:
        self.measured.append(n)
        assert super()._first_token_s(n) > 0
        return n if n > 64 else 1.0


@pytest.mark.parametrize("reuse", [False, True])
def test_a_step_takes_the_tokens_of_prompts_that_were_chosen(
    folder: Path, prompts: Tokens, expected: Tokens, reuse: bool
) -> None:
    """32 to 128 tokens are measured; the last doubling is made not to pay, so pieces have at most 64."""
    options = {"enable_max_num_tokens_tuning": True, "enable_kv_cache_reuse": reuse}
    core = make_core(folder, kind=SlowBeyond64, **options)
    assert isinstance(core, SlowBeyond64) and isinstance(core.worker, NotedWorker)
    core.measured = []
    core.run_health_check()
    assert core.measured == [1] + [n for n in (32, 64, 128) for _ in range(3)]
    core.start_test()
    core.worker.pieces.clear()
    assert answer(core, make_batch(prompts)) == expected
    assert max(core.worker.pieces) == 64 < sum(map(len, prompts))
    assert core.statistics()["context_piece"] == 64


@pytest.mark.parametrize("role", ["executor", "context"])
def test_a_model_that_computes_nan_is_not_healthy(folder: Path, role: str) -> None:
    """Its answers would all be token 0, and a test of that VALID."""
    core = make_core(folder, role=role)
    core.run_health_check()
    model = core.engine.worker.part.model
    model._norm.weight = model._norm.weight * float("nan")
    with pytest.raises(RunError, match="computes no finite numbers"):
        core.run_health_check()


@pytest.mark.parametrize("max_num_tokens", [16, 2048])
def test_a_preempted_request_gives_the_same_tokens(
    folder: Path, prompts: Tokens, expected: Tokens, max_num_tokens: int
) -> None:
    core = make_core(folder, kv_cache_tokens=160, max_seq_len=None, max_num_tokens=max_num_tokens)
    assert answer(core, make_batch(prompts)) == expected
    assert core.statistics()["preemptions"] > 3


@pytest.mark.parametrize(("max_num_tokens", "kv_cache_tokens"), [(2048, None), (16, None), (16, 160)])
def test_metrics(folder: Path, prompts: Tokens, max_num_tokens: int, kv_cache_tokens: int | None) -> None:
    """Tokens count in the step that computes them.

    What a preemption throws away is computed again, and counts again.
    """
    core = make_core(
        folder,
        max_num_tokens=max_num_tokens,
        kv_cache_tokens=kv_cache_tokens,
        max_seq_len=None if kv_cache_tokens else 256,
    )
    answer(core, make_batch(prompts[:3]))  # a warm-up
    core.start_test()
    assert core.metrics() == Metrics(0, 0, 0, 0, 0.0)
    core.enqueue(make_batch(prompts))
    answers, seen = Answers(), [core.metrics()]
    assert seen[0] == Metrics(0, 0, 0, len(prompts), 0.0)
    while core.has_work():
        answers.poll(core)
        seen.append(core.metrics())
        (prompt, generated, running, waiting, usage), before = seen[-1], seen[-2]
        assert (
            0 <= prompt - before.prompt_tokens <= max_num_tokens
            and 0 <= generated - before.generated_tokens <= len(prompts)
        )
        assert running + waiting + len(answers.final) == len(prompts)
        assert usage is not None and (usage > 0) == (running > 0)
    n_prompt, n_output = sum(map(len, prompts)), N_OUTPUT * len(prompts)
    assert seen[-1][1:] == (n_output, 0, 0, 0.0)
    preempted = core.statistics()["preemptions"] > 0
    assert (seen[-1].prompt_tokens > n_prompt) if preempted else (seen[-1].prompt_tokens == n_prompt)
    assert preempted == (kv_cache_tokens is not None)
    assert any(0 < metrics.prompt_tokens < n_prompt for metrics in seen) == (max_num_tokens == 16)


@pytest.fixture(scope="module")
def alike(folder: Path) -> tuple[Tokens, Tokens]:
    """Return prompts that begin alike, and what transformers answers."""
    rng = np.random.default_rng(8)
    beginnings = [rng.integers(0, 512, n).tolist() for n in (24, 37)]
    prompts = [beginnings[i % 2] + rng.integers(0, 512, rng.integers(1, 25)).tolist() for i in range(14)]
    return prompts, expected_tokens(folder, prompts, N_OUTPUT)


@pytest.mark.parametrize("reuse", ["", "reuse", "host memory"])
@pytest.mark.parametrize("chunking", ["off", "first_come_first_served", "equal_progress"])
@pytest.mark.parametrize("policy", ["max_util", "no_evict", "static"])
def test_policies_chunking_and_reuse(
    folder: Path, alike: tuple[Tokens, Tokens], policy: str, chunking: str, reuse: str
) -> None:
    """Tokens stay the same with a cache of 20 blocks, of which a sequence needs up to 11."""
    prompts, wanted = alike
    options: dict[str, Any] = {"max_num_tokens": 64, "enable_chunked_context": False}
    if chunking != "off":
        options = {"max_num_tokens": 24, "context_chunking_policy": chunking}
    options |= {
        "batch_scheduler_policy": policy,
        "enable_kv_cache_reuse": bool(reuse),
        "kv_host_cache_gb": 0.01 if reuse == "host memory" else None,
        "kv_cache_tokens": 160,
        "max_seq_len": None,
    }
    core = make_core(folder, **options)
    assert answer(core, make_batch(prompts)) == wanted
    if reuse == "host memory":
        assert answer(core, make_batch(prompts)) == wanted, "again, by what host memory has kept"
    statistics = core.statistics()
    assert (statistics["preemptions"] > 0) == (policy == "max_util")
    of_reuse = {"reused_blocks", "reused_tokens"} if reuse else set()
    assert set(statistics) - {"loaded_blocks"} == {"preemptions"} | of_reuse
    if reuse == "host memory":
        assert statistics["reused_blocks"] >= statistics["loaded_blocks"] > 0
    if reuse:
        assert statistics["reused_tokens"] == 8 * statistics["reused_blocks"] > 0
        core.start_test()
        assert set(core.statistics().values()) == {0}


def test_the_cached_tokens_of_each_prompt(folder: Path) -> None:
    """Those of whole blocks, also of a response to an earlier prompt; never the prompt's last token."""
    core = make_core(folder, enable_kv_cache_reuse=True, tokens_per_block=8)
    flags = int(RequestFlag.PROMPT_COUNTS)

    def counts(prompt: list[int]) -> tuple[list[list[int]], list[int]]:
        core.enqueue(make_batch([prompt], flags=flags))
        found: list[list[int]] = []
        response: list[int] = []
        while core.has_work():
            for one in (core.poll_responses() or make_batch([])).split():
                flag = int(one.rows["flags"][0])
                if flag & ResponseFlag.PROMPT_COUNTS:
                    found.append(one.tokens.tolist())
                elif flag & ResponseFlag.FINAL:
                    response = one.tokens.tolist()
        return found, response

    prompt = list(range(5, 29))
    found, response = counts(prompt)
    assert found == [[24, 0]]
    assert counts(prompt)[0] == [[24, 16]]
    later = [*prompt, *response, 7]
    assert counts(later)[0] == [[len(later), (len(later) - 2) // 8 * 8]]
    core.start_test()


def test_requests_that_come_while_others_run(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, max_num_tokens=50)
    batch = make_batch(prompts)
    offsets = batch.offsets()
    answers = Answers()
    for i in range(len(prompts)):
        core.enqueue(Batch(batch.rows[i : i + 1], batch.tokens[offsets[i] : offsets[i + 1]]))
        answers.poll(core)
    assert answers.run(core).tokens() == expected


@pytest.mark.long
def test_bfloat16_runs_and_starts_like_float32(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, dtype="bfloat16", max_num_tokens=40)
    answers = answer(core, make_batch(prompts))
    assert core.engine.worker.part.cache.keys.dtype == torch.bfloat16
    assert all(len(tokens) == N_OUTPUT for tokens in answers)
    assert sum(a[0] == b[0] for a, b in zip(answers, expected, strict=True)) >= 0.8 * len(prompts)


@pytest.mark.parametrize("blocks", ["together", "scattered", "shared"])
def test_decode_attention_equals_the_plain_formula(blocks: str) -> None:
    """Blocks that lie close together are read in place; scattered ones and those of several sequences are
    gathered first."""
    torch.manual_seed(1)
    cache = KVCache(1, 100, 2, 4, 8, torch.float32)
    lengths = [0, 3, 4, 17]
    numbers = iter(range(1, 100, 9) if blocks == "scattered" else range(1, 20))
    tables = {slot: [next(numbers) for _ in range(n // 4 + 1)] for slot, n in enumerate(lengths)}
    if blocks == "shared":
        lengths.append(14)
        tables[4] = [*tables[3][:3], next(numbers)]
    spans = [Span(slot, n, 1) for slot, n in enumerate(lengths)]
    for pool in (cache.keys, cache.values):
        pool.normal_()
    qkv = torch.randn(len(spans), 6 + 2 + 2, 8)
    unturned = torch.ones(32, 4, dtype=torch.complex64)
    attended = StepAttention(spans, tables, cache, 6, unturned, torch.float32)(0, qkv.clone())
    for i, span in enumerate(spans):
        keys, values = (
            pool[0, tables[span.slot]]
            .transpose(0, 1)
            .reshape(2, -1, 8)[:, : span.n_cached + 1]
            .repeat_interleave(3, 0)
            for pool in (cache.keys, cache.values)
        )
        weights = (qkv[i, :6, None] * keys).sum(-1).div(8**0.5).softmax(-1)
        torch.testing.assert_close(attended[i].view(6, 8), (weights[..., None] * values).sum(1))


# --- a real model ---


@pytest.mark.skipif("MPILLM_TEST_MODEL" not in os.environ, reason="MPILLM_TEST_MODEL names no folder")
def test_a_real_model_equals_transformers() -> None:
    from mpillm.data.dataset import load_dataset
    from mpillm.data.tokenizer import load_tokenizer

    model = Path(os.environ["MPILLM_TEST_MODEL"])
    dataset = load_dataset(None, load_tokenizer(model))
    prompts = [dataset.sample(i).tolist() for i in range(64)]
    wanted = expected_tokens(model, prompts, 64)
    options = {"end_ids": None, "max_seq_len": 1024, "tokens_per_block": 32}
    assert answer(make_core(model, **options), make_batch(prompts, max_output=64)) == wanted
    scarce = make_core(
        model, **options | {"max_seq_len": None, "kv_cache_tokens": 1024, "max_num_tokens": 100}
    )
    assert answer(scarce, make_batch(prompts, max_output=64)) == wanted
    assert scarce.statistics()["preemptions"] > 0
    pair = make_pair(model, options, options | {"max_seq_len": None, "kv_cache_tokens": 1024})
    assert hands_off(*pair, make_batch(prompts, max_output=64, generation=1)) == wanted
