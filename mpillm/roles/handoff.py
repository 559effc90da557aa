"""Handoff of a request and its KV cache from a context to a generation instance, with any layouts.

The instances' root ranks negotiate over the route communicator, with many requests per message:

    OFFER    context to generation: requests that have memory in the context instance, a step before they run
    ACCEPT   generation to context: a slot, the number under which all generation ranks expect the KV cache
    FIRST    context to generation: the first token, or NO_TOKEN if the response ended with its first token
    ACCEPT   with NO_SLOT: the generation instance has dropped a request that ended with its first token
    DROP     context to generation: requests that were cancelled after their offer

The KV cache moves from rank to rank in the handoff communicator (`engine.handoff.transfers`). If ACCEPT
arrives in time, the cache of the first layers moves while later layers are computed. Each root rank's core
orders the other ranks of the instance to send or receive.

A generation instance accepts offers in their order of arrival. While it has no free memory, its offers wait,
but offers to other instances do not. Context instances offer only requests that already have memory. So every
accepted KV cache arrives, and instances cannot wait for each other in a circle. A request's id stays in use
until both sides have released the request.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from mpillm.comms.messages import (
    ACCEPT,
    DROP,
    FIRST,
    NO_SLOT,
    NO_TOKEN,
    OFFER,
    WARM_UP,
    Batch,
    NumberRows,
    RequestFlag,
    concat,
)
from mpillm.cores.capabilities import ReceivesKv, SendsKv

if TYPE_CHECKING:  # at run time, this import would start MPI
    from mpillm.comms.transport import Transport

_SLOTS = 256  # maximum number of KV caches in transfer to one receiver


class Kv(Enum):
    """State of an offered request's KV cache, as either of the two instances records it."""

    OFFERED = auto()  # in the context instance, not yet accepted
    TRANSFERRING = auto()
    TRANSFERRED = auto()  # completely sent, or received


class First(Enum):
    """State of a request's first token."""

    AWAITED = auto()
    CONTINUES = auto()  # the response has more tokens
    ENDED = auto()  # the response ended with the first token


class _ReceiverState(Enum):
    """State of an offered request in the generation instance, as the context instance's root rank sees it."""

    HOLDS = auto()  # has the request, or will have it
    DROPPED = auto()  # has dropped a request that ended with its first token
    LOST = auto()  # is lost, and sends nothing more


# Receiver states in which the context instance releases a request, by the states of its KV cache and of its
# first token. In all other states, the context instance waits.
_RELEASED_FOR: dict[tuple[Kv, First], tuple[_ReceiverState, ...]] = {
    (Kv.TRANSFERRED, First.CONTINUES): tuple(_ReceiverState),
    (Kv.TRANSFERRED, First.ENDED): (_ReceiverState.DROPPED, _ReceiverState.LOST),
    (Kv.OFFERED, First.ENDED): (_ReceiverState.DROPPED, _ReceiverState.LOST),
    (Kv.OFFERED, First.CONTINUES): (_ReceiverState.LOST,),
}


class _End(Enum):
    """End of a request's handoff in the generation instance."""

    ADMITTED = auto()
    RELEASED = auto()  # its KV cache has arrived, and is released
    DROPPED = auto()  # it is dropped before it gets memory


# End of a handoff, by the states of KV cache and first token. In other states, the instance waits.
_ENDS: dict[tuple[Kv, First], _End] = {
    (Kv.TRANSFERRED, First.CONTINUES): _End.ADMITTED,
    (Kv.TRANSFERRED, First.ENDED): _End.RELEASED,
    (Kv.OFFERED, First.ENDED): _End.DROPPED,
}
_ENDS_WITHOUT_SENDER: dict[Kv, _End] = {Kv.TRANSFERRED: _End.RELEASED, Kv.OFFERED: _End.DROPPED}


@dataclass
class _SentOffer:
    """State of an offered request in the context instance's root rank."""

    instance: int  # the generation instance
    timed: bool  # whether to measure the duration of the transfer
    kv: Kv = Kv.OFFERED
    first: First = First.AWAITED  # as sent to the receiver
    receiver: _ReceiverState = _ReceiverState.HOLDS
    started_at: float = 0.0  # arrival of ACCEPT, time.perf_counter()
    transfer_us: int | None = None  # duration of the transfer, if `timed`

    @property
    def done(self) -> bool:
        return self.receiver in _RELEASED_FOR.get((self.kv, self.first), ())


class HandoffOutcome(NamedTuple):
    """Outcome of a finished handoff in the context instance."""

    id: int
    ended: bool  # whether the response ended with its first token
    transfer_us: int | None = None  # from the arrival of ACCEPT to the last byte sent; None: not requested


