"""The paged KV cache: memory in blocks of tokens, and who holds which block."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from mpillm.engine.device import to_device

NULL_BLOCK = 0  # never given out: what short rows of a block table are filled with


class BlockAllocator:
    """Gives out block numbers 1 to n, the lowest free one first, so that the blocks in use stay close together."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(1, n_blocks + 1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` blocks; the caller has seen that `n_free` is enough."""
        return [heapq.heappop(self._free) for _ in range(n)]

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


class KVCache:
    """Keys and values, each [layers, n_blocks + 1, kv_heads, tokens_per_block, head_dim]; keys are rotated (see `model`).

    A piece of a handoff is [layers, 2, kv_heads, tokens, head_dim] of the cache's dtype, contiguous, keys before values.
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
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self._shape = (n_layers, n_blocks + 1, n_kv_heads, tokens_per_block, head_dim)
        self.keys, self.values = (_zeros(self._shape, dtype, torch.device(device)) for _ in range(2))

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.tokens_per_block)

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int:
        n_layers, n_heads = layers.stop - layers.start, heads.stop - heads.start
        n_bytes: int = 2 * n_layers * n_heads * n_tokens * self._shape[-1] * self.keys.element_size()
        return n_bytes

    @torch.inference_mode()
    def new_piece(self, n_tokens: int, layers: slice, heads: slice) -> Tensor:
        """Room for a piece of a handoff: uint8 [bytes]."""
        return torch.empty(self.piece_bytes(n_tokens, layers, heads), dtype=torch.uint8, device=self.keys.device)

    @torch.inference_mode()
    def read(self, blocks: list[int], n_tokens: int, layers: slice, heads: slice) -> Tensor:
        """A copy of some layers and heads of the first `n_tokens` tokens in `blocks`: a piece of a handoff, uint8 [bytes]."""
        piece = self.new_piece(n_tokens, layers, heads)
        if piece.is_cuda:
            self._copy_on_gpu(blocks, n_tokens, layers, heads, piece, into_piece=True)
            return piece
        n_whole, rest = divmod(n_tokens, self.tokens_per_block)
        for held, whole, end in self._parts(piece, n_tokens, layers, heads):
            whole.copy_(held[:, blocks[:n_whole]])
            if rest:
                end.copy_(held[:, blocks[n_whole], :, :rest])
        return piece

    @torch.inference_mode()
    def write(self, blocks: list[int], n_tokens: int, layers: slice, heads: slice, piece: Tensor) -> None:
        """Fill `blocks` from what `read` gave for the same tokens, layers and heads."""
        if piece.is_cuda:
            self._copy_on_gpu(blocks, n_tokens, layers, heads, piece, into_piece=False)
            return
        n_whole, rest = divmod(n_tokens, self.tokens_per_block)
        for held, whole, end in self._parts(piece, n_tokens, layers, heads):
            held[:, blocks[:n_whole]] = whole
            if rest:
                held[:, blocks[n_whole], :, :rest] = end

    def _copy_on_gpu(self, blocks: list[int], n_tokens: int, layers: slice, heads: slice, piece: Tensor, *, into_piece: bool) -> None:
        """In one kernel, without waiting."""
        from mpillm.engine.kernels import copy_blocks

        there = to_device(np.array(blocks[: self.blocks_for(n_tokens)], np.int32), piece.device)
        handed = piece.view(self.keys.dtype).view(layers.stop - layers.start, 2, heads.stop - heads.start, n_tokens, self._shape[-1])
        copy_blocks(self.keys[layers], self.values[layers], there, heads.start, handed, into_piece)

    def _parts(self, piece: Tensor, n_tokens: int, layers: slice, heads: slice) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Views for keys, then for values: the cache's layers and heads, the piece's tokens of whole blocks as such, those behind them.

        [layers, n_blocks + 1, kv_heads, tokens_per_block, head_dim], [layers, whole blocks, kv_heads, tokens_per_block, head_dim], [layers,
        kv_heads, tokens, head_dim].
        """
        size, head_dim = self._shape[-2:]
        n_whole = n_tokens // size
        n_layers, n_heads = layers.stop - layers.start, heads.stop - heads.start
        handed = piece.view(self.keys.dtype).view(n_layers, 2, n_heads, n_tokens, head_dim)
        parts = []
        for pool, part in zip((self.keys, self.values), handed.unbind(1), strict=True):
            whole = part[:, :, : n_whole * size].view(n_layers, n_heads, n_whole, size, head_dim).transpose(1, 2)
            parts.append((pool[layers, :, heads], whole, part[:, :, n_whole * size :]))
        return parts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU zeros whose memory the system provides as it is used: NumPy's are, PyTorch's are written at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(dtype).view(shape)
