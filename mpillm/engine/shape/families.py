"""The model families of the torch core: what each has besides Llama's layer, by its name in `config.json`.

Everything else is Llama's (`transformer`): RMS norms, rotary embeddings of pairs, grouped heads, SwiGLU, or a
mixture of it. A new family of these parts is one entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

# Projections with the same input are one matrix in the engine, with their outputs concatenated.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
Raw = Mapping[str, Any]  # what `config.json` says, with the family's defaults
CORRECTION = "e_score_correction_bias"  # of a router: float32, not in the checkpoint's type
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]  # of `ops.gated`
CLAMP, SWISH = 7.0, 1.702  # of clamped_swiglu: the largest value, and what the sigmoid's input is times


class Experts(NamedTuple):
    """The names of a mixture in a layer, and what of `config.json` is its own."""

    prefix: str = "mlp"
    router: str = "gate"
    gate_up: str = "gate_up_proj"  # of `FUSED`
    down: str = "down_proj"
    inner_size: str = "intermediate_size"  # config.json's name
    biases: bool = False  # the router and each expert's products have one
    # Chosen from the best groups, by sigmoids and a bias, beside a shared one; the first layers have none.
    grouped: bool = False
    packed: bool = False  # a layer's experts are a tensor in a checkpoint (see `packed_experts`)


class Latent(NamedTuple):
    """Sizes of latent attention (see `latent`), as `config.json` names them."""

    q_lora_rank: int  # 0: queries are one product
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    score_factor: float  # scores are times this, besides the root of a query's size

    @property
    def head_dim(self) -> int:
        """Values of a token in the cache, and of a query there."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Family(NamedTuple):
    """How a family differs from Llama."""

    title: str = ""  # as the pages name it
    renames: Mapping[str, str] = MappingProxyType({})  # fields of config.json that Llama calls otherwise
    defaults: Raw = MappingProxyType({})  # of fields that config.json may leave out, as transformers has them
    rope: Raw | None = None  # rope_parameters, where config.json has neither these nor rope_scaling
    # Fields that may have no other value (None: be left out), besides those of every family.
    fixed: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    qkv_bias: bool = False  # q, k and v are products with a bias
    o_bias: bool = False
    qk_norm: bool = False  # each head of q and k has an RMS norm, before the rotation
    # Which layers see the last `sliding_window` tokens only.
    slides: Callable[[int, Raw], bool] | None = None
    layer_types: bool = False  # config.json may name other layers that do
    local_rope: bool = False  # these layers have a rotary base of their own
    sinks: bool = False  # each head has a score that takes its share of attention, and adds nothing
    latent: bool = False  # heads share a latent (see `latent`)
    experts: Experts | None = None
    activation: Activation = "silu"
    is_gated: bool = True  # the feed-forward; otherwise the activation of one product, with biases
    layer_norms: bool = False  # in place of RMS norms: with means and biases
    learned_positions: bool = False  # added to the embedding, in place of rotations
    norms_after: bool = False  # what attention and feed-forward add is normed, too
    norms_add_one: bool = False  # a norm's weight is stored less 1
    scales_embedding: bool = False  # by the square root of hidden_size


def _all_layers(layer: int, raw: Raw) -> bool:
    return True


def _upper_layers(layer: int, raw: Raw) -> bool:
    return layer >= int(raw["max_window_layers"])


def _even_layers(layer: int, raw: Raw) -> bool:
    return layer % 2 == 0


def _all_but_each(layer: int, raw: Raw) -> bool:
    return (layer + 1) % int(raw["sliding_window_pattern"]) != 0


_QWEN = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32_768,
}
# Mistral's sizes, which its descendants have too
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_ALWAYS_NORMED = {"norm_topk_prob": (True, None)}  # the weights of a row's experts

FAMILIES = {
    "LlamaForCausalLM": Family("Llama"),
    "MistralForCausalLM": Family("Mistral", defaults=_MISTRAL | {"sliding_window": 4096}, slides=_all_layers),
    "MixtralForCausalLM": Family(
        "Mixtral",
        defaults=_MISTRAL | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
        fixed=_ALWAYS_NORMED,
        slides=_all_layers,
        experts=Experts("block_sparse_moe", gate_up="w13", down="w2"),
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen2",
        defaults=_QWEN | {"num_key_value_heads": 32},
        qkv_bias=True,
        slides=_upper_layers,
        layer_types=True,
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen3",
        defaults=_QWEN | {"num_key_value_heads": 32, "head_dim": 128},
        qk_norm=True,
        slides=_upper_layers,
        layer_types=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-MoE",
        defaults=_QWEN | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False},
        fixed={"mlp_only_layers": ([], None), "decoder_sparse_step": (1, None)},
        qk_norm=True,
        slides=_all_layers,
        experts=Experts(inner_size="moe_intermediate_size"),
    ),
    "GPT2LMHeadModel": Family(
        "GPT-2",
        renames={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
        },
        fixed={
            "activation_function": ("gelu_new",),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        qkv_bias=True,
        o_bias=True,
        activation="gelu_tanh",
        is_gated=False,
        layer_norms=True,
        learned_positions=True,
    ),
    "GptOssForCausalLM": Family(
        "gpt-oss",
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        fixed=_ALWAYS_NORMED
        | {
            "attention_bias": (True, None),
            "swiglu_alpha": (SWISH, None),
            "swiglu_limit": (CLAMP, None),
        },
        qkv_bias=True,
        o_bias=True,
        slides=_even_layers,
        layer_types=True,
        sinks=True,
        experts=Experts(router="router", biases=True, packed=True),
        activation="clamped_swiglu",
    ),
    "DeepseekV3ForCausalLM": Family(
        "DeepSeek V3",
        renames={"n_routed_experts": "num_local_experts"},
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
        },
        fixed={
            "rope_interleave": (True, None),
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        },
        latent=True,
        experts=Experts(inner_size="moe_intermediate_size", grouped=True),
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3 (text)",
        defaults={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        qk_norm=True,
        slides=_all_but_each,
        layer_types=True,
        local_rope=True,
        activation="gelu_tanh",
        norms_after=True,
        norms_add_one=True,
        scales_embedding=True,
    ),
}

MODEL_TYPES = {  # of config.json: transformers goes by it
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
