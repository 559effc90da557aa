"""Qwen3 (Qwen Team, 2025): Llama's layer with norms of each q and k head; sliding windows in upper layers."""

from __future__ import annotations

from mpillm.engine.shape.composition import GatedFeedForward, GroupedQueryAttention, PreNorm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields
from mpillm.engine.shape.families.qwen2 import DEFAULTS, upper_layers
from mpillm.engine.shape.model_config import Family, ModelConfig


def layer(config: ModelConfig, index: int) -> PreNorm:
    return PreNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(qk_norm=True, window=config.window(index)),
        RmsNorm("post_attention_layernorm"),
        GatedFeedForward(config.intermediate_size),
    )


FIELDS = FamilyFields(defaults=DEFAULTS | {"head_dim": 128}, slides=upper_layers, layer_types=True)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", "Qwen3", FIELDS, layer)
