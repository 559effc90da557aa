"""`kernels.step_kernels` in plain PyTorch on any device: its oracle on a GPU, its stand-in without one."""

from __future__ import annotations

import torch
from torch import Tensor

from mpillm.engine.cache.kv_cache import rounded, widened
from mpillm.engine.kernels.ops import add_norm, combine, gated, route, route_grouped, scaled

__all__ = [
    "add_norm",
    "combine",
    "context_attention",
    "context_tile",
    "copied_rows",
    "decode_attention",
    "embed",
    "fp8_context_attention",
    "gated",
    "rotate_store",
    "route",
    "route_grouped",
    "scaled",
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
    out: Tensor | None = None,
) -> Tensor:
    n, d = len(qkv), qkv.shape[2]
    k, size = keys.shape[1:3]
    pairs = qkv[:, : n_heads + k].float().view(n, n_heads + k, d // 2, 2)
    turned = torch.view_as_complex(pairs) * torch.view_as_complex(rotations[positions].view(n, 1, d // 2, 2))
    qkv[:, : n_heads + k] = torch.view_as_real(turned).flatten(-2).to(qkv.dtype)
    block = table[slots, positions // size].long()
    key_scales, value_scales = (None, None) if scales is None else scales
    for pool, own, some in (
        (keys, qkv[:, n_heads : n_heads + k], key_scales),
        (values, qkv[:, n_heads + k :], value_scales),
    ):
        held = rounded(own, pool.dtype, some)
        if pool is keys or values.data_ptr() != keys.data_ptr():
            pool[block, :, positions % size] = held
        own.copy_(held.to(qkv.dtype))
    return qkv if out is None else out.copy_(qkv)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with q [rows, heads, head_dim] to float32 [tokens, kv_heads, head_dim]."""
    n, d = int(positions.max()) + 1, q.shape[2]
    keys, values = (
        x.transpose(0, 1)[:, :n].repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (keys, values)
    )
    scores = torch.einsum("rhd,htd->rht", q.float(), keys) / d**0.5
    token = torch.arange(n, device=q.device)
    hidden = token > positions[:, None]
    if window:
        hidden |= token <= positions[:, None] - window
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(q), -1, 1)], dim=2)
    return torch.einsum("rht,htd->rhd", scores.softmax(-1)[:, :, :n], values).flatten(1)


def _in_blocks(
    keys: Tensor, values: Tensor, scales: Tensor | None, blocks: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    """Return the first n tokens of a sequence in float32, with the cache's scales."""
    blocks = blocks[: -(-n // keys.shape[2])].long()
    pools = zip((keys, values), (None, None) if scales is None else scales, strict=True)
    some, others = (
        widened(pool[blocks], torch.float32, scale).transpose(1, 2).flatten(0, 1)[:n] for pool, scale in pools
    )
    return some, others


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
    window: int = 0,
    sinks: Tensor | None = None,
    rank: int = 0,
) -> None:
    for i, (slot, position) in enumerate(zip(slots.tolist(), positions, strict=True)):
        held = _in_blocks(keys, values, scales, table[slot], int(position) + 1)
        out[i] = _attend(qkv[i : i + 1, :n_heads], *held, position[None], window, sinks)[0].to(out.dtype)


def context_tile(
    n_heads: int, n_kv_heads: int, dtype: torch.dtype, rank: int = 0, is_scaled: bool = False
) -> int:
    return 16


def copied_rows(
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    copies: Tensor,
    n_rows: int,
    longest: int,
    dtype: torch.dtype,
) -> Tensor:
    rows = torch.full((n_rows, 2, *keys.shape[1:4:2]), torch.nan, dtype=dtype, device=keys.device)
    for slot, n, first in copies.tolist():
        assert n <= longest
        for i, pool in enumerate((keys, values)):
            rows[first : first + n, i] = pool[table[slot].long()].transpose(1, 2).flatten(0, 1)[:n].to(dtype)
    return rows.flatten(1, 2)


def context_attention(
    qkv: Tensor,
    copied: Tensor | None,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    table: Tensor,
    tiles: Tensor,
    out: Tensor,
    n_heads: int,
    cached: bool,
    window: int = 0,
    sinks: Tensor | None = None,
    rank: int = 0,
) -> None:
    k = keys.shape[1]
    rows = qkv[:, n_heads:] if copied is None else copied
    for row, n, position, slot, n_cached, first in tiles.tolist():
        assert cached or not n_cached
        n_own = position + n - n_cached
        own = rows[first : first + n_own].float().view(n_own, 2, k, -1).transpose(0, 1)
        if scales is not None:
            own = own * scales.view(2, 1, k, 1)
        held = _in_blocks(keys, values, scales, table[slot], n_cached)
        some, others = (torch.cat(parts) for parts in zip(held, own, strict=True))
        positions = torch.arange(position, position + n, device=qkv.device)
        q = qkv[row : row + n, :n_heads]
        out[row : row + n] = _attend(q, some, others, positions, window, sinks).to(out.dtype)


def fp8_context_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor,
    table: Tensor,
    copies: Tensor,
    n_rows: int,
    longest: int,
    tiles: Tensor,
    out: Tensor,
    n_heads: int,
) -> None:
    """Multiply in float32."""
    copied = copied_rows(keys, values, table, copies, n_rows, longest, torch.float32)
    context_attention(qkv, copied, keys, values, scales, table, tiles, out, n_heads, False)
