"""Instances of context and generation servers, which are separate runs.

A context server answers CONTEXT_ONLY requests with their first token. It keeps the KV cache until a
generation server fetches it (`kv_socket`). The HTTP thread of the generation server fetches the cache before
it sends a GENERATION_ONLY request to the ranks. So complete caches travel from one run's host memory to the
other's.

Inside each run, the handoff (`roles.handoff`) needs two instances. The second one is this role, with caches
in its memory (`engine.handoff.host_end`). The engine's blocks are in use only while a cache moves to or from
this memory, whatever happens to the other run. Both servers also answer requests that need no other server.

For this run's leader role, a context-only request lasts until its cache is fetched or dropped. Only then does
FINAL follow FIRST, so credits limit the memory that waiting caches take.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
from mpillm.cores.capabilities import Cache, OwnMemory, TransfersKvToRuns
from mpillm.endpoint.disagg.kv_socket import KvStore
from mpillm.phases import Phase
from mpillm.roles.handoff import HandoffReceiver, HandoffSender
from mpillm.roles.instance import InstanceRole

if TYPE_CHECKING:
    from mpillm.comms.tags import Tag
    from mpillm.comms.transport import Buffer, Transport

_log = logging.getLogger(__name__)
_GRACE_S = 5.0  # time for the fetch of a cache whose share of the credits other requests need
_PARTNER = 0  # index of the second instance, which is this rank's memory
_RANK = 0  # rank of both instances in `_Loopback`


class Arrival(NamedTuple):
    """The result of a context server for a request."""

    first_token: int
    cache: Cache


class _LoopbackMessage(NamedTuple):
    """A message that has arrived, with the fields of `Envelope`."""

    source: int
    buffer: Buffer


class _Loopback:
    """The transport between an instance and its partner on the same rank: `send` calls the handler."""

    def __init__(self) -> None:
        self.handlers: dict[Tag, Callable[[_LoopbackMessage], None]] = {}

    def send(self, dest: int, tag: Tag, buffer: Buffer) -> None:
        self.handlers[tag](_LoopbackMessage(dest, buffer))


class _Server(InstanceRole):
    """An instance, and this rank's memory as its partner in handoffs."""

    def __init__(self, core: LLMCore, route: Transport, leader: int, instance: int) -> None:
        super().__init__(core, route, leader, instance)
        assert isinstance(core, TransfersKvToRuns)
        self._kv = core
        self._end: OwnMemory | None = None
        self._loopback = cast("Transport", _Loopback())

    def load(self) -> None:
        super().load()
        self._end = self._kv.host_end()

    @property
    def _memory(self) -> OwnMemory:
        assert self._end is not None
        return self._end

    def quiet_s(self) -> float:
        return 0.0  # the store's threads, and the engine's side of the handoff, can have news at any time

    def _finish(self, id_: int, tokens: list[int], flags: ResponseFlag) -> None:
        """Send the last row of a request."""
        rows = np.array([(id_, len(tokens), flags | ResponseFlag.FINAL)], RESPONSE)
        super()._on_responses(Batch(rows, np.array(tokens, np.int32)))


