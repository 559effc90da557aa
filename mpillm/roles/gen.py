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
        self, core: LLMCore, route: Transport | None, leader: int, instance: int, senders: dict[int, int], warm_up_senders: int
    ) -> None:
        """`senders`: rank in the route communicator to the context instance that it leads.

        `warm_up_senders`: how many context instances will warm this one up.
        """
        super().__init__(core, route, leader, instance)
        self._receiver = HandoffReceiver(route, core, senders) if route is not None else None
        self._warm_up_senders = warm_up_senders
        self._warmed = 0
        self._counted = 0  # of the requests that were admitted

    def warmup(self) -> None:
        """Its requests come by the handoff, perhaps before it is told that the warm-up has begun."""

    def done(self, phase: str) -> bool:
        if self._receiver is None:
            return True
        announced = self._receiver.announced
        if phase == "warmup":
            return len(announced) == self._warm_up_senders and self._warmed == sum(announced.values())
        return phase != "drain" or self._receiver.idle

    def poll(self) -> bool:
        if self._receiver is None:
            self._core.poll_kv()
            return super().poll()
        moved = self._receiver.poll()
        admitted = self._receiver.admitted
        self._owed += admitted - self._counted
        self._counted = admitted
        return super().poll() or moved

    def _on_responses(self, responses: Batch) -> None:
        super()._on_responses(responses)
        # The first token was the context instance's.
        self._tokens -= len(responses) if self._in_test else 0
        if not self._in_test:
            self._warmed += len(responses)
            self._owed -= len(responses)
