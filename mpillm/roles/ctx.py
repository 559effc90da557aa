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
    """Keeps a request's prompt until it is offered: the generation instance gets prompt and KV cache."""

    def __init__(
        self,
        core: LLMCore,
        route: Transport | None,
        leader: int,
        instance: int,
        receivers: dict[int, int],
        warm_up_receivers: list[int],
    ) -> None:
        """`receivers`: generation instance to its leader's rank in the route communicator.

        `warm_up_receivers`: the generation instances that this one warms up.
        """
        super().__init__(core, route, leader, instance)
        self._sender = HandoffSender(route, core, receivers) if route is not None else None
        self._n_receivers = len(receivers)
        self._warm_up_receivers = warm_up_receivers
        self._requests: dict[int, Batch] = {}
        self._answered: set[int] = set()  # by their first token, while the handoff is not over

    def warmup(self) -> None:
        if self._sender is None:
            return
        batches = []
        for receiver in self._warm_up_receivers:
            requests = self._core.warm_up_requests()
            # Ids of their own: a generation instance may be warmed up by several context instances at once.
            requests.rows["id"] += (self._instance * self._n_receivers + receiver) * _WARM_UP_IDS
            requests.rows["generation"] = receiver
            self._sender.announce(receiver, int((requests.rows["max_output"] > 1).sum()))
            batches.append(requests)
        requests = concat(batches)
        self._warming = set(requests.rows["id"].tolist())
        self._enqueue(requests)

    def done(self, phase: str) -> bool:
        return super().done(phase) and (phase != "drain" or self._sender is None or self._sender.idle)

    def poll(self) -> bool:
        if self._sender is None:
            self._core.poll_kv()
            return super().poll()
        self._offer()  # before the next step: the receivers can answer while it computes
        worked = super().poll()
        handed_over = self._sender.poll()
        if handed_over:
            self._on_handed_over(handed_over)
        return worked or bool(handed_over)

    def _enqueue(self, requests: Batch) -> None:
        for request in requests.split():
            if request.rows["generation"][0] != NO_INSTANCE:
                self._requests[int(request.rows["id"][0])] = request
        super()._enqueue(requests)

    def _offer(self) -> None:
        assert self._sender is not None
        if started := self._core.started():
            self._sender.offer([self._requests.pop(id_) for id_ in started])

    def _on_responses(self, responses: Batch) -> None:
        assert self._sender is not None
        self._offer()  # what was started in this step; no response can be of a request that is yet to start
        first_tokens: dict[int, int | None] = {}
        for row, start in zip(responses.rows, responses.offsets(), strict=False):
            id_, final = int(row["id"]), bool(row["flags"] & ResponseFlag.FINAL)
            if id_ in self._sender:
                first_tokens[id_] = None if final else int(responses.tokens[start])
                if final:
                    # Not FIRST and FINAL at once, which says that nothing more will be heard of it: CONTEXT_DONE will.
                    row["flags"] &= ~np.uint32(ResponseFlag.FIRST)
                    self._answered.add(id_)
                else:
                    self._tokens += self._in_test
            elif final:
                row["flags"] |= ResponseFlag.FIRST
                self._requests.pop(id_, None)
        super()._on_responses(responses)  # the first token leaves before the KV cache does
        if first_tokens:
            self._sender.tell_first(first_tokens)

    def _on_handed_over(self, ids: list[int]) -> None:
        n_counted = len(self._answered.intersection(ids))
        self._answered.difference_update(ids)
        if not self._in_test:
            self._warming.difference_update(ids)
            return
        self._owed -= len(ids) - n_counted
        self._samples += len(ids) - n_counted
        rows = np.zeros(len(ids), RESPONSE)
        rows["id"] = ids
        rows["flags"] = ResponseFlag.CONTEXT_DONE
        self._send(Batch(rows, np.zeros(0, np.int32)))
