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


GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
}


def write_family(file: Path, model: Any) -> None:
    """Write a model of transformers as GGUF, with a tokenizer of bytes."""
    config, architecture = model.config, GGUF_ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    if architecture is gguf.MODEL_ARCH.GPT2:
        _add_gpt2_values(writer, config)
    else:
        _add_values(writer, config, architecture)
    tokens = [*VOCAB, *(f"<{i}>" for i in range(config.vocab_size - len(VOCAB)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in _family_tensors(model).items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_gpt2_values(writer: Any, config: Any) -> None:
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _add_values(writer: Any, config: Any, architecture: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "layer_types", None) and "sliding_attention" in config.layer_types:
        writer.add_sliding_window(config.sliding_window)
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture is not gguf.MODEL_ARCH.LLAMA:
            writer.add_expert_feed_forward_length(
                getattr(config, "moe_intermediate_size", config.intermediate_size)
            )


def _family_tensors(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return a model's tensors as llama.cpp's converter makes them, before they are renamed."""
    config, is_llama = model.config, type(model).__name__ in ("LlamaForCausalLM", "MixtralForCausalLM")
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if is_llama and ("q_proj" in name or "k_proj" in name):
            values = permute(
                values, config.num_attention_heads if "q_" in name else config.num_key_value_heads
            )
        if type(model).__name__ == "Gemma3ForCausalLM" and name.endswith("norm.weight"):
            values = values + 1
        if "experts.gate_up_proj" in name:  # of all experts
            layer, kind = name.partition("gate_up_proj")[0], "bias" if name.endswith("bias") else "weight"
            if type(model).__name__ == "GptOssForCausalLM":
                values = values.swapaxes(1, 2) if kind == "weight" else values
                halves: tuple[Any, ...] = (values[:, ::2], values[:, 1::2])
            else:
                halves = tuple(np.split(values, 2, axis=1))
            made |= {
                f"{layer}{half}_proj.{kind}": one for half, one in zip(("gate", "up"), halves, strict=True)
            }
            continue
        if "experts.down_proj" in name:
            kind = "bias" if name.endswith("bias") else "weight"
            if type(model).__name__ == "GptOssForCausalLM" and kind == "weight":
                values = values.swapaxes(1, 2)
            name = f"{name.removesuffix('_bias')}.{kind}"
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        if name.endswith("sinks"):
            name += ".weight"
        made[name] = values
    return made


def write_gguf(
    file: Path,
    weights: dict[str, np.ndarray[Any, Any]],
    pre: str = "smollm",
    architecture: str = "llama",
    extra_key: str | None = None,
    extra_tensor: str | None = None,
    merges: Sequence[str] = ("Ġ Ġ", "Ċ Ċ", "a b"),
    split: int = 0,
) -> None:
    """Write a GGUF file as llama.cpp's converter does; `split`: tensors in each of several files, if any."""
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
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
