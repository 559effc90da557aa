"""MXFP4 is widened as transformers widens it; what is wrong with packed experts is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.entries import blocks_name, scale_name
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.engine_configs import engine_config
from tests.helpers.families import make_family, pack_experts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mpillm.engine.build_engine import build  # noqa: E402
from mpillm.engine.shape.mxfp4 import MAGNITUDES, rounded, widened  # noqa: E402
from mpillm.engine.weights.quantize import quantize  # noqa: E402
from mpillm.engine.weights.rank_weights import open_weights  # noqa: E402
from mpillm.engine.weights.sources import Checkpoint  # noqa: E402

_EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_has_the_bits_of_transformers(dtype: Any) -> None:
    """All bytes with all exponents, as far as the type has them."""
    # Only here: it imports much of PyTorch, in each process of pytest-xdist.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    exponents = torch.arange(8, 250, dtype=torch.uint8).view(1, -1, 1).expand(1, -1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 242, 16, 16)
    wanted = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)[0].t()
    found = widened(blocks[0].flatten(1), exponents[0]).to(dtype)
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


def test_parts_as_they_are(folders: tuple[Path, Any]) -> None:
    """Bytes and exponents are those of the floats, for whole blocks of columns."""
    folder, _ = folders
    source = Checkpoint(folder, load_model_config(str(folder)))
    for part, columns in (
        ("gate_proj", slice(None)),
        ("up_proj", slice(32, 64)),
        ("down_proj", slice(0, 32)),
    ):
        name, rows = f"{_EXPERTS}.5.{part}.weight", slice(3, 20)
        held = [source.get(each, rows, columns) for each in (blocks_name(name), scale_name(name))]
        assert torch.equal(widened(*held), source.get(name, rows, columns))


def test_rounding() -> None:
    """To the nearest, ties to the even number; what the format holds stays, and zeros."""
    levels = torch.tensor(MAGNITUDES)
    ties = (levels[:-1] + levels[1:]) / 2
    row = torch.cat([levels, -levels, ties, -ties, torch.tensor([0.24, 0.26])])
    found = widened(*rounded(row[None] * 2**-9))[0] * 2**9
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert found.tolist() == [*levels, *-levels, *even, *-even, 0.0, 0.5]
    assert not widened(*rounded(torch.zeros(2, 64))).any()
    matrix = (
        torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 40)[:, None]
    )
    held = widened(*rounded(matrix))
    assert torch.equal(widened(*rounded(held)), held)
    assert ((held - matrix).norm(dim=1) < 0.2 * matrix.norm(dim=1)).all()


def test_where_experts_stay_as_they_are(folders: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = folders

    def held(**options: Any) -> tuple[str, int]:
        info = model_info(engine_config(folder, **options))
        return info.quantization, info.n_bytes

    gpu: dict[str, Any] = {"gpu_bytes": 8 << 30}
    kept, widened_there = held()[1], held(quantization="none")[1]
    assert held()[0] == "mxfp4" and kept < widened_there / 2
    assert [held(tp_size=2)[0], held(tp_size=4)[0], held(tp_size=4, ep_size=2)[0]] == [
        "mxfp4",
        "none",
        "mxfp4",
    ]
    assert held(**gpu)[0] == "none" and held(**gpu, dtype="bfloat16")[0] == "mxfp4"
    for message, options in {
        "64 numbers in 4 parts of a multiple of 32": {"tp_size": 4},
        "on a GPU they multiply bfloat16, not float32": gpu,
    }.items():
        with pytest.raises(ConfigError, match=message):
            held(quantization="mxfp4", **options)
    with pytest.raises(ConfigError, match="can't be in MXFP4: it has none"):
        model_info(engine_config("tiny-llama", quantization="mxfp4"))
    assert held(quantization="fp8")[0] == "fp8"


def test_an_engine_of_them(folders: tuple[Path, Any], tmp_path: Path) -> None:
    """A rank's file holds their bytes, and a run of it computes with these."""
    folder, _ = folders
    build(folder, tmp_path / "engine", tp_size=2)
    core = engine_config(folder, engine_dir=str(tmp_path / "engine"), tp_size=2, tp_rank=1)
    info = model_info(core)
    assert info.quantization == "mxfp4"
    config = dataclasses.replace(info.config, stored="mxfp4")  # of the checkpoint
    of_checkpoint = dataclasses.replace(info, engine=None, config=config)
    built, cut = (open_weights(of, info.layout, "cpu", dummy=False) for of in (info, of_checkpoint))
    for name in (f"{_EXPERTS}.3.gate_up_proj", f"{_EXPERTS}.3.down_proj"):
        (found, exponents), (wanted, others) = built.matrix(name), cut.matrix(name)
        assert exponents is not None and others is not None and found.dtype == torch.uint8
        assert torch.equal(found, wanted) and torch.equal(exponents, others)


def test_wrong_tensors_are_named(folders: tuple[Path, Any], tmp_path: Path) -> None:
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
