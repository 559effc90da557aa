"""Checkpoints of AWQ, GPTQ and compressed-tensors are read to the bit. Others are refused before the load."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.engine_configs import engine_config
from tests.helpers.families import make_family
from tests.helpers.int4 import FORMS, pack_int4, quantization_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mpillm.engine.build_engine import build  # noqa: E402
from mpillm.engine.kernels import linear  # noqa: E402
from mpillm.engine.kernels.linear import Int4Linear  # noqa: E402
from mpillm.engine.shape import int4  # noqa: E402
from mpillm.engine.shape.entries import blocks_name, scale_name  # noqa: E402
from mpillm.engine.shape.layout import RankLayout  # noqa: E402
from mpillm.engine.weights.rank_weights import open_weights, rotary_order  # noqa: E402
from mpillm.engine.weights.sources import Checkpoint  # noqa: E402
from tests.helpers.compilers import no_compiler  # noqa: E402

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def written(folder: Path, form: str, group: int) -> Any:
    model = make_family("LlamaForCausalLM", folder, **_SIZES)
    pack_int4(model, folder, form, group)
    return model


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("form", FORMS)
def test_every_weight_has_the_bits_of_the_references(tmp_path: Path, form: str, group: int) -> None:
    """They multiply in float16, and so round once. Whole, in parts, and as a rank has them."""
    model = written(tmp_path, form, group)
    source = Checkpoint(tmp_path, load_model_config(str(tmp_path)))
    for name, wanted in model.named_parameters():
        if name.endswith("_proj.weight"):
            assert torch.equal(source.get(name).half().float(), wanted)
    name, size = "model.layers.1.mlp.down_proj.weight", 128 if group == -1 else group
    rows, columns = slice(3, 20), slice(size, 256)
    wanted = dict(model.named_parameters())[name][rows, columns]
    assert torch.equal(source.get(name, rows, columns).half().float(), wanted)
    held = [source.get(part(name), rows, columns) for part in (blocks_name, scale_name)]
    assert torch.equal(int4.widened(*held).half().float(), wanted)
    info = model_info(engine_config(tmp_path))
    weights = open_weights(info, RankLayout(), "cpu", dummy=False)
    q, k, v = (dict(model.named_parameters())[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    numbers, scales = weights.matrix("model.layers.0.self_attn.qkv_proj")
    assert scales is not None
    found = int4.widened(numbers, scales).half().float()
    assert torch.equal(found, torch.cat([rotary_order(q, 32), rotary_order(k, 32), v]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.long
def test_products(dtype: Any, group: int, compiles: bool) -> None:
    random = torch.Generator().manual_seed(1)
    for outputs in (1, 31, 100, linear._PIECE // 256 + 31):  # of the last, several pieces are widened
        blocks = torch.randint(256, (outputs, 128), dtype=torch.uint8, generator=random)
        zeros = torch.randint(17, (outputs, 256 // group), generator=random)
        scales = torch.stack([torch.rand(zeros.shape, generator=random), zeros], dim=-1).half()
        with contextlib.nullcontext() if compiles else no_compiler():
            product = Int4Linear(blocks, scales, dtype)
        wide = int4.widened(blocks, scales).double()
        for n in (0, 1, 3, 13, 97):
            x = torch.randn(n, 256, generator=random).to(dtype)
            rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(
                product(x).double(), x.double() @ wide.T, rtol=rounding, atol=rounding * 100
            )


def test_rounding() -> None:
    matrix = (
        torch.randn(20, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 20)[:, None]
    )
    matrix[4] = 0
    held = int4.widened(*int4.rounded(matrix, 128))
    largest = matrix.view(20, 2, 128).abs().amax(-1).repeat_interleave(128, 1)
    assert ((held - matrix).abs() <= largest / 14 * 1.01).all()


def test_a_built_engine_and_dummy_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder, "gptq", 64)
    build(folder, tmp_path / "engine", tp_size=2)
    core = engine_config(folder, tp_size=2, engine_dir=str(tmp_path / "engine"))
    of_folder = engine_config(folder, tp_size=2)
    infos = [model_info(config) for config in (core, of_folder)]
    assert [info.quantization for info in infos] == ["int4"] * 2 and infos[0].n_bytes == infos[1].n_bytes
    name = "model.layers.1.mlp.down_proj"
    built, cut, made = (
        open_weights(info, info.layout, "cpu", dummy=dummy).matrix(name)
        for info, dummy in ((infos[0], False), (infos[1], False), (infos[1], True))
    )
    for found, wanted, other in zip(built, cut, made, strict=True):
        assert found is not None and wanted is not None and other is not None
        assert torch.equal(found, wanted) and (other.dtype, other.shape) == (wanted.dtype, wanted.shape)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written(folder, "gptq", 128)
    raw = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"bits": 8}, "bits 8 is not supported"),
        ({"group_size": 16}, "group_size 16 is not supported"),
        ({"desc_act": True}, "desc_act true is not supported"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"lm_head": True}, "lm_head true"),
        ({"quant_method": "awq", "version": "gemv"}, 'version "gemv" is not supported'),
        ({"quant_method": "awq", "zero_point": False}, "zero_point false"),
        ({"quant_method": "awq", "modules_to_not_convert": ["q_proj"]}, "modules_to_not_convert"),
    ):
        changed = raw | {"quantization_config": raw["quantization_config"] | change}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            load_model_config(str(folder))
    (folder / "config.json").write_text(json.dumps(raw))

    def info(**options: Any) -> object:
        return model_info(engine_config(folder, **options))

    with pytest.raises(
        ConfigError, match=r"a rank holds 64 inputs of .*; int4 needs multiples of its group, 128"
    ):
        info(tp_size=4)
    with pytest.raises(ConfigError, match=r"the weights of .* are int4"):
        info(quantization="fp8")
    with pytest.raises(
        ConfigError, match=r"in bfloat16 .* and with group_size 128 or -1; here float32 and 128"
    ):
        info(gpu_bytes=8 << 30)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.down_proj"
    for suffix, value, message in (
        ("scales", torch.full_like(tensors[f"{prefix}.scales"], torch.nan), "negative or not finite"),
        ("qzeros", None, "no tensor model.layers.1.mlp.down_proj.qzeros"),
        ("qweight", tensors[f"{prefix}.qweight"].float(), "is of type F32; can read I32"),
        ("g_idx", tensors[f"{prefix}.g_idx"].flip(0), "inputs are in another order"),
    ):
        changed = {**tensors, f"{prefix}.{suffix}": value}
        kept = {name: x.contiguous() for name, x in changed.items() if x is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            there = info()
            open_weights(there, RankLayout(), "cpu", dummy=False).matrix(prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "rest", "message"),
    [
        ({"num_bits": 8}, {}, "weights.num_bits 8 is not supported by the torch core; supported: 4"),
        ({"type": "float"}, {}, 'weights.type "float" is not supported'),
        ({"actorder": "group"}, {}, 'weights.actorder "group" .*; supported: null, "weight", "static"'),
        ({"group_size": 16}, {}, "weights.group_size 16 .*; supported: 32, 64, 128"),
        ({"strategy": "tensor"}, {}, 'weights.strategy "tensor"'),
        ({}, {"ignore": []}, r"ignore \[\] is not supported"),
        ({}, {"format": "nvfp4-pack-quantized"}, '"nvfp4-pack-quantized" .*"float-quantized", "pack-quant'),
        ({}, {"format": "marlin-24"}, 'format "marlin-24" is not supported'),
        ({}, {"architectures": ["MixtralForCausalLM"]}, 'format "pack-quantized" is not supported'),
    ],
)
def test_pack_quantized_values_that_are_refused(
    tmp_path: Path, weights: dict[str, Any], rest: dict[str, Any], message: str
) -> None:
    make_family("MixtralForCausalLM" if "architectures" in rest else "LlamaForCausalLM", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = quantization_config("packed", 32, **weights) | rest
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"{message}.*; fetch the model in a supported form, or"):
        load_model_config(str(tmp_path))


def test_a_rank_of_a_pack_quantized_model(tmp_path: Path) -> None:
    """Ranks of a TP group have whole groups of inputs, and whole outputs."""
    model = written(tmp_path, "packed", 32)
    info = model_info(engine_config(tmp_path, tp_size=2))
    name = "model.layers.1.mlp.down_proj"
    wanted = dict(model.named_parameters())[f"{name}.weight"]
    for rank, part in enumerate(wanted.chunk(2, dim=1)):
        weights = open_weights(info, RankLayout(tp_size=2, tp_rank=rank), "cpu", dummy=False)
        numbers, scales = weights.matrix(name)
        assert scales is not None and torch.equal(int4.widened(numbers, scales).half().float(), part)


def test_bfloat16_scales_keep_their_bits(tmp_path: Path) -> None:
    written(tmp_path, "packed symmetric", 32)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    scales = tensors[f"{name}_scale"].bfloat16()
    scales[0, 0] = 2.0**-16 * 1.9921875  # 1.1111111 in binary
    save_file(tensors | {f"{name}_scale": scales}, file, {"format": "pt"})
    source = Checkpoint(tmp_path, load_model_config(str(tmp_path)))
    assert torch.equal(source.get(scale_name(name))[..., 0].float(), scales.float())
    scales[0, 0] = 1e5
    save_file(tensors | {f"{name}_scale": scales}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="scales above 65504"):
        Checkpoint(tmp_path, load_model_config(str(tmp_path))).get(scale_name(name))


def test_scales_of_tensors_with_a_prefix_are_checked(tmp_path: Path) -> None:
    """Names may have `transformer.` before them."""
    written(tmp_path, "awq", 64)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {f"transformer.{name}": x for name, x in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert model_info(engine_config(tmp_path)).quantization == "int4"
