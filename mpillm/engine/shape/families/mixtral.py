"""Mixtral (Jiang et al., Mixtral of Experts, 2024): Mistral's layer with a mixture of experts."""

from __future__ import annotations

from mpillm.engine.shape.composition import GroupedQueryAttention, Mixture, PreNorm, RmsNorm
from mpillm.engine.shape.config_fields import FamilyFields
from mpillm.engine.shape.families.mistral import DEFAULTS, every_layer
from mpillm.engine.shape.model_config import Family, ModelConfig

FIELDS = FamilyFields(
    defaults=DEFAULTS | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
    fixed={"norm_topk_prob": (True, None)},
    quantization=(),
    slides=every_layer,
    expert_size="intermediate_size",
)


def layer(config: ModelConfig, index: int) -> PreNorm:
    return PreNorm(
        RmsNorm("input_layernorm"),
        GroupedQueryAttention(window=config.window(index)),
        RmsNorm("post_attention_layernorm"),
        Mixture(
            config.n_experts,
            config.n_experts_per_token,
            config.intermediate_size,
            prefix="block_sparse_moe",
            gate_up="w13",
            down="w2",
        ),
    )


MIXTRAL = Family("MixtralForCausalLM", "mixtral", "Mixtral", FIELDS, layer)
