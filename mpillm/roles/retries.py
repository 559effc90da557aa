"""Requests of instances that are lost: when they can be sent again.

The harness may send a request again as soon as nothing more of it can come from the instance that is left.
With one kind of instance that is at once. In a disaggregated run it depends on what is lost:

    context     The generation instance may have everything it needs, or not even if the context instance
                said that it has handed the request over. It is asked (SETTLE), and answers for each request:
                CONTEXT_DONE, it will be answered; LOST, nothing of it is there.
    generation  The context instance says LOST for what it has not started; the rest ends there as if it
                had been handed over: with CONTEXT_DONE, or with its first token.

Messages of the two kinds of ranks overtake each other, so an instance may answer before the leader knows why.
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
class Found:
    """What follows for the requests of an instance that is lost."""

    again: dict[int, list[int]] = field(default_factory=dict)  # to send again, by the lost instance
    to_settle: dict[int, list[int]] = field(default_factory=dict)  # to ask about, by generation instance
    handed_over: list[int] = field(default_factory=list)  # answered; only CONTEXT_DONE was missing


class _Settling(NamedTuple):
    """A request whose context instance is lost: a generation instance was asked about it."""

    lost: int
    asked: int
    handed_over: bool  # the harness has been told so


class Retries:
    """The leader's account of them."""

    def __init__(self, entry: InstancePool, generation: InstancePool | None) -> None:
        self._entry = entry
        self._generation = generation
        self.any = False  # instance is lost
        # Of requests whose generation instance is lost, while a context instance has them: that instance.
        self._in_context: dict[int, int] = {}
        self._settling: dict[int, _Settling] = {}

    def lost(self, instance: int) -> Found:
        """Take the requests that a lost instance owed from the pools."""
        self.any = True
        generation = self._generation
        if generation is not None and instance in generation.instances:
            return self._lost_generation(generation, instance)
        ids = self._entry.owed_by(instance)
        self._entry.retire(self._entry.position(instance))
        self._entry.owner[ids] = -1
        if generation is None:
            return Found({instance: ids} if ids else {})
        found = Found()
        mine = self._entry.last_owner == self._entry.position(instance)
        for id_ in np.flatnonzero(mine & (generation.owner >= 0)).tolist():
            asked = int(generation.instances[generation.owner[id_]])
            self._settling[id_] = _Settling(instance, asked, id_ not in ids)
            found.to_settle.setdefault(asked, []).append(id_)
        for id_ in ids:
            if id_ in self._settling:
                continue
            if (first_lost := self._in_context.pop(id_, None)) is not None:
                found.again.setdefault(first_lost, []).append(id_)
            else:
                found.handed_over.append(id_)
        return found

    def _lost_generation(self, generation: InstancePool, instance: int) -> Found:
        ids = generation.owed_by(instance)
        generation.retire(generation.position(instance))
        generation.owner[ids] = -1
        found = Found()
        for id_ in ids:
            if self._entry.owner[id_] >= 0:
                self._in_context[id_] = instance
            else:
                self._settling.pop(id_, None)
                found.again.setdefault(instance, []).append(id_)
        for id_ in [id_ for id_, settling in self._settling.items() if settling.asked == instance]:
            if not self._settling.pop(id_).handed_over:
                found.handed_over.append(id_)
        return found

    def sift(
        self, instance: int, responses: Batch, needs: NDArray[np.int64]
    ) -> tuple[Batch, dict[int, list[int]]]:
        """Return what of an instance's responses concerns the harness, and the requests to send again.

        The latter by the lost instance that owed them; `needs`: KV tokens by request id.
        """
        again: dict[int, list[int]] = {}
        generation = self._generation
        if generation is None:
            return responses, again
        from_generation = instance in generation.instances
        rows, offsets = responses.rows, responses.offsets()
        keep = np.ones(len(rows), np.bool_)
        done: list[tuple[int, int, int]] = []
        for i, (id_, flags) in enumerate(zip(rows["id"].tolist(), rows["flags"].tolist(), strict=True)):
            if from_generation:
                settling = self._settling.get(id_)
                if not flags & (_LOST | _CONTEXT_DONE):
                    if settling is not None and settling.handed_over and flags & _FINAL:
                        del self._settling[id_]  # from now on the id may be another request's
                    continue
                keep[i] = False
                if settling is None or settling.lost != responses.tokens[offsets[i]]:
                    continue
                del self._settling[id_]
                if flags & _LOST and generation.owner[id_] >= 0:
                    _release(generation, id_, needs)
                    again.setdefault(settling.lost, []).append(id_)
                elif not settling.handed_over:
                    done.append((id_, 0, _CONTEXT_DONE))
            elif flags & _LOST:
                keep[i] = False
                _release(self._entry, id_, needs)
                lost = self._in_context.pop(id_, -1)
                if lost < 0:  # this leader has not heard of it yet
                    lost = int(generation.instances[generation.owner[id_]])
                    _release(generation, id_, needs)
                again.setdefault(lost, []).append(id_)
            elif id_ in self._in_context and flags & _FINAL:
                del self._in_context[id_]  # the answer ended with its first token
            elif id_ in self._in_context and flags & _CONTEXT_DONE:
                keep[i] = False
                _release(self._entry, id_, needs)
                again.setdefault(self._in_context.pop(id_), []).append(id_)
        kept = responses if keep.all() else responses.select(keep)
        if done:
            kept = concat([kept, Batch(np.array(done, RESPONSE), np.zeros(0, np.int32))])
        return kept, again


def _release(pool: InstancePool, id_: int, needs: NDArray[np.int64]) -> None:
    pool.give_back(pool.owner[[id_]], needs[[id_]])
    pool.owner[id_] = -1
