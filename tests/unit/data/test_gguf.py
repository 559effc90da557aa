"""A GGUF file becomes a Hugging Face folder with the same weights and tokenizer, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.fetch import fetch_model, parts_of
from mpillm.data.gguf import convert
from tests.helpers.gguf_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TEMPLATE,
    VOCAB,
    gguf,
    llama_weights,
    safetensors_numpy,
    tokenizers,
    write_gguf,
)


@pytest.mark.parametrize("tied", [True, False])
def test_convert_restores_the_weights(tmp_path: Path, tied: bool) -> None:
    weights = llama_weights(tied)
    write_gguf(tmp_path / "m.gguf", weights)
    convert(tmp_path / "m.gguf", tmp_path)
    converted = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(converted[name], weight, err_msg=name)
        assert converted[name].dtype == np.float32
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        HEADS,
        KV_HEADS,
        HEAD_DIM,
    )
    assert (config["rope_theta"], config["rms_norm_eps"], config["vocab_size"]) == (50000.0, 1e-5, len(VOCAB))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_a_split_model(tmp_path: Path) -> None:
    weights = llama_weights(False)
    write_gguf(tmp_path / "m.gguf", weights, split=5)
    parts = parts_of(tmp_path / "m-00002-of-00003.gguf")
    assert parts == sorted(tmp_path.glob("*.gguf")) and len(parts) == 3
    convert(parts[0], tmp_path, parts[1:])
    converted = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(converted[name], weight) for name, weight in weights.items())
    parts[0].rename(alone := tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"one of 3 files .* must end in -00001-of-00003.gguf"):
        convert(alone, tmp_path)
    alone.rename(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ConfigError, match=r"should have 12; fetch all files again"):
        convert(parts[0], tmp_path, parts[1:])
    parts[1].write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"m-00002-of-00003.gguf: a Git LFS pointer"):
        convert(parts[0], tmp_path, parts[1:])
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-00003.gguf: No such file"):
        fetch_model(str(parts[0]), tmp_path / "models")


def test_a_secret_of_the_environment_does_not_change_a_model(tmp_path: Path) -> None:
    """What mpillm writes about a run is masked; a model's files are not."""
    write_gguf(tmp_path / "m.gguf", llama_weights(True))
    code = (
        "import pathlib, sys; from mpillm.data.gguf import convert; convert(*map(pathlib.Path, sys.argv[1:]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.gguf", tmp_path],
        env={**os.environ, "OPENAI_API_KEY": "LlamaForCausalLM"},
        timeout=120,
        check=True,
    )
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_convert_quantized(tmp_path: Path) -> None:
    """In Q4_1 32 weights share a float16 scale and a float16 minimum, written out here by hand."""
    blocks = np.random.default_rng(1).integers(0, 256, (HIDDEN * FFN // 32, 20), np.uint8)
    blocks[:, 0:4] = np.array([0.5, -1.25], np.float16).view(np.uint8)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    file = tmp_path / "m.gguf"
    write_gguf(file, llama_weights())
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_gate.weight":
            writer.add_tensor(tensor.name, blocks.reshape(FFN, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "q.gguf", tmp_path)
    gate = safetensors_numpy.load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(gate, (nibbles * 0.5 - 1.25).reshape(FFN, HIDDEN))


def test_converted_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights())
    convert(tmp_path / "m.gguf", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab  12\n\n3<|im_end|>").tokens == [
        "<|im_start|>",
        "ab",
        "ĠĠ",
        "1",
        "2",
        "ĊĊ",
        "3",
        "<|im_end|>",
    ]
    text = "Ünïcode 🐌  and\ttabs"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE
    assert (settings["bos_token"], settings["eos_token"], settings["model_max_length"]) == (
        "<|im_start|>",
        "<|im_end|>",
        128,
    )


@pytest.mark.parametrize(
    ("pre", "has_bos"), [("llama-bpe", True), ("llama3", True), ("llama-v3", True), ("qwen2", False)]
)
def test_llama_3_begins_with_a_bos_token(tmp_path: Path, pre: str, has_bos: bool) -> None:
    """As in llama.cpp, if the file does not say so."""
    write_gguf(tmp_path / "m.gguf", llama_weights(), pre=pre)
    convert(tmp_path / "m.gguf", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<|im_start|>"] * has_bos + ["ab"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "falcon"}, "architecture 'falcon'"),
        (
            {"architecture": "deepseek2"},
            "'deepseek2', which .* the engine runs DeepSeek V3 from .*safetensors",
        ),
        ({"pre": "mystery"}, "'mystery'"),
        ({"extra_key": "llama.rope.scaling.attn_factor"}, "has llama.rope.scaling.attn_factor, which cannot"),
        ({"merges": ()}, "has no tokenizer.ggml.merges"),
        ({"merges": ["a nowhere"]}, "tokenizer makes no sense"),
        ({"extra_tensor": "rope_freqs.weight"}, "has rope_freqs of no known model"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "'blk.0.attn_q.bias', which a llama model does not have"),
    ],
)
def test_convert_refuses_unknown_models(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "m.gguf", llama_weights(), **change)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "m.gguf", tmp_path)


def test_convert_garbage(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a gguf file at all" * 10)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path)


COUNTS = {
    "an array longer than the file": (0, 1, 9, (0).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little")),
    "texts beyond the file": (0, 1, 9, (8).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little")),
    "a text longer than the file": (0, 1, 8, (1 << 60).to_bytes(8, "little")),
    "more values than the file": (0, 1 << 60, 0, b"x"),
    "more tensors than the file": (1 << 60, 1, 0, b"x"),
    "arrays in arrays": (0, 1, 9, ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 5_000),
}


@pytest.mark.parametrize("case", COUNTS)
def test_convert_believes_no_count(case: str, tmp_path: Path) -> None:
    n_tensors, n_values, kind, value = COUNTS[case]
    head = b"GGUF" + (3).to_bytes(4, "little") + n_tensors.to_bytes(8, "little")
    head += n_values.to_bytes(8, "little") + (1).to_bytes(8, "little") + b"k" + kind.to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(head + value)
    with pytest.raises(ConfigError, match=r"m.gguf is not a GGUF file .*(more than the file|in an array)"):
        convert(tmp_path / "m.gguf", tmp_path)
