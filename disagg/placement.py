"""Choose the worker ranks of each instance so that TP groups are split over as few nodes as possible.

All slots (worker ranks) are used, so sums must be exact. A set of nodes is *closed* if whole groups fill it.
Consecutive groups on a closed set of n nodes are split at most at its n - 1 inner borders. Conversely, split
groups connect nodes to closed sets, and n connected nodes need at least n - 1 splits. The number of splits is
the number of nodes of a group minus one, summed over groups. So the minimum is the number of nodes minus the
maximum number of closed sets into which they can be divided. This module searches for that division.

A run has at most two sizes of TP groups: `a` (context) and `b` (generation). A closed set of s slots contains
x and y of them, with a x + b y = s. x can increase in steps of b / gcd(a, b). So a division is possible if
the minimum values of x of all its sets add up to at most the number of a-groups, and likewise for y. An
increase of some x then makes the sums exact.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement, islice, product

Pair = tuple[int, int]  # (context, generation)

# The exact search visits pairs of (remaining nodes, closed set among them). With more pairs than this, closed
# sets are first chosen greedily.
_MAX_PAIRS = 20_000
_MAX_CANDIDATES = 10_000  # sets of one size that `_greedy` tries


def place(
    nodes: Sequence[Sequence[int]], sizes: Pair, counts: Pair, stages: Pair
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each context and each generation instance, with the fewest splits of TP groups.

    `nodes`: the worker ranks of each node, ascending. `sizes`: ranks per TP group. `counts`: numbers of TP
    groups. `stages`: TP groups per instance. Instances are ordered by their first rank. The TP groups of an
    instance are on one node if that causes no split. For the limits of the result, see `closed_sets`.
    """
    slots = [len(ranks) for ranks in nodes]
    sets = closed_sets(slots, sizes, counts)
    groups: tuple[list[list[int]], list[list[int]]] = ([], [])
    for members, share in zip(
        sets,
        _shares([sum(slots[i] for i in members) for members in sets], sizes, counts, stages),
        strict=True,
    ):
        ranks = [rank for i in members for rank in nodes[i]]
        start = 0
        for which in (0, 1):
            for _ in range(share[which]):
                groups[which].append(ranks[start : start + sizes[which]])
                start += sizes[which]
    node_of = {rank: i for i, ranks in enumerate(nodes) for rank in ranks}
    return _instances(groups[0], stages[0], node_of), _instances(groups[1], stages[1], node_of)


