"""Credits and policies: which instance gets which requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch


class InstancePool:
    """The instances of one role as the leader sees them: what each can still hold and what it owes.

    Sending a request takes credit, its last response returns it: an instance never receives more than it
    granted.
    """

    def __init__(self, instances: list[int], policy: str) -> None:
        """`instances`: their indices in the plan; `policy`: a value of --traffic_distribution_policy."""
        self.instances = np.array(instances, np.int64)
        n = len(instances)
        self.free_requests = np.zeros(n, np.int64)
        self.free_tokens = np.zeros(n, np.int64)
        self.owed_requests = np.zeros(n, np.int64)
        self.owed_tokens = np.zeros(n, np.int64)
        self._choose: Callable[[NDArray[np.int64]], int] = {
            "round_robin": self._next_in_turn,
            "load_balancing": self._fewest_owed_tokens,
            # Of instances without cached prompts. Of those with them: `prefix_pool.PrefixPool`.
            "kv_cache_aware": self._fewest_owed_tokens,
        }[policy]
        self._turn = 0
        self._position = {instance: i for i, instance in enumerate(instances)}

    def position(self, instance: int) -> int:
        """Return the index of `instance` in this pool's arrays."""
        return self._position[instance]

    def grant(self, position: int, requests: int, tokens: int) -> None:
        """Add credit: the instance can hold this much more."""
        self.free_requests[position] += requests
        self.free_tokens[position] += tokens

    def assign(self, needs: NDArray[np.int64], requests: Batch) -> NDArray[np.int64]:
        """Take credit for the first requests; return the position of each one's instance, shape [sent].

        `needs`: KV tokens of each of `requests`. Empty if there is no room for the first one.
        """
        position, n = self.pick(needs)
        if n:
            self.take(position, needs[:n])
        return np.full(n, position, np.int64)

    def pick(self, needs: NDArray[np.int64]) -> tuple[int, int]:
        """Return the position of the instance for the next requests, and how many; (-1, 0) if none has room.

        `needs`: KV tokens of the waiting requests, in order. An instance receives consecutive requests up to
        its fair share, so that one message per instance spreads a large batch, and a single request goes
        where the policy says.
        """
        candidates = np.flatnonzero((self.free_requests > 0) & (self.free_tokens >= needs[0]))
        if not len(candidates):
            return -1, 0
        chosen = self._choose(candidates)
        needed = np.cumsum(needs)
        fits = int(np.searchsorted(needed, self.free_tokens[chosen], "right"))
        level = (int(needed[-1]) + int(self.owed_tokens[candidates].sum())) / len(candidates)
        share = int(np.searchsorted(needed, max(0.0, level - int(self.owed_tokens[chosen])), "right"))
        return chosen, max(1, min(fits, share, int(self.free_requests[chosen])))

    def take(self, position: int, needs: NDArray[np.int64]) -> None:
        """Take credit for requests that were sent; `needs`: KV tokens of each."""
        n, tokens = len(needs), int(needs.sum())
        self.free_requests[position] -= n
        self.free_tokens[position] -= tokens
        self.owed_requests[position] += n
        self.owed_tokens[position] += tokens

    def give_back(self, positions: NDArray[np.int64], needs: NDArray[np.int64]) -> None:
        """Give back the credit of requests that ended: one entry of `positions` and `needs` each."""
        n = len(self.instances)
        requests = np.bincount(positions, minlength=n)
        tokens = np.bincount(positions, weights=needs, minlength=n).astype(np.int64)
        self.free_requests += requests
        self.free_tokens += tokens
        self.owed_requests -= requests
        self.owed_tokens -= tokens

    def _next_in_turn(self, candidates: NDArray[np.int64]) -> int:
        chosen = int(candidates[np.searchsorted(candidates, self._turn) % len(candidates)])
        self._turn = chosen + 1
        return chosen

    def _fewest_owed_tokens(self, candidates: NDArray[np.int64]) -> int:
        # Among equals the least recently served: otherwise a quiet run would give everything to the first.
        order = (candidates - self._turn) % len(self.instances)
        chosen = int(candidates[np.lexsort((order, self.owed_tokens[candidates]))[0]])
        self._turn = chosen + 1
        return chosen
