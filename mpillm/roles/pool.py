"""Credits and policies: which instance gets which requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch, total

_LEAST_WEIGHT = 1e-6  # of an instance that has granted nothing, which gets nothing
_NEVER = 1 << 62  # more than any load


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
        # Who has the least to do gets the next request; of those who are in turn, all have the same.
        self._loads = np.zeros(n, np.int64)
        self._weights = np.ones(n)  # of loads, by position: see `weigh`
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

    def weigh(self) -> None:
        """From now on give instances that have granted more a larger share, in proportion.

        What an instance answers faster it owes for a shorter time, so it gets more in any case. But of
        instances that can hold different numbers of requests the small ones would be full, and let requests
        wait, while the large ones had room.
        """
        requests, tokens = self.free_requests + self.owed_requests, self.free_tokens + self.owed_tokens
        weights = np.minimum(requests / max(1, requests.max()), tokens / max(1, tokens.max()))
        self._weights = np.maximum(weights, _LEAST_WEIGHT)
        for position in range(len(weights)):
            self._note_load(position)

    def retire(self, position: int) -> None:
        """Give nothing to the instance any more; it owes nothing."""
        self._done_tokens[position] = self._most_owed[position] = 0
        self.free_requests[position] = self.free_tokens[position] = 0
        self.owed_requests[position] = self.owed_tokens[position] = 0

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
        room = self._with_room(need)
        slow: list[int] = []
        while (chosen := self._choose(room, self._turn)) >= 0:
            if left is None or not self._is_too_slow(chosen, need, left, slow):
                break
            slow.append(chosen)
            room[chosen] = False
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
            room[slow] = True
            owed, weight = int(self.owed_tokens[room].sum()), float(self._weights[room].sum())
            fair = (int(needed[-1]) + owed) / weight * float(self._weights[chosen])
        share = int(np.searchsorted(needed, max(0.0, fair - int(self.owed_tokens[chosen])), "right"))
        return chosen, max(1, min(fits, share, int(self.free_requests[chosen])))

    def _with_room(self, need: int) -> NDArray[np.bool_]:
        """Return which instances can hold a request of `need` KV tokens, shape [instances]."""
        room: NDArray[np.bool_] = (self.free_requests > 0) & (self.free_tokens >= need)
        return room

    def _choose(self, room: NDArray[np.bool_], start: int) -> int:
        """Return the position with the least load among those with `room`; -1: there is none.

        Among equals it is the first one from `start` on, and then from 0.
        """
        loads = np.where(room, self._loads, _NEVER)
        chosen = int(loads.argmin())
        if loads[chosen] == _NEVER:
            return -1
        if chosen < start < len(loads):
            later = start + int(loads[start:].argmin())
            chosen = later if loads[later] == loads[chosen] else chosen
        return chosen

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
        self._note_load(position)

    def _note_load(self, position: int) -> None:
        if not self._in_turn:
            self._loads[position] = int(self.owed_tokens[position] / self._weights[position])
