"""Decode steps that `bench engine --device cuda` measures, with a GPU's way of running them, on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.bench.bench_decode import bench_decode
from mpillm.bench.decode_steps import WARM_UP, Guesses, decode_steps
from mpillm.config.core_config import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.speculation.start_speculation import start_drafter
from mpillm.engine.step import Step
from tests.helpers.eagle_heads import eagle
from tests.helpers.gpu_steps_on_cpu import gpu_worker
from tests.helpers.guesses import draft_target

N_STEPS, CONTEXT = 5, 40


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("of_one", [1, 2, 4])
@pytest.mark.parametrize("how", [{"decoding_type": "NGram"}, draft_target(Path("tiny-llama"))], ids=str)
def test_each_step_has_the_rows_asked_for(
    how: dict[str, Any], batch: int, of_one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence has a token and its guesses, none of them right, up to `max_concurrency` sequences."""
    said = how | {"max_draft_len": 3, "max_concurrency": 3}
    core = CoreConfig(
        "torch",
        model_path="tiny-llama",
        load_format="dummy",
        max_batch_size=4,
        max_seq_len=256,
        speculative_config=said,
    )
    of = TorchCore(core)
    worker = gpu_worker(of)
    rows: list[int] = []
    run = worker.run

    def noting(step: Step) -> object:
        rows.append(len(step.tokens))
        return run(step)

    monkeypatch.setattr(worker, "run", noting)
    guesses = Guesses(start_drafter(core, worker), of_one - 1, 3) if of_one > 1 else None
    decoded = decode_steps(worker, core, batch, CONTEXT, N_STEPS, guesses)
    assert decoded.step_s > 0 and decoded.host_s > 0
    assert len(rows) >= WARM_UP + N_STEPS
    wanted = batch * (of_one if batch <= 3 else 1)
    assert rows[: WARM_UP + N_STEPS] == [wanted] * (WARM_UP + N_STEPS)


def test_no_head_is_measured() -> None:
    """Its sequences would lack what the model thought, and cost less than they do."""
    options: Any = SimpleNamespace(speculative_config=eagle(Path("head")))
    with pytest.raises(ConfigError, match="measures no head"):
        bench_decode(options)
