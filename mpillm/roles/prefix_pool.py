"""Policy kv_cache_aware: a request goes where the blocks of its prompt's beginning are cached.

As TensorRT-LLM's router of that name (`KvCacheAwareRouter` in tensorrt_llm/serve/router.py): the instance
with the highest *cached part of the prompt - open requests / max_batch_size* gets the request; among equals,
the one that was served the longest ago. TensorRT-LLM's router asks its servers for the events of their
caches. This one knows what it has sent where, and assumes that an instance forgets the blocks that it used
the longest ago, as soon as its cache is full: no instance tells it anything.
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

_MOST_BLOCKS = 1 << 20  # remembered, of all instances together: about 250 MB
_MOST_HOLDERS = 8  # of the same blocks that are compared, besides the idlest instance
_CACHES_GRANTED = 2  # a core grants more than its cache holds, so that the next requests wait there


class PrefixRouting(NamedTuple):
    """Arguments of TensorRT-LLM's router, with its names and defaults."""

    tokens_per_block: int = 32
    max_batch_size: int = 64  # this many open requests weigh as much as a whole prompt in the cache


class PrefixPool(InstancePool):
    """A pool that knows which blocks of prompts each instance has.

    A request costs a look at each block of its prompt and at no more than nine instances. What
    grows with the number of instances are single operations on arrays, and on integers with a bit for each.
    """

    def __init__(self, instances: list[int], routing: PrefixRouting) -> None:
        super().__init__(instances, "kv_cache_aware")
        self._routing = routing
        n = len(instances)
        self._holders: dict[int, int] = {}  # of a block, by its hash: a bit for each position
        # By position: its blocks, the longest unused first.
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in instances]
        self._most_blocks = np.zeros(n, np.int64)
        self._served_at = np.zeros(n, np.int64)
        self._n_served = 0

    def grant(self, position: int, requests: int, tokens: int) -> None:
        super().grant(position, requests, tokens)
        granted = int(self.free_tokens[position] + self.owed_tokens[position])
        blocks = granted // _CACHES_GRANTED // self._routing.tokens_per_block
        self._most_blocks[position] = min(blocks, _MOST_BLOCKS // len(self.instances))

    def assign(self, needs: NDArray[np.int64], requests: Batch, left: int | None = None) -> NDArray[np.int64]:
        """Do as `InstancePool.assign`, without regard to what is `left`."""
        ends = np.cumsum(requests.rows["n_tokens"], dtype=np.int64).tolist()
        chosen: list[int] = []
        for need, start, end in zip(needs.tolist(), [0, *ends], ends, strict=False):
            if (idlest := self._choose(self._with_room(need), 0)) < 0:
                break
            blocks = self._hashes(requests.tokens[start:end])
            position = self._best(idlest, blocks, need)
            self._remember(position, blocks)
            self._n_served += 1
            self._served_at[position] = self._n_served
            self._return_to(position, -1, -need)
            chosen.append(position)
        return np.array(chosen, np.int64)

    def _note_load(self, position: int) -> None:
        """The fewest open requests first, then the longest without a new one."""
        self._loads[position] = (self.owed_requests[position] << 40) + self._served_at[position]

    def _hashes(self, prompt: NDArray[np.int32]) -> list[int]:
        """Return a hash of each full block and those before it; the last token is computed in any case."""
        size = 4 * self._routing.tokens_per_block
        data = prompt[:-1].tobytes()
        hashes, before = [], 0
        for start in range(0, len(data) - size + 1, size):
            before = hash((before, data[start : start + size]))
            hashes.append(before)
        return hashes

    def _best(self, idlest: int, blocks: list[int], need: int) -> int:
        """Return the position with the highest score."""
        best, best_score, seen, left = idlest, self._score(idlest, 0.0), 0, _MOST_HOLDERS
        for n_cached, holders in reversed(self._levels(blocks)):
            if holders >> idlest & 1:
                # No other instance with these blocks, or fewer of them, has less to do.
                candidates = [idlest]
            else:
                candidates = list(islice(_bits(holders & ~seen, self._n_served % len(self.instances)), left))
            for position in candidates:
                score = self._score(position, n_cached / len(blocks))
                has_room = self.free_requests[position] > 0 and self.free_tokens[position] >= need
                if score > best_score and has_room:
                    best, best_score = position, score
            left -= len(candidates)
            seen |= holders
            if candidates == [idlest] or left <= 0:
                break
        return best

    def _score(self, position: int, cached: float) -> float:
        return cached - int(self.owed_requests[position]) / self._routing.max_batch_size

    def _levels(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Return how many of the first blocks are cached, and by whom (a bit each): the fewest blocks first.

        Who has more of them is in the levels of fewer, too.
        """
        levels: list[tuple[int, int]] = []
        held, n = -1, 0
        for block in blocks:
            still = self._holders.get(block, 0) & held
            if still != held and n:
                levels.append((n, held))
            if not still:
                return levels
            held, n = still, n + 1
        return [*levels, (n, held)] if n else levels

    def _remember(self, position: int, blocks: list[int]) -> None:
        mine, bit, holders = self._blocks[position], 1 << position, self._holders
        for block in reversed(blocks):  # a block is useless without those before it: forget those later
            mine[block] = None
            mine.move_to_end(block)
            holders[block] = holders.get(block, 0) | bit
        while len(mine) > self._most_blocks[position]:
            block, _ = mine.popitem(last=False)
            holders[block] &= ~bit
            if not holders[block]:
                del holders[block]


def make_pool(instances: list[int], policy: str, routing: PrefixRouting) -> InstancePool:
    """Return a pool of instances that get prompts; `routing`: for the policy kv_cache_aware."""
    return PrefixPool(instances, routing) if policy == "kv_cache_aware" else InstancePool(instances, policy)


def _bits(mask: int, first: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, from `first` upwards and then from 0."""
    for part, offset in ((mask >> first, first), (mask & ((1 << first) - 1), 0)):
        while part:
            lowest = part & -part
            yield offset + lowest.bit_length() - 1
            part ^= lowest
