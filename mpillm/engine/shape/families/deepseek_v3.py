"""DeepSeek-V3 (DeepSeek-AI, 2024): latent attention; dense first layers, then mixtures of grouped experts."""

from __future__ import annotations

from typing import Any

from mpillm.engine.shape.composition import (
    ExpertGroups,
    GatedFeedForward,
    Latent,
    LatentAttention,
    Mixture,
    PreNorm,
    RmsNorm,
)
from mpillm.engine.shape.config_fields import ConfigFields, FamilyFields
from mpillm.engine.shape.model_config import Family, ModelConfig


def _more(fields: ConfigFields) -> dict[str, Any]:
    latent = _latent(fields)
    n_dense = fields.integer("first_k_dense_replace") if fields.raw["first_k_dense_replace"] else 0
    return {
        "n_kv_heads": 1,
        "head_dim": latent.head_dim,
        "latent": latent,
        "routed_factor": float(fields.number("routed_scaling_factor")),
        "n_dense_layers": n_dense,
        "dense_size": fields.integer("intermediate_size"),
        "shared_size": fields.integer("n_shared_experts") * fields.integer("moe_intermediate_size"),
        "groups": _groups(fields),
    }


def _latent(fields: ConfigFields) -> Latent:
    sizes = {name: fields.integer(name) for name in Latent._fields[1:]}
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if sizes[name] % 2:
            raise fields.error(
                f"{name} is {sizes[name]}; must be even, because a key is rotated in pairs of numbers"
            )
    return Latent(fields.integer("q_lora_rank") if fields.raw["q_lora_rank"] is not None else 0, **sizes)


def _groups(fields: ConfigFields) -> tuple[int, int]:
    n_experts, n_per_token = fields.integer("num_local_experts"), fields.integer("num_experts_per_tok")
    n, n_chosen = fields.integer("n_group"), fields.integer("topk_group")
    if n_experts % n or n_chosen > n or n_per_token > n_experts // n * n_chosen:
        raise fields.error(
            f"n_routed_experts {n_experts}, n_group {n}, topk_group {n_chosen},"
            f" num_experts_per_tok {n_per_token}: n_group must divide n_routed_experts, topk_group must be"
            " at most n_group, and the chosen groups must have at least num_experts_per_tok experts together"
        )
    return n, n_chosen


FIELDS = FamilyFields(
    renames={"n_routed_experts": "num_local_experts"},
    aliases=(("qk_rope_head_dim", "head_dim"),),
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
    quantization=(),
    expert_size="moe_intermediate_size",
    more=_more,
)


def layer(config: ModelConfig, index: int) -> PreNorm:
    assert config.latent is not None
    return PreNorm(
        RmsNorm("input_layernorm"),
        LatentAttention(config.latent),
        RmsNorm("post_attention_layernorm"),
        GatedFeedForward(config.dense_size) if index < config.n_dense_layers else _mixture(config),
    )


def _mixture(config: ModelConfig) -> Mixture:
    return Mixture(
        config.n_experts,
        config.n_experts_per_token,
        config.intermediate_size,
        weights_add_up=config.norms_choice,
        groups=ExpertGroups(*config.groups, config.routed_factor, config.shared_size),
    )


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", "DeepSeek V3", FIELDS, layer)
