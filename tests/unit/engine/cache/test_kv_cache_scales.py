"""The scales of a KV cache in fp8 come from a checkpoint, from calibration or from an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.data.dataset import PromptLimits, load_dataset
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.calibrate import kv_scales
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.weights.quantize import quantize
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import Checkpoint
from tests.helpers.engine_configs import engine_config
from tests.helpers.fp8_caches import N_KV_HEADS, N_LAYERS, scales_of_heads, with_scales
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.oracle import Tokens
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import answer, make_batch, make_core


def test_scales_of_a_checkpoint_by_any_name_and_shape(tmp_path: Path) -> None:
    """A layer may have one scale, of no dimension or of one, or one for each head, also under ModelOpt's
    names."""
    scales: dict[str, torch.Tensor] = {}
    for layer in range(N_LAYERS):
        prefix = f"model.layers.{layer}.self_attn."
        scales |= [
            {prefix + "k_scale": torch.tensor(0.25), prefix + "v_scale": torch.tensor([0.5])},
            {
                prefix + "k_proj.k_scale": torch.tensor([0.25]),
                prefix + "v_proj.v_scale": torch.tensor(0.5, dtype=torch.bfloat16),
            },
            {
                prefix + "k_scale": torch.arange(1.0, 5.0).view(4, 1, 1),
                prefix + "v_scale": torch.tensor([0.5]),
            },
        ][layer % 3]
    folder = with_scales(tmp_path / "model", scales, strategy="attn_head")
    model = load_model_config(str(folder))
    for layout in (
        RankLayout(),
        RankLayout(2, 1, tp_rank=1),
        RankLayout(8, 1, tp_rank=5),
        RankLayout(1, 2, pp_rank=1),
    ):
        heads, layers = layout.kv_heads(model), layout.layers(model)
        found = Shards(Checkpoint(folder, model), model, layout, torch.float32).kv_scales(layers)
        keys: list[list[float]] = [[0.25] * 4, [0.25] * 4, [1, 2, 3, 4]]
        assert found is not None
        assert found.tolist() == [[keys[layer % 3][heads], [0.5] * len(keys[0][heads])] for layer in layers]


@pytest.mark.long
@pytest.mark.parametrize("qformat", ["full_prec", "fp8"])
def test_generate_engines_calibrates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: Tokens, qformat: str
) -> None:
    """TRTLLM_CHECKPOINT_FLAGS=kv_cache_dtype:fp8 makes a checkpoint with scales and an engine of it; runs of
    both have an fp8 cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRTLLM_CHECKPOINT_FLAGS", f"qformat:{qformat},kv_cache_dtype:fp8,calib_size:3")
    save_preset("tiny-llama", Path("llama"))
    make_tokenizer(Path("llama"))  # calibration prompts are texts
    assert main(["generate-engines", "--model_path=llama"]) == 0
    checkpoint, engine = (
        Path(f"build/checkpoints/llama-{qformat}-kv_fp8-hf"),
        Path(f"build/engines/llama-{qformat}-kv_fp8-torch-tp1-pp1"),
    )
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    held = load_file(checkpoint / "model.safetensors")
    texts = load_dataset(None, load_tokenizer(Path("llama")), PromptLimits(512, max_seq_len=256))
    scales = kv_scales(Path("llama"), [texts.sample(i).tolist() for i in range(3)], 1)
    assert len(scales) == 2 * N_LAYERS
    for name, scale in scales.items():
        torch.testing.assert_close(held[name], scale)
    of_checkpoint, of_engine = make_core(checkpoint), make_core(checkpoint, engine_dir=str(engine))
    for core in (of_checkpoint, of_engine):
        assert (core.info.kv_dtype, core.info.quantization) == (
            "fp8",
            "none" if qformat == "full_prec" else "fp8",
        )
        scales_there = core.engine.worker.part.cache.scales
        assert scales_there is not None
        for layer, pair in enumerate(scales_there):
            for one, name in zip(pair, ("k_scale", "v_scale"), strict=True):
                assert one.tolist() == held[f"model.layers.{layer}.self_attn.{name}"].tolist() * N_KV_HEADS
    few = make_batch(prompts[:4])
    assert answer(of_checkpoint, few) == answer(of_engine, few)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("kv_cache_dtype:int8", "kv_cache_dtype int8: the torch core has only fp8"),
        ("kv_cache_dtype:fp8,calib_size:0", "calib_size 0: expected a whole number of at least 1"),
        (
            "qformat:fp8,calib_sise:4",
            "the torch core has no flag 'calib_sise'.*did you mean 'calib_size'.*it has qformat,"
            " kv_cache_dtype, ",
        ),
    ],
)
def test_flags_that_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_preset("tiny-llama", Path("llama"))
    assert main(["generate-engines", "--model_path=llama", f"--trtllm_checkpoint_flags={flags}"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_checkpoint_with_scales_keeps_them_when_it_is_quantised(tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "fp8-kv", scales_of_heads())
    quantize(folder, tmp_path / "fp8", "fp8")
    model = load_model_config(str(tmp_path / "fp8"))
    assert (model.quantization, model.kv_quantization) == ("fp8", "fp8")
    with pytest.raises(ConfigError, match="it has scales for the KV cache already"):
        quantize(folder, tmp_path / "again", "fp8", kv_scales=scales_of_heads())
    with pytest.raises(
        ConfigError, match="its weights are fp8 already; calibrate the model that it was made from"
    ):
        quantize(tmp_path / "fp8", tmp_path / "again", "none", kv_scales=scales_of_heads())


@pytest.mark.parametrize(
    ("scheme", "scales", "message"),
    [
        ({"num_bits": 4}, {}, r"kv_cache_scheme.num_bits 4 is not supported by the torch core; supported: 8"),
        ({"dynamic": True}, {}, "kv_cache_scheme.dynamic true"),
        ({"type": "int"}, {}, 'kv_cache_scheme.type "int"'),
        ({}, {"model.layers.2.self_attn.k_scale": None}, "no tensor model.layers.2.self_attn.k_scale in"),
        (
            {},
            {"model.layers.2.self_attn.k_scale": torch.ones(3)},
            r"k_scale has shape \[3\], config.json makes it \[4\]",
        ),
        (
            {},
            {"model.layers.2.self_attn.k_scale": torch.ones(1, dtype=torch.int32)},
            "k_scale is of type I32",
        ),
    ],
    ids=str,
)
def test_what_is_refused_of_a_checkpoint(
    tmp_path: Path, scheme: dict[str, Any], scales: dict[str, Any], message: str
) -> None:
    changed = {name: x for name, x in (scales_of_heads() | scales).items() if x is not None}
    with pytest.raises(ConfigError, match=message):
        model_info(engine_config(str(with_scales(tmp_path / "model", changed, **scheme))))
