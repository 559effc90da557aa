"""Latent attention (DeepSeek V3): all heads read one short vector of each token, and no more is cached.

A token's key is its latent and a few rotated values; its value is the latent. The matrix that makes keys from
latents is multiplied into the queries. The matrix that makes values from latents is multiplied into the
result. So one KV head of `Latent.head_dim` values serves all query heads, with the kernels of any model and a
cache of keys alone. If a kernel reads a key as a value, it has a few additional numbers, which the result
ignores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.kernels import ops
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.kernels.ops import UnscaledProduct
from mpillm.engine.model.projections import OutputProduct
from mpillm.engine.model.step_parts import LayerKind
from mpillm.engine.shape.composition import Latent
from mpillm.engine.weights.rank_weights import Weights

_EPS = 1e-6  # of both norms; the value in config.json does not apply


class LatentProjections:
    """Implements `layers.Projections`."""

    def __init__(self, weights: Weights, prefix: str, sizes: Latent, output: OutputProduct) -> None:
        """`prefix`: of its tensors."""
        self.kind = LayerKind(rank=sizes.kv_lora_rank)
        self._sizes = sizes
        self._output = output
        self._q_a: Linear | None = None
        if sizes.q_lora_rank:
            self._q_a = weights.linear(f"{prefix}.q_a_proj")
            self._q_norm = weights.get(f"{prefix}.q_a_layernorm")
        self._q = weights.linear(f"{prefix}.{'q_b_proj' if sizes.q_lora_rank else 'q_proj'}")
        self._kv = weights.linear(f"{prefix}.kv_a_proj_with_mqa")
        self._kv_norm = weights.get(f"{prefix}.kv_a_layernorm")
        kv_weights = weights.dense(f"{prefix}.kv_b_proj")
        kv_weights = kv_weights.view(-1, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.kv_lora_rank)
        keys, values = kv_weights[:, : sizes.qk_nope_head_dim], kv_weights[:, sizes.qk_nope_head_dim :]
        # Attention divides scores by the root of the cached head size.
        self._scale = (sizes.head_dim / sizes.query_dim) ** 0.5 * weights.config.score_factor
        self._keys, self._values = keys.contiguous(), values.transpose(1, 2).contiguous()

    def rounds(self, n_rows: int) -> bool:
        """Return False (see `Linear.rounds`): several products read the input."""
        return False

    def qkv(self, x: Tensor) -> Tensor:
        """Return [rows, heads + 2, head_dim]: queries, the key, the value."""
        sizes, rank = self._sizes, self._sizes.kv_lora_rank
        q = x if self._q_a is None else ops.norm(self._q_a(x), self._q_norm, _EPS)
        h = len(self._keys)
        q = self._q(q).view(len(x), h, sizes.query_dim).mul_(self._scale)
        plain, turned = q[:, :, : sizes.qk_nope_head_dim], q[:, :, sizes.qk_nope_head_dim :]
        kv = self._kv(x)
        out = x.new_zeros(len(x), h + 2, sizes.head_dim)
        out[:, :h, :rank] = torch.bmm(plain.transpose(0, 1), self._keys).transpose(0, 1)
        out[:, :h, rank:] = turned
        out[:, h:, :rank] = ops.norm(kv[:, :rank], self._kv_norm, _EPS)[:, None]
        out[:, h, rank:] = kv[:, rank:]
        return out

    def output(self, attended: Tensor, onto: Tensor | None = None) -> Tensor | UnscaledProduct | None:
        return self._output(self._results(attended), onto)

    def _results(self, attended: Tensor) -> Tensor:
        """Return [rows, heads * v_head_dim] of [rows, heads * head_dim]."""
        latents = attended.view(len(attended), len(self._values), self._sizes.head_dim)
        latents = latents[:, :, : self._sizes.kv_lora_rank]
        return torch.bmm(latents.transpose(0, 1), self._values).transpose(0, 1).flatten(1)
