"""KV caches of another type than the model's: fp8 with scales, and bfloat16.

The Triton kernels of it: tests/gpu.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.engine.build_engine import build
from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache, rounded, widened
from mpillm.engine.calibrate import kv_scales
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.tensors.rounding import FP8, to_fp8, widen
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import Checkpoint
from mpillm.runtime.core_configs import check_handoff
from tests.helpers.engine_configs import changed, engine_config
from tests.helpers.fp8_caches import N_KV_HEADS, N_LAYERS, scales_of_heads, with_scales
from tests.helpers.gpu_steps_on_cpu import GpuCore
from tests.helpers.oracle import Tokens
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import N_OUTPUT, answer, hands_off, make_batch, make_core, make_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_scales(tmp_path_factory.mktemp("models") / "fp8-kv", scales_of_heads())


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    rng = np.random.default_rng(5)
    beginning = rng.integers(0, 512, 20).tolist()
    return [
        beginning * (i % 2) + rng.integers(0, 512, n).tolist()
        for i, n in enumerate([1, 2, 3, 31, 32, 33, 60, 17, 44, 8, 70, 25])
    ]


def oracle(folder: Path, prompts: Tokens, round_cached: Any) -> Tokens:
    """Return what transformers answers if its attention sees keys and values through `round_cached(layer,
    is_value, x)`."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    attend = modeling_llama.eager_attention_forward

    def through_cache(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = (
            round_cached(module.layer_idx, i, x.transpose(1, 2)).transpose(1, 2)
            for i, x in enumerate((key, value))
        )
        return attend(module, query, key, value, *args, **kwargs)

    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    weights = {
        name: x for name, x in load_file(folder / "model.safetensors").items() if not name.endswith("_scale")
    }
    model = transformers.LlamaForCausalLM._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.load_state_dict(weights)
    model.generation_config.eos_token_id = None
    answers = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(modeling_llama, "eager_attention_forward", through_cache)
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=N_OUTPUT, pad_token_id=0
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Tokens) -> Tokens:
    tensors = load_file(folder / "model.safetensors")

    def through_fp8(layer: int, is_value: int, x: torch.Tensor) -> torch.Tensor:
        scales = tensors[f"model.layers.{layer}.self_attn.{'kv'[is_value]}_scale"][:, None]
        return (x / scales).clamp(-448, 448).to(FP8).float() * scales

    return oracle(folder, prompts, through_fp8)


def same(found: Tokens, wanted: Tokens) -> int:
    return sum(a == b for a, b in zip(found, wanted, strict=True))


def test_every_fp8_number_is_widened_exactly() -> None:
    codes = torch.arange(256).to(torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    assert torch.equal(widen(codes.view(FP8)), codes.view(FP8).float())
    assert torch.equal(
        to_fp8(codes.view(FP8).float() * 3, torch.tensor(3.0)).float(), codes.view(FP8).float()
    )


@pytest.mark.long
def test_rounding_has_a_scale_for_each_head() -> None:
    x = torch.tensor([[[1.0, 30.0], [1.03, 30.0]]])  # one token, two heads
    numbers = rounded(x, FP8, torch.tensor([0.5, 0.01]))
    assert numbers.float().tolist() == [[[2.0, 60.0], [104.0, 448.0]]]
    wide = widened(numbers[:, :, None], torch.float32, torch.tensor([0.5, 0.01]))
    torch.testing.assert_close(wide[:, :, 0], torch.tensor([[[1.0, 30.0], [1.04, 4.48]]]))


# --- answers ---


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_size": 5, "max_num_tokens": 7},
        {"max_num_tokens": 128, "enable_chunked_context": False},
        {"kv_cache_tokens": 160, "max_seq_len": None, "max_num_tokens": 24},
        {"enable_kv_cache_reuse": True, "max_batch_size": 3},
    ],
    ids=str,
)
def test_answers_are_those_of_attention_over_rounded_keys_and_values(
    folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]
) -> None:
    """One answer may differ: where a key lies in the middle between two fp8 numbers, the last bit of a sum
    decides how it is rounded."""
    core = make_core(folder, **options)
    assert core.info.kv_dtype == "fp8" and core.engine.worker.part.cache.keys.dtype == FP8
    found = answer(core, make_batch(prompts))
    assert same(found, expected) >= len(prompts) - 1
    plain = answer(make_core(folder, kv_cache_dtype="bfloat16"), make_batch(prompts))
    assert same(plain, expected) < len(prompts) - 1  # so the rounding is seen
    statistics = core.statistics()
    assert ("kv_cache_tokens" in options) == (statistics["preemptions"] > 0)
    assert statistics.get("reused_blocks", 1) > 0


