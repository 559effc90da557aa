"""Checkpoints in fp8 as others write them: a scale for a matrix (ModelOpt, compressed-tensors) or a block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.shape.read_config import load_model_config
from tests.helpers.engine_configs import engine_config
from tests.helpers.torch_cores import N_OUTPUT, answer, make_batch, make_core

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mpillm.engine.build_engine import build  # noqa: E402
from mpillm.engine.shape.entries import is_linear  # noqa: E402
from mpillm.engine.shape.layout import RankLayout  # noqa: E402
from mpillm.engine.tensors.rounding import dequantize_blocks  # noqa: E402
from mpillm.engine.weights.quantize import quantize  # noqa: E402
from mpillm.engine.weights.rank_weights import Shards, open_weights  # noqa: E402
from mpillm.engine.weights.sources import Checkpoint  # noqa: E402
from tests.helpers.families import make_family  # noqa: E402
from tests.helpers.oracle import expected_tokens  # noqa: E402

NUMBER = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
STATIC = {**NUMBER, "strategy": "tensor"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": STATIC, "input_activations": STATIC}},
    "ignore": ["lm_head"],
}
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
}
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
FORMS = ("compressed-tensors", "modelopt", "modelopt in config.json", "blocks")
PROMPTS = [[3 + (7 * i + j) % 300 for j in range(3 + 5 * i)] for i in range(6)]

EXPERT = dict.fromkeys(("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"), "mlp.experts.3.down_proj")
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32}


def make(form: str, folder: Path, family: str = "LlamaForCausalLM", **shape: int) -> dict[str, Any]:
    """Write a checkpoint, and in `floats` beside it what its numbers stand for, which is returned."""
    make_family(family, folder / "floats", **SHAPE | shape)
    floats, there = load_file(folder / "floats/model.safetensors"), {}
    for name, x in sorted(floats.items()):
        if not is_linear(name):
            there[name] = x
            continue
        if form == "blocks":
            grid = [torch.arange(n) // 128 for n in x.shape]
            scales = torch.rand(int(grid[0][-1]) + 1, int(grid[1][-1]) + 1) / 100 + 0.002
            wide = scales[grid[0]][:, grid[1]]
            there[f"{name}_scale_inv"] = scales
        else:
            wide = x.abs().max() / 448
            there[f"{name}_scale"] = wide.clone() if "modelopt" in form else wide.reshape(1).clone()
            there[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)
        numbers = (x / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        there[name], floats[name] = numbers, numbers.float() * wide
    config = json.loads((folder / "floats/config.json").read_text())
    if form == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    else:
        config["quantization_config"] = {
            "compressed-tensors": COMPRESSED,
            "blocks": BLOCKS,
            "modelopt in config.json": {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "ignore": ["lm_head"],
            },
        }[form]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(there, folder / "model.safetensors", {"format": "pt"})
    save_file(floats, folder / "floats/model.safetensors", {"format": "pt"})
    return floats


@pytest.fixture(scope="module", params=FORMS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("form")
    return folder, make(request.param, folder)


@pytest.mark.long
def test_tokens(folders: tuple[Path, Any], tmp_path: Path) -> None:
    """They are transformers' with the floats that the numbers stand for; from an engine, too."""
    folder, _ = folders
    wanted = expected_tokens(folder / "floats", PROMPTS, N_OUTPUT)
    assert answer(make_core(folder, dtype="float32"), make_batch(PROMPTS)) == wanted
    build(folder, tmp_path / "engine", dtype="float32")
    core = make_core(folder, dtype="float32", engine_dir=str(tmp_path / "engine"))
    assert answer(core, make_batch(PROMPTS)) == wanted