@dataclass
class _ReceivedOffer:
    """State of an offered request in the generation instance's root rank."""

    source: int  # root rank of the context instance
    request: Batch
    kv: Kv = Kv.OFFERED
    slot: int = NO_SLOT  # NO_SLOT until the offer is accepted
    first: First = First.AWAITED
    first_token: int = NO_TOKEN
    cached: int = -1  # prompt tokens; see `FIRST`
    cancelled: bool = False  # whether the request was cancelled before ACCEPT
    lost: bool = False  # whether its sender is lost

    @property
    def end(self) -> _End | None:
        return _ENDS_WITHOUT_SENDER.get(self.kv) if self.lost else _ENDS.get((self.kv, self.first))


class HandoffSender:
    """The context instance's side of handoffs, on its root rank."""

    def __init__(self, transport: Transport, core: SendsKv, receivers: dict[int, int]) -> None:
        """`receivers`: root rank of each generation instance in the transport's communicator, by instance."""
        self._transport = transport
        self._core = core
        self._receivers = receivers
        self._offers: dict[int, _SentOffer] = {}
        self._maybe_done: list[int] = []
        self.n_transfers = 0  # KV caches in transfer from this instance
        ACCEPT.handle(transport, self._on_accept)

    def __contains__(self, id_: int) -> bool:
        """Return whether the request was offered, and its handoff has not finished."""
        return id_ in self._offers

    @property
    def idle(self) -> bool:
        return not self._offers

    def offer(self, requests: list[Batch]) -> None:
        """Offer requests to the generation instances that their rows name. Each batch has one row."""
        by_instance: dict[int, list[Batch]] = {}
        for request in requests:
            instance = int(request.rows["generation"][0])
            by_instance.setdefault(instance, []).append(request)
            timed = bool(request.rows["flags"][0] & RequestFlag.TIMES)
            self._offers[int(request.rows["id"][0])] = _SentOffer(instance, timed)
        for instance, batches in by_instance.items():
            OFFER.send(self._transport, self._receivers[instance], concat(batches))

    def announce(self, instance: int, n_requests: int) -> None:
        """Send a generation instance the number of warm-up requests that will arrive by handoff."""
        WARM_UP.send(self._transport, self._receivers[instance], n_requests)

    def cancel(self, ids: list[int]) -> None:
        """Forward the cancellation of offered requests.

        Their handoff continues; the receiver drops the requests afterwards.
        """
        by_receiver: dict[int, list[int]] = {}
        for id_ in ids:
            by_receiver.setdefault(self._receivers[self._offers[id_].instance], []).append(id_)
        for receiver, cancelled in by_receiver.items():
            DROP.send(self._transport, receiver, cancelled)

    def lost(self, instance: int) -> None:
        """Release the requests that were offered to a lost instance, once their contexts are computed."""
        for id_, offer in self._offers.items():
            if offer.instance == instance:
                offer.receiver = _ReceiverState.LOST
                self._maybe_done.append(id_)

    def send_first_tokens(self, tokens: dict[int, int | None], cached: dict[int, int] | None = None) -> None:
        """Send first tokens of offered requests, by id. None: the response ended with its first token.

        `cached`: prompt tokens that were in the KV cache, for requests with PROMPT_COUNTS.
        """
        cached = cached or {}
        by_receiver: dict[int, list[tuple[int, int, int]]] = {}
        for id_, token in tokens.items():
            offer = self._offers[id_]
            offer.first = First.ENDED if token is None else First.CONTINUES
            self._maybe_done.append(id_)
            by_receiver.setdefault(self._receivers[offer.instance], []).append(
                (id_, NO_TOKEN if token is None else token, cached.get(id_, -1))
            )
        for receiver, firsts in by_receiver.items():
            FIRST.send(self._transport, receiver, firsts)

    def poll(self) -> list[HandoffOutcome]:
        """Release requests whose handoff has finished; return the outcomes."""
        for id_ in self._core.poll_kv():
            offer = self._offers[id_]
            offer.kv = Kv.TRANSFERRED
            self.n_transfers -= 1
            if offer.timed:
                offer.transfer_us = min(int(1e6 * (time.perf_counter() - offer.started_at)), 2**31 - 1)
            self._maybe_done.append(id_)
        done = [id_ for id_ in dict.fromkeys(self._maybe_done) if self._offers[id_].done]
        self._maybe_done = []
        for id_ in done:
            self._core.release_kv(id_)
        ended = [(id_, self._offers.pop(id_)) for id_ in done]
        return [HandoffOutcome(id_, offer.first is First.ENDED, offer.transfer_us) for id_, offer in ended]

    def _on_accept(self, source: int, accepted: NumberRows) -> None:
        for id_, slot in accepted:
            offer = self._offers[id_]
            if slot == NO_SLOT:
                offer.receiver = _ReceiverState.DROPPED
                self._maybe_done.append(id_)
            else:
                offer.kv, offer.started_at = Kv.TRANSFERRING, time.perf_counter()
                self.n_transfers += 1
                self._core.send_kv(id_, offer.instance, slot)


