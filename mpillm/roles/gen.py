"""The generation instance: receives KV caches and generates on from the first token."""

from __future__ import annotations

from mpillm.comms.handoff import HandoffReceiver
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.messages import Batch
from mpillm.roles.instance import InstanceRole


class Generation(InstanceRole):
    """Its requests come from context instances, never from the leader."""

    def __init__(
        self, core: LLMCore, route: Transport | None, leader: int, instance: int, handoff: Transport, warm_up_senders: int
    ) -> None:
        """`warm_up_senders`: how many context instances will warm this one up."""
        super().__init__(core, route, leader, instance)
        self._receiver = HandoffReceiver(handoff, core)
        self._warm_up_senders = warm_up_senders
        self._warmed = 0

    def warmup(self) -> None:
        """Its requests come by the handoff, perhaps before it is told that the warm-up has begun."""

    def done(self, phase: str) -> bool:
        if phase != "warmup" or self._route is None:
            return True
        announced = self._receiver.announced
        return len(announced) == self._warm_up_senders and self._warmed == sum(announced.values())

    def poll(self) -> bool:
        before = self._receiver.offered
        moved = self._receiver.poll()
        self._owed += self._receiver.offered - before
        return super().poll() or moved

    def _on_responses(self, responses: Batch) -> None:
        super()._on_responses(responses)
        # The first token was the context instance's.
        self._tokens -= len(responses) if self._in_test else 0
        if not self._in_test:
            self._warmed += len(responses)
            self._owed -= len(responses)
