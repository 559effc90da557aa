"""Adapters beside each other and beside none in one batch, against PEFT, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from disagg.errors import ConfigError
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.extras.lora import MODULES, Adapters
from mpillm.engine.extras.request_extras import RequestExtras
from mpillm.triton.peft_adapter import convert
from tests.helpers.adapters import make_adapter, with_adapter
from tests.helpers.oracle import Oracle
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import answer_with_extras, make_core

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9, 3], [8, 8, 8, 8]]
N_OUTPUT = 9


class Models:
    """Holds a folder, adapters for it, and what each answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        save_preset("tiny-llama", self.folder)
        self.adapters = {1: folder / "all", 2: folder / "attention"}
        make_adapter(self.folder, self.adapters[1], 1)
        make_adapter(self.folder, self.adapters[2], 2, ("q_proj", "v_proj"))
        self.of = {i: Oracle(self.folder) for i in (0, 1, 2)}
        for i, adapter in self.adapters.items():
            self.of[i].model = with_adapter(self.of[i].model, adapter)

    def answer(self, model: int, prompt: list[int], **options: Any) -> list[int]:
        return self.of[model].tokens(prompt, N_OUTPUT, **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("lora"))


def run(core: TorchCore, prompts: list[list[int]], extras_by_id: dict[int, RequestExtras]) -> list[list[int]]:
    return answer_with_extras(core, prompts, extras_by_id, N_OUTPUT)


@pytest.mark.parametrize("options", [{}, {"enable_kv_cache_reuse": True, "max_num_tokens": 24}])
@pytest.mark.long
def test_mixed_in_a_batch(options: dict[str, Any], models: Models) -> None:
    """Each prompt is answered by each adapter and by none; with reuse, no adapter gets the blocks of
    another."""
    core = make_core(models.folder, **options)
    adapters = {}
    for i, folder in models.adapters.items():
        weights, config = convert(folder, "float16")
        adapters[i] = core.make_adapter(weights[0], config[0])
    which = [i % 3 for i in range(3 * len(PROMPTS))]
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    expected = [models.answer(model, prompt) for model, prompt in zip(which, prompts, strict=True)]
    assert len({tuple(answer) for answer in expected}) == len(expected)
    for _ in range(2):
        extras_by_id = {i: RequestExtras(adapter=adapters[model]) for i, model in enumerate(which) if model}
        assert run(core, prompts, extras_by_id) == expected
    assert ("reused_blocks" in core.statistics()) == bool(options)


def test_beams_and_logits_with_an_adapter(models: Models) -> None:
    core = make_core(models.folder)
    weights, config = convert(models.adapters[1], "float32")
    adapter = core.make_adapter(weights[0], config[0])
    extras_by_id = {
        0: RequestExtras(adapter=adapter, beam_width=3, ends=()),
        1: RequestExtras(adapter=adapter, keeps_context_logits=True),
    }
    answers = run(core, PROMPTS, extras_by_id)
    assert answers[0] == models.answer(1, PROMPTS[0], num_beams=3)
    assert answers[1:] == [models.answer(i, PROMPTS[n]) for i, n in ((1, 1), (0, 2), (0, 3))]
    logits = models.of[1].logits(PROMPTS[1]).numpy()
    np.testing.assert_allclose(np.concatenate(extras_by_id[1].context_logits), logits, atol=1e-3)


@pytest.mark.parametrize(
    ("module", "layer", "rank", "message"),
    [
        (9, 0, 4, "this model has no module 9"),
        (1, 99, 4, "attn_q of layer 99 with rank 4 is not possible"),
        (1, 0, 0, "attn_q of layer 0 with rank 0 is not possible"),
        (1, 0, 5, "attn_q of layer 0 has not 5 x"),
        (1, 0, 3, "attn_q of layer 0 has not 3 x"),
    ],
)
def test_what_does_not_fit(module: int, layer: int, rank: int, message: str, models: Models) -> None:
    core = make_core(models.folder)
    hidden = core.info.config.hidden_size
    with pytest.raises(ValueError, match=message):
        core.make_adapter(
            np.ones((1, 4 * 2 * hidden), np.float16), np.array([[module, layer, rank]], np.int32)
        )
    with pytest.raises(ValueError, match=r"expected \[modules, values\]"):
        core.make_adapter(np.ones((2, 8), np.float16), np.array([[1, 0, 1]], np.int32))


def test_the_longest_unused_are_forgotten(models: Models) -> None:
    core = make_core(models.folder)
    hidden = core.info.config.hidden_size

    def make() -> Any:
        return core.make_adapter(
            np.ones((1, 2 * hidden), np.float16), np.array([[MODULES["attn_dense"], 0, 1]], np.int32)
        )

    adapters = Adapters(2 * make().n_bytes)
    assert adapters.get(0, make) is not adapters.get(0, make), "weights without an id are of one request"
    first = adapters.get(1, make)
    adapters.get(2, make)
    assert adapters.get(1, None) is first
    adapters.get(3, make)
    for task_id in (2, 4):
        with pytest.raises(
            LookupError, match=f"LoRA task {task_id} not found in cache. Please send LoRA weights"
        ):
            adapters.get(task_id, None)
    assert adapters.get(1, None) is first
    with pytest.raises(ValueError, match="exceed lora_cache_host_memory_bytes 1"):
        Adapters(1).get(1, make)


@pytest.mark.parametrize(
    "config",
    [
        '{"r": 0, "lora_alpha": 4}',
        '{"r": 2, "lora_alpha": NaN}',
        '{"r": Infinity, "lora_alpha": 4}',
        "[" * 100_000,
    ],
)
def test_an_adapter_that_cannot_be(config: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="not a readable PEFT adapter"):
        convert(tmp_path, "float16")
