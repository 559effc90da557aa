"""The context instance: computes the prompt and the first token, and hands the KV cache to a generation instance."""

from __future__ import annotations

import numpy as np

from mpillm.comms.handoff import HandoffSender
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.messages import NO_INSTANCE, RESPONSE, Batch, ResponseFlag, concat
from mpillm.roles.instance import InstanceRole

_WARM_UP_IDS = 4096  # more than the requests of any warm-up


class Context(InstanceRole):
    """Keeps a request's prompt until its KV cache has left: the generation instance gets both."""

    def __init__(
        self,
        core: LLMCore,
        route: Transport | None,
        leader: int,
        instance: int,
        handoff: Transport,
        receivers: dict[int, int],
        warm_up_receivers: list[int],
    ) -> None:
        """`receivers`: generation instance to its rank in the handoff communicator.

        `warm_up_receivers`: the generation instances that this one warms up.
        """
        super().__init__(core, route, leader, instance)
        self._sender = HandoffSender(handoff, core)
        self._receivers = receivers
        self._warm_up_receivers = warm_up_receivers
        self._requests: dict[int, Batch] = {}

    def warmup(self) -> None:
        if self._route is None:
            return
        batches = []
        for receiver in self._warm_up_receivers:
            requests = self._core.warm_up_requests()
            # Ids of their own: a generation instance may be warmed up by several context instances at once.
            requests.rows["id"] += (self._instance * len(self._receivers) + receiver) * _WARM_UP_IDS
            requests.rows["generation"] = receiver
            self._sender.announce(self._receivers[receiver], len(requests))
            batches.append(requests)
        requests = concat(batches)
        self._warming = set(requests.rows["id"].tolist())
        self._enqueue(requests)

    def poll(self) -> bool:
        worked = super().poll()
        handed_over = self._sender.poll()
        if handed_over:
            rows = np.zeros(len(handed_over), RESPONSE)
            rows["id"] = handed_over
            rows["flags"] = ResponseFlag.CONTEXT_DONE
            if not self._in_test:
                self._warming.difference_update(handed_over)
            else:
                self._owed -= len(handed_over)
                self._samples += len(handed_over)
                self._send(Batch(rows, np.zeros(0, np.int32)))
        return worked or bool(handed_over)

    def _enqueue(self, requests: Batch) -> None:
        offsets = requests.offsets()
        for i, id_ in enumerate(requests.rows["id"].tolist()):
            self._requests[id_] = Batch(requests.rows[i : i + 1], requests.tokens[offsets[i] : offsets[i + 1]])
        super()._enqueue(requests)

    def _on_responses(self, responses: Batch) -> None:
        super()._on_responses(responses)  # the first token leaves before the KV cache does
        offsets = responses.offsets()
        for row, start in zip(responses.rows, offsets, strict=False):
            request = self._requests.pop(int(row["id"])) if row["flags"] & (ResponseFlag.FIRST | ResponseFlag.FINAL) else None
            if request is None or row["flags"] & ResponseFlag.FINAL or request.rows["generation"][0] == NO_INSTANCE:
                continue
            self._tokens += self._in_test
            self._sender.offer(self._receivers[int(request.rows["generation"][0])], request, int(responses.tokens[start]))
