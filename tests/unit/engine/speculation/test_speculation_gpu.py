"""Guesses in the GPU's way of running steps, on a CPU. On a real one: tests/gpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run.gpu_steps import GpuSteps
from mpillm.engine.run.worker import Follower, Worker
from mpillm.engine.schedule.sequence import UNREAD
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import ModelInfo, check_model
from mpillm.engine.shape.speculative_config import decode_rows
from mpillm.engine.speculation import start_speculation
from mpillm.engine.speculation.draft_model import DraftModel
from tests.helpers import plain_kernels
from tests.helpers.draft_tokens import N_OUTPUT, NGRAM, draft_target
from tests.helpers.engine_configs import changed
from tests.helpers.gpu_steps_on_cpu import LateGpuCore
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import Answers, make_batch, make_core


def feed_backwards(steps: GpuSteps, tokens: Tensor) -> None:
    """As `GpuSteps.feed`: a GPU may write tokens in any order."""
    steps._last.index_copy_(0, steps._token_slots.flip(0), tokens.flip(0))


def answers(
    core: TorchCore, prompts: Tokens, n_output: int | list[int] = N_OUTPUT, **fields: Any
) -> tuple[Tokens, list[tuple[Step, int]]]:
    """Return them, and each step with how many were in flight before it."""
    steps: list[tuple[Step, int]] = []
    run = core.engine.worker.run

    def noting(step: Step) -> Any:
        steps.append((step, len(core.engine._in_flight)))
        return run(step)

    worker: Any = core.engine.worker
    worker.run = noting
    core.enqueue(make_batch(prompts, max_output=n_output, **fields))
    found = Answers()
    while not core.engine.is_idle():
        found.poll(core)
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
    return found.tokens(), steps


SCARCE = {"kv_cache_tokens": 256, "max_seq_len": None}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_size": 3, "max_num_tokens": 9}, SCARCE | {"max_num_tokens": 24}],
    ids=str,
)
def test_greedy_tokens_are_the_plain_ones(
    folder: Path, repetitive: Tokens, plain: Tokens, options: dict[str, Any]
) -> None:
    core = make_core(folder, kind=LateGpuCore, speculative_config=NGRAM, **options)
    found, steps = answers(core, repetitive)
    assert found == plain
    assert 0 < core.statistics()["accepted_tokens"] <= core.statistics()["drafted_tokens"]
    assert not any(n for _, n in steps)
    with_guesses = [step for step, _ in steps if any(span.is_few for span in step.spans)]
    of_decode = [len(step.tokens) == len(step.logits_rows) for step in with_guesses]
    assert any(of_decode)
    assert not (options and all(of_decode))  # some beside contexts
    assert max(len(step.tokens) for step in with_guesses if len(step.tokens) == len(step.logits_rows)) <= (
        decode_rows(core.config.engine)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_size": 3, "max_num_tokens": 9}, SCARCE | {"max_num_tokens": 24}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["the model itself", "half of it"])
def test_a_draft_model(
    folder: Path,
    draft_folder: Path,
    repetitive: Tokens,
    plain: Tokens,
    kind: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its decode steps have a token for each of their rows, and from the second guess on nobody waits."""
    steps: list[Step] = []

    def draft_worker(config: EngineConfig, info: ModelInfo) -> Worker:
        n_decode_rows = DraftModel.decode_rows(config.scheduler)
        worker = Worker.on_gpu(config, info, Groups(), plain_kernels, n_decode_rows)
        run = worker.run

        def noting(step: Step) -> Any:
            steps.append(step)
            return run(step)

        noted: Any = worker
        noted.run = noting
        return worker

    monkeypatch.setattr(start_speculation, "draft_worker", draft_worker)
    monkeypatch.setattr(GpuSteps, "feed", feed_backwards)
    speculative_config = draft_target({"the model itself": folder, "half of it": draft_folder}[kind], 4)
    core = make_core(folder, kind=LateGpuCore, speculative_config=speculative_config, **options)
    found, _ = answers(core, repetitive)
    assert found == plain
    counts = core.statistics()
    assert 0 < counts["accepted_tokens"] <= counts["drafted_tokens"]
    assert counts["accepted_tokens"] == counts["drafted_tokens"] or kind == "half of it"
    of_decode = [step for step in steps if all(span.decodes for span in step.spans)]
    assert all(len(step.logits_rows) == len(step.tokens) for step in of_decode)
    assert any(span.is_few for step in of_decode for span in step.spans)
    rows = max(len(step.tokens) for step in of_decode)
    assert rows <= DraftModel.decode_rows(core.config.engine.scheduler)
    unread = [step for step in steps if UNREAD in step.tokens]
    assert unread
    assert all(set(step.tokens) == {UNREAD} for step in unread)


