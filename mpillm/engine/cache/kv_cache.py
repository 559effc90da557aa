"""The paged KV cache: keys and values in blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpillm.engine.kernels.puts import Put, TargetCache, put_table
from mpillm.engine.tensors.rounding import FP8, to_fp8, widen
from mpillm.engine.tensors.segments import fixed_segments
from mpillm.engine.tensors.staging import Staging, to_device


class CachedBlocks(NamedTuple):
    """A sequence's blocks, the number of tokens in them, and its window blocks (see `WindowBlocks`)."""

    blocks: list[int]
    n_tokens: int
    window_blocks: Sequence[int] = ()


class KVCache:
    """Keys and values: [layers, n_blocks + 1, kv_heads, tokens_per_block, head_dim] each; keys are rotated.

    In fp8, a value is the stored number times the scale of its layer and head: `scales` (float32 [layers, 2,
    kv_heads], keys before values; None in another dtype). A piece of a handoff, which one message carries, is
    [layers, parts, kv_heads, tokens, head_dim] of the cache's dtype, contiguous, keys before values. It
    contains no scales, because both instances read the same scales from the weights. A cache of latents (see
    `latent`) has one part, and `values` is `keys`.
    """

    def __init__(
        self,
        n_layers: int,
        n_blocks: int,
        n_kv_heads: int,
        tokens_per_block: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Tensor | None = None,
        n_parts: int = 2,
    ) -> None:
        """`scales`: of an fp8 cache; None: all are 1. `n_parts`: see `ModelConfig.kv_parts`."""
        self.tokens_per_block = tokens_per_block
        self.scales: Tensor | None = None
        if dtype == FP8:
            self.scales = torch.ones(n_layers, 2, n_kv_heads, device=device) if scales is None else scales
            if n_parts == 1:
                self.scales = self.scales[:, :1].expand(-1, 2, -1).contiguous()
        self._shape = (n_layers, n_blocks + 1, n_kv_heads, tokens_per_block, head_dim)
        self.pools = [_zeros(self._shape, dtype, torch.device(device)) for _ in range(n_parts)]
        self.keys, self.values = self.pools[0], self.pools[-1]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks. `copies`: pairs of source and target; no block is both."""
        old, new = to_device(np.array(copies, np.int64).T, self.keys.device)
        for pool in map(_movable, self.pools):
            pool.index_copy_(1, new, pool.index_select(1, old))

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.tokens_per_block)

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int:
        n_layers, n_heads = layers.stop - layers.start, heads.stop - heads.start
        n_each: int = n_layers * n_heads * n_tokens * self._shape[-1] * self.keys.element_size()
        return len(self.pools) * n_each

    @torch.inference_mode()
    def new_piece(self, cached: CachedBlocks, layers: slice, heads: slice) -> Tensor:
        """Return a buffer for a piece of a handoff: uint8 [bytes]."""
        n_bytes = self.piece_bytes(cached.n_tokens, layers, heads)
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.keys.device)

    @torch.inference_mode()
    def read(self, cached: list[CachedBlocks], layers: slice, heads: slice) -> list[Tensor]:
        """Copy some layers and heads. Returns a piece of a handoff for each sequence, uint8 [bytes]."""
        sizes = [self.piece_bytes(one.n_tokens, layers, heads) for one in cached]
        pieces = list(torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=self.keys.device), sizes))
        self.read_into(cached, layers, heads, pieces)
        return pieces

    @torch.inference_mode()
    def read_into(
        self, cached: list[CachedBlocks], layers: slice, heads: slice, pieces: list[Tensor]
    ) -> None:
        """Fill pieces, as `read` does. With a GPU, pieces are in its memory, or pinned in the host's."""
        if self.keys.is_cuda:
            self._copy_on_gpu(cached, layers, heads, pieces, into_pieces=True)
            return
        for (blocks, n_tokens, _), piece in zip(cached, pieces, strict=True):
            n_full, n_last = divmod(n_tokens, self.tokens_per_block)
            for pool, full, end in self._parts(piece, n_tokens, layers, heads):
                full.copy_(pool[:, blocks[:n_full]])
                if n_last:
                    end.copy_(pool[:, blocks[n_full], :, :n_last])

    @torch.inference_mode()
    def write(self, cached: list[CachedBlocks], layers: slice, heads: slice, pieces: list[Tensor]) -> None:
        """Fill blocks with pieces of the same tokens, layers and heads; pieces as in `read_into`."""
        if self.keys.is_cuda:
            self._copy_on_gpu(cached, layers, heads, pieces, into_pieces=False)
            return
        for (blocks, n_tokens, _), piece in zip(cached, pieces, strict=True):
            n_full, n_last = divmod(n_tokens, self.tokens_per_block)
            for pool, full, end in self._parts(piece, n_tokens, layers, heads):
                pool[:, blocks[:n_full]] = full
                if n_last:
                    pool[:, blocks[n_full], :, :n_last] = end

    def _copy_on_gpu(
        self,
        cached: list[CachedBlocks],
        layers: slice,
        heads: slice,
        pieces: list[Tensor],
        *,
        into_pieces: bool,
    ) -> None:
        """Copy all pieces in one kernel, without waiting for it."""
        from mpillm.engine.kernels.handoff_kernels import copy_blocks

        rows: tuple[list[int], ...] = [], [], [], []
        for (blocks, n_tokens, _), piece in zip(cached, pieces, strict=True):
            n, firsts = self.blocks_for(n_tokens), range(0, n_tokens, self.tokens_per_block)
            of_piece = blocks[:n], firsts, [n_tokens] * n, [piece.data_ptr()] * n
            for row, numbers in zip(rows, of_piece, strict=True):
                row += numbers
        table = to_device(np.array(rows, np.int64), self.keys.device)
        keys, values = (_movable(pool[layers]) for pool in (self.keys, self.values))
        copy_blocks(keys, values, table, heads.start, heads.stop - heads.start, into_pieces)

    def put(
        self, puts: list[Put], target: TargetCache, n_layers: int, n_heads: int, staging: Staging
    ) -> None:
        """Copy some layers and heads of sequences into a cache on another GPU, without waiting."""
        from mpillm.engine.kernels.handoff_kernels import put_blocks

        table, n_rows = put_table(puts, self.tokens_per_block)
        keys, values = (_movable(pool) for pool in (self.keys, self.values))
        put_blocks(keys, values, target, staging.to_device(table), n_rows, n_layers, n_heads)

    def _parts(
        self, piece: Tensor, n_tokens: int, layers: slice, heads: slice
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return views for keys, then values: of the cache, the piece's full blocks, the piece's last tokens.

        Shapes: [layers, n_blocks + 1, kv_heads, tokens_per_block, head_dim], [layers, full blocks, kv_heads,
        tokens_per_block, head_dim], [layers, kv_heads, tokens, head_dim].
        """
        size, head_dim = self._shape[-2:]
        n_full = n_tokens // size
        n_layers, n_heads = layers.stop - layers.start, heads.stop - heads.start
        handed = piece.view(self.keys.dtype).view(n_layers, len(self.pools), n_heads, n_tokens, head_dim)
        parts = []
        for pool, part in zip(self.pools, handed.unbind(1), strict=True):
            full = part[:, :, : n_full * size].view(n_layers, n_heads, n_full, size, head_dim).transpose(1, 2)
            parts.append((pool[layers, :, heads], full, part[:, :, n_full * size :]))
        return parts


def _movable(pool: Tensor) -> Tensor:
    """Return the pool in a dtype that any GPU can move: fp8 as bytes."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def rounded(x: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Convert x [..., kv_heads, head_dim] to a cache's `dtype`, with `scales` [kv_heads] in fp8."""
    return x.to(dtype) if scales is None else to_fp8(x, scales[:, None])


def widened(cached: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Convert values of a cache, [..., kv_heads, tokens, head_dim], to `dtype`."""
    return cached.to(dtype) if scales is None else widen(cached).mul_(scales[:, None, None]).to(dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU, memory is allocated when it is first used; PyTorch would write it all."""
    if device.type != "cpu":
        with fixed_segments():  # other processes access the cache (see `peer_memory`)
            return torch.zeros(shape, dtype=dtype, device=device)
    return lazy_zeros(shape, dtype)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in the host's memory, which is allocated when it is first used."""
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(dtype).view(shape)
