"""gpt-oss (OpenAI, 2025): attention with biases and sinks, a mixture of experts in every layer.

Even layers default to sliding windows.
"""

from __future__ import annotations

from mpillm.engine.shape.composition import CLAMP, SWISH, GroupedQueryAttention, Mixture, PreNorm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields, Raw
from mpillm.engine.shape.model_config import Family, ModelConfig


def _even_layers(layer: int, raw: Raw) -> bool:
    return layer % 2 == 0


FIELDS = FamilyFields(
    defaults={
        "head_dim": 64,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    fixed={
        "norm_topk_prob": (True, None),
        "attention_bias": (True, None),
        "swiglu_alpha": (SWISH, None),
        "swiglu_limit": (CLAMP, None),
    },
    quantization=("mxfp4",),
    slides=_even_layers,
    layer_types=True,
    expert_size="intermediate_size",
)


def layer(config: ModelConfig, index: int) -> PreNorm:
    return PreNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(qkv_bias=True, o_bias=True, window=config.window(index), sinks=True),
        RmsNorm("post_attention_layernorm"),
        Mixture(
            config.n_experts,
            config.n_experts_per_token,
            config.intermediate_size,
            router="router",
            activation="clamped_swiglu",
            bias=True,
        ),
    )


GPT_OSS = Family("GptOssForCausalLM", "gpt_oss", "gpt-oss", FIELDS, layer, checkpoint="packed experts")