@pytest.mark.long
def test_sampled_tokens_are_the_plain_ones(folder: Path, repetitive: Tokens) -> None:
    fields: dict[str, Any] = {"temperature": [0, 0.7, 0] * 3, "seed": range(9), "top_k": 3, "min_output": 14}
    core = make_core(folder, end_ids=(3, 5))
    core.enqueue(make_batch(repetitive, max_output=N_OUTPUT, **fields))
    wanted = Answers().run(core).tokens()
    core = make_core(folder, kind=LateGpuCore, end_ids=(3, 5), speculative_config=NGRAM)
    assert answers(core, repetitive, **fields)[0] == wanted


@pytest.mark.long
def test_steps_run_ahead_while_nobody_guesses(folder: Path, repetitive: Tokens, plain: Tokens) -> None:
    """With more requests than `max_concurrency`, a step starts before the last one's tokens are read, but
    none does beside a step with guesses."""
    config = NGRAM | {"max_concurrency": 4}
    core = make_core(folder, kind=LateGpuCore, speculative_config=config)
    found, steps = answers(core, repetitive, [12] * 5 + [N_OUTPUT] * 4)
    assert found == [tokens[: 12 if i < 5 else None] for i, tokens in enumerate(plain)]
    guesses = [any(span.is_few for span in step.spans) for step, _ in steps]
    assert any(guesses)
    assert any(n for _, n in steps)
    for (_, n), is_guess, after_guess in zip(steps, guesses, [False, *guesses], strict=False):
        assert not (n and (is_guess or after_guess))


@pytest.mark.long
def test_a_request_is_cancelled_beside_guesses(folder: Path, repetitive: Tokens, plain: Tokens) -> None:
    core = make_core(folder, kind=LateGpuCore, speculative_config=NGRAM)
    core.enqueue(make_batch(repetitive, max_output=N_OUTPUT))
    found = Answers()
    for _ in range(40):
        found.poll(core)
    core.engine.cancel(1)
    while not core.engine.is_idle():
        found.poll(core)
    assert found.cancelled == [1]
    assert found.tokens() == [tokens for i, tokens in enumerate(plain) if i != 1]
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks


def test_memory_is_kept_for_the_rows_of_guesses() -> None:
    config = make_core("tiny-llama").config.engine
    config = changed(
        config, model_path="llama3.1-8b", gpu_bytes=139 << 30, max_batch_size=64, max_num_tokens=2048
    )
    guessing = changed(config, speculative_config=NGRAM)
    assert decode_rows(config) == 64
    assert decode_rows(guessing) == 320
    assert decode_rows(changed(guessing, max_num_tokens=100)) == 100
    assert decode_rows(changed(guessing, role="context")) == 64
    few = changed(guessing, speculative_config=NGRAM | {"max_concurrency": 8})
    assert decode_rows(few) == 64
    sizes = [
        check_model(changed(c, max_batch_size=4096, max_seq_len=None)).kv_cache_tokens
        for c in (config, changed(guessing, max_num_tokens=20480))
    ]
    assert sizes[1] < sizes[0]


def test_memory_is_kept_for_a_draft_model() -> None:
    """The KV caches of both hold as many tokens."""
    config = make_core("tiny-llama").config.engine
    config = changed(
        config, model_path="llama3.1-8b", gpu_bytes=60 << 30, max_batch_size=2048, max_seq_len=4096
    )
    ngram, target = (
        changed(config, speculative_config=options)
        for options in (NGRAM, draft_target(Path("llama3.2-1b"), 4))
    )
    plain, beside = (check_model(c) for c in (ngram, target))
    draft = check_model(changed(config, model_path="llama3.2-1b"))
    taken = (plain.kv_cache_tokens - beside.kv_cache_tokens) * plain.config.kv_bytes_per_token("bfloat16")
    fraction = config.kv_cache_free_gpu_mem_fraction
    of_cache = beside.kv_cache_tokens * draft.config.kv_bytes_per_token("bfloat16")
    assert taken > fraction * draft.n_bytes + of_cache
    assert taken < fraction * (draft.n_bytes + (6 << 30)) + of_cache
    TorchCore.check(CoreConfig("torch", target))
    context = changed(target, role="context")
    assert check_model(context) == check_model(changed(config, role="context"))
    with pytest.raises(ConfigError, match=r"llama3.1-8b with llama3.2-1b beside it does not fit"):
        check_model(changed(target, gpu_bytes=19 << 30))


@pytest.mark.long
def test_a_follower_notes_guesses_as_decode(folder: Path, repetitive: Tokens) -> None:
    core = make_core(folder, kind=LateGpuCore, speculative_config=NGRAM)
    _, steps = answers(core, repetitive[:3])
    step = next(step for step, _ in steps if any(span.is_few for span in step.spans))
    noted: list[tuple[int, ...]] = []
    peers = SimpleNamespace(layout=core.info.layout, take_plan=lambda: step)
    worker: Any = SimpleNamespace(part=core.engine.worker.part, peers=peers, run=lambda step: None)
    worker.part.peers = peers
    follower = Follower(worker)
    recorder: Any = SimpleNamespace(step=lambda began, ended, *counts: noted.append(counts))
    follower.recorder = recorder
    assert follower.has_work()
    follower.step()
    assert noted == [(0, len(step.spans), 0)]
