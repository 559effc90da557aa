"""Policy conversation: a request goes to the instance that had the conversation's previous request.

TensorRT-LLM has a router of this name (tensorrt_llm/serve/router.py). It returns to the conversation's server
however busy that is. Here, the rule for a busy instance is that of `PrefixPool`, for a prompt that is
completely cached: another instance gets the request if it has `max_batch_size` fewer open requests.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch
from mpillm.roles.pool import InstancePool

MAX_SESSIONS = 1 << 16  # conversations that are remembered, in about 12 MB


class SessionPool(InstancePool):
    """Pool that remembers each conversation's instance. Other requests go to the least loaded instance."""

    def __init__(self, instances: list[int], max_batch_size: int) -> None:
        super().__init__(instances, "load_balancing")
        self._max_batch_size = max_batch_size
        self._holders: OrderedDict[int, int] = OrderedDict()  # positions; least recently used first

    def assign(self, needs: NDArray[np.int64], requests: Batch, left: int | None = None) -> NDArray[np.int64]:
        """Assign requests as `InstancePool.assign` does, but ignore `left`."""
        chosen: list[int] = []
        for need, session in zip(needs.tolist(), requests.rows["session"].tolist(), strict=False):
            available = self._with_capacity(need)
            if (position := self._choose(available, self._turn)) < 0:
                break
            if session not in self._holders:  # equally loaded instances take turns
                self._turn = position + 1
            if session:
                position = self._holder(session, position, available)
            self._return_to(position, -1, -need)
            chosen.append(position)
        return np.array(chosen, np.int64)

    def _holder(self, session: int, idlest: int, available: NDArray[np.bool_]) -> int:
        """Return the position for a conversation's request, and remember it."""
        position = self._holders.get(session, idlest)
        more = int(self.outstanding_requests[position] - self.outstanding_requests[idlest])
        if not available[position] or more >= self._max_batch_size:
            position = idlest
        self._holders[session] = position
        self._holders.move_to_end(session)
        if len(self._holders) > MAX_SESSIONS:
            self._holders.popitem(last=False)
        return position
