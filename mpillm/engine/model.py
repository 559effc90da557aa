"""Llama and Mixtral, over a flat batch: a step's tokens are rows, whatever sequence they belong to.

`Weights` has the rows of the q and k projections reordered, so that the two halves that a rotary embedding turns against each other lie
side by side; the rotation is then one complex product, in place. Scores do not change; a cached key has its pairs in that order.

It gives a rank its own heads, intermediate values, experts and vocabulary. So the model runs as it is written, on fewer of them;
what remains is to sum over the TP group behind `o`, behind the feed-forward, and behind the embedding.

What is not a product is somebody else's: attention comes with the step, the rest is `ops` or, on a GPU, `kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mpillm.engine import ops
from mpillm.engine.linear import GroupedLinear, Linear
from mpillm.engine.model_config import ModelConfig, RopeScaling
from mpillm.engine.ops import Choice
from mpillm.engine.parallel import Groups
from mpillm.engine.weights import Weights


class Attention(Protocol):
    """Of one step, called once per layer: qkv [rows, heads + 2 * kv_heads, head_dim] to [rows, heads * head_dim].

    It turns queries and keys by their positions, stores keys and values, and attends.
    """

    def __call__(self, layer: int, qkv: Tensor) -> Tensor: ...


class Ops(Protocol):
    """See `ops`."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def route(self, scores: Tensor, n_chosen: int, experts: range) -> Choice: ...

    def combine(self, y: Tensor, weights: Tensor) -> Tensor: ...


class Mlp:
    """The dense feed-forward, its intermediate values split over the TP group; the result is a part of a sum over it."""

    def __init__(self, weights: Weights, ops: Ops, gate_up: str, down: str) -> None:
        self._ops = ops
        self.gate_up = weights.linear(gate_up)
        self.down = weights.linear(down)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._ops.silu_mul(self.gate_up(x)))


class Mixture:
    """The best experts of many for each row, weighted; this rank adds what its own contribute."""

    def __init__(self, weights: Weights, prefix: str, experts: range, ops: Ops) -> None:
        self._ops = ops
        self._experts = experts
        self._n_chosen = weights.config.n_experts_per_token
        self.router = Linear(weights.get(f"{prefix}.gate"))
        self.gate_up = GroupedLinear([weights.linear(f"{prefix}.experts.{i}.w13") for i in experts])
        self.down = GroupedLinear([weights.linear(f"{prefix}.experts.{i}.w2") for i in experts])

    def __call__(self, x: Tensor) -> Tensor:
        choice = self._ops.route(self.router(x), self._n_chosen, self._experts)
        hidden = self._ops.silu_mul(self.gate_up(x, choice))
        return self._ops.combine(self.down(hidden, choice), choice.weights)


class Layer:
    def __init__(self, weights: Weights, index: int, experts: range, ops: Ops) -> None:
        prefix = f"model.layers.{index}"
        self.input_norm = weights.get(f"{prefix}.input_layernorm")
        self.qkv = weights.linear(f"{prefix}.self_attn.qkv_proj")
        self.o = weights.linear(f"{prefix}.self_attn.o_proj")
        self.post_norm = weights.get(f"{prefix}.post_attention_layernorm")
        self.mlp: Mlp | Mixture
        if weights.config.n_experts:
            self.mlp = Mixture(weights, f"{prefix}.block_sparse_moe", experts, ops)
        else:
            self.mlp = Mlp(weights, ops, f"{prefix}.mlp.gate_up_proj", f"{prefix}.mlp.down_proj")


class Llama:
    """This rank's weights and its part of the forward pass, for Llama and Mixtral; holds no state of any sequence."""

    def __init__(self, config: ModelConfig, weights: Weights, max_seq_len: int, groups: Groups, ops: Ops = ops) -> None:
        """Reads one layer after the other from `weights`; ConfigError if a tensor cannot be read."""
        layout = groups.layout
        self.config = config
        self._groups = groups
        self._ops = ops
        self._n_heads = layout.n_heads(config) + 2 * _length(layout.kv_heads(config))
        self.layers = [Layer(weights, i, layout.experts(config), ops) for i in layout.layers(config)]
        self.lm_head: Linear | None = None
        if layout.is_first_stage or (layout.is_last_stage and config.tie_word_embeddings):
            self.embedding = weights.get("model.embed_tokens")
        if layout.is_last_stage:
            self._norm = weights.get("model.norm")
            self.lm_head = Linear(self.embedding if config.tie_word_embeddings else weights.get("lm_head"))
        self.vocabulary = layout.vocabulary(config)
        self.rotations = _rotations(config, max_seq_len).to(weights.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding for `tokens` (int64)."""
        if self._groups.layout.tp_size == 1:
            return self.embedding.index_select(0, tokens)
        mine = (tokens >= self.vocabulary.start) & (tokens < self.vocabulary.stop)
        x = self.embedding.index_select(0, torch.where(mine, tokens - self.vocabulary.start, 0))
        return self._groups.all_reduce(x.mul_(mine[:, None]))

    def forward(self, x: Tensor, attention: Attention, wanted: Tensor | None, layer_stored: Callable[[int], None] | None = None) -> Tensor:
        """`x`, the step's rows (changed), through this stage's layers; the last stage gives rows `wanted` (int64; None: all), normed.

        `layer_stored` is called with each of this stage's layers as soon as the cache has its keys and values.
        """
        all_reduce, eps = self._groups.all_reduce, self.config.rms_norm_eps
        normed = self._ops.add_norm(x, None, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            attended = attention(i, layer.qkv(normed).view(len(x), self._n_heads, self.config.head_dim))
            if layer_stored is not None:
                layer_stored(i)
            is_last = i == len(self.layers) - 1
            if self.lm_head is not None and is_last and wanted is not None:  # nothing reads the other rows any more
                x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
            normed = self._ops.add_norm(x, all_reduce(layer.o(attended)), layer.post_norm, eps)
            delta = all_reduce(layer.mlp(normed))
            if is_last and self.lm_head is None:
                return x.add_(delta)
            normed = self._ops.add_norm(x, delta, self._norm if is_last else self.layers[i + 1].input_norm, eps)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """This rank's columns of the logits, in the weights' dtype, of what `forward` gave on the last stage."""
        assert self.lm_head is not None
        return self.lm_head(normed)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _rotations(config: ModelConfig, max_seq_len: int) -> Tensor:
    """exp(i * position * frequency): complex64 [max_seq_len, head_dim / 2]."""
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(max_seq_len).float(), _scaled(frequencies, config.rope_scaling))
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "llama3":
        # Low frequencies are slowed by the factor, high ones kept, those between blended.
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    return frequencies / scaling.factor
