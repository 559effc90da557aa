"""Credits of instances, and policies that choose an instance for each request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch, total

_MIN_WEIGHT = 1e-6  # weight of an instance without credits
_NEVER = 1 << 62  # load of an unavailable instance: above any real load


class InstancePool:
    """Instances of one role, with their credits and outstanding requests.

    Sending a request uses credits, and its final response returns them, so an instance never receives more
    requests or KV tokens than it has granted.
    """

    def __init__(self, instances: list[int], policy: str) -> None:
        """`instances`: indices in the plan; `policy`: a value of --traffic_distribution_policy."""
        self.instances = np.array(instances, np.int64)
        n = len(instances)
        self.free_requests = np.zeros(n, np.int64)
        self.free_tokens = np.zeros(n, np.int64)
        self.outstanding_requests = np.zeros(n, np.int64)
        self.outstanding_tokens = np.zeros(n, np.int64)
        # `round_robin` chooses in turn, other policies by load. `PrefixPool` also considers cached prompts.
        self._in_turn = policy == "round_robin"
        self._turn = 0
        # Position of the instance where each request is outstanding, or -1, by request id (small and reused).
        self.owner = np.full(0, -1, np.int64)
        self.last_owner = np.full(0, -1, np.int64)  # the same, but kept after the request's end
        self._position = {instance: i for i, instance in enumerate(instances)}
        # The instance with the least load gets the next request. With round_robin, all loads are equal.
        self._loads = np.zeros(n, np.int64)
        self._weights = np.ones(n)  # each instance's relative share of requests, see `set_weights`
        # Used to share the last requests of a test, after which no more follow: see `pick`.
        self._done_tokens = np.zeros(n, np.int64)
        self._max_outstanding = np.zeros(n, np.int64)  # KV tokens, maximum so far

    def forget_prompts(self) -> None:
        """Note that the instances' prefix caches are empty."""

    def __contains__(self, instance: object) -> bool:
        return instance in self._position

    def position(self, instance: int) -> int:
        """Return the index of `instance` in this pool's arrays."""
        return self._position[instance]

    def grow(self, n: int) -> None:
        """Extend the arrays by `n` request ids."""
        more = np.full(n, -1, np.int64)
        self.owner = np.concatenate([self.owner, more])
        self.last_owner = np.concatenate([self.last_owner, more])

    def outstanding_of(self, instance: int) -> list[int]:
        """Return the ids of the instance's outstanding requests."""
        ids: list[int] = np.flatnonzero(self.owner == self._position[instance]).tolist()
        return ids

    def grant(self, position: int, requests: int, tokens: int) -> None:
        """Add credits: additional requests and KV tokens."""
        self.free_requests[position] += requests
        self.free_tokens[position] += tokens

    def set_weights(self) -> None:
        """From now on, share requests in proportion to the instances' credits.

        A faster instance gets more requests in any case, because its requests are outstanding for a shorter
        time. But with equal weights, small instances would be full while large ones have free capacity.
        """
        requests, tokens = (
            self.free_requests + self.outstanding_requests,
            self.free_tokens + self.outstanding_tokens,
        )
        weights = np.minimum(requests / max(1, requests.max()), tokens / max(1, tokens.max()))
        self._weights = np.maximum(weights, _MIN_WEIGHT)
        for position in range(len(weights)):
            self._note_load(position)

    def retire(self, position: int) -> None:
        """Set a lost instance's credits and outstanding requests to zero."""
        self._done_tokens[position] = self._max_outstanding[position] = 0
        self.free_requests[position] = self.free_tokens[position] = 0
        self.outstanding_requests[position] = self.outstanding_tokens[position] = 0

    def assign(self, needs: NDArray[np.int64], requests: Batch, left: int | None = None) -> NDArray[np.int64]:
        """Choose instances for the first requests, and use credits; return the positions, shape [sent].

        `needs`: KV tokens of each request; `left`: see `pick`. The result is empty if no instance has credits
        for the first request.
        """
        position, n = self.pick(needs, left)
        if n:
            self.take(position, needs[:n])
        return np.full(n, position, np.int64)

    def pick(self, needs: NDArray[np.int64], left: int | None = None) -> tuple[int, int]:
        """Return an instance's position, and the number of requests for it; (-1, 0) if no instance fits.

        The policy chooses the instance, which gets consecutive requests up to its fair share. So a large
        batch takes one message per instance.

        Args:
            needs: KV tokens of the waiting requests, in order.
            left: KV tokens of all waiting requests if no more requests follow, otherwise None. If set,
                an instance that is too slow (see `_is_too_slow`) gets no request.
        """
        need = int(needs[0])
        available = self._with_capacity(need)
        slow: list[int] = []
        while (chosen := self._choose(available, self._turn)) >= 0:
            if left is None or not self._is_too_slow(chosen, need, left, slow):
                break
            slow.append(chosen)
            available[chosen] = False
        if chosen < 0:
            return -1, 0
        self._turn = chosen + 1
        if len(needs) == 1:
            return chosen, 1
        needed = np.cumsum(needs)
        fits = int(np.searchsorted(needed, self.free_tokens[chosen], "right"))
        if left is not None and self._done_tokens[chosen]:
            level = (left + int(self.outstanding_tokens.sum())) / int(self._done_tokens.sum())
            fair = level * int(self._done_tokens[chosen])
        else:
            available[slow] = True
            outstanding = int(self.outstanding_tokens[available].sum())
            weight = float(self._weights[available].sum())
            fair = (int(needed[-1]) + outstanding) / weight * float(self._weights[chosen])
        share = int(np.searchsorted(needed, max(0.0, fair - int(self.outstanding_tokens[chosen])), "right"))
        return chosen, max(1, min(fits, share, int(self.free_requests[chosen])))

    def _with_capacity(self, need: int) -> NDArray[np.bool_]:
        """Return which instances can hold a request of `need` KV tokens, shape [instances]."""
        fits: NDArray[np.bool_] = (self.free_requests > 0) & (self.free_tokens >= need)
        return fits

    def _choose(self, available: NDArray[np.bool_], start: int) -> int:
        """Return the `available` position with the least load; -1 if none is available.

        Among equal loads, the first position from `start` on wins; if there is none, the first from 0.
        """
        loads = np.where(available, self._loads, _NEVER)
        chosen = int(loads.argmin())
        if loads[chosen] == _NEVER:
            return -1
        if chosen < start < len(loads):
            later = start + int(loads[start:].argmin())
            chosen = later if loads[later] == loads[chosen] else chosen
        return chosen

    def _is_too_slow(self, position: int, need: int, left: int, slow: list[int]) -> bool:
        """Return whether the other instances complete all `left` tokens before this one completes a request.

        Instances in `slow` do not count. The request needs `need` KV tokens. The rate of an instance is its
        completed KV tokens so far. The request takes at least the time that the instance needs for half of
        its maximum outstanding tokens. The other half is assumed to wait in the core, which may grant twice
        the tokens that it computes simultaneously. Before its first completed request, an instance is not
        too slow.
        """
        done, outstanding = self._done_tokens, self.outstanding_tokens
        if not done[position]:
            return False
        others = done > 0
        others[[*slow, position]] = False
        if not others.any():
            return False
        own = max(int(self._max_outstanding[position]) / 2, int(outstanding[position]) + need) / int(
            done[position]
        )
        fastest = float((self._max_outstanding[others] / 2 / done[others]).min())
        together = (left + int(outstanding[others].sum())) / int(done[others].sum())
        return own > max(fastest, together)

    def take(self, position: int, needs: NDArray[np.int64]) -> None:
        """Use credits for sent requests; `needs`: KV tokens of each."""
        self._return_to(position, -len(needs), -total(needs))

    def return_credits(self, positions: NDArray[np.int64], needs: NDArray[np.int64]) -> None:
        """Return the credits of ended requests. `positions`, `needs`: one entry per request."""
        if not len(positions):
            return
        if len(positions) == 1 or (positions == positions[0]).all():  # usual: one instance
            self._return_to(int(positions[0]), len(positions), total(needs))
            return
        unique, at = np.unique(positions, return_inverse=True)
        tokens = np.bincount(at, weights=needs).astype(np.int64)
        for position, n, n_tokens in zip(
            unique.tolist(), np.bincount(at).tolist(), tokens.tolist(), strict=True
        ):
            self._return_to(position, n, n_tokens)

    def _return_to(self, position: int, n: int, tokens: int) -> None:
        """Return credits of an instance; negative `n` and `tokens` use credits."""
        self.free_requests[position] += n
        self.free_tokens[position] += tokens
        self.outstanding_requests[position] -= n
        self.outstanding_tokens[position] -= tokens
        if tokens > 0:
            self._done_tokens[position] += tokens
        elif self.outstanding_tokens[position] > self._max_outstanding[position]:
            self._max_outstanding[position] = self.outstanding_tokens[position]
        self._note_load(position)

    def _note_load(self, position: int) -> None:
        if not self._in_turn:
            self._loads[position] = int(self.outstanding_tokens[position] / self._weights[position])
