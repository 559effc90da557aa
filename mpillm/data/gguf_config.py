"""Conversion of a GGUF file's metadata to `config.json`, and of its tensor names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PACKED = ("mlp.experts",)  # gpt-oss has all experts of a layer in one tensor
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
_OF_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_READ = (  # keys of every architecture, without the prefix of its name
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)  # fmt: skip
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_LLAMA3 = [(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)]  # of Llama 3.1 and 3.2


class Metadata:
    """Values of a GGUF file, by names without the architecture's prefix."""

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        self.source, self.values = source, values
        self.architecture = str(values.get("general.architecture"))

    def __getitem__(self, name: str) -> Any:
        return self.values[f"{self.architecture}.{name}"]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{name}", default)

    def token(self, name: str) -> int | None:
        return self.values.get(f"tokenizer.ggml.{name}_token_id")


def _config(metadata: Metadata) -> dict[str, Any]:
    """Return the fields that most families have, under Llama's names."""
    heads, hidden = metadata["attention.head_count"], metadata["embedding_length"]
    head_dim = metadata.get("attention.key_length") or metadata.get("rope.dimension_count", hidden // heads)
    if head_dim != metadata.get("attention.value_length", head_dim):
        raise ConfigError(
            f"{metadata.source} has values of another size than keys, which cannot be converted"
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.get("feed_forward_length"),
        "num_hidden_layers": metadata["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["context_length"],
        "rms_norm_eps": _decimal(metadata["attention.layer_norm_rms_epsilon"]),
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
    }


def _decimal(value: float) -> float:
    """Return the shortest decimal with the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class Architecture(NamedTuple):
    """Conversion rules of a model family."""

    hugging_face: Callable[[Metadata], tuple[str, str]]  # architecture and model_type
    more: Callable[[Metadata], dict[str, Any]] = lambda _: {}  # additional keys of config.json
    read: tuple[str, ...] = ()  # keys that the conversion reads in addition to `_READ`
    tensors: Mapping[str, str] = _TENSORS
    # Prefix before an expert's number, and the names of its three matrices; `PACKED`: one tensor.
    experts: tuple[str, ...] = ()
    permutes: bool = False  # the file has the rows of q and k in another order (see `gguf._unpermute`)
    norms_add_one: bool = False
    biases: bool = False
    config: Callable[[Metadata], dict[str, Any]] = _config  # the fields of config.json
    layers: str = "model.layers."  # before a layer's number
    turned: tuple[str, ...] = ()  # tensors whose rows are inputs in the model, and outputs in the file


def _dense(name: str, model_type: str) -> Callable[[Metadata], tuple[str, str]]:
    return lambda _: (name, model_type)


def _llama(metadata: Metadata) -> tuple[str, str]:
    return (
        ("MixtralForCausalLM", "mixtral") if metadata.get("expert_count") else ("LlamaForCausalLM", "llama")
    )


def _llama_fields(metadata: Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count"):
        return {"attention_bias": False, "mlp_bias": False}
    return {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "sliding_window": None,
    }


def _gemma_fields(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata["attention.key_length"]
    is_27b = metadata["block_count"] == 62  # the queries of 27B have another scale
    heads = metadata["attention.head_count"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": metadata["embedding_length"] // heads if is_27b else head_dim,
        "sliding_window": metadata["attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10_000.0),
    }


def _gpt_oss_fields(metadata: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": True,
        "intermediate_size": metadata["expert_feed_forward_length"],
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
        "sliding_window": metadata["attention.sliding_window"],
    }


def _gpt2_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "n_embd": metadata["embedding_length"],
        "n_inner": metadata["feed_forward_length"],
        "n_layer": metadata["block_count"],
        "n_head": metadata["attention.head_count"],
        "n_positions": metadata["context_length"],
        "layer_norm_epsilon": _decimal(metadata["attention.layer_norm_epsilon"]),
        "activation_function": "gelu_new",
    }


ARCHITECTURES = {
    "llama": Architecture(
        _llama,
        _llama_fields,
        _EXPERTS[:2],
        _TENSORS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        ("block_sparse_moe.experts", "w1", "w3", "w2"),
        permutes=True,
    ),
    "qwen2": Architecture(_dense("Qwen2ForCausalLM", "qwen2"), biases=True),
    "qwen3": Architecture(_dense("Qwen3ForCausalLM", "qwen3"), tensors=_TENSORS | _QK_NORMS),
    "qwen3moe": Architecture(
        _dense("Qwen3MoeForCausalLM", "qwen3_moe"),
        lambda metadata: {
            "num_experts": metadata["expert_count"],
            "num_experts_per_tok": metadata["expert_used_count"],
            "moe_intermediate_size": metadata["expert_feed_forward_length"],
            "norm_topk_prob": True,
        },
        _EXPERTS,
        _TENSORS | _QK_NORMS | {"ffn_gate_inp": "mlp.gate"},
        ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    ),
    "gemma3": Architecture(
        _dense("Gemma3ForCausalLM", "gemma3_text"),
        _gemma_fields,
        ("attention.sliding_window", "rope.freq_base_swa"),
        _TENSORS
        | _QK_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_add_one=True,
    ),
    "gpt-oss": Architecture(
        _dense("GptOssForCausalLM", "gpt_oss"),
        _gpt_oss_fields,
        (*_EXPERTS, "attention.sliding_window"),
        {name: target for name, target in _TENSORS.items() if name not in (*_FEED_FORWARD, "ffn_norm")}
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        PACKED,
        biases=True,
    ),
    "gpt2": Architecture(
        _dense("GPT2LMHeadModel", "gpt2"),
        read=("attention.layer_norm_epsilon",),
        tensors=_OF_GPT2,
        biases=True,
        config=_gpt2_config,
        layers="transformer.h.",
        turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a file. Raises ConfigError if it cannot be converted."""
    name, source = metadata.architecture, metadata.source
    if name not in ARCHITECTURES:
        more = f"; known: {', '.join(ARCHITECTURES)}"
        if name == "deepseek2":
            more = "; the engine runs DeepSeek V3 from the safetensors that DeepSeek publishes"
        raise ConfigError(f"{source} has architecture {name[:60]!r}, which cannot be converted{more}")
    known = {f"{name}.{key}" for key in (*_READ, *ARCHITECTURES[name].read)}
    if unknown := [key for key in metadata.values if key.startswith(f"{name}.") and key not in known]:
        raise ConfigError(f"{source} has {', '.join(unknown)[:300]}, which cannot be converted")
    return ARCHITECTURES[name]


def config_of(metadata: Metadata, is_tied: bool, rope_factors: NDArray[np.float32] | None) -> dict[str, Any]:
    """Return `config.json`. `rope_factors`: the file's tensor by which rotary frequencies are divided."""
    architecture = architecture_of(metadata)
    name, model_type = architecture.hugging_face(metadata)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        **architecture.config(metadata),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float32",
        "vocab_size": len(metadata.values["tokenizer.ggml.tokens"]),
        **architecture.more(metadata),
    }
    if architecture.norms_add_one:
        del config["hidden_act"]  # Gemma's name is hidden_activation
    if (scaling := _rope_scaling(metadata, config, rope_factors)) is not None:
        config["rope_scaling"] = scaling
    for field, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        if (token := metadata.token(key)) is not None:
            config[f"{field}_token_id"] = token
    if (turn := metadata.token("eot")) not in (None, config.get("eos_token_id")):
        config["eos_token_id"] = [token for token in (config.get("eos_token_id"), turn) if token is not None]
    return config


def _rope_scaling(
    metadata: Metadata, config: Mapping[str, Any], factors: NDArray[np.float32] | None
) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type", "none")
    if factors is not None:
        for factor, low, high, length in _LLAMA3:
            known = _llama3(config, factor, low, high, length)
            if kind == "none" and factors.shape == known.shape and np.allclose(factors, known, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
        raise ConfigError(f"{metadata.source} has rope_freqs of no known model, which cannot be converted")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": metadata["rope.scaling.factor"]}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata["rope.scaling.original_context_length"]
        if metadata.architecture == "gpt-oss":
            scaling["truncate"] = False
    elif kind != "linear":
        raise ConfigError(f"{metadata.source} has rope.scaling.type {kind!r}, which cannot be converted")
    return scaling


def _llama3(
    config: Mapping[str, Any], factor: float, low: float, high: float, length: int
) -> NDArray[np.float64]:
    """Return the divisor of each frequency, as llama.cpp computes it."""
    d = config["head_dim"]
    waves = 2 * math.pi * config["rope_theta"] ** (np.arange(0, d, 2) / d)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
