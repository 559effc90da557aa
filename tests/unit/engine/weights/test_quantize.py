"""Quantised checkpoints: the folder, the arithmetic against transformers with the weights multiplied out, and
what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_info import check_model, model_info
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.tensors.rounding import dequantize_rows, quantize_rows
from mpillm.engine.weights.quantize import quantize
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import Checkpoint
from tests.helpers.engine_configs import engine_config
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.oracle import Tokens, expected_tokens
from tests.helpers.presets import save_preset
from tests.helpers.quantized_models import dequantized
from tests.helpers.torch_cores import N_OUTPUT, answer, make_batch, make_core

Folders = dict[tuple[str, str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return the tiny models by name and algorithm."""
    made = {}
    for preset in ("tiny-llama", "tiny-mixtral"):
        root = tmp_path_factory.mktemp(preset)
        save_preset(preset, root / "none")
        made[preset, "none"] = root / "none"
        for algorithm in ("int8", "fp8"):
            quantize(root / "none", root / algorithm, algorithm)
            made[preset, algorithm] = root / algorithm
    return made


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    rng = np.random.default_rng(11)
    return [rng.integers(0, 512, n).tolist() for n in (1, 2, 17, 33, 60, 5, 88, 12)]


def config(model: Path | str, **options: Any) -> EngineConfig:
    return engine_config(model, **{"max_seq_len": 128} | options)


