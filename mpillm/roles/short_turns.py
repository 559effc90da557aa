"""Later turns that a generation instance computes itself, with most of the prompt in its KV cache.

In a disaggregated run, the generation instance of a conversation's previous response has that response and
its prompt in the KV cache. A context instance would have to compute the response again, and to hand the whole
cache off. So if few tokens are new, the generation instance computes them. TensorRT-LLM has this rule
(conditional_disagg_config.max_local_prefill_length) for prompts that its router finds in a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.roles.pool import InstancePool
from mpillm.roles.session_pool import MAX_SESSIONS


class _PreviousTurn(NamedTuple):
    position: int  # of its generation instance in the pool
    n_tokens: int  # of its prompt


class ShortTurns:
    """Remembers the generation instance of each conversation's previous turn."""

    def __init__(self, pool: InstancePool, max_new_tokens: int) -> None:
        """`max_new_tokens`: after the previous turn's prompt, which include the previous response."""
        self._pool = pool
        self._max_new_tokens = max_new_tokens
        self._previous: OrderedDict[int, _PreviousTurn] = OrderedDict()  # least recently used first

    def position(self, row: np.void, need: int) -> int:
        """Return the position of the generation instance that computes this request itself, or -1.

        `row`: of dtype REQUEST. `need`: its KV tokens. A context instance computes the request if the
        generation instance has no credits for it.
        """
        previous = self._previous.get(int(row["session"]))
        if previous is None or not 0 < int(row["n_tokens"]) - previous.n_tokens <= self._max_new_tokens:
            return -1
        pool, position = self._pool, previous.position
        fits = pool.free_requests[position] > 0 and pool.free_tokens[position] >= need
        return position if fits else -1

    def first(self, rows: NDArray[np.void], needs: NDArray[np.int64]) -> int:
        """Return the index of the first of these requests that `position` accepts, or their number."""
        pairs = enumerate(zip(rows, needs.tolist(), strict=True))
        return next((i for i, (row, need) in pairs if self.position(row, need) >= 0), len(rows))

    def forget_all(self) -> None:
        """Note that the instances' prefix caches are empty."""
        self._previous.clear()

    def remember(self, rows: NDArray[np.void], position: int) -> None:
        """Remember requests that the generation instance at this position gets."""
        for session, n_tokens in zip(rows["session"].tolist(), rows["n_tokens"].tolist(), strict=True):
            if session:
                self._previous[session] = _PreviousTurn(position, n_tokens)
                self._previous.move_to_end(session)
        while len(self._previous) > MAX_SESSIONS:
            self._previous.popitem(last=False)
