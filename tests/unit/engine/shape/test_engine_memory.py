"""A model that does not fit is refused with the bytes needed and the bytes there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import mpillm.engine.shape.model_info
from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.memory import load_bytes
from mpillm.engine.shape.model_info import check_model, model_info
from mpillm.engine.shape.speculative_config import draft_config
from mpillm.engine.speculation.check_speculation import check_speculation
from tests.helpers.engine_configs import engine_config

GIB = 2**30


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the node has."""

    def have(gib: float) -> None:
        monkeypatch.setattr(mpillm.engine.shape.model_info, "available_bytes", lambda: int(gib * GIB))

    return have


def config(model: str, **options: Any) -> EngineConfig:
    return engine_config(model, load_format="dummy", **options)


# What the published models are known to have, in numbers and heads.
@pytest.mark.parametrize(
    ("preset", "billions", "layers", "heads", "kv_heads", "length"),
    [
        ("llama2-7b", 6.738, 32, 32, 32, 4096),
        ("llama2-13b", 13.016, 40, 40, 40, 4096),
        ("llama2-70b", 68.977, 80, 64, 8, 4096),
        ("llama3.1-8b", 8.030, 32, 32, 8, 131072),
        ("llama3.1-70b", 70.554, 80, 64, 8, 131072),
        ("llama3.1-405b", 405.853, 126, 128, 8, 131072),
        ("mixtral-8x7b", 46.703, 32, 32, 8, 32768),
        ("gpt-oss-20b", 20.915, 24, 64, 8, 131072),
        ("gpt-oss-120b", 116.829, 36, 64, 8, 131072),
        ("qwen3-0.6b", 0.596, 28, 16, 8, 40960),
        ("qwen3-30b-a3b", 30.532, 48, 32, 4, 40960),
    ],
)
def test_presets(preset: str, billions: float, layers: int, heads: int, kv_heads: int, length: int) -> None:
    info = model_info(config(preset, quantization="none"))
    assert info.n_bytes / 2e9 == pytest.approx(billions, abs=0.001)
    shape = info.config
    assert (shape.n_layers, shape.n_heads, shape.n_kv_heads) == (layers, heads, kv_heads)
    assert info.max_seq_len == length
    assert info.dtype == "bfloat16"
    assert (info.config.rope_scaling.kind == "llama3") == preset.startswith("llama3")


