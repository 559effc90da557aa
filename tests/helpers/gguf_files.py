"""GGUF files of a tiny model, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
VOCAB = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    "ĠĠ",
    "ĊĊ",
    "ab",
]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"


def llama_weights(tied: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """Return random weights of one layer, under their Hugging Face names."""
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens": (len(VOCAB), HIDDEN),
        "model.norm": (HIDDEN,),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.up_proj": (FFN, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, FFN),
    }
    if not tied:
        shapes["lm_head"] = (len(VOCAB), HIDDEN)
    return {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a query or key projection as llama.cpp's convert_hf_to_gguf.py does."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    file: Path,
    weights: dict[str, np.ndarray[Any, Any]],
    pre: str = "smollm",
    architecture: str = "llama",
    extra_key: str | None = None,
    extra_tensor: str | None = None,
    merges: Sequence[str] = ("Ġ Ġ", "Ċ Ċ", "a b"),
) -> None:
    """Write a GGUF file as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * 3 + [1] * (len(VOCAB) - 3))
    if merges:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if extra_key is not None:
        writer.add_uint32(extra_key, 1)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(2, np.float32))
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in weights.items():
        stored = weight
        if "q_proj" in name or "k_proj" in name:
            stored = permute(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(name_map.get_name(name, try_suffixes=(".weight",)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
