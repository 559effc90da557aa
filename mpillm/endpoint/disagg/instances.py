"""Instances of context and generation servers, which are runs of their own.

A context server answers CONTEXT_ONLY requests with their first token and keeps the KV cache for whoever
fetches it (`kv_socket`); a generation server's HTTP thread fetches it before it sends a GENERATION_ONLY
request. So what travels between two runs is whole caches from memory to memory: the engines' blocks are held
only while a cache moves inside its run (`engine.handoff.host_end`), whatever becomes of the other run. Both
also answer requests that ask for neither.

To the leader's role a context-only request lasts until its cache is fetched or dropped: only then does FINAL
follow FIRST, so credits limit the memory that waiting caches take.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpillm.comms.messages import (
    DONE,
    NO_INSTANCE,
    NO_TOKEN,
    NO_TOKENS,
    RESPONSE,
    Batch,
    RequestFlag,
    ResponseFlag,
)
from mpillm.cores.base import Credits, LLMCore
from mpillm.cores.capabilities import Cache, HandsOverToRuns, OwnMemory
from mpillm.endpoint.disagg.kv_socket import KvStore
from mpillm.phases import Phase
from mpillm.roles.handoff import First, Kv
from mpillm.roles.instance import InstanceRole

if TYPE_CHECKING:
    from mpillm.comms.transport import Transport

_log = logging.getLogger(__name__)
_SLOTS = 256  # most KV caches that move inside this run at once
_GRACE_S = 5.0  # for a cache to be fetched that others have no room for
_PARTNER = 0  # the instance that stands for this rank's memory


class Arrival(NamedTuple):
    """The result of a context server for a request."""

    first_token: int
    cache: Cache


class _Server(InstanceRole):
    def __init__(self, core: LLMCore, route: Transport, leader: int, instance: int) -> None:
        super().__init__(core, route, leader, instance)
        assert isinstance(core, HandsOverToRuns)
        self._kv = core
        self._end: OwnMemory | None = None
        self._slots = list(range(_SLOTS))

    def load(self) -> None:
        super().load()
        self._end = self._kv.host_end()

    @property
    def _memory(self) -> OwnMemory:
        assert self._end is not None
        return self._end

    def quiet_s(self) -> float:
        return 0.0  # threads of the store, and the engine's end of the handoff, change things at any time

    def _tell_end(self, id_: int, tokens: list[int], flags: ResponseFlag) -> None:
        """Make the last row of a request."""
        rows = np.array([(id_, len(tokens), flags | ResponseFlag.FINAL)], RESPONSE)
        super()._on_responses(Batch(rows, np.array(tokens, np.int32)))


class _Fate(Enum):
    """What becomes of a context-only request, for whoever asked."""

    AWAITED = auto()
    OVER = auto()  # its cache was fetched, or nobody has fetched it in time
    DROPPED = auto()  # nobody waits for the answer


# The last row of a request whose blocks are free: whether it has the first token, and its flags. In all other
# states it waits.
_LAST_ROWS: dict[tuple[First, _Fate], tuple[bool, ResponseFlag]] = {
    (First.GOES_ON, _Fate.OVER): (True, ResponseFlag(0)),
    (First.GOES_ON, _Fate.DROPPED): (False, ResponseFlag.CANCELLED),
    (First.ENDED, _Fate.AWAITED): (True, ResponseFlag.FIRST),
    (First.ENDED, _Fate.OVER): (True, ResponseFlag.FIRST),
    (First.ENDED, _Fate.DROPPED): (False, ResponseFlag.CANCELLED),
}


@dataclass
class _Context:
    """A context-only request that has memory for its context."""

    n_tokens: int
    cache: Cache | None = None  # once all of it is in this rank's memory
    left: bool = False  # all of it has left the engine's blocks
    released: bool = False  # those blocks
    first: First = First.AWAITED
    first_token: int = NO_TOKEN
    fate: _Fate = _Fate.AWAITED

    @property
    def kv(self) -> Kv:
        return Kv.MOVED if self.left and self.cache is not None else Kv.MOVING


class ContextServer(_Server):
    """Computes prompts and first tokens."""

    def __init__(self, core: LLMCore, route: Transport, leader: int, instance: int, store: KvStore) -> None:
        super().__init__(core, route, leader, instance)
        self._store = store
        self._asked: dict[int, int] = {}  # tokens of the prompts that have no memory yet
        self._contexts: dict[int, _Context] = {}
        self._to_send: deque[int] = deque()  # no slot yet
        self._id_of: dict[int, int] = {}  # by slot
        self._not_fetched = 0
        # Caches in the store, the oldest first: since when (time.monotonic()), and their tokens.
        self._kept: dict[int, tuple[float, int]] = {}
        self._kept_tokens = 0
        self._room = Credits(0, 0)  # for these

    def ready(self) -> None:
        requests, tokens = self._core.credits()
        self._room = Credits(requests // 2, tokens // 2)
        self._store.most_open = requests - requests // 8
        super().ready()

    def done(self, phase: Phase) -> bool:
        return super().done(phase) and (phase != "drain" or not self._contexts)

    def stop(self) -> None:
        self._store.close()
        super().stop()

    def report(self) -> dict[str, Any]:
        return {**super().report(), "not_fetched": self._not_fetched}

    def poll(self) -> bool:
        self._start()
        worked = super().poll()
        if not self._contexts:
            return worked
        changed = self._kv.poll_kv()
        for id_ in changed:
            self._contexts[id_].left = True
        for slot, cache in self._memory.poll().items():
            self._slots.append(slot)
            changed.append(self._id_of.pop(slot))
            self._contexts[changed[-1]].cache = cache
        over = self._store.take_fetched()
        if overdue := [*dict.fromkeys((*self._store.overdue(), *self._surplus()))]:
            self._not_fetched += len(overdue)
            _log.warning("dropped the KV caches of %d contexts: nobody has fetched them", len(overdue))
            for id_ in overdue:
                self._store.drop(id_)
        for id_ in (*over, *overdue):
            if self._contexts[id_].fate is _Fate.AWAITED:
                self._contexts[id_].fate = _Fate.OVER
            self._forget(id_)
        changed += over + overdue
        for id_ in dict.fromkeys(changed):
            self._settle(id_)
        return worked or bool(changed)

    def _surplus(self) -> list[int]:
        """Return caches that should have been fetched by now, if others need their share of the credits."""
        requests, tokens = len(self._kept), self._kept_tokens
        found: list[int] = []
        for id_, (since, n) in self._kept.items():
            if requests <= self._room.requests and tokens <= self._room.tokens:
                break
            if time.monotonic() < since + _GRACE_S:
                break
            found.append(id_)
            requests, tokens = requests - 1, tokens - n
        return found

    def _forget(self, id_: int) -> None:
        _, n_tokens = self._kept.pop(id_, (0.0, 0))
        self._kept_tokens -= n_tokens

    def _enqueue(self, requests: Batch) -> None:
        mine = (requests.rows["flags"] & RequestFlag.CONTEXT_ONLY) != 0
        if mine.any():
            requests = Batch(requests.rows.copy(), requests.tokens)
            requests.rows["generation"] = np.where(mine, _PARTNER, NO_INSTANCE)
            rows = requests.rows[mine]
            self._asked |= dict(zip(rows["id"].tolist(), rows["n_tokens"].tolist(), strict=True))
        super()._enqueue(requests)

    def _start(self) -> None:
        """Send the caches of contexts that have memory, as they are computed."""
        for id_ in self._kv.started():
            self._contexts[id_] = _Context(self._asked.pop(id_))
            self._to_send.append(id_)
        while self._to_send and self._slots:
            id_, slot = self._to_send.popleft(), self._slots.pop()
            self._id_of[slot] = id_
            self._memory.take(slot, self._contexts[id_].n_tokens)
            self._kv.send_kv(id_, _PARTNER, slot)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        self._start()  # from then on the core does not cancel a request
        super()._on_drop(source, ids)
        for id_ in ids:
            if id_ in self._contexts:
                self._contexts[id_].fate = _Fate.DROPPED
                self._store.drop(id_)
                self._forget(id_)
                self._settle(id_)

    def _on_responses(self, responses: Batch) -> None:
        self._start()  # the requests that this step started: no other can have a response
        held_back = np.zeros(len(responses), bool)
        for i, (row, start) in enumerate(zip(responses.rows, responses.offsets(), strict=False)):
            if row["flags"] & NO_TOKENS:
                continue
            id_, final = int(row["id"]), bool(row["flags"] & ResponseFlag.FINAL)
            if (context := self._contexts.get(id_)) is not None:
                context.first, context.first_token = (
                    First.ENDED if final else First.GOES_ON,
                    int(responses.tokens[start]),
                )
                # An answer that ends with its first token is told when its id is free, too.
                held_back[i] = final
                if not final and context.fate is not _Fate.DROPPED:
                    self._store.open(id_)  # before the HTTP thread asks for its key
            elif final:
                self._asked.pop(id_, None)
        told = responses.select(~held_back) if held_back.any() else responses
        if len(told):
            super()._on_responses(told)
        for id_ in responses.rows["id"].tolist():
            if id_ in self._contexts:
                self._settle(id_)

    def _settle(self, id_: int) -> None:
        """Free the engine's blocks as soon as possible, then the rest if nobody waits for it."""
        context = self._contexts[id_]
        if not context.released:
            if context.kv is not Kv.MOVED or context.first is First.AWAITED:
                return
            context.released = True
            self._kv.release_kv(id_)
            if (context.first, context.fate) == (First.GOES_ON, _Fate.AWAITED):
                assert context.cache is not None
                self._store.put(id_, context.cache)
                self._kept[id_] = time.monotonic(), context.n_tokens
                self._kept_tokens += context.n_tokens
            context.cache = None
        if (last := _LAST_ROWS.get((context.first, context.fate))) is not None:
            has_token, flags = last
            self._tell_end(id_, [context.first_token] if has_token else [], flags)
            del self._contexts[id_]


