"""Everything that is wrong with a model is said before torch is imported."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.find_model import presets
from mpillm.engine.shape.model_info import check_model
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from tests.helpers.engine_configs import engine_config
from tests.helpers.presets import preset_json

GPT2 = {  # beside Llama's fields
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 128,
    "n_inner": 256,
    "n_layer": 6,
    "n_head": 8,
    "n_positions": 4096,
    "layer_norm_epsilon": 1e-05,
}


def config(model_path: Path | str | None, **options: Any) -> EngineConfig:
    return engine_config(model_path, **options)


def write_checkpoint(folder: Path, change: dict[str, Any] | None = None) -> Path:
    """Return a folder that only looks like a checkpoint: its tensors are a hole in a sparse file.

    Returns the safetensors file.
    """
    folder.mkdir(exist_ok=True)
    raw = preset_json("tiny-llama")
    if change and "architectures" in change:
        del raw["model_type"]  # which is Llama's
    (folder / "config.json").write_text(json.dumps(raw | (change or {})))
    header, end = {}, 0
    for name, shape in tensor_shapes(load_model_config("tiny-llama")).items():
        start = end
        n = 4
        for size in shape:
            n *= size
        end += n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    file = folder / "model.safetensors"
    write_file(file, header, end)
    return file


def write_file(file: Path, header: dict[str, Any], n_data: int) -> None:
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + n_data)


def test_a_good_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    info = check_model(config(tmp_path, max_seq_len=512))
    assert (info.vocab_size, info.max_seq_len, info.end_ids) == (512, 512, (257,))
    assert (info.config.n_layers, info.config.n_heads, info.config.n_kv_heads) == (6, 8, 4)
    header, _ = read_header((tmp_path / "model.safetensors").read_bytes())
    assert info.n_bytes == sum(end - start for start, end in (e["data_offsets"] for e in header.values()))
    assert check_model(config(tmp_path, dtype="bfloat16")).n_bytes == info.n_bytes // 2


def test_lengths(tmp_path: Path) -> None:
    assert check_model(config("tiny-llama")).max_seq_len == 4096
    # Each of two sequences takes whole blocks of 32.
    assert check_model(config("tiny-llama", max_batch_size=2, max_seq_len=100)).kv_cache_tokens == 256
    scarce = check_model(config("tiny-llama", kv_cache_tokens=130))
    assert (scarce.kv_cache_tokens, scarce.max_seq_len) == (128, 128)
    assert check_model(config("tiny-llama", end_ids=(1, 2))).end_ids == (1, 2)


def test_a_prompt_that_must_be_computed_in_one_step() -> None:
    """Without chunked context a prompt must fit one step, except on a generation instance, which computes
    none."""
    for change, expected in (
        ({}, 100),
        ({"role": "context"}, 100),
        ({"role": "generation"}, None),
        ({"enable_chunked_context": True}, None),
    ):
        options: dict[str, Any] = {"max_num_tokens": 100, "enable_chunked_context": False} | change
        assert check_model(config("tiny-llama", **options)).max_prompt_len == expected


def test_stop_words_are_tokens() -> None:
    """A preset has no tokenizer, so a token of a stop word is a byte."""
    assert check_model(config("tiny-llama", stop_words=("ab\n", (300, 5)))).stop_words == (
        (97, 98, 10),
        (300, 5),
    )


def test_bytes_and_lengths_of_a_rank() -> None:
    """A rank that holds a part of the model is told the part's bytes.

    All ranks of an instance have a cache of the same number of tokens.
    """
    whole = check_model(config("tiny-mixtral"))
    ranks = [
        check_model(config("tiny-mixtral", tp_size=4, pp_size=2, ep_size=2, tp_rank=tp, pp_rank=pp))
        for tp in range(4)
        for pp in range(2)
    ]
    repeated = 3 * (2 * 6 + 1) * 128 + 3 * 6 * 8 * 128  # norms and routers: on each rank of a TP group
    assert sum(rank.n_bytes for rank in ranks) == whole.n_bytes + 4 * repeated
    alone, first, second = (
        check_model(config("tiny-mixtral", max_batch_size=10_000, **options)).kv_cache_tokens
        for options in ({}, {"tp_size": 2}, {"tp_size": 2, "tp_rank": 1})
    )
    assert first == second == pytest.approx(2 * alone, abs=32)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    code = (
        "import sys; from mpillm.cores.registry import BackendRegistry; from mpillm.cores.base import"
        " CoreConfig; from mpillm.engine.shape.engine_config import EngineConfig;"
        f" config = CoreConfig('torch', EngineConfig(model_path={str(tmp_path)!r}));"
        " BackendRegistry.get('torch').check(config);"
        " assert not {'torch', 'safetensors', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": None}, "needs --model_path"),
        ({"model_path": "tiny-lama"}, r"no such preset \(did you mean 'tiny-llama'\?\)"),
        ({"model_path": "/no/such/folder"}, "/no/such/folder: no such folder"),
        ({"load_format": "dumy"}, "load_format dumy"),
        ({"dtype": "float8"}, "dtype float8"),
        (
            {"batch_scheduler_policy": "no_evit"},
            r"batch_scheduler_policy no_evit: .*static \(did you mean 'no_evict'\?\)",
        ),
        (
            {"context_chunking_policy": "equal"},
            "context_chunking_policy equal: not one of first_come_first_served, equal_progress",
        ),
        ({"beam_width": 4}, "beam_width 4: must be 1; only requests to Triton may ask for more"),
        (
            {"stop_words": ("abc", (512,))},
            r"stop_words \(512,\): tokens \[512\]; must be one or more, each from 0 to 511",
        ),
        ({"stop_words": ((),)}, r"stop_words \(\): tokens \[\]; must be one or more"),
        ({"core_options": {"ttft_ms": 3}}, "core_options ttft_ms: the torch core has no such option"),
        ({"core_options": {"use_custom_all_reduce": 3}}, "use_custom_all_reduce:3: not true or false"),
        ({"core_options": {"use_custom_all_reduce": True}}, "use_custom_all_reduce:True: only for GPUs"),
        ({"core_options": {"use_fp8_context_fmha": True}}, "use_fp8_context_fmha:True: only for GPUs"),
        (
            {"core_options": {"use_fp8_context_fmha": True}, "gpu_bytes": 1 << 40, "quantization": "fp8"},
            "use_fp8_context_fmha:True: only with weights and a KV cache in fp8; they are in fp8 and float32",
        ),
        (
            {
                "core_options": {"use_fp8_context_fmha": True},
                "gpu_bytes": 1 << 40,
                "quantization": "fp8",
                "kv_cache_dtype": "fp8",
            },
            "use_fp8_context_fmha:True: only for heads of 64 or 128 values",
        ),
        ({"tp_size": 3}, "tensor_parallel_size 3 does not divide the 8 attention heads"),
        ({"tp_size": 16}, "tensor_parallel_size 16 does not divide the 8 attention heads"),
        ({"pp_size": 7}, "pipeline_parallel_size 7 is more than the 6 layers of tiny-llama"),
        ({"tp_size": 2, "ep_size": 2}, "moe_expert_parallel_size 2: tiny-llama has no experts"),
        (
            {"tp_size": 2, "ep_size": 4, "model_path": "tiny-mixtral"},
            "expert_parallel_size 4 does not divide the 2 tensor",
        ),
        ({"max_seq_len": 8192}, "max_seq_len 8192: tiny-llama allows 1 to 4096"),
        (
            {"kv_cache_tokens": 100, "max_seq_len": 200},
            "^--kv_cache_tokens 100: a KV cache .* does not hold one sequence of 200 tokens",
        ),
        ({"kv_cache_tokens": 10}, "KV cache of 10 tokens"),
        ({"max_batch_size": 0}, "max_batch_size 0"),
        ({"max_num_tokens": 0}, "max_num_tokens 0"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(config(**{"model_path": "tiny-llama"} | options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM is not supported by the torch core; supported: Llama",
        ),
        ({"num_local_experts": 2}, "LlamaForCausalLM has num_local_experts"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok 3 of 2 experts",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**7},
            r"num_local_experts makes \d+ experts in \d+ layers; must be 100000 at most",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": [1]},
            r"mlp_only_layers \[1\] is not supported",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "decoder_sparse_step": 2},
            "decoder_sparse_step 2 is not supported",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8},
            "moe_intermediate_size is null; must be a positive number",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["chunked"] * 6},
            "layer_types .* must name full_attention or sliding_attention for each of 6 layers",
        ),
        ({"architectures": None, "model_type": "bert"}, 'model_type "bert" is not supported'),
        ({"attention_bias": True}, "attention_bias true"),
        ({"architectures": 8}, "architecture 8 is not supported"),
        ({"architectures": {"a": 1}}, "architecture {'a': 1} is not supported"),
        ({"rope_scaling": 8, "rope_parameters": None}, "rope_scaling is 8; must be an object"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; must be 10000 at most"),
        ({"vocab_size": 10**400}, "not valid JSON: a number of too many digits"),
        ({"vocab_size": 10**300}, r"vocab_size is 1000.*\.\.\.; must be 2147483647 at most"),
        ({"mlp_bias": True}, "mlp_bias true"),
        (
            GPT2 | {"activation_function": "relu"},
            'activation_function "relu" is not supported',
        ),
        (GPT2 | {"n_head": "x", "num_attention_heads": None}, 'n_head is "x"; must be a positive number'),
        (GPT2, "no tensor wte.weight"),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "head_dim": None,
                "n_routed_experts": 8,
                "n_group": 3,
            },
            "moe_intermediate_size is null",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "head_dim": None,
                "n_routed_experts": 8,
                "moe_intermediate_size": 32,
                "n_group": 3,
            },
            "n_routed_experts 8, n_group 3, topk_group 4, num_experts_per_tok 8: n_group must divide",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "head_dim": None,
                "n_routed_experts": 8,
                "rope_interleave": False,
            },
            "rope_interleave false is not supported",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "head_dim": None,
                "n_routed_experts": 8,
                "qk_rope_head_dim": 15,
            },
            "qk_rope_head_dim is 15; must be even",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping 30.0 is not supported",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "rope type linear of sliding_attention is not supported",
        ),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type longrope is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32}},
            "rope type yarn needs factor",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": -1,
                }
            },
            "beta_fast is -1; must be a positive number",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope type linear needs factor"),
        ({"rope_theta": 0}, "rope_theta is 0; must be a positive number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, 'rope_theta is "1e4"; must be a positive number'),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor, high_freq_factor",
        ),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 132}, "hidden_size 132 is not a multiple"),
        ({"head_dim": 15}, "head_dim is 15; must be even"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"vocab_size": "many"}, 'vocab_size is "many"'),
        ({"num_hidden_layers": 7}, "no tensor model.layers.6.input_layernorm.weight"),
        (
            {"intermediate_size": 300},
            r"gate_proj.weight has shape \[256, 128\], config.json makes it \[300, 128\]",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        (
            {"eos_token_id": "</s>"},
            'config.json: eos_token_id "</s>": must be a token id or an array of them',
        ),
        ({"eos_token_id": [1, "x"]}, 'eos_token_id .1, "x".: must be a token id or an array'),
    ],
    ids=str,
)
def test_bad_configurations(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        check_model(config(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": ["a" * 30_000]},
        {"architectures": ["b" * 30_000]},
        {"rope_scaling": {"rope_type": "c" * 30_000}, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": "d" * 30_000}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_long_values_are_cut_in_messages(tmp_path: Path, change: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        check_model(config(tmp_path))
    assert len(str(caught.value)) < 1000


def test_bad_files(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path)
    good = file.read_bytes()

    def expect_error(message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            check_model(config(tmp_path))
        assert str(tmp_path) in str(caught.value)

    file.write_bytes(good[:-1])
    expect_error(r"model.safetensors: truncated: its header describes \d+ bytes, it has \d+")
    for n in (0, 5, 100):
        file.write_bytes(good[:n])
        expect_error("model.safetensors: truncated, or not a safetensors file")
    file.write_bytes(struct.pack("<Q", 50) + b"x" * 1000)
    expect_error("its header cannot be read")
    header, n_data = read_header(good)
    write_file(file, {name: entry for name, entry in header.items() if name != "model.norm.weight"}, n_data)
    expect_error("no tensor model.norm.weight in model.safetensors")
    header["lm_head.weight"]["dtype"] = "F8_E5M2"
    write_file(file, header, n_data)
    expect_error("tensor lm_head.weight is of type F8_E5M2; can read F32, BF16, F16")
    file.unlink()
    expect_error("model.safetensors: no such file")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    expect_error("model-00001-of-00002.safetensors: no such file")
    index.write_text("{}")
    expect_error("no weight_map")
    (tmp_path / "config.json").write_text("{")
    expect_error("config.json:1: not valid JSON")
    (tmp_path / "config.json").write_text("[" * 100_000)
    expect_error("config.json: not valid JSON: nested too deep")
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    expect_error("config.json: not UTF-8 text")
    (tmp_path / "config.json").write_text("[]")
    expect_error("config.json: not a JSON object")
    (tmp_path / "config.json").unlink()
    expect_error("no model there: the folder has no config.json")


def read_header(raw: bytes) -> tuple[dict[str, Any], int]:
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), len(raw) - 8 - length


@pytest.mark.parametrize("preset", presets())
def test_the_text_of_a_model_is_equal_in_each_process(preset: str) -> None:
    """Context and generation servers compare it. So it contains no address of a function."""
    assert " at 0x" not in repr(load_model_config(preset))
