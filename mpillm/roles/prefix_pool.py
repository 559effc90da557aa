"""Policy kv_cache_aware: a request goes to the instance where the first blocks of its prompt are cached.

This is the policy of TensorRT-LLM's `KvCacheAwareRouter` (tensorrt_llm/serve/router.py). A request goes to
the instance with the highest score: *cached part of the prompt - open requests / max_batch_size*. Among
instances without cached blocks and with equally few open requests, the one with the oldest last request wins.
TensorRT-LLM's router requests cache events from its servers. This policy instead records the prompts that the
leader has sent, and assumes that a full cache evicts the least recently used blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch
from mpillm.roles.pool import InstancePool
from mpillm.roles.session_pool import SessionPool

_MAX_BLOCKS = 1 << 20  # maximum number recorded for all instances together, in about 250 MB
_MAX_HOLDERS = 8  # maximum number of instances with cached blocks to compare with the least loaded instance
_CACHES_GRANTED = 2  # the embedded engine grants the tokens of two caches, so that requests wait in the core


class PrefixRouting(NamedTuple):
    """Arguments of TensorRT-LLM's router, with its names and defaults."""

    tokens_per_block: int = 32
    max_batch_size: int = 64  # this many open requests outweigh a completely cached prompt


class PrefixPool(InstancePool):
    """Pool that records which prompt blocks each instance has cached.

    For each request, the pool looks up each block of the prompt, and compares at most nine instances. So
    the number of instances hardly matters: it only sets the size of arrays, and of integers used as bit sets.
    """

    def __init__(self, instances: list[int], routing: PrefixRouting) -> None:
        super().__init__(instances, "kv_cache_aware")
        self._routing = routing
        n = len(instances)
        self._holders: dict[int, int] = {}  # positions that have each block (a bit each), by the block's hash
        # Hashes of each instance's cached blocks, least recently used first, by position.
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in instances]
        self._max_blocks = np.zeros(n, np.int64)
        self._served_at = np.zeros(n, np.int64)
        self._n_served = 0

    def forget_prompts(self) -> None:
        self._holders.clear()
        for blocks in self._blocks:
            blocks.clear()

    def grant(self, position: int, requests: int, tokens: int) -> None:
        super().grant(position, requests, tokens)
        granted = int(self.free_tokens[position] + self.outstanding_tokens[position])
        blocks = granted // _CACHES_GRANTED // self._routing.tokens_per_block
        self._max_blocks[position] = min(blocks, _MAX_BLOCKS // len(self.instances))

    def assign(self, needs: NDArray[np.int64], requests: Batch, left: int | None = None) -> NDArray[np.int64]:
        """Assign requests as `InstancePool.assign` does, but ignore `left`."""
        ends = np.cumsum(requests.rows["n_tokens"], dtype=np.int64).tolist()
        chosen: list[int] = []
        salts = requests.rows["salt"].tolist()
        for need, salt, start, end in zip(needs.tolist(), salts, [0, *ends], ends, strict=False):
            if (idlest := self._choose(self._with_capacity(need), 0)) < 0:
                break
            blocks = self._hashes(requests.tokens[start:end], salt)
            position = self._best(idlest, blocks, need)
            self._remember(position, blocks)
            self._n_served += 1
            self._served_at[position] = self._n_served
            self._return_to(position, -1, -need)
            chosen.append(position)
        return np.array(chosen, np.int64)

    def _note_load(self, position: int) -> None:
        """Set the load, which orders instances by open requests, then by the time of the last request."""
        self._loads[position] = (self.outstanding_requests[position] << 40) + self._served_at[position]

    def _hashes(self, prompt: NDArray[np.int32], salt: int) -> list[int]:
        """Return one hash per full block, which covers all blocks up to it. The last token is not cached."""
        size = 4 * self._routing.tokens_per_block
        data = prompt[:-1].tobytes()
        hashes, before = [], salt
        for start in range(0, len(data) - size + 1, size):
            before = hash((before, data[start : start + size]))
            hashes.append(before)
        return hashes

    def _best(self, idlest: int, blocks: list[int], need: int) -> int:
        """Return the position with the highest score."""
        best, best_score, seen, left = idlest, self._score(idlest, 0.0), 0, _MAX_HOLDERS
        for n_cached, holders in reversed(self._levels(blocks)):
            if holders >> idlest & 1:
                # The least loaded instance has these blocks: no instance with as many or fewer scores higher.
                candidates = [idlest]
            else:
                candidates = list(islice(_bits(holders & ~seen, self._n_served % len(self.instances)), left))
            for position in candidates:
                score = self._score(position, n_cached / len(blocks))
                has_credits = self.free_requests[position] > 0 and self.free_tokens[position] >= need
                if score > best_score and has_credits:
                    best, best_score = position, score
            left -= len(candidates)
            seen |= holders
            if candidates == [idlest] or left <= 0:
                break
        return best

    def _score(self, position: int, cached: float) -> float:
        return cached - int(self.outstanding_requests[position]) / self._routing.max_batch_size

    def _levels(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Return pairs, ascending: a number of first blocks, and the instances that have them (a bit each).

        An instance with more blocks is also in the levels with fewer blocks.
        """
        levels: list[tuple[int, int]] = []
        common, n = -1, 0
        for block in blocks:
            still = self._holders.get(block, 0) & common
            if still != common and n:
                levels.append((n, common))
            if not still:
                return levels
            common, n = still, n + 1
        return [*levels, (n, common)] if n else levels

    def _remember(self, position: int, blocks: list[int]) -> None:
        own, bit, holders = self._blocks[position], 1 << position, self._holders
        for block in reversed(blocks):  # evict the first blocks last: later blocks are useless without them
            own[block] = None
            own.move_to_end(block)
            holders[block] = holders.get(block, 0) | bit
        while len(own) > self._max_blocks[position]:
            block, _ = own.popitem(last=False)
            holders[block] &= ~bit
            if not holders[block]:
                del holders[block]


def make_pool(instances: list[int], policy: str, routing: PrefixRouting) -> InstancePool:
    """Return a pool of instances that receive prompts.

    `routing`: for the policies kv_cache_aware and conversation.
    """
    if policy == "kv_cache_aware":
        return PrefixPool(instances, routing)
    if policy == "conversation":
        return SessionPool(instances, routing.max_batch_size)
    return InstancePool(instances, policy)


def _bits(mask: int, first: int) -> Iterator[int]:
    """Yield the positions of the set bits of `mask`, from `first` upwards, then from 0 to `first`."""
    for part, offset in ((mask >> first, first), (mask & ((1 << first) - 1), 0)):
        while part:
            lowest = part & -part
            yield offset + lowest.bit_length() - 1
            part ^= lowest