def test_each_rank_has_the_bits_of_its_part(folders: tuple[Path, Any]) -> None:
    """Also where ranks' parts do not end with a block."""
    folder, floats = folders
    config = load_model_config(str(folder))
    for rank in range(4):
        source, layout = Checkpoint(folder, config), RankLayout(4, tp_rank=rank)
        shards = Shards(source, config, layout, torch.float32, "cpu", config.quantization)
        for name in ("mlp.down_proj", "mlp.gate_proj", "self_attn.v_proj"):
            weight, scales = shards.matrix(f"model.layers.1.{name}")
            weight = weight.float() if scales is None else weight.float() * scales
            full = f"model.layers.1.{name}.weight"
            rows, columns = layout.part(full, config)
            assert torch.equal(weight, floats[full][rows, columns])


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.long
def test_families_that_are_published_in_blocks(tmp_path: Path, family: str) -> None:
    """Tokens of the floats; and 8 bits that are rounded as they are loaded give most first tokens."""
    make("blocks", tmp_path, family)
    wanted = expected_tokens(tmp_path / "floats", PROMPTS, N_OUTPUT)
    assert answer(make_core(tmp_path, dtype="float32"), make_batch(PROMPTS)) == wanted
    found = answer(make_core(tmp_path, dtype="float32", quantization="int8"), make_batch(PROMPTS))
    assert sum(a[:1] == b[:1] for a, b in zip(found, wanted, strict=True)) >= len(PROMPTS) - 2


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("LlamaForCausalLM", "int4"),
        ("Qwen3MoeForCausalLM", "mxfp4"),
        ("DeepseekV3ForCausalLM", "mxfp4"),
    ],
)
def test_blocks_are_rounded_as_their_floats_are(tmp_path: Path, family: str, quantization: str) -> None:
    """At load and in an engine."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    make("blocks", tmp_path, family, **shape | ({"moe_intermediate_size": 192} if family in EXPERT else {}))
    options: dict[str, Any] = {"quantization": quantization, "dtype": "float32"}
    build(tmp_path, engine := tmp_path / "engine", tp_size=2, **options)
    infos = [
        model_info(engine_config(folder, tp_size=2, tp_rank=1, **options, **more))
        for folder, more in (
            (tmp_path / "floats", {}),
            (tmp_path, {}),
            (tmp_path, {"engine_dir": str(engine)}),
        )
    ]
    wanted, *found = (open_weights(info, info.layout, "cpu", dummy=False) for info in infos)
    for part in ("self_attn.o_proj", EXPERT.get(family, "mlp.down_proj")):
        for weights in found:
            for mine, theirs in zip(
                weights.matrix(f"model.layers.1.{part}"), wanted.matrix(f"model.layers.1.{part}"), strict=True
            ):
                if mine is None or theirs is None:
                    assert mine is theirs
                else:
                    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_blocks_are_multiplied_as_in_transformers() -> None:
    # Only here: it imports much of PyTorch, in each process of pytest-xdist.
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3)
    reference: Any = Fp8Dequantize
    wanted = reference(None)._dequantize_one(numbers, scales, torch.float32)
    assert torch.equal(dequantize_blocks(numbers, scales, slice(None), slice(None)), wanted)


def core_config(folder: Path) -> EngineConfig:
    return engine_config(folder)


def test_wrong_tensors_are_named_before_loading(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    make("modelopt", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    changes: list[tuple[dict[str, Any], str]] = [
        (
            {f"{name}_scale": torch.tensor(torch.nan)},
            f"{name}_scale has scales that are negative or not finite",
        ),
        ({f"{name}_scale": torch.tensor(torch.inf)}, "negative or not finite"),
        ({f"{name}_scale": torch.tensor(-1.0)}, "negative or not finite"),
        ({f"{name}_scale": torch.ones(3)}, rf"{name}_scale has shape \[3\]"),
        ({name: whole[name].float()}, "is of type F32; can read F8_E4M3"),
    ]
    for change, message in changes:
        save_file(whole | change, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            model_info(core_config(tmp_path))
    del whole[f"{name}_scale"]
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"no tensor {name}_scale"):
        model_info(core_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [
        ("model.layers.1.self_attn.q_proj.bias", True),  # Qwen2's
        ("model.layers.1.self_attn.q_norm.weight", True),  # Qwen3's
        ("model.layers.3.input_layernorm.weight", True),  # behind the last
        ("model.layers.1.self_attn.rotary_emb.inv_freq", False),
        ("model.layers.1.mlp.down_proj.input_scale", False),
        ("vision.weight", False),
    ],
)
def test_weights_of_another_family(tmp_path: Path, name: str, is_wrong: bool) -> None:
    """Parameters of layers that config.json does not describe are named; a bias of zeros is none."""
    make_family("LlamaForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({**whole, name: torch.ones(64)}, file, {"format": "pt"})
    if is_wrong:
        with pytest.raises(ConfigError, match=f"no model that has the tensor {name}"):
            model_info(core_config(tmp_path))
    else:
        model_info(core_config(tmp_path))
    save_file({**whole, "model.layers.1.mlp.down_proj.bias": torch.zeros(64)}, file, {"format": "pt"})
    model_info(core_config(tmp_path))


def test_random_weights_in_place_of_them(folders: tuple[Path, Any]) -> None:
    core = make_core(folders[0], dtype="float32", load_format="dummy")
    found = answer(core, make_batch(PROMPTS))
    assert len({tuple(tokens) for tokens in found}) > 1


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4"}, 'hf_quant_config.json: .*quant_algo "NVFP4" is not supported'),
        ("modelopt", {"exclude_modules": []}, "exclude_modules"),
        ("modelopt", {"kv_cache_quant_algo": "NVFP4"}, 'kv_cache_quant_algo "NVFP4"'),
        ("modelopt", {"kv_cache_quant_algo": "FP8"}, "no tensor model.layers.0.self_attn.k_scale"),
        ("blocks", {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\] .* \[128, 128\]"),
        ("blocks", {"scale_fmt": "ue8m0"}, 'scale_fmt "ue8m0"'),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, form: str, change: dict[str, Any], message: str) -> None:
    make(form, tmp_path)
    file, key = (
        ("hf_quant_config.json", "quantization")
        if form == "modelopt"
        else ("config.json", "quantization_config")
    )
    raw = json.loads((tmp_path / file).read_text())
    raw[key] |= change
    (tmp_path / file).write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        model_info(core_config(tmp_path))


def test_scales_of_a_kv_cache(tmp_path: Path) -> None:
    """ModelOpt's names: the cache is in fp8."""
    make("modelopt", tmp_path)
    raw = json.loads((tmp_path / "hf_quant_config.json").read_text())
    raw["quantization"]["kv_cache_quant_algo"] = "FP8"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        for kind in "kv":
            tensors[f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(0.01)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    info = model_info(core_config(tmp_path))
    assert (info.kv_dtype, info.quantization) == ("fp8", "fp8")
    answer(make_core(tmp_path, dtype="float32"), make_batch(PROMPTS))


@pytest.mark.parametrize("form", ["modelopt in config.json", "blocks"])
def test_scales_of_a_kv_cache_in_the_format_of_vllm(tmp_path: Path, form: str) -> None:
    """`kv_cache_scheme` may also be a word."""
    make(form, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    blocks = {"weight_block_size": BLOCKS["weight_block_size"]} if form == "blocks" else {}
    for scheme in ("static", STATIC):
        raw["quantization_config"] = {"quant_method": "fp8", "kv_cache_scheme": scheme, **blocks}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match=r"no tensor model.layers.0.self_attn.k_scale"):
            model_info(core_config(tmp_path))
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(3) for kind in "kv"]
    scales = {name: torch.tensor(0.5 + i) for i, name in enumerate(names)}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | scales, file, {"format": "pt"})
    info = model_info(core_config(tmp_path))
    assert info.kv_dtype == "fp8"
    found = open_weights(info, info.layout, "cpu", dummy=False).kv_scales(range(3))
    assert found is not None and found[:, :, 0].flatten().tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_kv_cache_schemes_that_are_refused(tmp_path: Path, method: str) -> None:
    make("blocks", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    for scheme, message in (("dynamic", 'kv_cache_scheme "dynamic"'), ({"num_bits": 4}, "num_bits 4")):
        raw["quantization_config"]["kv_cache_scheme"] = scheme
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match=message):
            model_info(core_config(tmp_path))


def test_they_are_not_quantised_again(tmp_path: Path) -> None:
    for form, what in (("blocks", "blocks"), ("modelopt", "fp8")):
        make(form, tmp_path / form)
        with pytest.raises(ConfigError, match=f"its weights are {what} already; quantise the model"):
            quantize(tmp_path / form, tmp_path / "int8", "int8")