def test_a_draft_model_must_fit_beside_the_model(node: Any) -> None:
    """Its KV cache holds sequences of the model, not as many tokens as it could read."""
    guessing = config(
        "llama3.2-1b",
        max_seq_len=512,
        kv_cache_tokens=4096,
        speculative_config={
            "decoding_type": "Draft_Target",
            "max_draft_len": 2,
            "speculative_model": "llama3.2-1b",
        },
    )
    alone = load_bytes(model_info(guessing).config, model_info(guessing).layout, "bfloat16", "none") / GIB
    node(2.2 * alone + 1)
    TorchCore.check(CoreConfig("torch", guessing))
    node(1.5 * alone + 1)
    with pytest.raises(ConfigError, match=r"llama3.2-1b does not fit: .* of the model that it guesses for"):
        TorchCore.check(CoreConfig("torch", guessing))
    check_model(guessing)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_host_cache_gb": 1.0, "enable_kv_cache_reuse": True},
        {
            "core_options": {"use_fp8_context_fmha": True},
            "gpu_bytes": 80 << 30,
            "quantization": "fp8",
            "kv_cache_dtype": "fp8",
        },
        {"acceptance_length": 2.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_model_are_not_those_of_its_draft_model(options: dict[str, Any]) -> None:
    """Such as memory of the host, which the draft model never uses."""
    draft = {"decoding_type": "Draft_Target", "max_draft_len": 2, "speculative_model": "llama3.2-1b"}
    target = config("llama3.2-1b", max_seq_len=512, speculative_config=draft, **options)
    check_speculation(target, model_info(target))
    drafting = draft_config(target)
    assert drafting is not None
    assert (drafting.core_options, drafting.acceptance_length) == ({}, None)
    assert model_info(drafting).host_blocks == 0
    assert model_info(drafting).kv_dtype == "bfloat16"


def test_a_model_that_does_not_fit(node: Any) -> None:
    """A model is refused that needs 12.55 GiB of weights, up to 0.49 more while they are packed, and 2 GiB of
    KV cache for the longest sequence."""
    node(15.1)
    assert check_model(config("llama2-7b")).kv_cache_tokens == 4096
    node(14.9)
    with pytest.raises(ConfigError) as caught:
        check_model(config("llama2-7b"))
    assert (
        "llama2-7b does not fit: it needs 15.0 GiB of memory (13.0 GiB to load the weights in bfloat16, "
        "2.0 GiB of KV cache for 4096 tokens), and 14.9 GiB are available"
    ) in str(caught.value)
    check_model(config("llama2-7b", max_seq_len=1024))
    check_model(config("llama2-7b", kv_cache_tokens=2048))
    with pytest.raises(
        ConfigError,
        match=r"28.1 GiB of memory \(26.1 GiB to load the weights in float32, 2.0 GiB of KV cache",
    ):
        check_model(config("llama2-7b", dtype="float32", kv_cache_tokens=2048))


def test_all_ranks_of_a_node_count(node: Any) -> None:
    node(40)
    check_model(config("llama2-7b", tp_size=2, node_ranks=4))
    node(20)
    with pytest.raises(
        ConfigError,
        match=r"of the 4 ranks on this node needs 7.5 GiB of memory .*, 30.1 GiB together, and 20.0 GiB are",
    ):
        check_model(config("llama2-7b", tp_size=2, node_ranks=4))


def test_the_stage_that_holds_the_most_counts(node: Any) -> None:
    """Of 126 layers on 4 stages two have 32; the first and the last hold an embedding of 3.9 GiB, too."""
    node(100)
    with pytest.raises(ConfigError, match=r"needs 205\.\d GiB of memory \(201\.\d GiB"):
        check_model(config("llama3.1-405b", pp_size=4, max_seq_len=32768))
    first = model_info(config("llama3.1-405b", pp_size=4, pp_rank=0)).n_bytes
    assert 187 < first / GIB < 189


def test_a_tied_embedding_is_there_twice(node: Any) -> None:
    """A tied embedding is kept as rows to look up, and packed for the logits: as much as a head of its
    own."""
    info = model_info(config("tiny-llama"))
    tied = dataclasses.replace(info.config, tie_word_embeddings=True)
    assert load_bytes(tied, info.layout, "float32", "none") == load_bytes(
        info.config, info.layout, "float32", "none"
    )
    assert len(info.layout.shapes(tied)) < len(info.layout.shapes(info.config))


@pytest.mark.parametrize(
    ("model", "max_num_tokens", "measured"),
    [
        ("llama2-70b", 2048, 2.22),
        ("llama2-70b", 8192, 3.61),
        ("llama3.1-8b", 16384, 3.35),
        ("mixtral-8x7b", 16384, 4.29),
    ],
)
def test_a_gpu_keeps_what_a_step_takes(model: str, max_num_tokens: int, measured: float) -> None:
    """At least the GiB that an H200 had in use beside weights and KV cache after the largest steps."""
    core = engine_config(
        model,
        quantization="fp8",
        kv_cache_dtype="fp8",
        gpu_bytes=140 << 30,
        max_batch_size=1024,
        max_num_tokens=max_num_tokens,
        max_seq_len=2048,
        enable_chunked_context=True,
        kv_cache_free_gpu_mem_fraction=1.0,
    )
    info = check_model(core)
    per_token = info.config.kv_bytes_per_token("fp8", 1, 1)
    assert (140 << 30) - info.n_bytes - info.kv_cache_tokens * per_token > measured * (1 << 30)
