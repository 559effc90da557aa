"""Decode steps that `bench engine --device cuda` measures, with a GPU's way of running them, on a CPU."""

from __future__ import annotations

import pytest

from mpillm.bench.decode_steps import WARM_UP, decode_steps
from mpillm.config.core_config import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.speculation.speculative_config import SpeculativeConfig
from mpillm.engine.step import Step
from tests.helpers.gpu_steps_on_cpu import gpu_worker

N_STEPS, CONTEXT = 5, 40


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("of_one", [1, 2, 4])
def test_each_step_has_the_rows_asked_for(batch: int, of_one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence has a token and its guesses, none of them right, up to `max_concurrency` sequences."""
    said = {"decoding_type": "NGram", "max_draft_len": 3, "max_concurrency": 3}
    core = CoreConfig(
        "torch",
        model_path="tiny-llama",
        load_format="dummy",
        max_batch_size=4,
        max_seq_len=256,
        speculative_config=said,
    )
    worker = gpu_worker(TorchCore(core))
    rows: list[int] = []
    run = worker.run

    def noting(step: Step) -> object:
        rows.append(len(step.tokens))
        return run(step)

    monkeypatch.setattr(worker, "run", noting)
    guesses = SpeculativeConfig.read(said | {"max_draft_len": of_one - 1}) if of_one > 1 else None
    decoded = decode_steps(worker, core, batch, CONTEXT, N_STEPS, guesses)
    assert decoded.step_s > 0 and decoded.host_s > 0
    assert len(rows) >= WARM_UP + N_STEPS
    wanted = batch * (of_one if batch <= 3 else 1)
    assert rows[: WARM_UP + N_STEPS] == [wanted] * (WARM_UP + N_STEPS)
