"""All layers in one call compute, bit by bit, what they do one by one; or they are left out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from mpillm.cores.torch_core import TorchCore
from mpillm.engine.kernels import linear
from mpillm.engine.kernels.cpu_products import cpu_products
from mpillm.engine.model.attention import _MAX_BY_ROW
from mpillm.engine.run import cpu_steps
from mpillm.engine.run.cpu_steps import CpuLayers, CpuSteps
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.families.known import FAMILIES
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.compilers import no_compiler
from tests.helpers.torch_cores import make_core

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take compiled products, whether or not others are faster here."""
    monkeypatch.setattr(linear, "_compiled", cpu_products)


def steps_of(core: TorchCore) -> Any:
    assert core.worker is not None and isinstance(core.worker.steps, CpuSteps)
    return core.worker.steps


def step(*spans: Span, wanted: list[int] | None = None) -> Step:
    n = sum(span.n_new for span in spans)
    generator = torch.Generator().manual_seed(n)
    tokens = torch.randint(3, 500, (n,), generator=generator).tolist()
    return Step(spans=list(spans), tokens=tokens, logits_rows=list(range(n)) if wanted is None else wanted)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}],
    ids=str,
)
def test_equal_one_by_one(options: dict[str, Any]) -> None:
    steps = steps_of(make_core("tiny-llama", **options))
    layers = steps._layers
    assert layers is not None
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return layers(*args)

    with torch.inference_mode():
        for now in (
            step(Span(0, 0, 9, 0, [0, 1]), Span(1, 0, 30, 0, [2, 3, 4, 5]), wanted=[8, 38]),
            step(Span(0, 9, 1), Span(1, 30, 1), Span(2, 0, 2, 0, [6]), wanted=[0, 1, 3]),
            step(Span(0, 10, 1)),
        ):
            steps._layers = counted
            found = steps.forward(now)
            steps._layers = None
            assert found.equal(steps.forward(now))
    assert len(calls) == 3


def test_left_out_for_rows_that_pytorch_attends_with_and_when_somebody_waits_for_layers() -> None:
    steps = steps_of(make_core("tiny-llama", max_seq_len=_MAX_BY_ROW + 8))
    stored: list[int] = []

    def never(*args: Any) -> torch.Tensor:
        raise AssertionError("all layers in one call")

    steps._layers = never
    with torch.inference_mode():
        steps.forward(step(Span(0, 0, _MAX_BY_ROW + 1, 0, [*range(65)])))
        steps.forward(step(Span(1, 0, 2, 0, [65])), stored.append)
    assert stored == [*range(len(steps._part.model.layers))]


def test_made_for_dense_models_of_one_rank_with_compiled_products() -> None:
    assert steps_of(make_core("tiny-mixtral"))._layers is None
    steps = steps_of(make_core("tiny-llama"))
    assert steps._layers is not None and steps._kernels is not None
    part = steps._part
    part.groups.layout = RankLayout(tp_size=2)
    assert CpuLayers.of(part, steps._kernels) is None
    with no_compiler():
        assert steps_of(make_core("tiny-llama"))._layers is None


def test_only_a_layer_of_llamas_formula_without_a_window() -> None:
    """Other families would give other tokens in that call."""
    llama = load_model_config("tiny-llama")
    assert cpu_steps._is_llama(llama, 0)
    assert cpu_steps._is_llama(replace(llama, family=FAMILIES["MistralForCausalLM"]), 0)
    for name in (
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GPT2LMHeadModel",
        "GptOssForCausalLM",
        "Gemma3ForCausalLM",
    ):
        assert not cpu_steps._is_llama(replace(llama, family=FAMILIES[name]), 0)
    windows = (0, *[16] * (llama.n_layers - 1))
    with_windows = replace(llama, family=FAMILIES["MistralForCausalLM"], windows=windows)
    assert [cpu_steps._is_llama(with_windows, i) for i in (0, 1)] == [True, False]
