"""The paged KV cache: memory in blocks of tokens, and who holds which block."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

    A handed-over cache is [layers, 2, kv_heads, tokens, head_dim] of the cache's dtype, contiguous, keys before values.
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

    def handoff_bytes(self, n_tokens: int) -> int:
        n_layers, _, n_kv_heads, _, head_dim = self._shape
        return 2 * n_layers * n_kv_heads * n_tokens * head_dim * self.keys.element_size()

    @torch.inference_mode()
    def read(self, blocks: list[int], n_tokens: int) -> NDArray[np.uint8]:
        """A copy of the first `n_tokens` tokens in `blocks`, in the form of the handoff."""
        n_layers, _, n_kv_heads, _, head_dim = self._shape
        out = self.keys.new_empty(n_layers, 2, n_kv_heads, n_tokens, head_dim)
        for i, pool in enumerate((self.keys, self.values)):
            out[:, i] = pool[:, blocks].transpose(1, 2).reshape(n_layers, n_kv_heads, -1, head_dim)[:, :, :n_tokens]
        buffer: NDArray[np.uint8] = out.view(torch.uint8).cpu().numpy().reshape(-1)
        return buffer

    @torch.inference_mode()
    def write(self, blocks: list[int], n_tokens: int, buffer: NDArray[np.uint8]) -> None:
        """Fill `blocks` from a handoff of `n_tokens` tokens."""
        n_layers, _, n_kv_heads, size, head_dim = self._shape
        handed = torch.from_numpy(buffer).to(self.keys.device).view(self.keys.dtype).view(n_layers, 2, n_kv_heads, n_tokens, head_dim)
        for i, pool in enumerate((self.keys, self.values)):
            for j, block in enumerate(blocks):
                part = handed[:, i, :, j * size : (j + 1) * size]
                pool[:, block, :, : part.shape[2]] = part


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU zeros whose memory the system provides as it is used: NumPy's are, PyTorch's are written at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(n_bytes, np.uint8)).view(dtype).view(shape)
