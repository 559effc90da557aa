"""The tensors that a checkpoint of a model must have, under Llama's names or those of its family's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpillm.engine.shape.families import CORRECTION, FUSED, Latent

if TYPE_CHECKING:
    from mpillm.engine.shape.model_config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint must have."""
    h = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for i in range(config.n_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _of_layer(config, i).items()}
    for i in range(config.n_layers, config.n_layers + config.n_guess_layers):
        own = _of_layer(config, i) | _of_guesses(config)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    if config.family.learned_positions:
        shapes["model.embed_positions.weight"] = (config.max_position_embeddings, h)
    if config.family.layer_norms:
        norms = [name for name in shapes if name.endswith("norm.weight")]
        shapes |= {f"{name.removesuffix('weight')}bias": shapes[name] for name in norms}
    return shapes


def _of_layer(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    h, d, inner, family = config.hidden_size, config.head_dim, config.intermediate_size, config.family
    q, kv = config.n_heads * d, config.n_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "post_attention_layernorm.weight": (h,),
    }
    if family.norms_after:
        shapes |= {f"{name}_feedforward_layernorm.weight": (h,) for name in ("pre", "post")}
    if family.qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv))}
    if family.o_bias:
        shapes["self_attn.o_proj.bias"] = (h,)
    if family.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (d,) for name in ("q", "k")}
    if family.sinks:
        shapes["self_attn.sinks.weight"] = (config.n_heads,)
    parts, gate_up, down, biases = ["mlp"], "gate_up_proj", "down_proj", False
    if not family.is_gated:
        gate_up, down, biases = "c_fc", "c_proj", True
    if config.latent is not None:
        shapes = {name: shape for name, shape in shapes.items() if "_proj" not in name}
        shapes |= _of_latent(config, config.latent)
    experts = family.experts
    if experts is not None and not config.has_experts(layer):
        inner = config.dense_size
    elif experts is not None:
        gate_up, down, biases = experts.gate_up, experts.down, experts.biases
        parts = [f"{experts.prefix}.experts.{e}" for e in range(config.n_experts)]
        shapes[f"{experts.prefix}.{experts.router}.weight"] = (config.n_experts, h)
        if biases:
            shapes[f"{experts.prefix}.{experts.router}.bias"] = (config.n_experts,)
        if experts.grouped:
            shapes[f"{experts.prefix}.{experts.router}.{CORRECTION}.weight"] = (config.n_experts,)
            shared = f"{experts.prefix}.shared_experts"
            shapes |= {f"{shared}.{name}.weight": (config.shared_size, h) for name in FUSED[gate_up]}
            shapes[f"{shared}.{down}.weight"] = (h, config.shared_size)
    for prefix in parts:
        for name, shape in (
            *((name, (inner, h)) for name in FUSED.get(gate_up, (gate_up,))),
            (down, (h, inner)),
        ):
            shapes[f"{prefix}.{name}.weight"] = shape
            if biases:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    return shapes


def _of_guesses(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    return {
        "enorm.weight": (h,),
        "hnorm.weight": (h,),
        "eh_proj.weight": (h, 2 * h),
        "shared_head.norm.weight": (h,),
        "shared_head.head.weight": (config.vocab_size, h),
    }


def _of_latent(config: ModelConfig, sizes: Latent) -> dict[str, tuple[int, ...]]:
    h, heads, rank = config.hidden_size, config.n_heads, sizes.kv_lora_rank
    q, q_rank = heads * sizes.query_dim, sizes.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (sizes.head_dim, h),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), rank),
        "o_proj.weight": (h, heads * sizes.v_head_dim),
    }
    if q_rank:
        shapes |= {
            "q_a_proj.weight": (q_rank, h),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (q, q_rank),
        }
    else:
        shapes["q_proj.weight"] = (q, h)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}
