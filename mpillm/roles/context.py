"""Role of a context instance: compute a request's context and first token, and hand the request off."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import CANCEL, DONE, NO_INSTANCE, NO_TOKENS, RESPONSE, Batch, ResponseFlag, concat
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import TransfersKv
from mpillm.phases import Phase
from mpillm.roles.handoff import HandoffOutcome, HandoffSender
from mpillm.roles.instance import InstanceRole
from mpillm.telemetry.recorder import Recorder, SpanTracker

if TYPE_CHECKING:  # at run time, this import would start MPI
    from mpillm.comms.transport import Transport

_WARM_UP_IDS = 4096  # ids reserved for each warm-up, which has fewer requests


class ContextRole(InstanceRole):
    """Role of a context instance's root rank, which keeps each request until the request is offered."""

    works_on = "context"

    def __init__(
        self,
        core: LLMCore,
        route: Transport,
        leader: int,
        instance: int,
        receivers: dict[int, int],
        warm_up_receivers: list[int],
    ) -> None:
        """`receivers`: root rank of each generation instance, by instance index.

        `warm_up_receivers`: generation instances that this context instance warms up.
        """
        super().__init__(core, route, leader, instance)
        assert isinstance(core, TransfersKv)
        self._started = core.started
        self._transfers: SpanTracker | None = None  # tracks when KV caches are in transfer
        self._sender = HandoffSender(route, core, receivers)
        self._n_receivers = len(receivers)
        self._warm_up_receivers = warm_up_receivers
        self._requests: dict[int, Batch] = {}  # requests that are not offered yet, by id
        self._lost: set[int] = set()  # lost generation instances
        self._dropped: set[int] = set()  # ids of requests for lost instances, until they end in the core

    def warmup(self) -> None:
        batches = []
        for receiver in self._warm_up_receivers:
            requests = self._core.warm_up_requests()
            # Unique ids: several context instances may warm up one generation instance simultaneously.
            requests.rows["id"] += (self._instance * self._n_receivers + receiver) * _WARM_UP_IDS
            requests.rows["generation"] = receiver
            self._sender.announce(receiver, int((requests.rows["max_output"] > 1).sum()))
            batches.append(requests)
        requests = concat(batches)
        self._warming = set(requests.rows["id"].tolist())
        self._enqueue(requests)

    def done(self, phase: Phase) -> bool:
        return super().done(phase) and (phase != "drain" or self._sender.idle)

    def record(self, recorder: Recorder) -> None:
        super().record(recorder)
        self._transfers = recorder.track(recorder.handoff)

    def poll(self) -> bool:
        if self._transfers is not None:
            self._transfers.update(self._sender.n_transfers > 0, time.perf_counter())
        self._offer()  # before the core's next step, so that receivers can accept during the step
        worked = super().poll()
        outcomes = self._sender.poll()
        if outcomes:
            self._on_handoffs(outcomes)
        return worked or bool(outcomes)

    def lost(self, instance: int) -> None:
        super().lost(instance)
        self._lost.add(instance)
        self._offer()
        for id_, request in self._requests.items():
            if request.rows["generation"][0] == instance:
                self._dropped.add(id_)
        self._core.cancel(self._dropped)
        self._sender.lost(instance)

    def _enqueue(self, requests: Batch) -> None:
        if self._lost and (is_lost := np.isin(requests.rows["generation"], [*self._lost])).any():
            self._n_outstanding -= int(is_lost.sum())
            self._send_flag(requests.rows["id"][is_lost].tolist(), ResponseFlag.LOST)
            requests = requests.select(~is_lost)
            if not len(requests):
                return
        for request in requests.split():
            if request.rows["generation"][0] != NO_INSTANCE:
                self._requests[int(request.rows["id"][0])] = request
        super()._enqueue(requests)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        self._offer()  # first: the receivers, not this core, cancel offered requests
        if own := [id_ for id_ in ids if id_ in self._requests]:
            super()._on_drop(source, own)
        if offered := [id_ for id_ in ids if id_ in self._sender]:
            self._sender.cancel(offered)
        # These requests have ended here. The leader receives their last rows before CANCEL.
        if ended := [id_ for id_ in ids if id_ not in self._requests and id_ not in self._sender]:
            CANCEL.send(self._route, self._leader, ended)

    def _offer(self) -> None:
        if started := self._started():
            self._sender.offer([self._requests.pop(id_) for id_ in started])

    def _on_responses(self, responses: Batch) -> None:
        self._offer()  # first: a request that started in this step may already have a response
        first_tokens: dict[int, int | None] = {}
        cached: dict[int, int] = {}
        for row, start in zip(responses.rows, responses.offsets(), strict=False):
            if row["flags"] & NO_TOKENS:
                if row["flags"] & ResponseFlag.PROMPT_COUNTS:
                    cached[int(row["id"])] = int(responses.tokens[start + 1])
                continue
            id_, final = int(row["id"]), bool(row["flags"] & ResponseFlag.FINAL)
            if id_ in self._dropped and final:
                self._dropped.remove(id_)
                if row["flags"] & ResponseFlag.CANCELLED:
                    row["flags"] = ResponseFlag.LOST
                    self._n_outstanding -= 1
                    del self._requests[id_]
                    continue
            if id_ in self._sender:
                first_tokens[id_] = None if final else int(responses.tokens[start])
                if final:
                    # FIRST with FINAL would mean that nothing follows, but CONTEXT_DONE follows.
                    row["flags"] &= ~np.uint32(ResponseFlag.FIRST)
            elif final:
                row["flags"] |= ResponseFlag.FIRST
                self._requests.pop(id_, None)
        super()._on_responses(responses)  # to the leader first, then to the receivers
        if first_tokens:
            self._sender.send_first_tokens(first_tokens, cached)

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Return the number of first tokens, even of responses that continue in a generation instance."""
        return int(rows["n_tokens"][(rows["flags"] & NO_TOKENS) == 0].sum())

    def _on_handoffs(self, outcomes: list[HandoffOutcome]) -> None:
        if not self._in_test:
            self._warming.difference_update(one.id for one in outcomes)
            return
        self._ended(sum(not one.ended for one in outcomes))  # the others were counted with their first token
        rows = np.zeros(len(outcomes), RESPONSE)
        rows["id"] = [one.id for one in outcomes]
        rows["flags"] = ResponseFlag.CONTEXT_DONE
        rows["n_tokens"] = [one.transfer_us is not None for one in outcomes]
        transfer_us = [one.transfer_us for one in outcomes if one.transfer_us is not None]
        DONE.send(self._route, self._leader, Batch(rows, np.array(transfer_us, np.int32)))
