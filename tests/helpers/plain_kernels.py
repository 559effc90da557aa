"""`kernels.step_kernels` in plain PyTorch on any device: its oracle on a GPU, its stand-in without one."""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.cache.kv_cache import rounded, widened
from mpillm.engine.model.ops import add_norm, combine, route, scaled, silu_mul

__all__ = [
    "add_norm",
    "combine",
    "context_attention",
    "context_tile",
    "decode_attention",
    "embed",
    "rotate_store",
    "route",
    "scaled",
    "silu_mul",
]


def embed(weight: Tensor, tokens: Tensor, slots: Tensor, last: Tensor, first: int) -> Tensor:
    tokens = torch.where(tokens < 0, last[slots], tokens) - first
    mine = (tokens >= 0) & (tokens < len(weight))
    return weight[tokens.clamp(0, len(weight) - 1)] * mine[:, None]


def rotate_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    rotations: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    n_heads: int,
) -> Tensor:
    n, d = len(qkv), qkv.shape[2]
    k, size = keys.shape[1:3]
    pairs = qkv[:, : n_heads + k].float().view(n, n_heads + k, d // 2, 2)
    turned = torch.view_as_complex(pairs) * torch.view_as_complex(rotations[positions].view(n, 1, d // 2, 2))
    qkv[:, : n_heads + k] = torch.view_as_real(turned).flatten(-2).to(qkv.dtype)
    block = table[slots, positions // size].long()
    key_scales, value_scales = (None, None) if scales is None else scales
    keys[block, :, positions % size] = rounded(qkv[:, n_heads : n_heads + k], keys.dtype, key_scales)
    values[block, :, positions % size] = rounded(qkv[:, n_heads + k :], values.dtype, value_scales)
    return qkv


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None, blocks: Tensor, positions: Tensor
) -> Tensor:
    """Attend with q [rows, heads, head_dim] of one sequence, in float32."""
    k, size, d = keys.shape[1:]
    n = int(positions.max()) + 1
    blocks = blocks[: -(-n // size)].long()
    pools = zip((keys, values), (None, None) if scales is None else scales, strict=True)
    wide = (widened(pool[blocks], torch.float32, some) for pool, some in pools)
    keys, values = (
        x.transpose(0, 1).reshape(k, -1, d)[:, :n].repeat_interleave(q.shape[1] // k, 0) for x in wide
    )
    scores = torch.einsum("rhd,htd->rht", q.float(), keys) / d**0.5
    hidden = torch.arange(n, device=q.device) > positions[:, None]
    return torch.einsum(
        "rht,htd->rhd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), values
    ).flatten(1)


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    n_heads: int,
) -> None:
    for i, (slot, position) in enumerate(zip(slots.tolist(), positions, strict=True)):
        out[i] = _attend(qkv[i : i + 1, :n_heads], keys, values, scales, table[slot], position[None])[0].to(
            out.dtype
        )


def context_tile(n_heads: int, n_kv_heads: int, dtype: torch.dtype) -> int:
    return 16


def context_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    n_heads: int,
    cached: bool,
) -> None:
    for row, n, position, slot, _ in tiles.tolist():
        positions = torch.arange(position, position + n, device=qkv.device)
        out[row : row + n] = _attend(
            qkv[row : row + n, :n_heads], keys, values, scales, table[slot], positions
        ).to(out.dtype)
