"""Blocks of a KV cache in host memory (see `HostBlocks`)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache, lazy_zeros
from mpillm.engine.schedule.host_blocks import BlockCopy


class HostCache:
    """A rank's part of the blocks in host memory: all layers and heads of its KV cache.

    Each block is contiguous, as a piece of a handoff. With a GPU, the memory is pinned, and a kernel reads
    and writes it directly.
    """

    def __init__(self, cache: KVCache, n_blocks: int) -> None:
        """Take the memory: on a CPU as it is used; with a GPU here, in 0.4 s per GB.

        Raises ConfigError if the memory cannot be pinned.
        """
        n_layers, _, n_heads, self._n_tokens, _ = cache.keys.shape
        self._cache = cache
        self._layers, self._heads = slice(0, n_layers), slice(0, n_heads)
        shape = n_blocks, cache.piece_bytes(self._n_tokens, self._layers, self._heads)
        self._blocks = lazy_zeros(shape, torch.uint8)
        if cache.keys.is_cuda:
            _pin(self._blocks)
            weakref.finalize(self, _unpin, self._blocks)
            self.copy([BlockCopy(1, 1, is_load=False), BlockCopy(1, 1, is_load=True)])  # compiles the kernels

    @torch.inference_mode()
    def copy(self, copies: list[BlockCopy]) -> None:
        """Make the copies in their order, on a GPU without waiting for them."""
        for together in _runs(copies):
            cached = [CachedBlocks([copy.block], self._n_tokens) for copy in together]
            pieces = [self._blocks[copy.host_block - 1] for copy in together]
            move = self._cache.write if together[0].is_load else self._cache.read_into
            move(cached, self._layers, self._heads, pieces)


def _pin(memory: Tensor) -> None:
    """Pin memory. PyTorch's allocator of pinned memory would round the size up to a power of two."""
    error = _cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        raise ConfigError(
            f"--kv_host_cache_gb: {memory.nbytes / 1e9:.3g} GB of host memory cannot be pinned: {error}",
            about=["kv_host_cache_gb"],
        )


def _unpin(memory: Tensor) -> None:
    _cuda_runtime().cudaHostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _runs(copies: list[BlockCopy]) -> list[list[BlockCopy]]:
    """Split copies into runs in one direction, without two copies to the same block."""
    runs: list[list[BlockCopy]] = []
    used: set[int] = set()
    for copy in copies:
        target = copy.block if copy.is_load else -copy.host_block
        if not runs or copy.is_load != runs[-1][0].is_load or target in used:
            runs.append([])
            used = set()
        runs[-1].append(copy)
        used.add(target)
    return runs
