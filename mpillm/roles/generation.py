"""The generation instance: receives KV caches and generates on from the first token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.phases import Phase
from mpillm.roles.handoff import HandoffReceiver
from mpillm.roles.instance import InstanceRole


class Generation(InstanceRole):
    """Its requests come from context instances, never from the leader."""

    def __init__(self, core: LLMCore, route: Transport, leader: int, instance: int, senders: dict[int, int], warm_up_senders: int) -> None:
        """`senders`: rank in the route communicator to the context instance that it leads.

        `warm_up_senders`: how many context instances will warm this one up.
        """
        super().__init__(core, route, leader, instance)
        self._receiver = HandoffReceiver(route, core, senders)
        self._warm_up_senders = warm_up_senders
        self._warmed = 0

    def warmup(self) -> None:
        """Its requests come by the handoff, perhaps before it is told that the warm-up has begun."""

    def done(self, phase: Phase) -> bool:
        announced = self._receiver.announced
        if phase == "warmup":
            return len(announced) == self._warm_up_senders and self._warmed == sum(announced.values())
        return phase != "drain" or self._receiver.idle

    def poll(self) -> bool:
        moved = self._receiver.poll()
        self._owed = self._receiver.admitted - self._warmed - self._samples if self._in_test else 0
        return super().poll() or moved

    def _on_responses(self, responses: Batch) -> None:
        self._warmed += 0 if self._in_test else len(responses)
        super()._on_responses(responses)

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Without the first ones, which are the context instances'."""
        return int((np.maximum(rows["n_tokens"], 1) - 1)[final].sum())