def logits(core: TorchCore, prompt: list[int]) -> torch.Tensor:
    """Return the logits of every position of `prompt`."""
    worker, n = core.worker, len(prompt)
    assert worker is not None
    with torch.inference_mode():
        step = Step([Span(0, 0, n, 0, list(range(1, 2 + n // 8)))], prompt, list(range(n)))
        return worker.logits(step).float()


# --- arithmetic ---


@pytest.mark.parametrize(("algorithm", "largest"), [("int8", 127), ("fp8", 448)])
def test_rounding(algorithm: str, largest: float) -> None:
    """The largest value of a row is exact, none is off by more than half a step, and a row of zeros stays
    zeros."""
    torch.manual_seed(0)
    matrix = torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    matrix[5] = 0
    numbers, scales = quantize_rows(matrix, algorithm)
    assert numbers.element_size() == 1 and scales.shape == (64, 1) and scales[5] == 1
    torch.testing.assert_close(scales[:5] * largest, matrix[:5].abs().amax(1, keepdim=True))
    widened = numbers.float() * scales
    # A step: of int8 the scale, of e4m3 an eighth of the number's power of two, which is at least 2 ** -6.
    step = (
        scales
        if algorithm == "int8"
        else scales * torch.exp2(numbers.float().abs().clamp(min=2**-6).log2().floor() - 3)
    )
    assert ((widened - matrix).abs() <= 0.5001 * step).all()
    assert torch.equal(dequantize_rows(numbers, scales, torch.float32), widened)


def test_every_fp8_number_is_widened_as_pytorch_does() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()][None]
    assert numbers.shape[1] == 254
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize_rows(numbers, torch.ones(1, 1), dtype), numbers.to(dtype))


@pytest.mark.parametrize("algorithm", ["int8", "fp8"])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mixtral"])
def test_logits_are_those_of_the_weights_multiplied_out(
    folders: Folders, prompts: Tokens, tmp_path: Path, preset: str, algorithm: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folders[preset, algorithm]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        dequantized(folder, tmp_path / "floats"), dtype=torch.float32
    ).eval()
    core = make_core(folder)
    assert core.info.quantization == algorithm
    for prompt in prompts:
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits(core, prompt), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["int8", "fp8"])
def test_greedy_tokens_are_those_of_transformers(
    folders: Folders, prompts: Tokens, tmp_path: Path, algorithm: str
) -> None:
    folder = folders["tiny-llama", algorithm]
    wanted = expected_tokens(dequantized(folder, tmp_path / "floats"), prompts, N_OUTPUT)
    for options in ({}, {"max_batch_size": 3, "max_num_tokens": 9}):
        assert answer(make_core(folder, **options), make_batch(prompts)) == wanted
    assert wanted != expected_tokens(folders["tiny-llama", "none"], prompts, N_OUTPUT), (
        "the weights were not rounded"
    )


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mixtral"])
def test_bfloat16_is_close(folders: Folders, prompts: Tokens, preset: str) -> None:
    """Both ways to multiply int8 weights in bfloat16, for few rows and for many, come close to float32."""
    exact, rounded = (make_core(folders[preset, "int8"], dtype=dtype) for dtype in ("float32", "bfloat16"))
    for prompt in (prompts[2], prompts[6]):
        wanted, found = logits(exact, prompt), logits(rounded, prompt)
        if preset == "tiny-llama":  # a router's near ties go either way
            assert float((found - wanted).norm() / wanted.norm()) < 0.05
        assert found.isfinite().all()


@pytest.mark.parametrize("algorithm", ["int8", "fp8"])
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-mixtral"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1), (4, 1, 2)], ids=str)
def test_quantised_at_load_or_before_is_the_same(
    folders: Folders, preset: str, algorithm: str, shape: tuple[int, int, int]
) -> None:
    """Every rank has the same weights: a row has one scale, even if its columns are spread over ranks."""
    if preset == "tiny-llama" and shape[2] > 1:
        pytest.skip("no experts")
    before, at_load = (load_model_config(str(folders[preset, name])) for name in (algorithm, "none"))
    for rank in range(shape[0]):
        layout = RankLayout(*shape, tp_rank=rank, pp_rank=shape[1] - 1)
        shards = [
            Shards(
                Checkpoint(folders[preset, name], model), model, layout, torch.float32, quantization=algorithm
            )
            for name, model in ((algorithm, before), ("none", at_load))
        ]
        layer = f"model.layers.{layout.layers(before)[-1]}"
        names = [f"{layer}.self_attn.qkv_proj", f"{layer}.self_attn.o_proj"]
        if before.n_experts:
            names += [
                f"{layer}.block_sparse_moe.experts.{layout.experts(before)[-1]}.{name}"
                for name in ("w13", "w2")
            ]
        else:
            names += [f"{layer}.mlp.gate_up_proj", f"{layer}.mlp.down_proj"]
        for name in names:
            (numbers, scales), (numbers_too, scales_too) = (shard.matrix(name) for shard in shards)
            assert scales is not None and scales_too is not None and numbers.element_size() == 1
            assert torch.equal(numbers.view(torch.int8), numbers_too.view(torch.int8)) and torch.equal(
                scales, scales_too
            )


@pytest.mark.parametrize("algorithm", ["none", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_weights_is_known(folders: Folders, algorithm: str, dtype: str) -> None:
    info = check_model(config(folders["tiny-llama", algorithm], dtype=dtype))
    width, n_bytes = 4 if dtype == "float32" else 2, {"none": 0, "int8": 0}
    for name, shape in tensor_shapes(info.config).items():
        n = math.prod(shape)
        n_bytes["none"] += n * width
        n_bytes["int8"] += n + 4 * shape[0] if "_proj" in name else n * width
    assert info.n_bytes == n_bytes["int8" if algorithm == "int8" else "none"]  # fp8: floats on a CPU
    if algorithm == "fp8":
        assert (
            check_model(config(folders["tiny-llama", "fp8"], dtype=dtype, gpu_bytes=8 << 30)).n_bytes
            == n_bytes["int8"]
        )


# --- the folder ---


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """Write a checkpoint in bfloat16 in two files with an index, a tied embedding, an unknown tensor, and a
    tokenizer."""
    folder = tmp_path / "source"
    save_preset("tiny-llama", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(8.0)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((folder / "config.json").read_text()) | {
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "generation_config.json", "pytorch_model.bin", "fetched.json"):
        (folder / name).write_text("{}")
    return folder


def test_the_folder(two_files: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    record = quantize(two_files, tmp_path / "out", "int8", progress=lines.append)
    out = tmp_path / "out"
    assert len(lines) == 2
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    kept = [
        "config.json",
        "generation_config.json",
        "quantization.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    ]
    assert sorted(p.name for p in out.iterdir()) == sorted([*files, *kept])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for file in files:
        before, after = load_file(two_files / file), load_file(out / file)
        assert set(after) == {name for name, where in index["weight_map"].items() if where == file} and set(
            before
        ) <= set(after)
        for name, tensor in before.items():
            if "_proj" in name:
                scales = after[f"{name}_scale"]
                assert (
                    after[name].dtype == torch.int8
                    and scales.shape == (len(tensor), 1)
                    and scales.dtype == torch.float32
                )
                error = float((after[name] * scales - tensor.float()).norm() / tensor.float().norm())
                assert (
                    record["relative_errors"][name] == pytest.approx(error, rel=1e-3) and 0.002 < error < 0.01
                )
            else:
                assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], tensor)
    assert len(record["relative_errors"]) == 6 * 7
    assert json.loads((out / "quantization.json").read_text()) == record
    raw = json.loads((out / "config.json").read_text())
    assert raw.pop("quantization_config")["config_groups"]["group_0"]["weights"]["type"] == "int"
    assert raw == json.loads((two_files / "config.json").read_text())
    assert check_model(config(out)).dtype == "bfloat16"


def test_none_is_a_copy(two_files: Path, tmp_path: Path) -> None:
    quantize(two_files, tmp_path / "out", "none")
    for file in two_files.glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "out" / file.name)
        assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert check_model(config(tmp_path / "out")).quantization == "none"


def test_an_existing_folder_is_replaced_only_with_overwrite(folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConfigError, match="out: exists already"):
        quantize(folders["tiny-llama", "none"], tmp_path / "out", "int8")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    quantize(folders["tiny-llama", "none"], tmp_path / "out", "fp8", overwrite=True)
    assert check_model(config(tmp_path / "out")).quantization == "fp8"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# --- what is refused ---


def damaged(tmp_path: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Return a copy of a model with other tensors."""
    folder = tmp_path / "damaged"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_cannot_be_quantised(folders: Folders, tmp_path: Path) -> None:
    source, out = folders["tiny-llama", "none"], tmp_path / "out"
    with pytest.raises(ConfigError, match=r"algorithm int9: not one of none, int8, fp8.*int8"):
        quantize(source, out, "int9")
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        quantize(tmp_path / "nowhere", out, "int8")
    with pytest.raises(ConfigError, match="its weights are fp8 already"):
        quantize(folders["tiny-llama", "fp8"], out, "int8")
    with pytest.raises(ConfigError, match="holds the model to quantise"):
        quantize(source, source / ".." / source.name, "int8", overwrite=True)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.3\.mlp\.up_proj\.weight"):
        quantize(damaged(tmp_path, source, lambda t: t.pop("model.layers.3.mlp.up_proj.weight")), out, "int8")
    shutil.rmtree(tmp_path / "damaged")

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")

    with pytest.raises(
        ConfigError, match=r"model\.layers\.2\.mlp\.up_proj\.weight has values that are not finite"
    ):
        quantize(damaged(tmp_path, source, poison), out, "fp8")
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="truncated"):
        quantize(tmp_path / "damaged", out, "int8")
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"], "something was left behind"


def test_a_full_disk(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of room is reported before anything is written or, if another process takes the room meanwhile,
    when it happens."""
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        with pytest.raises(ConfigError, match=r"are needed on this disk, and 0\.0 GiB are free"):
            quantize(folders["tiny-llama", "none"], tmp_path / "out", "int8")

    with (
        files_of_at_most(100_000),
        pytest.raises(ConfigError, match="out: cannot be written: File too large"),
    ):
        quantize(folders["tiny-llama", "none"], tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


def test_a_damaged_quantised_checkpoint(folders: Folders, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    changes: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda t: t.pop(f"{name}_scale"), f"no tensor {name}_scale"),
        (
            lambda t: t.update({f"{name}_scale": torch.ones(1)}),
            rf"{name}_scale has shape \[1\], config.json makes it \[64, 1\]",
        ),
        (lambda t: t.update({name: t[name].float()}), f"{name} is of type F32; can read I8"),
    ]
    for change, message in changes:
        with pytest.raises(ConfigError, match=message):
            check_model(config(damaged(tmp_path, folders["tiny-llama", "int8"], change)))
        shutil.rmtree(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "hqq"},
            'quant_method "hqq" is not supported by the torch core; supported: compressed-tensors',
        ),
        ({"format": "marlin-24"}, 'format "marlin-24" is not supported'),
        ({"config_groups": {}}, "config_groups {} is not supported by the torch core; supported: one group"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"ignore": []}, "ignore"),
        (
            {"weights": {"num_bits": 4}},
            r"weights.num_bits 4 is not supported by the torch core; supported: 8",
        ),
        ({"weights": {"strategy": "group"}}, 'weights.strategy "group"'),
        ({"weights": {"symmetric": False}}, "weights.symmetric false"),
        ({"targets": ["re:.*mlp.*"]}, "targets"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_quantization_config(
    folders: Folders, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(folders["tiny-llama", "int8"], tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    quantization = raw["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    for name, value in change.items():
        if name == "weights":
            group["weights"] |= value
        elif name == "targets":
            group["targets"] = value
        else:
            quantization[name] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        model_info(config(tmp_path))


def test_an_engine_refuses_unsupported_quantizations(folders: Folders, tmp_path: Path) -> None:
    floats, int8 = folders["tiny-llama", "none"], folders["tiny-llama", "int8"]
    with pytest.raises(ConfigError, match="--quantization int3: not one of auto, none, int8, fp8"):
        model_info(config(floats, quantization="int3"))
    for kind in ("fp8", "none"):
        with pytest.raises(ConfigError, match=f"--quantization {kind}: the weights of .* are int8"):
            model_info(config(int8, quantization=kind))
    with pytest.raises(
        ConfigError, match=r"int8 weights run only on CPUs \(--device cpu\); on a GPU use fp8"
    ):
        model_info(config(int8, gpu_bytes=8 << 30))
    assert (
        model_info(config(floats, quantization="fp8", gpu_bytes=8 << 30)).n_bytes
        < model_info(config(floats)).n_bytes / 2
    )
    raw = json.loads((floats / "config.json").read_text()) | {"intermediate_size": 264}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ConfigError,
        match=r"a rank holds \[264, 128\] of model\.layers\.0\.mlp\.gate_proj\.weight; .* multiples of 16",
    ):
        model_info(config(tmp_path, load_format="dummy", quantization="fp8", gpu_bytes=8 << 30))
    model_info(config(tmp_path, load_format="dummy", quantization="fp8"))