@pytest.mark.long
def test_a_bfloat16_cache_of_a_float32_model(prompts: Tokens, tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path)
    wanted = oracle(tmp_path, prompts, lambda layer, is_value, x: x.bfloat16().float())
    core = make_core(tmp_path, kv_cache_dtype="bfloat16", max_num_tokens=50)
    assert (core.info.dtype, core.info.kv_dtype, core.engine.worker.part.cache.keys.dtype) == (
        "float32",
        "bfloat16",
        torch.bfloat16,
    )
    assert same(answer(core, make_batch(prompts)), wanted) >= len(prompts) - 1


@pytest.mark.long
def test_fp8_without_scales_has_scale_1(prompts: Tokens, tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path)
    wanted = oracle(tmp_path, prompts, lambda layer, is_value, x: x.clamp(-448, 448).to(FP8).float())
    core = make_core(tmp_path, kv_cache_dtype="fp8")
    assert core.engine.worker.part.cache.scales is not None and torch.equal(
        core.engine.worker.part.cache.scales, torch.ones(N_LAYERS, 2, N_KV_HEADS)
    )
    assert same(answer(core, make_batch(prompts)), wanted) >= len(prompts) - 1


@pytest.mark.long
def test_the_steps_of_a_gpu(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """The GPU's steps give their kernels the right inputs; plain kernels take the place of Triton's."""
    core = make_core(folder, kind=GpuCore, max_num_tokens=24)
    assert same(answer(core, make_batch(prompts)), expected) >= len(prompts) - 1


def test_a_cache_is_handed_over_as_it_is(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    context, generation = make_pair(folder, {"max_num_tokens": 24}, {"tokens_per_block": 4})
    assert (
        same(hands_off(context, generation, make_batch(prompts, generation=1)), expected) >= len(prompts) - 1
    )
    assert context.statistics()["kv_bytes"] == sum(
        map(len, prompts)
    ) * context.info.config.kv_bytes_per_token("fp8")


def test_pieces_keep_every_bit() -> None:
    """Pieces move between blocks of different sizes unchanged, NaN included."""
    n_tokens, there, here = 11, [3, 1, 7], [2, 5]
    caches = [KVCache(3, 8, 4, size, 16, FP8) for size in (4, 8)]
    assert caches[0].piece_bytes(n_tokens, slice(0, 3), slice(0, 4)) == 2 * 3 * 4 * 16 * n_tokens
    for pool in (caches[0].keys, caches[0].values):
        pool.view(torch.uint8).random_(0, 256)
    part = slice(1, 3), slice(2, 4)
    caches[1].write(
        [CachedBlocks(here, n_tokens)], *part, caches[0].read([CachedBlocks(there, n_tokens)], *part)
    )
    for name in ("keys", "values"):
        sent, got = (getattr(cache, name).view(torch.uint8) for cache in caches)
        sent, got = (
            pool[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :n_tokens]
            for pool, blocks in ((sent, there), (got, here))
        )
        assert torch.equal(got[1:, 2:], sent[1:, 2:])
        assert not got[:1].any() and not got[:, :2].any()


@pytest.mark.long
def test_scales_are_twice_what_the_largest_key_and_value_need(prompts: Tokens, tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path)
    largest = np.zeros((N_LAYERS, 2))

    def watch(layer: int, is_value: int, x: torch.Tensor) -> torch.Tensor:
        # what an answer adds is none of calibration's business
        n = x.shape[1] if x.shape[1] <= n_prompt else n_prompt
        largest[layer, is_value] = max(largest[layer, is_value], float(x[:, :n].abs().max()))
        return x

    for prompt in prompts:
        n_prompt = len(prompt)
        oracle(tmp_path, [prompt], watch)
    found = kv_scales(tmp_path, prompts, 1)
    for layer in range(N_LAYERS):
        for kind, wanted in zip("kv", largest[layer] * 2 / 448, strict=True):
            scale = found.pop(f"model.layers.{layer}.self_attn.{kind}_scale")
            assert scale.shape == (1,)
            torch.testing.assert_close(float(scale), wanted, rtol=1e-5, atol=0)
    assert not found


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engine_has_its_scales(
    folder: Path, tmp_path: Path, prompts: Tokens, expected: Tokens, tp_size: int
) -> None:
    build(folder, tmp_path / "engine", tp_size)
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert config["pretrained_config"]["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    model = load_model_config(str(folder))
    for rank in range(tp_size):
        layout = RankLayout(tp_size, tp_rank=rank)
        held = load_file(tmp_path / "engine" / f"rank{rank}.safetensors")
        wanted = Shards(Checkpoint(folder, model), model, layout, torch.float32).kv_scales(
            layout.layers(model)
        )
        assert wanted is not None
        for layer in range(N_LAYERS):
            assert torch.equal(held[f"model.layers.{layer}.self_attn.kv_scale"], wanted[layer])
    if tp_size == 1:
        core = make_core(folder, engine_dir=str(tmp_path / "engine"))
        assert core.info.kv_dtype == "fp8"
        assert same(answer(core, make_batch(prompts)), expected) >= len(prompts) - 1


def test_instances_that_hand_over_have_one_type() -> None:
    cores = [
        CoreConfig("torch", engine_config("tiny-llama", role=role, kv_cache_dtype="fp8"))
        for role in ("context", "generation")
    ]
    check_handoff(cores, (model_info(core.engine) for core in cores))
    cores[1] = CoreConfig("torch", engine_config("tiny-llama", role="generation"))
    with pytest.raises(
        ConfigError,
        match="context instances have a KV cache in fp8 and generation instances have a KV cache in float32",
    ):
        check_handoff(cores, (model_info(core.engine) for core in cores))


# --- memory ---


def config(**options: Any) -> EngineConfig:
    return engine_config("llama3.1-8b", max_batch_size=4096, max_seq_len=8192, **options)


def test_a_cache_in_fp8_holds_twice_the_tokens() -> None:
    sizes = {
        dtype: model_info(config(gpu_bytes=100 << 30, kv_cache_dtype=dtype))
        for dtype in ("auto", "bfloat16", "fp8")
    }
    assert sizes["auto"] == sizes["bfloat16"]
    assert sizes["auto"].kv_dtype == "bfloat16"
    assert sizes["fp8"].kv_cache_tokens == pytest.approx(2 * sizes["auto"].kv_cache_tokens, abs=64)
    model = sizes["fp8"].config
    assert (
        model.kv_bytes_per_token("fp8", 2) * 2
        == model.kv_bytes_per_token("bfloat16", 2)
        == 2 * 32 * 4 * 128 * 2
    )


def test_heads_that_fp8_does_not_fit(tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path)
    narrow = json.loads((tmp_path / "config.json").read_text()) | {"head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    core = engine_config(tmp_path, load_format="dummy", kv_cache_dtype="fp8", max_seq_len=64)
    assert model_info(core).kv_dtype == "fp8"
    with pytest.raises(
        ConfigError,
        match=r"--kv_cache_dtype fp8: heads of .* have 8 values; on a GPU fp8 needs a multiple of 16",
    ):
        model_info(changed(core, gpu_bytes=8 << 30))
    with pytest.raises(
        ConfigError, match=r"--kv_cache_dtype fp9: not one of auto, bfloat16, fp8 \(did you mean 'fp8'\?\)"
    ):
        model_info(changed(core, kv_cache_dtype="fp9"))
