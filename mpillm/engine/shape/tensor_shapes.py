"""The tensors that a checkpoint of a model must have: names and shapes, from the model's composition."""

from __future__ import annotations

from collections.abc import Iterator

from mpillm.engine.shape.composition import (
    CORRECTION,
    FUSED,
    AnyAttention,
    AnyFeedForward,
    AnyLayer,
    GatedFeedForward,
    GroupedQueryAttention,
    Latent,
    LayerNorm,
    Mixture,
    Norm,
    PreNorm,
)
from mpillm.engine.shape.model_config import ModelConfig

_Shape = tuple[int, ...]
_Shapes = Iterator[tuple[str, _Shape]]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint must have."""
    h, family = config.hidden_size, config.family
    shapes: dict[str, _Shape] = {"model.embed_tokens.weight": (config.vocab_size, h)}
    shapes |= _of_norm(family.norm, h)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for i in range(config.n_layers + config.n_draft_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _of_layer(config.layer(i), config)}
        if i >= config.n_layers:
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _of_mtp(config)}
    if family.embedding.has_positions:
        shapes["model.embed_positions.weight"] = (config.max_position_embeddings, h)
    return shapes


def _of_layer(layer: AnyLayer, config: ModelConfig) -> _Shapes:
    h = config.hidden_size
    norms: list[Norm] = [layer.norm, layer.post_norm]
    if not isinstance(layer, PreNorm):
        norms += [layer.attention_norm, layer.after_norm]
    for norm in norms:
        yield from _of_norm(norm, h)
    for name, shape in _of_attention(layer.attention, config):
        yield f"self_attn.{name}", shape
    yield from _of_feed_forward(layer.feed_forward, h)


def _of_norm(norm: Norm, width: int) -> _Shapes:
    yield f"{norm.name}.weight", (width,)
    if isinstance(norm, LayerNorm):
        yield f"{norm.name}.bias", (width,)


def _product(name: str, n_out: int, n_in: int, bias: bool = False) -> _Shapes:
    yield f"{name}.weight", (n_out, n_in)
    if bias:
        yield f"{name}.bias", (n_out,)


def _of_attention(attention: AnyAttention, config: ModelConfig) -> _Shapes:
    if not isinstance(attention, GroupedQueryAttention):
        yield from _of_latent(attention.sizes, config.n_heads, config.hidden_size)
        return
    h, d = config.hidden_size, config.head_dim
    for name, n_heads in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads)):
        yield from _product(f"{name}_proj", n_heads * d, h, attention.qkv_bias)
    yield from _product("o_proj", h, config.n_heads * d, attention.o_bias)
    if attention.qk_norm:
        yield from (("q_norm.weight", (d,)), ("k_norm.weight", (d,)))
    if attention.sinks:
        yield "sinks.weight", (config.n_heads,)


def _of_latent(sizes: Latent, n_heads: int, h: int) -> _Shapes:
    q, rank, q_rank = n_heads * sizes.query_dim, sizes.kv_lora_rank, sizes.q_lora_rank
    yield from _product("kv_a_proj_with_mqa", sizes.head_dim, h)
    yield "kv_a_layernorm.weight", (rank,)
    yield from _product("kv_b_proj", n_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), rank)
    yield from _product("o_proj", h, n_heads * sizes.v_head_dim)
    if q_rank:
        yield from _product("q_a_proj", q_rank, h)
        yield "q_a_layernorm.weight", (q_rank,)
        yield from _product("q_b_proj", q, q_rank)
    else:
        yield from _product("q_proj", q, h)


def _of_feed_forward(feed_forward: AnyFeedForward, h: int) -> _Shapes:
    prefix = feed_forward.prefix
    if isinstance(feed_forward, Mixture):
        yield from _of_mixture(feed_forward, h)
    elif isinstance(feed_forward, GatedFeedForward):
        yield from _gated(prefix, h, feed_forward.size)
    else:
        yield from _product(f"{prefix}.c_fc", feed_forward.size, h, bias=True)
        yield from _product(f"{prefix}.c_proj", h, feed_forward.size, bias=True)


def _gated(
    prefix: str, h: int, size: int, gate_up: str = "gate_up_proj", down: str = "down_proj", bias: bool = False
) -> _Shapes:
    for name in FUSED[gate_up]:
        yield from _product(f"{prefix}.{name}", size, h, bias)
    yield from _product(f"{prefix}.{down}", h, size, bias)


def _of_mixture(mixture: Mixture, h: int) -> _Shapes:
    router, names = f"{mixture.prefix}.{mixture.router}", (mixture.gate_up, mixture.down)
    yield from _product(router, mixture.n_experts, h, mixture.bias)
    if mixture.groups is not None:
        yield f"{router}.{CORRECTION}.weight", (mixture.n_experts,)
        yield from _gated(f"{mixture.prefix}.shared_experts", h, mixture.groups.shared_size, *names)
    for expert in range(mixture.n_experts):
        yield from _gated(f"{mixture.prefix}.experts.{expert}", h, mixture.size, *names, mixture.bias)


def _of_mtp(config: ModelConfig) -> _Shapes:
    """Yield the tensors that a layer of multi-token prediction has in addition to the model's layers."""
    h = config.hidden_size
    yield from (("enorm.weight", (h,)), ("hnorm.weight", (h,)))
    yield from _product("eh_proj", h, 2 * h)
    yield "shared_head.norm.weight", (h,)
    yield from _product("shared_head.head", config.vocab_size, h)