class GenerationServer(_Server):
    """Generates from the second token on."""

    def __init__(
        self, core: LLMCore, route: Transport, leader: int, instance: int, arrivals: dict[int, Arrival]
    ) -> None:
        """`arrivals`: by request id; the HTTP thread adds them, right after it has sent the request."""
        super().__init__(core, route, leader, instance)
        self._arrivals = arrivals
        self._waiting: deque[Batch] = deque()  # requests, each with its prompt
        self._coming: dict[int, tuple[Batch, int, int]] = {}  # with the first token and the slot
        self._half_free: set[int] = set()  # slots: one end is done with them

    def done(self, phase: Phase) -> bool:
        return super().done(phase) and (phase != "drain" or not (self._waiting or self._coming))

    def poll(self) -> bool:
        while self._waiting and self._slots and self._take(self._waiting[0]):
            self._waiting.popleft()
        arrived = self._kv.poll_kv()
        for id_ in arrived:
            request, first_token, slot = self._coming.pop(id_)
            self._kv.admit(request, first_token)
            self._free(slot)
        if len(self._slots) < _SLOTS:
            for slot in self._memory.poll():
                self._free(slot)
        return super().poll() or bool(arrived)

    def _take(self, request: Batch) -> bool:
        """Move its cache into the engine's blocks; return False while the cache or the room is missing."""
        id_, n_tokens = int(request.rows["id"][0]), int(request.rows["n_tokens"][0])
        arrival, slot = self._arrivals.get(id_), self._slots[-1]
        if arrival is None or not self._kv.receive_kv(request, _PARTNER, slot):
            return False
        self._slots.pop()
        self._arrivals.pop(id_, None)
        self._coming[id_] = request, arrival.first_token, slot
        self._memory.give(slot, n_tokens, arrival.cache)
        rows = np.array([(id_, 1, ResponseFlag.FIRST)], RESPONSE)
        DONE.send(self._route, self._leader, Batch(rows, np.array([arrival.first_token], np.int32)))
        return True

    def _free(self, slot: int) -> None:
        """Note that one end is done with the slot, which is free when both are."""
        if slot in self._half_free:
            self._half_free.remove(slot)
            self._slots.append(slot)
        else:
            self._half_free.add(slot)

    def _enqueue(self, requests: Batch) -> None:
        mine = (requests.rows["flags"] & RequestFlag.GENERATION_ONLY) != 0
        if mine.any():
            self._waiting += [
                Batch(request.rows.copy(), request.tokens.copy())
                for request, is_mine in zip(requests.split(), mine.tolist(), strict=True)
                if is_mine
            ]
            requests = requests.select(~mine)
        if len(requests):
            super()._enqueue(requests)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        super()._on_drop(source, ids)
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if (id_ := int(request.rows["id"][0])) in ids:
                self._tell_end(id_, [], ResponseFlag.CANCELLED)
            else:
                self._waiting.append(request)
