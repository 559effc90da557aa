"""Qwen2 (Qwen Team, 2024): Llama's layer with q, k and v biases; upper layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from mpillm.engine.shape.composition import GatedFeedForward, GroupedQueryAttention, PreNorm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields, Raw
from mpillm.engine.shape.model_config import Family, ModelConfig

DEFAULTS: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
}


def upper_layers(layer: int, raw: Raw) -> bool:
    return layer >= int(raw["max_window_layers"])


def layer(config: ModelConfig, index: int) -> PreNorm:
    return PreNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(qkv_bias=True, window=config.window(index)),
        RmsNorm("post_attention_layernorm"),
        GatedFeedForward(config.intermediate_size),
    )


FIELDS = FamilyFields(defaults=DEFAULTS, slides=upper_layers, layer_types=True)
QWEN2 = Family("Qwen2ForCausalLM", "qwen2", "Qwen2", FIELDS, layer)
