"""Llama and Mixtral, over a flat batch: a step's tokens are rows, whatever sequence they belong to.

Rows of the q and k projections are reordered at load so that the two halves that a rotary embedding turns against each other lie
side by side; the rotation is then one complex product, in place. Scores do not change; a cached key has its pairs in that order.

`Shards` gives a rank its own heads, intermediate values, experts and vocabulary. So the model runs as it is written, on fewer of them;
what remains is to sum over the TP group behind `o`, behind the feed-forward, and behind the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.attention import StepAttention
from mpillm.engine.linear import Linear
from mpillm.engine.model_config import ModelConfig, RopeScaling
from mpillm.engine.parallel import Groups
from mpillm.engine.weights import Shards, WeightSource


class Mlp:
    """The dense feed-forward, its intermediate values split over the TP group; the result is a part of a sum over it."""

    def __init__(self, shards: Shards, gate: str, up: str, down: str) -> None:
        self.gate_up = Linear(torch.cat([shards.get(gate), shards.get(up)]))
        self.down = Linear(shards.get(down))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate, inplace=True) * up)


class Mixture:
    """The best experts of many for each row, weighted; this rank adds what its own contribute."""

    def __init__(self, shards: Shards, prefix: str, experts: range) -> None:
        self._n_chosen = shards.config.n_experts_per_token
        self._router = Linear(shards.get(f"{prefix}.gate"))
        self.experts = {i: Mlp(shards, *(f"{prefix}.experts.{i}.{w}" for w in ("w1", "w3", "w2"))) for i in experts}

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._router(x).float().softmax(-1).topk(self._n_chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for i, expert in self.experts.items():
            rows, places = torch.where(chosen == i)
            if len(rows):
                out.index_add_(0, rows, expert(x.index_select(0, rows)) * weights[rows, places, None])
        return out


class Layer:
    def __init__(self, shards: Shards, index: int, experts: range) -> None:
        prefix, head_dim = f"model.layers.{index}", shards.config.head_dim

        def get_rotary(name: str) -> Tensor:
            weight = shards.get(f"{prefix}.self_attn.{name}")
            return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

        self.input_norm = shards.get(f"{prefix}.input_layernorm")
        self.qkv = Linear(torch.cat([get_rotary("q_proj"), get_rotary("k_proj"), shards.get(f"{prefix}.self_attn.v_proj")]))
        self.o = Linear(shards.get(f"{prefix}.self_attn.o_proj"))
        self.post_norm = shards.get(f"{prefix}.post_attention_layernorm")
        self.mlp: Mlp | Mixture
        if shards.config.n_experts:
            self.mlp = Mixture(shards, f"{prefix}.block_sparse_moe", experts)
        else:
            self.mlp = Mlp(shards, *(f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down")))


class Llama:
    """This rank's weights and its part of the forward pass, for Llama and Mixtral; holds no state of any sequence."""

    def __init__(self, config: ModelConfig, source: WeightSource, dtype: torch.dtype, max_seq_len: int, groups: Groups) -> None:
        """Reads one layer after the other from `source`; ConfigError if a tensor cannot be read."""
        layout = groups.layout
        shards = Shards(source, config, layout, dtype)
        self.config = config
        self._groups = groups
        self._heads = layout.n_heads(config), _length(layout.kv_heads(config))
        self.layers = [Layer(shards, i, layout.experts(config)) for i in layout.layers(config)]
        self.lm_head: Linear | None = None
        if layout.is_first_stage or (layout.is_last_stage and config.tie_word_embeddings):
            self._embedding = shards.get("model.embed_tokens")
        if layout.is_last_stage:
            self._norm = shards.get("model.norm")
            self.lm_head = Linear(self._embedding if config.tie_word_embeddings else shards.get("lm_head"))
        self._vocabulary = layout.vocabulary(config)
        self._rotations = _rotations(config, max_seq_len)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding for `tokens` (int64)."""
        if self._groups.layout.tp_size == 1:
            return self._embedding.index_select(0, tokens)
        mine = (tokens >= self._vocabulary.start) & (tokens < self._vocabulary.stop)
        x = self._embedding.index_select(0, torch.where(mine, tokens - self._vocabulary.start, 0))
        return self._groups.all_reduce(x.mul_(mine[:, None]))

    def forward(self, x: Tensor, attention: StepAttention, wanted: Tensor, layer_stored: Callable[[int], None] | None = None) -> Tensor:
        """`x`, the step's rows, through this stage's layers; the last stage gives this rank's columns of the logits of rows `wanted`.

        wanted: int64; logits: float32 [len(wanted), this rank's vocabulary]. `layer_stored` is called with each of this stage's layers as
        soon as the cache has its keys and values.
        """
        (n_heads, n_kv_heads), all_reduce = self._heads, self._groups.all_reduce
        turned = n_heads + n_kv_heads
        rotations = self._rotations[attention.positions][:, None]
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normed(x, layer.input_norm)).view(len(x), turned + n_kv_heads, self.config.head_dim)
            _rotate(qkv[:, :turned], rotations)
            attended = attention(i, qkv)
            if layer_stored is not None:
                layer_stored(i)
            if self.lm_head is not None and i == len(self.layers) - 1:  # nothing reads the other rows any more
                x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
            x.add_(all_reduce(layer.o(attended)))
            x.add_(all_reduce(layer.mlp(self._normed(x, layer.post_norm))))
        return x if self.lm_head is None else self.lm_head(self._normed(x, self._norm)).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _rotate(x: Tensor, rotations: Tensor) -> None:
    """Turn the pairs of x [rows, heads, head_dim] in place by rotations [rows, 1, head_dim / 2] (complex64)."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(*x.shape[:2], -1, 2)).mul_(rotations)
    else:
        turned = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2)).mul_(rotations)
        x.copy_(torch.view_as_real(turned).view(x.shape))


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
