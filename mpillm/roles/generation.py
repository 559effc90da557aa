"""The generation instance: receives KV caches, and generates from the second token on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import Batch, ResponseFlag
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.phases import Phase
from mpillm.roles.handoff import HandoffReceiver
from mpillm.roles.instance import InstanceRole


class Generation(InstanceRole):
    """Receives its requests from context instances, never from the leader."""

    def __init__(
        self,
        core: LLMCore,
        route: Transport,
        leader: int,
        instance: int,
        senders: dict[int, int],
        warm_up_senders: int,
    ) -> None:
        """`senders`: for each rank of the route communicator the context instance that it leads.

        `warm_up_senders`: how many context instances will warm this one up.
        """
        super().__init__(core, route, leader, instance)
        self._receiver = HandoffReceiver(route, core, senders)
        self._warm_up_senders = warm_up_senders
        self._warmed = 0

    def warmup(self) -> None:
        """Do nothing: the handoff brings the requests, perhaps even before this call."""

    def done(self, phase: Phase) -> bool:
        announced = self._receiver.announced
        if phase == "warmup":
            return len(announced) == self._warm_up_senders and self._warmed == sum(announced.values())
        return phase != "drain" or self._receiver.idle

    def poll(self) -> bool:
        moved = self._receiver.poll()
        self._owed = self._receiver.admitted - self._warmed - self._samples if self._in_test else 0
        return super().poll() or moved

    def _on_drop(self, source: int, ids: list[int]) -> None:
        """Drop what a context instance has offered or handed over; the message comes from it or from the
        leader."""
        self._receiver.cancel(ids)
        self._tell_of(ids, ResponseFlag.CANCEL_DONE)

    def _on_responses(self, responses: Batch) -> None:
        self._warmed += 0 if self._in_test else len(responses)
        super()._on_responses(responses)

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Return their number without the first tokens, which the context instances generated."""
        return int((np.maximum(rows["n_tokens"], 1) - 1)[final].sum())
