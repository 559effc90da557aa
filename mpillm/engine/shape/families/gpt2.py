"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, biases in all products of a layer, GELU."""

from __future__ import annotations

from typing import Any

from mpillm.engine.shape.composition import (
    Embedding,
    GroupedQueryAttention,
    LayerNorm,
    PlainFeedForward,
    PreNorm,
)
from mpillm.engine.shape.config_fields import ConfigFields, FamilyFields
from mpillm.engine.shape.model_config import Family, ModelConfig


def _inner_size(fields: ConfigFields) -> dict[str, Any]:
    return {"intermediate_size": fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))}


FIELDS = FamilyFields(
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
    quantization=(),
    more=_inner_size,
)


def layer(config: ModelConfig, index: int) -> PreNorm:
    return PreNorm(
        LayerNorm("input_layernorm"),
        GroupedQueryAttention(qkv_bias=True, o_bias=True),
        LayerNorm("post_attention_layernorm"),
        PlainFeedForward(config.intermediate_size),
    )


GPT2 = Family(
    "GPT2LMHeadModel",
    "gpt2",
    "GPT-2",
    FIELDS,
    layer,
    embedding=Embedding(has_positions=True),
    norm=LayerNorm("model.norm"),
    checkpoint="gpt2",
)
