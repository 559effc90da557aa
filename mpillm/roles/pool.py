"""Credits and policies: which instance gets which requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch, total
from mpillm.roles.room_tree import RoomTree

_LEAST_WEIGHT = 1e-6  # of an instance that has granted nothing, which gets nothing


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
        # Of instances without cached prompts, `kv_cache_aware` chooses the idlest, too (see `PrefixPool`).
        self._in_turn = policy == "round_robin"
        self._turn = 0
        # By request id: the position of the instance that owes it, or -1. Ids are small and reused.
        self.owner = np.full(0, -1, np.int64)
        self.last_owner = np.full(0, -1, np.int64)  # of its last or present request, by the same id
        self._position = {instance: i for i, instance in enumerate(instances)}
        self._tree = RoomTree(n)
        self._weights = [1.0] * n  # of loads, by position: see `weigh`
        # Of what is left of a test whose requests were all there at its start: see `_shares_of_the_rest`.
        self._done_tokens = np.zeros(n, np.int64)
        self._most_owed = np.zeros(n, np.int64)  # tokens

    def __contains__(self, instance: object) -> bool:
        return instance in self._position

    def position(self, instance: int) -> int:
        """Return the index of `instance` in this pool's arrays."""
        return self._position[instance]

    def grow(self, n: int) -> None:
        """Make room for `n` more request ids."""
        more = np.full(n, -1, np.int64)
        self.owner = np.concatenate([self.owner, more])
        self.last_owner = np.concatenate([self.last_owner, more])

    def owed_by(self, instance: int) -> list[int]:
        """Return the ids of the requests that the instance owes."""
        ids: list[int] = np.flatnonzero(self.owner == self._position[instance]).tolist()
        return ids

    def grant(self, position: int, requests: int, tokens: int) -> None:
        """Add credit: the instance can hold this much more."""
        self.free_requests[position] += requests
        self.free_tokens[position] += tokens
        self._changed(position)

    def weigh(self) -> None:
        """From now on give instances that have granted more a larger share, in proportion.

        What an instance answers faster it owes for a shorter time, so it gets more in any case. But of
        instances that can hold different numbers of requests the small ones would be full, and let requests
        wait, while the large ones had room.
        """
        requests, tokens = self.free_requests + self.owed_requests, self.free_tokens + self.owed_tokens
        weights = np.minimum(requests / max(1, requests.max()), tokens / max(1, tokens.max()))
        for position in np.flatnonzero(weights != self._weights).tolist():
            self._weights[position] = max(float(weights[position]), _LEAST_WEIGHT)
            self._changed(position)

    def retire(self, position: int) -> None:
        """Give nothing to the instance any more; it owes nothing."""
        self._done_tokens[position] = self._most_owed[position] = 0
        self.free_requests[position] = self.free_tokens[position] = 0
        self.owed_requests[position] = self.owed_tokens[position] = 0
        self._changed(position)

    def assign(self, needs: NDArray[np.int64], requests: Batch, left: int | None = None) -> NDArray[np.int64]:
        """Take credit for the first requests; return the position of each one's instance, shape [sent].

        `needs`: KV tokens of each of `requests`; `left`: see `pick`. Empty if there is no room for the first
        one.
        """
        position, n = self.pick(needs, left)
        if n:
            self.take(position, needs[:n])
        return np.full(n, position, np.int64)

    def pick(self, needs: NDArray[np.int64], left: int | None = None) -> tuple[int, int]:
        """Return the position of the instance for the next requests, and how many; (-1, 0) if none has room.

        `needs`: KV tokens of the waiting requests, in order. An instance receives consecutive requests up to
        its fair share, so that one message per instance spreads a large batch, and a single request goes
        where the policy says. `left`: KV tokens of all that wait, if no more requests will come; an instance
        that would be the last to answer them then gets none, though it has room.
        """
        need = int(needs[0])
        choose = self._tree.next_from if self._in_turn else self._tree.idlest
        # Among equals the least recently served: otherwise a quiet run would give everything to the first.
        chosen = choose(self._turn, need)
        slow: list[int] = []
        while left is not None and chosen >= 0 and self._is_too_slow(chosen, need, left, slow):
            slow.append(chosen)
            self._tree.update(chosen, False, 0, 0)
            chosen = choose(self._turn, need)
        for position in slow:
            self._changed(position)
        if chosen < 0:
            return -1, 0
        self._turn = chosen + 1
        if len(needs) == 1:
            return chosen, 1
        needed = np.cumsum(needs)
        fits = int(np.searchsorted(needed, self.free_tokens[chosen], "right"))
        if left is not None and self._done_tokens[chosen]:
            level = (left + int(self.owed_tokens.sum())) / int(self._done_tokens.sum())
            fair = level * int(self._done_tokens[chosen])
        else:
            weight, owed = self._tree.those_with(need)
            fair = (int(needed[-1]) + owed) / weight * self._weights[chosen]
        share = int(np.searchsorted(needed, max(0.0, fair - int(self.owed_tokens[chosen])), "right"))
        return chosen, max(1, min(fits, share, int(self.free_requests[chosen])))

    def _is_too_slow(self, position: int, need: int, left: int, slow: list[int]) -> bool:
        """Return whether the other instances, without those in `slow`, answer all that is `left` before this
        one could answer a request more, of `need` KV tokens.

        Nobody has to know seconds: what each has answered so far, in KV tokens, is its rate. An instance
        takes at least as long for a request as for half of the most that it has owed: cores grant twice what
        they compute at once, so that the next requests wait there. Of one that has answered nothing yet
        nothing is known.
        """
        done, owed = self._done_tokens, self.owed_tokens
        if not done[position]:
            return False
        others = done > 0
        others[[*slow, position]] = False
        if not others.any():
            return False
        own = max(int(self._most_owed[position]) / 2, int(owed[position]) + need) / int(done[position])
        quickest = float((self._most_owed[others] / 2 / done[others]).min())
        together = (left + int(owed[others].sum())) / int(done[others].sum())
        return own > max(quickest, together)

    def take(self, position: int, needs: NDArray[np.int64]) -> None:
        """Take credit for requests that were sent; `needs`: KV tokens of each."""
        self._return_to(position, -len(needs), -total(needs))

    def give_back(self, positions: NDArray[np.int64], needs: NDArray[np.int64]) -> None:
        """Give back the credit of requests that ended: one entry of `positions` and `needs` each."""
        if not len(positions):
            return
        if len(positions) == 1 or (positions == positions[0]).all():  # as a rule: one instance has answered
            self._return_to(int(positions[0]), len(positions), total(needs))
            return
        where, at = np.unique(positions, return_inverse=True)
        tokens = np.bincount(at, weights=needs).astype(np.int64)
        for position, n, n_tokens in zip(
            where.tolist(), np.bincount(at).tolist(), tokens.tolist(), strict=True
        ):
            self._return_to(position, n, n_tokens)

    def _return_to(self, position: int, n: int, tokens: int) -> None:
        """Give credit back to an instance; less than 0: take it."""
        self.free_requests[position] += n
        self.free_tokens[position] += tokens
        self.owed_requests[position] -= n
        self.owed_tokens[position] -= tokens
        if tokens > 0:
            self._done_tokens[position] += tokens
        elif self.owed_tokens[position] > self._most_owed[position]:
            self._most_owed[position] = self.owed_tokens[position]
        self._changed(position)

    def _changed(self, position: int) -> None:
        """Bring the tree up to date: after every change of an instance's numbers."""
        takes, owed = bool(self.free_requests[position] > 0), int(self.owed_tokens[position])
        free, weight = int(self.free_tokens[position]), self._weights[position]
        self._tree.update(position, takes, free, self._load(position), weight, owed)

    def _load(self, position: int) -> int:
        """Return what an instance has to do; who has the least gets the next request."""
        return int(self.owed_tokens[position] / self._weights[position])
