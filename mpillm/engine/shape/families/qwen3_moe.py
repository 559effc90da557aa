"""Qwen3-MoE (Qwen Team, 2025): Qwen3's layer with a mixture of experts."""

from __future__ import annotations

from mpillm.engine.shape.composition import GroupedQueryAttention, Mixture, PreNorm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields
from mpillm.engine.shape.families.mistral import every_layer
from mpillm.engine.shape.families.qwen2 import DEFAULTS
from mpillm.engine.shape.model_config import Family, ModelConfig

FIELDS = FamilyFields(
    defaults=DEFAULTS | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False},
    fixed={"mlp_only_layers": ([], None), "decoder_sparse_step": (1, None)},
    quantization=(),
    slides=every_layer,
    expert_size="moe_intermediate_size",
)


def layer(config: ModelConfig, index: int) -> PreNorm:
    return PreNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(qk_norm=True, window=config.window(index)),
        RmsNorm("post_attention_layernorm"),
        Mixture(
            config.n_experts,
            config.n_experts_per_token,
            config.intermediate_size,
            weights_add_up=config.norms_choice,
        ),
    )


QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3-MoE", FIELDS, layer)
