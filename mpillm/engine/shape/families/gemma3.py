"""Gemma 3 (Gemma Team, 2025): norms before and after attention and feed-forward.

By default, five of six layers have a sliding window.
"""

from __future__ import annotations

from typing import Any

from mpillm.engine.shape.composition import (
    Embedding,
    GatedFeedForward,
    GroupedQueryAttention,
    RmsNorm,
    SandwichNorm,
)
from mpillm.engine.shape.config_fields import ConfigFields, FamilyFields, Raw
from mpillm.engine.shape.model_config import Family, ModelConfig


def _all_but_every_sixth(layer: int, raw: Raw) -> bool:
    return (layer + 1) % int(raw["sliding_window_pattern"]) != 0


def _query_scalar(fields: ConfigFields) -> dict[str, Any]:
    return {"query_scalar": float(fields.number("query_pre_attn_scalar"))}


FIELDS = FamilyFields(
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
    slides=_all_but_every_sixth,
    layer_types=True,
    local_rope=True,
    more=_query_scalar,
)


def layer(config: ModelConfig, index: int) -> SandwichNorm:
    window = config.window(index)
    return SandwichNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(qk_norm=True, window=window, local_rope=window > 0),
        RmsNorm("post_attention_layernorm"),
        RmsNorm("pre_feedforward_layernorm"),
        GatedFeedForward(config.intermediate_size, activation="gelu_tanh"),
        RmsNorm("post_feedforward_layernorm"),
    )


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    "Gemma 3 (text)",
    FIELDS,
    layer,
    embedding=Embedding(is_scaled=True),
    norms_less_one=True,
)
