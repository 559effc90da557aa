"""A tree over instances: who has room for a request and the least to do, in about log(n) looks.

A segment tree, as arrays: node 1 is the root, node i has the children 2 i and 2 i + 1, and the leaves are
the instances in their order. Each node knows, of the instances below it that take requests: the most and the
fewest free tokens, the least load, the sum of their weights (how many they are, if all are alike), and
the sum of what they owe: their loads times their weights.
"""

from __future__ import annotations

import heapq

_NEVER = 1 << 62  # more than any load or number of tokens


class RoomTree:
    """`update` costs log2(n) steps. The questions do, too, unless those with the least to do lack room."""

    def __init__(self, n: int) -> None:
        """`n`: instances; none takes requests yet."""
        self._n = n
        self._first_leaf = leaf = 1 << max(0, (n - 1).bit_length())
        self._most_free = [-1] * (2 * leaf)
        self._least_free = [_NEVER] * (2 * leaf)
        self._least_load = [_NEVER] * (2 * leaf)
        self._weight: list[float] = [0] * (2 * leaf)
        self._owed = [0] * (2 * leaf)

    def update(
        self, position: int, takes: bool, free: int, load: int, weight: float = 1, owed: int | None = None
    ) -> None:
        """Set an instance's free tokens and its load; `takes`: it takes one more request at least.

        `weight`: its share of loads, and `owed` what its load is a share of, if not all have the same weight.
        """
        node = self._first_leaf + position
        most, fewest, least, weights, total = (
            self._most_free,
            self._least_free,
            self._least_load,
            self._weight,
            self._owed,
        )
        if takes:
            most[node] = fewest[node] = free
            least[node] = load
            total[node] = load if owed is None else owed
            weights[node] = weight
        else:
            most[node], fewest[node], least[node], total[node], weights[node] = -1, _NEVER, _NEVER, 0, 0
        node >>= 1
        while node:
            a = 2 * node
            b = a + 1
            most[node] = most[a] if most[a] > most[b] else most[b]
            fewest[node] = fewest[a] if fewest[a] < fewest[b] else fewest[b]
            least[node] = least[a] if least[a] < least[b] else least[b]
            weights[node] = weights[a] + weights[b]
            total[node] = total[a] + total[b]
            node >>= 1

    def next_from(self, start: int, need: int) -> int:
        """Return the first instance with `need` free tokens, from `start` on, then from 0; -1: none has."""
        most = self._most_free
        for node in self._cyclic(start):
            if most[node] >= need:
                while node < self._first_leaf:
                    node *= 2
                    if most[node] < need:
                        node += 1
                return node - self._first_leaf
        return -1

    def idlest(self, start: int, need: int) -> int:
        """Return the instance with the least load among those with `need` free tokens; -1: none has.

        Among equals it is the first one from `start` on and then from 0. The search opens the node with the
        least load first (best first, branch and bound).
        """
        most, least, leaf = self._most_free, self._least_load, self._first_leaf
        # Nodes in the cyclic order; a child's place lies between its parent's and the next one's.
        heap = [
            (least[node], place, 0, node)
            for place, node in enumerate(self._cyclic(start))
            if most[node] >= need
        ]
        heapq.heapify(heap)
        while heap:
            _, place, _, node = heapq.heappop(heap)
            if node >= leaf:
                return node - leaf
            for child in (2 * node, 2 * node + 1):
                if most[child] >= need:
                    heapq.heappush(heap, (least[child], place, self._leftmost(child), child))
        return -1

    def those_with(self, need: int) -> tuple[float, int]:
        """Return the weights of the instances with `need` free tokens, and what they owe, both summed."""
        most, fewest = self._most_free, self._least_free
        weight, total = 0.0, 0
        waiting = [1]
        while waiting:
            node = waiting.pop()
            if most[node] < need:
                continue
            if fewest[node] >= need:
                weight += self._weight[node]
                total += self._owed[node]
            else:
                waiting += (2 * node, 2 * node + 1)
        return weight, total

    def _leftmost(self, node: int) -> int:
        while node < self._first_leaf:
            node *= 2
        return node

    def _cyclic(self, start: int) -> list[int]:
        """Return nodes that cover the instances from `start` on, then those before it, in this order."""
        start %= max(1, self._n)
        return [*self._cover(start, self._first_leaf), *self._cover(0, start)]

    def _cover(self, begin: int, end: int) -> list[int]:
        """Return the fewest nodes that cover instances `begin` to `end` - 1, in order."""
        left, right = begin + self._first_leaf, end + self._first_leaf
        head, tail = [], []
        while left < right:
            if left & 1:
                head.append(left)
                left += 1
            if right & 1:
                right -= 1
                tail.append(right)
            left >>= 1
            right >>= 1
        return head + tail[::-1]
