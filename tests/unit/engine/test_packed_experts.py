"""MXFP4 is widened as transformers widens it; what is wrong with packed experts is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.model.model_config import load_model_config
from mpillm.engine.weights.sources import Checkpoint
from tests.helpers.families import make_family, pack_experts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from mpillm.engine.weights.packed_experts import widened  # noqa: E402
from mpillm.engine.weights.quantize import quantize  # noqa: E402

_EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_has_the_bits_of_transformers(dtype: Any) -> None:
    """All bytes with all exponents, as far as the type has them."""
    exponents = torch.arange(8, 250, dtype=torch.uint8).view(1, -1, 1).expand(1, -1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 242, 16, 16)
    wanted = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)[0].t()
    found = widened(blocks[0], exponents[0]).to(dtype)
    assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("packed")
    model = make_family("GptOssForCausalLM", folder, intermediate_size=64)
    pack_experts(model, folder)
    return folder, model


def changed(folder: Path, target: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """Copy a folder with other tensors (None: without one)."""
    kept = load_file(folder / "model.safetensors") | tensors
    save_file(
        {name: x for name, x in kept.items() if x is not None}, target / "model.safetensors", {"format": "pt"}
    )
    raw = json.loads((folder / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(raw))
    return target


def test_parts_of_an_expert(folders: tuple[Path, Any]) -> None:
    folder, model = folders
    source = Checkpoint(folder, load_model_config(str(folder)))
    experts = model.model.layers[1].mlp.experts
    rows, columns = slice(3, 20), slice(32, 64)
    for part, whole in (
        ("gate_proj", experts.gate_up_proj[5].t()[0::2]),
        ("up_proj", experts.gate_up_proj[5].t()[1::2]),
        ("down_proj", experts.down_proj[5].t()),
    ):
        assert torch.equal(source.get(f"{_EXPERTS}.5.{part}.weight", rows, columns), whole[rows, columns])
    bias = source.get(f"{_EXPERTS}.5.up_proj.bias", rows)
    assert torch.equal(bias, experts.gate_up_proj_bias[5][1::2][rows])


def test_what_is_wrong_is_said(folders: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = folders
    blocks, scales = f"{_EXPERTS}.down_proj_blocks", f"{_EXPERTS}.down_proj_scales"
    for i, (tensors, message) in enumerate(
        (
            ({scales: None}, f"no tensor {scales}"),
            (
                {blocks: torch.zeros(8, 64, 3, 16, dtype=torch.uint8)},
                r"config.json makes it \[8, 64, 2, 16\]",
            ),
            ({blocks: torch.zeros(8, 64, 2, 16)}, "is of type F32; can read U8"),
        )
    ):
        (tmp_path / str(i)).mkdir()
        there = changed(folder, tmp_path / str(i), tensors)
        with pytest.raises(ConfigError, match=message):
            Checkpoint(there, load_model_config(str(there)))
    bad = load_file(folder / "model.safetensors")[scales]
    bad[2, 5, 1] = 255
    there = changed(folder, tmp_path, {scales: bad})
    source = Checkpoint(there, load_model_config(str(there)))
    source.get(f"{_EXPERTS}.1.down_proj.weight")
    with pytest.raises(ConfigError, match="down_proj_scales: expert 2 has scales that are no number"):
        source.get(f"{_EXPERTS}.2.down_proj.weight")


def test_they_are_not_quantised_to_another_folder(folders: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its weights are mxfp4 already; quantise the model"):
        quantize(folders[0], tmp_path / "int8", "int8")
    make_family("GptOssForCausalLM", tmp_path / "floats")
    with pytest.raises(ConfigError, match="which only --quantization of a run rounds"):
        quantize(tmp_path / "floats", tmp_path / "int8", "int8")


def test_other_values_of_what_is_fixed(folders: tuple[Path, Any], tmp_path: Path) -> None:
    for change, message in (
        ({"swiglu_limit": 6.0}, "swiglu_limit 6.0 is not supported"),
        ({"attention_bias": False}, "attention_bias false is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"quantization_config": {"quant_method": "awq"}}, 'quant_method "awq" is not supported'),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model_config(str(changed(folders[0], tmp_path, {}, **change)))
