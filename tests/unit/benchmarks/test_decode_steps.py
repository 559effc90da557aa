"""Decode steps that `benchmarks decode` measures, with a GPU's way of running them, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode_steps import WARM_UP, Guesses, context_steps, decode_steps
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Step
from mpillm.engine.speculation.start_speculation import start_drafter
from tests.helpers.draft_tokens import draft_target
from tests.helpers.eagle_heads import eagle, save_head
from tests.helpers.engine_configs import engine_config
from tests.helpers.gpu_steps_on_cpu import gpu_worker
from tests.helpers.presets import save_preset

N_STEPS, CONTEXT = 5, 40


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("of_one", [1, 2, 4])
@pytest.mark.parametrize("how", [{"decoding_type": "NGram"}, draft_target(Path("tiny-llama"))], ids=str)
def test_each_step_has_the_requested_rows(how: dict[str, Any], batch: int, of_one: int) -> None:
    """Each sequence has a token and its guesses, none of them right, up to `max_concurrency` sequences."""
    speculation = how | {"max_draft_len": 3, "max_concurrency": 3}
    config = engine_config(
        "tiny-llama", load_format="dummy", max_batch_size=4, max_seq_len=256, speculative_config=speculation
    )
    worker: Any = gpu_worker(TorchCore(CoreConfig("torch", config)))
    rows: list[int] = []
    run = worker.run

    def noting(step: Step) -> object:
        rows.append(len(step.tokens))
        return run(step)

    worker.run = noting
    guesses = Guesses(start_drafter(config, worker), of_one - 1, 3) if of_one > 1 else None
    decoded = decode_steps(worker, config, batch, CONTEXT, N_STEPS, guesses)
    assert decoded.step_s > 0 and decoded.host_s > 0
    assert len(rows) >= WARM_UP + N_STEPS
    wanted = batch * (of_one if batch <= 3 else 1)
    assert rows[: WARM_UP + N_STEPS] == [wanted] * (WARM_UP + N_STEPS)


@pytest.mark.parametrize("n", [1, 3])
def test_a_head_reads_what_the_model_thought(n: int, tmp_path: Path) -> None:
    """Contexts are computed before the steps that count, and each of those tests guesses."""
    save_preset("tiny-llama", tmp_path)
    save_head(tmp_path, tmp_path / "head")
    batch = 4
    config = engine_config(
        tmp_path,
        max_batch_size=batch,
        max_num_tokens=50,
        max_seq_len=256,
        speculative_config=eagle(tmp_path / "head"),
    )
    worker: Any = gpu_worker(TorchCore(CoreConfig("torch", config)))
    steps: list[tuple[int, int, int]] = []  # rows, those that get a token, and what the head guessed for them
    guessed: list[int] = []
    drafter: Any = start_drafter(config, worker)
    run, draft = worker.run, drafter.draft

    def noting(step: Step) -> object:
        steps.append((len(step.tokens), len(step.logits_rows), sum(guessed)))
        guessed.clear()
        return run(step)

    def noted(wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts: list[list[int]] = draft(wanted)
        guessed.append(sum(map(len, drafts)))
        return drafts

    worker.run, drafter.draft = noting, noted
    decoded = decode_steps(worker, config, batch, CONTEXT, N_STEPS, Guesses(drafter, n, None))
    assert decoded.step_s > 0
    n_contexts = next(i for i, (n_rows, n_wanted, _) in enumerate(steps) if n_rows == n_wanted)
    assert n_contexts <= context_steps(config, batch, CONTEXT)
    n_rows = batch * (1 + n)
    counted = steps[n_contexts:][: WARM_UP + N_STEPS]
    assert counted == [(n_rows, n_rows, batch * n)] * (WARM_UP + N_STEPS)