def closed_sets(slots: Sequence[int], sizes: Pair, counts: Pair) -> list[list[int]]:
    """Divide the nodes into as many closed sets as possible.

    Returns indices of nodes, ascending within a set. Sets are ordered by their first node. `slots`: worker
    ranks of each node, at least 1. Their sum is ``sizes[0] * counts[0] + sizes[1] * counts[1]``. An
    aggregated run has groups of one kind, so its second count is 0.

    The result is optimal if there are few kinds of nodes, as in a cluster. The problem is NP-hard. With many
    kinds (slot counts that differ even modulo the TP sizes), small sets are first chosen greedily, and a
    better division may exist.
    """
    a, b = sizes
    gcd = math.gcd(a, b)
    # If one size divides the other, whole large groups have no effect: only a node's remainder counts.
    divisible = max(sizes) % min(sizes) == 0
    kinds = [s % max(sizes) if divisible else s for s in slots]

    @cache
    def cost_of(total: int) -> Pair | None:
        """Return the minimum x and y of a set whose kinds add up to `total`; None if it is not closed."""
        x = next((x for x in range(min(total // a + 1, b // gcd)) if (total - a * x) % b == 0), None)
        y = next((y for y in range(min(total // b + 1, a // gcd)) if (total - b * y) % a == 0), None)
        return None if x is None or y is None else (x, y)

    chosen, left, budget = _greedy(Counter(kinds), counts, cost_of)
    n_undone = 1
    # None: the budget is too small, because of the sets that `_greedy` chose.
    while (exact := _exact(left, budget, cost_of, (b // gcd - 1, a // gcd - 1))) is None:
        for _ in range(min(n_undone, len(chosen))):
            members = chosen.pop()
            left.update(members)
            cost = cost_of(sum(members))
            assert cost is not None
            budget = (budget[0] + cost[0], budget[1] + cost[1])
        n_undone *= 2

    of_kind = {kind: [i for i in reversed(range(len(slots))) if kinds[i] == kind] for kind in set(kinds)}
    return sorted(sorted(of_kind[kind].pop() for kind in members) for members in chosen + exact)


_CostOf = Callable[[int], "Pair | None"]


def _greedy(
    left: Counter[int], budget: Pair, cost_of: _CostOf
) -> tuple[list[tuple[int, ...]], Counter[int], Pair]:
    """Choose closed sets, smallest and cheapest first, until the remaining nodes are few enough for `_exact`.

    Returns the sets, the kinds of the remaining nodes, and the remaining budget.
    """
    chosen: list[tuple[int, ...]] = []
    left = Counter(left)
    for size in range(1, left.total() + 1):
        candidates = list(islice(combinations_with_replacement(sorted(left), size), _MAX_CANDIDATES + 1))
        if _pairs(left) <= _MAX_PAIRS or len(candidates) > _MAX_CANDIDATES:
            break
        closed = [(cost, members) for members in candidates if (cost := cost_of(sum(members))) is not None]
        for cost, members in sorted(closed):
            limits = [left[kind] // n for kind, n in Counter(members).items()]
            limits += [budget[i] // cost[i] for i in (0, 1) if cost[i]]
            for _ in range(min(limits)):
                chosen.append(members)
                left.subtract(members)
            budget = (budget[0] - min(limits) * cost[0], budget[1] - min(limits) * cost[1])
            if _pairs(left) <= _MAX_PAIRS:
                break
        left = +left
    return chosen, left, budget


def _pairs(left: Counter[int]) -> int:
    """Count the pairs of (part of `left`, part of that part)."""
    return math.prod((n + 1) * (n + 2) // 2 for n in left.values())


def _exact(left: Counter[int], budget: Pair, cost_of: _CostOf, dearest: Pair) -> list[tuple[int, ...]] | None:
    """Divide `left` into as many closed sets (kinds of nodes) as possible; None if the budget allows none.

    If `left` is too large for the search, return one set of all nodes. `dearest`: maximum cost of a set.
    """
    kinds = sorted(left)
    if _pairs(left) > _MAX_PAIRS:
        everything = tuple(left.elements())
        cost = cost_of(sum(everything))
        return [everything] if cost is not None and cost[0] <= budget[0] and cost[1] <= budget[1] else None

    @cache
    def best(state: tuple[int, ...], x: int, y: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the maximum number of sets for `state` (nodes by kind) within budget x, y, and one set."""
        if not any(state):
            return 0, ()
        first = next(i for i, n in enumerate(state) if n)
        division: tuple[int, tuple[int, ...]] | None = None
        for part in product(*(range(1 if i == first else 0, n + 1) for i, n in enumerate(state))):
            cost = cost_of(sum(map(operator.mul, part, kinds)))
            if cost is None or cost[0] > x or cost[1] > y:
                continue
            others = tuple(map(operator.sub, state, part))
            n = sum(others)  # limit the budget to the maximum cost of `others`, so that the cache hits
            tail = best(others, min(x - cost[0], n * dearest[0]), min(y - cost[1], n * dearest[1]))
            if tail is not None and (division is None or tail[0] + 1 > division[0]):
                division = tail[0] + 1, part
                if division[0] == sum(state):  # every node is a separate set
                    break
        return division

    state, sets = tuple(left[kind] for kind in kinds), []
    while any(state):
        division = best(state, *budget)
        if division is None:
            return None
        members = tuple(kind for kind, n in zip(kinds, division[1], strict=True) for _ in range(n))
        cost = cost_of(sum(members))
        assert cost is not None
        sets.append(members)
        state = tuple(map(operator.sub, state, division[1]))
        budget = (budget[0] - cost[0], budget[1] - cost[1])
    return sets


def _shares(slots: Sequence[int], sizes: Pair, counts: Pair, stages: Pair) -> list[Pair]:
    """Return how many context and generation groups each closed set of `slots` slots holds.

    The first sets get as many context groups as possible. If there is a choice, sets contain whole instances.
    """
    a, b = sizes
    step = b // math.gcd(a, b)
    xs = [next(x for x in range(s // a + 1) if (s - a * x) % b == 0) for s in slots]
    missing = counts[0] - sum(xs)
    tests: tuple[Callable[[int, int], bool], ...] = (
        lambda x, y: x % stages[0] == 0 and y % stages[1] == 0,
        lambda x, y: x % stages[0] == 0,
        lambda x, y: True,
    )
    for fits in tests:
        for i, s in enumerate(slots):
            max_steps = min(s // a - xs[i], missing) // step
            x = next(
                (x for x in range(xs[i] + max_steps * step, xs[i], -step) if fits(x, (s - a * x) // b)), xs[i]
            )
            missing -= x - xs[i]
            xs[i] = x
    return [(x, (s - a * x) // b) for x, s in zip(xs, slots, strict=True)]


def _instances(groups: Sequence[list[int]], stages: int, node_of: Mapping[int, int]) -> list[list[int]]:
    """Join TP groups to instances of `stages` groups: on one node if possible, otherwise of neighbors.

    Instances are ordered by their first rank.
    """
    by_node: dict[frozenset[int], list[list[int]]] = {}
    for group in groups:
        by_node.setdefault(frozenset(node_of[rank] for rank in group), []).append(group)
    together: list[list[int]] = []
    over: list[list[int]] = []
    for same in by_node.values():
        n_joined = len(same) - len(same) % stages
        together += same[:n_joined]
        over += same[n_joined:]
    together += sorted(over)
    joined = [sorted(together[i : i + stages]) for i in range(0, len(together), stages)]
    return [[rank for group in instance for rank in group] for instance in sorted(joined)]
