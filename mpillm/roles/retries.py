"""Requests of lost instances: decide when the harness can resend them.

The harness may resend a request when no remaining instance will send more response rows for the request. In
an aggregated run, this is immediately the case. In a disaggregated run, the lost instance's role decides:

    context     The generation instance may lack the KV cache or the first token, even after CONTEXT_DONE. The
                leader sends SETTLE to the generation instance, which answers CONTEXT_DONE for requests that
                it will complete, and LOST for others. The harness resends incomplete LOST requests.
    generation  The context instance sends LOST for requests that it has not started, and the harness resends
                them. If a started request ends with its first token, its response is complete. Otherwise, the
                context instance sends CONTEXT_DONE, and the harness resends the request.

A context instance may detect a generation instance's loss before the leader does. If LOST arrives so early,
the leader treats the request's generation instance as lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag, concat
from mpillm.roles.pool import InstancePool

_LOST, _CONTEXT_DONE, _FINAL = int(ResponseFlag.LOST), int(ResponseFlag.CONTEXT_DONE), int(ResponseFlag.FINAL)


@dataclass
class RetryPlan:
    """Actions for the requests of a lost instance."""

    resend: dict[int, list[int]] = field(default_factory=dict)  # ids to resend, by lost instance
    to_settle: dict[int, list[int]] = field(default_factory=dict)  # ids for SETTLE, by generation instance
    # Ids of requests whose response is complete, and whose missing CONTEXT_DONE the leader must send.
    needs_context_done: list[int] = field(default_factory=list)


class _Inquiry(NamedTuple):
    """An unanswered SETTLE for one request."""

    context: int  # the lost context instance
    generation: int  # the instance that must answer
    handed_off: bool  # whether the leader forwarded CONTEXT_DONE to the harness before the loss


class Retries:
    """The leader's record of requests of lost instances."""

    def __init__(self, entry: InstancePool, generation: InstancePool | None) -> None:
        self._entry = entry
        self._generation = generation
        self.any = False  # whether an instance is lost
        # Lost generation instance of each request that is still in a context instance, by request id.
        self._in_context: dict[int, int] = {}
        self._inquiries: dict[int, _Inquiry] = {}

    def lost(self, instance: int) -> RetryPlan:
        """Remove a lost instance's outstanding requests from its pool; return the actions for them."""
        self.any = True
        generation = self._generation
        if generation is not None and instance in generation.instances:
            return self._lost_generation(generation, instance)
        ids = self._entry.outstanding_of(instance)
        self._entry.retire(self._entry.position(instance))
        self._entry.owner[ids] = -1
        if generation is None:
            return RetryPlan({instance: ids} if ids else {})
        plan = RetryPlan()
        own = self._entry.last_owner == self._entry.position(instance)
        for id_ in np.flatnonzero(own & (generation.owner >= 0)).tolist():
            other = int(generation.instances[generation.owner[id_]])
            self._inquiries[id_] = _Inquiry(instance, other, id_ not in ids)
            plan.to_settle.setdefault(other, []).append(id_)
        for id_ in ids:
            if id_ in self._inquiries:
                continue
            if (first_lost := self._in_context.pop(id_, None)) is not None:
                plan.resend.setdefault(first_lost, []).append(id_)
            else:
                plan.needs_context_done.append(id_)
        return plan

    def _lost_generation(self, generation: InstancePool, instance: int) -> RetryPlan:
        ids = generation.outstanding_of(instance)
        generation.retire(generation.position(instance))
        generation.owner[ids] = -1
        plan = RetryPlan()
        for id_ in ids:
            if self._entry.owner[id_] >= 0:
                self._in_context[id_] = instance
            else:
                self._inquiries.pop(id_, None)
                plan.resend.setdefault(instance, []).append(id_)
        for id_ in [id_ for id_, inquiry in self._inquiries.items() if inquiry.generation == instance]:
            if not self._inquiries.pop(id_).handed_off:
                plan.needs_context_done.append(id_)
        return plan

    def filter(
        self, instance: int, responses: Batch, needs: NDArray[np.int64]
    ) -> tuple[Batch, dict[int, list[int]]]:
        """Return the response rows to forward to the harness, and the ids to resend, by lost instance.

        `responses`: rows from `instance`. `needs`: KV tokens of each request, by request id.
        """
        resend: dict[int, list[int]] = {}
        generation = self._generation
        if generation is None:
            return responses, resend
        from_generation = instance in generation.instances
        rows, offsets = responses.rows, responses.offsets()
        keep = np.ones(len(rows), np.bool_)
        done: list[tuple[int, int, int]] = []
        for i, (id_, flags) in enumerate(zip(rows["id"].tolist(), rows["flags"].tolist(), strict=True)):
            if from_generation:
                inquiry = self._inquiries.get(id_)
                if not flags & (_LOST | _CONTEXT_DONE):
                    if inquiry is not None and inquiry.handed_off and flags & _FINAL:
                        del self._inquiries[id_]  # the harness may now reuse the id for another request
                    continue
                keep[i] = False
                if inquiry is None or inquiry.context != responses.tokens[offsets[i]]:
                    continue
                del self._inquiries[id_]
                if flags & _LOST and generation.owner[id_] >= 0:
                    _release(generation, id_, needs)
                    resend.setdefault(inquiry.context, []).append(id_)
                elif not inquiry.handed_off:
                    done.append((id_, 0, _CONTEXT_DONE))
            elif flags & _LOST:
                keep[i] = False
                _release(self._entry, id_, needs)
                lost = self._in_context.pop(id_, -1)
                if lost < 0:  # the leader has not yet detected the loss of the generation instance
                    lost = int(generation.instances[generation.owner[id_]])
                    _release(generation, id_, needs)
                resend.setdefault(lost, []).append(id_)
            elif id_ in self._in_context and flags & _FINAL:
                del self._in_context[id_]  # the response ended with its first token
            elif id_ in self._in_context and flags & _CONTEXT_DONE:
                keep[i] = False
                _release(self._entry, id_, needs)
                resend.setdefault(self._in_context.pop(id_), []).append(id_)
        remaining = responses if keep.all() else responses.select(keep)
        if done:
            remaining = concat([remaining, Batch(np.array(done, RESPONSE), np.zeros(0, np.int32))])
        return remaining, resend


def _release(pool: InstancePool, id_: int, needs: NDArray[np.int64]) -> None:
    pool.return_credits(pool.owner[[id_]], needs[[id_]])
    pool.owner[id_] = -1