class HandoffReceiver:
    """The generation instance's side of handoffs, on its root rank."""

    def __init__(self, transport: Transport, core: ReceivesKv, senders: dict[int, int]) -> None:
        """`senders`: index of each context instance, by its root rank in the transport's communicator."""
        self._transport = transport
        self._core = core
        self._senders = senders
        self._offers: dict[int, _ReceivedOffer] = {}
        self._waiting: deque[_ReceivedOffer] = deque()  # in order of arrival
        self._slots = list(range(_SLOTS))
        self.admitted = 0  # number of admitted requests since the start
        self.running: set[int] = set()  # admitted ids; the caller removes each at its final response
        # `PROMPT_COUNTS` of running requests that have this flag, likewise.
        self.prompt_counts: dict[int, tuple[int, int]] = {}
        self.announced: dict[int, int] = {}  # number of warm-up requests by sending rank
        OFFER.handle(transport, self._on_offer)
        FIRST.handle(transport, self._on_first)
        WARM_UP.handle(transport, self._on_warm_up)

    def __contains__(self, id_: int) -> bool:
        """Return whether the request was offered, and is not yet admitted or dropped."""
        return id_ in self._offers

    @property
    def idle(self) -> bool:
        return not self._offers

    @property
    def n_transfers(self) -> int:
        """Number of accepted KV caches that have not completely arrived."""
        return _SLOTS - len(self._slots)

    def lost(self, instance: int) -> None:
        """Drop a lost context instance's offers, but accepted offers only when their transfers have ended."""
        for id_, offer in list(self._offers.items()):
            if self._senders[offer.source] == instance:
                offer.lost = True
                self._settle(id_)

    def poll(self) -> bool:
        """Accept offers that fit into memory, and admit arrived requests; return whether there were any."""
        accepted: dict[int, list[tuple[int, int]]] = {}
        while self._waiting and self._slots:
            offer = self._waiting[0]
            if not self._core.receive_kv(offer.request, self._senders[offer.source], self._slots[-1]):
                break
            self._waiting.popleft()
            offer.kv, offer.slot = Kv.TRANSFERRING, self._slots.pop()
            id_ = int(offer.request.rows["id"][0])
            accepted.setdefault(offer.source, []).append((id_, offer.slot))
            if offer.cancelled:
                self._core.cancel([id_])
        for source, accepts in accepted.items():
            ACCEPT.send(self._transport, source, accepts)
        arrived = self._core.poll_kv()
        for id_ in arrived:
            self._offers[id_].kv = Kv.TRANSFERRED
            self._slots.append(self._offers[id_].slot)
            self._settle(id_)
        return bool(accepted or arrived)

    def cancel(self, ids: list[int]) -> None:
        """Cancel requests: mark an offer that is not accepted yet; the core cancels an accepted request."""
        for id_ in ids:
            if (offer := self._offers.get(id_)) is not None and offer.kv is Kv.OFFERED:
                offer.cancelled = True
            else:
                self._core.cancel([id_])

    def _settle(self, id_: int) -> None:
        """If the state of the request allows it, end the handoff: admit, release or drop the request."""
        offer = self._offers[id_]
        if (end := offer.end) is None:
            return
        if end is _End.ADMITTED:
            self._core.admit(offer.request, offer.first_token)
            self.admitted += 1
            self.running.add(id_)
            if offer.cached >= 0:
                self.prompt_counts[id_] = int(offer.request.rows["n_tokens"][0]), offer.cached
        elif end is _End.RELEASED:
            self._core.release_kv(id_)
        else:
            self._waiting.remove(offer)
        if end is not _End.ADMITTED and not offer.lost:
            ACCEPT.send(self._transport, offer.source, [(id_, NO_SLOT)])
        del self._offers[id_]

    def _on_warm_up(self, source: int, n_requests: int) -> None:
        self.announced[source] = n_requests

    def _on_offer(self, source: int, requests: Batch) -> None:
        for request in requests.split():
            offer = _ReceivedOffer(source, request)
            self._offers[int(request.rows["id"][0])] = offer
            self._waiting.append(offer)

    def _on_first(self, source: int, firsts: NumberRows) -> None:
        for id_, token, cached in firsts:
            offer = self._offers[id_]
            offer.first = First.ENDED if token == NO_TOKEN else First.CONTINUES
            offer.first_token, offer.cached = token, cached
            self._settle(id_)
