"""Blocks in host memory behind a prefix cache, for content that the KV cache has no room for.

When the prefix cache needs the memory of a block without a holder, a step first saves the content to host
memory. When a sequence begins with this content again, a step loads it into a block. TensorRT-LLM calls this
offloading and onboarding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """A copy between a block of the KV cache and a block in host memory, both numbered from 1."""

    block: int
    host_block: int
    is_load: bool  # from host memory


class HostBlocks:
    """Which content is in host memory. The least recently used content is replaced first."""

    def __init__(self, n_blocks: int) -> None:
        self._free = list(range(n_blocks, 0, -1))
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # by hash, the longest unused first
        self._copies: list[BlockCopy] = []
        self.loaded_blocks = 0  # since the start

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._block_of

    def save(self, hash_: bytes, block: int) -> None:
        """Save the content of a block, unless host memory has it."""
        host_block = self._block_of.pop(hash_, None)
        if host_block is None:
            host_block = self._free.pop() if self._free else self._replaced()
            if not host_block:
                return
            self._copies.append(BlockCopy(block, host_block, is_load=False))
        self._block_of[hash_] = host_block

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the host blocks with these hashes. They are not replaced before `load`."""
        return [self._block_of.pop(hash_) for hash_ in hashes]

    def load(self, hashes: Sequence[bytes], host_blocks: list[int], blocks: list[int]) -> None:
        """Load the content of host blocks that `hold` returned into blocks of the KV cache."""
        for hash_, host_block, block in zip(hashes, host_blocks, blocks, strict=True):
            self._copies.append(BlockCopy(block, host_block, is_load=True))
            self._block_of[hash_] = host_block
        self.loaded_blocks += len(blocks)

    def forget_all(self) -> None:
        """Let no sequence find the content that is in host memory now."""
        self._free += self._block_of.values()
        self._block_of.clear()

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies that the next step must make, in this order, before it computes."""
        copies, self._copies = self._copies, []
        return copies

    def _replaced(self) -> int:
        """Return the host block of the longest unused content, which is forgotten; 0: all are held."""
        if not self._block_of:
            return 0
        return self._block_of.popitem(last=False)[1]