class ContextServer(_Server):
    """Computes prompts and first tokens. Its memory receives the KV caches (`ReceivesKv`)."""

    def __init__(self, core: LLMCore, route: Transport, leader: int, instance: int, store: KvStore) -> None:
        super().__init__(core, route, leader, instance)
        self._store = store
        self._sender = HandoffSender(self._loopback, self._kv, {_PARTNER: _RANK})
        self._receiver = HandoffReceiver(self._loopback, self, {_RANK: _PARTNER})
        self._requests: dict[int, Batch] = {}  # context-only requests that have no KV cache blocks yet
        self._first_tokens: dict[int, int] = {}  # of requests that have blocks; NO_TOKEN: not computed yet
        # Tokens and flags of last rows. A row waits until neither side of the handoff has its request.
        self._last_rows: dict[int, tuple[list[int], ResponseFlag]] = {}
        self._arrived: dict[int, Cache] = {}  # caches whose requests have no first token yet
        self._not_fetched = 0
        # Caches in the store, the oldest first: their start (time.monotonic()) and tokens.
        self._stored: dict[int, tuple[float, int]] = {}
        self._n_stored_tokens = 0
        self._limits = Credits(0, 0)  # limits of `_stored`

    def ready(self) -> None:
        requests, tokens = self._core.credits()
        self._limits = Credits(requests // 2, tokens // 2)
        self._store.max_open = requests - requests // 8
        super().ready()

    def done(self, phase: Phase) -> bool:
        return super().done(phase) and (phase != "drain" or not self._first_tokens)

    def stop(self) -> None:
        self._store.close()
        super().stop()

    def report(self) -> dict[str, Any]:
        return {**super().report(), "not_fetched": self._not_fetched}

    def poll(self) -> bool:
        self._offer()
        worked = super().poll()
        if not self._first_tokens:
            return worked
        worked |= self._receiver.poll()
        self._receiver.running.clear()
        worked |= bool(self._sender.poll())
        self._end_fetched()
        for id_ in [*self._last_rows]:
            if id_ not in self._sender and id_ not in self._receiver:
                self._finish(id_, *self._last_rows.pop(id_))
                del self._first_tokens[id_]
                worked = True
        return worked

    # --- the memory's side of the handoff ---

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        row = request.rows[0]
        self._memory.take(int(row["id"]), slot, int(row["n_tokens"]))
        return True

    def poll_kv(self) -> list[int]:
        caches = self._memory.poll()
        self._arrived |= caches
        return [*caches]

    def admit(self, request: Batch, first_token: int) -> None:
        id_, n_tokens = int(request.rows["id"][0]), int(request.rows["n_tokens"][0])
        cache = self._arrived.pop(id_)
        if self._store.key(id_) is None:  # dropped
            return
        self._store.put(id_, cache)
        self._stored[id_] = time.monotonic(), n_tokens
        self._n_stored_tokens += n_tokens

    def release_kv(self, request_id: int) -> None:
        del self._arrived[request_id]

    def cancel(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self._store.drop(id_)
            self._forget(id_)

    def _end_fetched(self) -> None:
        """End the requests whose caches have been fetched, or are overdue."""
        over = self._store.take_fetched()
        if overdue := [*dict.fromkeys((*self._store.overdue(), *self._over_capacity()))]:
            self._not_fetched += len(overdue)
            _log.warning("dropped the KV caches of %d contexts: no server has fetched them", len(overdue))
            for id_ in overdue:
                self._store.drop(id_)
        for id_ in (*over, *overdue):
            self._forget(id_)
            self._last_rows.setdefault(id_, ([self._first_tokens[id_]], ResponseFlag(0)))

    def _over_capacity(self) -> list[int]:
        """Return the oldest caches beyond the limits, after their grace time: other requests need credits."""
        requests, tokens = len(self._stored), self._n_stored_tokens
        surplus: list[int] = []
        for id_, (since, n) in self._stored.items():
            if requests <= self._limits.requests and tokens <= self._limits.tokens:
                break
            if time.monotonic() < since + _GRACE_S:
                break
            surplus.append(id_)
            requests, tokens = requests - 1, tokens - n
        return surplus

    def _forget(self, id_: int) -> None:
        _, n_tokens = self._stored.pop(id_, (0.0, 0))
        self._n_stored_tokens -= n_tokens

    # --- the engine's side ---

    def _enqueue(self, requests: Batch) -> None:
        context_only = (requests.rows["flags"] & RequestFlag.CONTEXT_ONLY) != 0
        if context_only.any():
            requests = Batch(requests.rows.copy(), requests.tokens)
            requests.rows["generation"] = np.where(context_only, _PARTNER, NO_INSTANCE)
            for request in requests.select(context_only).split():
                self._requests[int(request.rows["id"][0])] = request
        super()._enqueue(requests)

    def _offer(self) -> None:
        """Begin the handoffs of requests that have blocks, while their contexts are computed."""
        if started := self._kv.started():
            self._first_tokens |= dict.fromkeys(started, NO_TOKEN)
            self._sender.offer([self._requests.pop(id_) for id_ in started])
            self._receiver.poll()

    def _on_drop(self, source: int, ids: list[int]) -> None:
        self._offer()  # the core does not cancel a request whose handoff has begun
        super()._on_drop(source, ids)
        for id_ in ids:
            if id_ in self._first_tokens:
                self._last_rows[id_] = [], ResponseFlag.CANCELLED
                self._receiver.cancel([id_])

    def _on_responses(self, responses: Batch) -> None:
        self._offer()  # include requests that this step has started, which may have responses
        first_tokens: dict[int, int | None] = {}
        delayed = np.zeros(len(responses), bool)
        for i, (row, start) in enumerate(zip(responses.rows, responses.offsets(), strict=False)):
            if row["flags"] & NO_TOKENS:
                continue
            id_, final = int(row["id"]), bool(row["flags"] & ResponseFlag.FINAL)
            if id_ in self._first_tokens:
                token = self._first_tokens[id_] = int(responses.tokens[start])
                first_tokens[id_] = None if final else token
                if final:  # the last row would free the id
                    delayed[i] = True
                    self._last_rows.setdefault(id_, ([token], ResponseFlag.FIRST))
                elif id_ not in self._last_rows:
                    self._store.open(id_)  # before the HTTP thread reads the cache's key
            elif final:
                self._requests.pop(id_, None)
        passed_on = responses.select(~delayed) if delayed.any() else responses
        if len(passed_on):
            super()._on_responses(passed_on)
        if first_tokens:
            self._sender.send_first_tokens(first_tokens)


class GenerationServer(_Server):
    """Generates from the second token on. Its memory sends the KV caches (`SendsKv`)."""

    def __init__(
        self, core: LLMCore, route: Transport, leader: int, instance: int, arrivals: dict[int, Arrival]
    ) -> None:
        """`arrivals`: by request id. The HTTP thread adds each one right after it has sent the request."""
        super().__init__(core, route, leader, instance)
        self._arrivals = arrivals
        self._sender = HandoffSender(self._loopback, self, {_PARTNER: _RANK})
        self._receiver = HandoffReceiver(self._loopback, self._kv, {_RANK: _PARTNER})
        self._waiting: deque[Batch] = deque()  # requests without an arrival yet, each with its prompt
        self._to_send: dict[int, tuple[int, Arrival]] = {}  # number of prompt tokens, arrival

    def done(self, phase: Phase) -> bool:
        idle = self._sender.idle and self._receiver.idle
        return super().done(phase) and (phase != "drain" or (idle and not self._waiting))

    def poll(self) -> bool:
        self._offer()
        moved = self._receiver.poll()
        self._receiver.running.clear()
        if not self._sender.idle:
            moved |= bool(self._sender.poll())
        return super().poll() or moved

    # --- the memory's side of the handoff ---

    def _offer(self) -> None:
        """Offer the instance the requests whose caches are in memory, in order of the requests' arrival."""
        while self._waiting:
            id_ = int(self._waiting[0].rows["id"][0])
            # A cache of an earlier request with this id may not have left yet.
            if id_ in self._sender or (arrival := self._arrivals.pop(id_, None)) is None:
                return
            request = self._waiting.popleft()
            self._to_send[id_] = int(request.rows["n_tokens"][0]), arrival
            self._sender.offer([request])
            self._sender.send_first_tokens({id_: arrival.first_token})

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        n_tokens, arrival = self._to_send[request_id]
        self._memory.give(request_id, slot, n_tokens, arrival.cache)
        rows = np.array([(request_id, 1, ResponseFlag.FIRST)], RESPONSE)
        DONE.send(self._route, self._leader, Batch(rows, np.array([arrival.first_token], np.int32)))

    def poll_kv(self) -> list[int]:
        return [*self._memory.poll()]

    def release_kv(self, request_id: int) -> None:
        del self._to_send[request_id]

    # --- the engine's side ---

    def _enqueue(self, requests: Batch) -> None:
        generation_only = (requests.rows["flags"] & RequestFlag.GENERATION_ONLY) != 0
        if generation_only.any():
            own = requests.select(generation_only)
            own.rows["generation"] = _PARTNER
            self._waiting += own.split()
            requests = requests.select(~generation_only)
        if len(requests):
            super()._enqueue(requests)

    def _on_drop(self, source: int, ids: list[int]) -> None:
        self._receiver.cancel(ids)
        self._send_flag(ids, ResponseFlag.CANCEL_DONE)
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if (id_ := int(request.rows["id"][0])) in ids:
                self._finish(id_, [], ResponseFlag.CANCELLED)
            else:
                self._waiting.append(request)
