"""The context instance: computes prompt and first token, hands the KV cache to a generation instance."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import CANCEL, DONE, NO_INSTANCE, NO_TOKENS, RESPONSE, Batch, ResponseFlag, concat
from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import TransfersKv
from mpillm.phases import Phase
from mpillm.roles.handoff import HandedOver, HandoffSender
from mpillm.roles.instance import InstanceRole
from mpillm.telemetry.recorder import Recorder, Spell

if TYPE_CHECKING:  # its import starts MPI
    from mpillm.comms.transport import Transport

_WARM_UP_IDS = 4096  # more than the requests of any warm-up


class Context(InstanceRole):
    """Keeps a request's prompt until it is offered: the generation instance receives prompt and KV cache."""

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
        """`receivers`: for each generation instance its leader's rank.

        `warm_up_receivers`: the generation instances that this one warms up.
        """
        super().__init__(core, route, leader, instance)
        assert isinstance(core, TransfersKv)
        self._started = core.started
        self._moves: Spell | None = None  # whether KV caches are under way
        self._sender = HandoffSender(route, core, receivers)
        self._n_receivers = len(receivers)
        self._warm_up_receivers = warm_up_receivers
        self._requests: dict[int, Batch] = {}  # not yet offered; the sender knows the others
        self._lost: set[int] = set()  # generation instances
        self._dropped: set[int] = set()  # requests for those, which the core has yet to cancel

    def warmup(self) -> None:
        batches = []
        for receiver in self._warm_up_receivers:
            requests = self._core.warm_up_requests()
            # Unique ids: several context instances may warm up a generation instance at once.
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
        self._moves = recorder.spell(recorder.handoff)

    def poll(self) -> bool:
        if self._moves is not None:
            self._moves.see(self._sender.n_moving > 0, time.perf_counter())
        self._offer()  # before the next step, so that receivers can answer while it computes
        worked = super().poll()
        handed_over = self._sender.poll()
        if handed_over:
            self._on_handed_over(handed_over)
        return worked or bool(handed_over)

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
        if self._lost and (gone := np.isin(requests.rows["generation"], [*self._lost])).any():
            self._owed -= int(gone.sum())
            self._tell_of(requests.rows["id"][gone].tolist(), ResponseFlag.LOST)
            requests = requests.select(~gone)
            if not len(requests):
                return
        for request in requests.split():
            if request.rows["generation"][0] != NO_INSTANCE:
                self._requests[int(request.rows["id"][0])] = request
        super()._enqueue(requests)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        self._offer()  # from then on the receiver cancels the request
        if mine := [id_ for id_ in ids if id_ in self._requests]:
            super()._on_drop(source, mine)
        if offered := [id_ for id_ in ids if id_ in self._sender]:
            self._sender.cancel(offered)
        # The leader has been told, before this arrives, that none of these is here any more.
        if gone := [id_ for id_ in ids if id_ not in self._requests and id_ not in self._sender]:
            CANCEL.send(self._route, self._leader, gone)

    def _offer(self) -> None:
        if started := self._started():
            self._sender.offer([self._requests.pop(id_) for id_ in started])

    def _on_responses(self, responses: Batch) -> None:
        self._offer()  # the requests that this step started: no other can have a response
        first_tokens: dict[int, int | None] = {}
        for row, start in zip(responses.rows, responses.offsets(), strict=False):
            if row["flags"] & NO_TOKENS:
                continue
            id_, final = int(row["id"]), bool(row["flags"] & ResponseFlag.FINAL)
            if id_ in self._dropped and final:
                self._dropped.remove(id_)
                if row["flags"] & ResponseFlag.CANCELLED:
                    row["flags"] = ResponseFlag.LOST
                    self._owed -= 1
                    del self._requests[id_]
                    continue
            if id_ in self._sender:
                first_tokens[id_] = None if final else int(responses.tokens[start])
                if final:
                    # FIRST with FINAL would say that nothing follows, but CONTEXT_DONE does.
                    row["flags"] &= ~np.uint32(ResponseFlag.FIRST)
            elif final:
                row["flags"] |= ResponseFlag.FIRST
                self._requests.pop(id_, None)
        super()._on_responses(responses)  # the first token leaves before the KV cache does
        if first_tokens:
            self._sender.tell_first(first_tokens)

    def _own_tokens(self, rows: NDArray[np.void], final: NDArray[np.bool_]) -> int:
        """Return the first tokens, also of answers that continue elsewhere."""
        return int(rows["n_tokens"][(rows["flags"] & NO_TOKENS) == 0].sum())

    def _on_handed_over(self, handed_over: list[HandedOver]) -> None:
        if not self._in_test:
            self._warming.difference_update(one.id for one in handed_over)
            return
        self._ended(sum(not one.ended for one in handed_over))  # the others ended with their first token
        rows = np.zeros(len(handed_over), RESPONSE)
        rows["id"] = [one.id for one in handed_over]
        rows["flags"] = ResponseFlag.CONTEXT_DONE
        rows["n_tokens"] = [one.moved_us is not None for one in handed_over]
        moved_us = [one.moved_us for one in handed_over if one.moved_us is not None]
        DONE.send(self._route, self._leader, Batch(rows, np.array(moved_us, np.int32)))
