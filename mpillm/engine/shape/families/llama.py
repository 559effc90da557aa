"""Llama (Meta; Touvron et al., 2023): RMS norms, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from mpillm.engine.shape.composition import GatedFeedForward, GroupedQueryAttention, PreNorm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields
from mpillm.engine.shape.model_config import Family, ModelConfig


def layer(config: ModelConfig, index: int) -> PreNorm:
    """Return the composition of a layer; with a window, it is Mistral's."""
    return PreNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(window=config.window(index)),
        RmsNorm("post_attention_layernorm"),
        GatedFeedForward(config.intermediate_size),
    )


LLAMA = Family("LlamaForCausalLM", "llama", "Llama", FamilyFields(), layer)
