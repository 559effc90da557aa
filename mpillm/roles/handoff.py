"""The handoff: a request and its KV cache move from a context to a generation instance, each of any layout.

The instances' leaders negotiate on the route, many requests per message:

    OFFER    context to generation: requests whose contexts have their memory, a step before their computation
    ACCEPT   back: there is room; all ranks of the generation instance expect the KV cache under this slot
    FIRST    context to generation: the first token, or that the answer ended with it
    ACCEPT   with NO_SLOT: the generation instance has dropped a request that ended with its first token
    DROP     context to generation: offered requests that their sender has given up since

The KV cache itself moves from rank to rank in the handoff communicator (`engine.handoff.transfers`); if the
acceptance arrives in time, while later layers still compute. The core tells the ranks of an instance what to
send and receive.

A generation instance takes offers in the order in which they arrive; one without room waits, and delays no
other instance's. Context instances offer only requests that already have their memory, so what a receiver
reserves room for always comes, whatever else the instances wait for: there is no circular wait. A request's
id stays in use until both sides have released the request.
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
    Pairs,
    RequestFlag,
    concat,
)
from mpillm.cores.capabilities import ReceivesKv, SendsKv

if TYPE_CHECKING:  # its import starts MPI
    from mpillm.comms.transport import Transport

_SLOTS = 256  # most KV caches on the way to one receiver


class Kv(Enum):
    """Where the KV cache of an offered request is, for either instance."""

    OFFERED = auto()  # in the context instance; the other has no room yet
    MOVING = auto()
    MOVED = auto()  # all of it has left, or arrived


class First(Enum):
    """What is known of a request's first token."""

    AWAITED = auto()
    GOES_ON = auto()  # the answer does
    ENDED = auto()  # the answer, with it


class _Receiver(Enum):
    """What the context instance's leader knows of the generation instance."""

    HOLDS = auto()  # the request, or will
    LET_GO = auto()  # of a request that ended with its first token
    LOST = auto()  # nothing more comes from it


# Which receivers let the context instance release a request, by where its KV cache is and what was told of
# its first token; in all other states it waits.
_RELEASED_FOR: dict[tuple[Kv, First], tuple[_Receiver, ...]] = {
    (Kv.MOVED, First.GOES_ON): tuple(_Receiver),
    (Kv.MOVED, First.ENDED): (_Receiver.LET_GO, _Receiver.LOST),
    (Kv.OFFERED, First.ENDED): (_Receiver.LET_GO, _Receiver.LOST),
    (Kv.OFFERED, First.GOES_ON): (_Receiver.LOST,),
}


class _End(Enum):
    """What becomes of a request that the generation instance's leader need not keep any longer."""

    ADMITTED = auto()
    RELEASED = auto()  # the memory of its KV cache is
    DROPPED = auto()  # there was no memory for it


# In all other states it waits.
_ENDS: dict[tuple[Kv, First], _End] = {
    (Kv.MOVED, First.GOES_ON): _End.ADMITTED,
    (Kv.MOVED, First.ENDED): _End.RELEASED,
    (Kv.OFFERED, First.ENDED): _End.DROPPED,
}
_ENDS_WITHOUT_SENDER: dict[Kv, _End] = {Kv.MOVED: _End.RELEASED, Kv.OFFERED: _End.DROPPED}


@dataclass
class _Given:
    """An offered request, as the context instance's leader sees it."""

    instance: int
    timed: bool  # the time of the KV cache's move is wanted
    kv: Kv = Kv.OFFERED
    first: First = First.AWAITED  # as the receiver knows it
    receiver: _Receiver = _Receiver.HOLDS
    moves_since: float = 0.0  # time.perf_counter()
    moved_us: int | None = None  # how long that took, if `timed`

    @property
    def done(self) -> bool:
        return self.receiver in _RELEASED_FOR.get((self.kv, self.first), ())


class HandedOver(NamedTuple):
    """A request that now belongs to the generation instance, or to nobody."""

    id: int
    ended: bool  # with its first token
    moved_us: int | None = None  # from both instances being ready to the last byte's leaving, if asked for


@dataclass
class _Taken:
    """An offered request, as the generation instance's leader sees it."""

    source: int
    request: Batch
    kv: Kv = Kv.OFFERED
    slot: int = NO_SLOT  # once it is accepted
    first: First = First.AWAITED
    first_token: int = NO_TOKEN
    cancelled: bool = False  # before the core knew of it
    lost: bool = False  # its sender is

    @property
    def end(self) -> _End | None:
        return _ENDS_WITHOUT_SENDER.get(self.kv) if self.lost else _ENDS.get((self.kv, self.first))


class HandoffSender:
    """The part of the context instance's leader."""

    def __init__(self, transport: Transport, core: SendsKv, receivers: dict[int, int]) -> None:
        """`receivers`: for each generation instance its leader's rank in the transport's communicator."""
        self._transport = transport
        self._core = core
        self._receivers = receivers
        self._given: dict[int, _Given] = {}
        self._maybe_done: list[int] = []
        self.n_moving = 0  # KV caches that leave this instance now
        ACCEPT.handle(transport, self._on_accept)

    def __contains__(self, id_: int) -> bool:
        """Return whether the request was offered and either side may still hold something of it."""
        return id_ in self._given

    @property
    def idle(self) -> bool:
        return not self._given

    def offer(self, requests: list[Batch]) -> None:
        """Offer requests, batches of one row and its prompt, to the generation instances that they name."""
        by_instance: dict[int, list[Batch]] = {}
        for request in requests:
            instance = int(request.rows["generation"][0])
            by_instance.setdefault(instance, []).append(request)
            timed = bool(request.rows["flags"][0] & RequestFlag.TIMES)
            self._given[int(request.rows["id"][0])] = _Given(instance, timed)
        for instance, batches in by_instance.items():
            OFFER.send(self._transport, self._receivers[instance], concat(batches))

    def announce(self, instance: int, n_requests: int) -> None:
        """Tell a generation instance how many warm-up requests to expect."""
        WARM_UP.send(self._transport, self._receivers[instance], n_requests)

    def cancel(self, ids: list[int]) -> None:
        """Pass on that these offered requests are given up.

        Their contexts are still computed and handed over: the receiver drops them then.
        """
        by_receiver: dict[int, list[int]] = {}
        for id_ in ids:
            by_receiver.setdefault(self._receivers[self._given[id_].instance], []).append(id_)
        for receiver, cancelled in by_receiver.items():
            DROP.send(self._transport, receiver, cancelled)

    def lost(self, instance: int) -> None:
        """Release what was offered to an instance that is lost, once its context is computed."""
        for id_, given in self._given.items():
            if given.instance == instance:
                given.receiver = _Receiver.LOST
                self._maybe_done.append(id_)

    def tell_first(self, tokens: dict[int, int | None]) -> None:
        """Send the first tokens of offered requests, by id; None: the answer ended with its first token."""
        by_receiver: dict[int, list[tuple[int, int]]] = {}
        for id_, token in tokens.items():
            given = self._given[id_]
            given.first = First.ENDED if token is None else First.GOES_ON
            self._maybe_done.append(id_)
            by_receiver.setdefault(self._receivers[given.instance], []).append(
                (id_, NO_TOKEN if token is None else token)
            )
        for receiver, firsts in by_receiver.items():
            FIRST.send(self._transport, receiver, firsts)

    def poll(self) -> list[HandedOver]:
        """Release finished requests; return those of which this instance holds nothing any more."""
        for id_ in self._core.poll_kv():
            given = self._given[id_]
            given.kv = Kv.MOVED
            self.n_moving -= 1
            if given.timed:
                given.moved_us = min(int(1e6 * (time.perf_counter() - given.moves_since)), 2**31 - 1)
            self._maybe_done.append(id_)
        done = [id_ for id_ in dict.fromkeys(self._maybe_done) if self._given[id_].done]
        self._maybe_done = []
        for id_ in done:
            self._core.release_kv(id_)
        gone = [(id_, self._given.pop(id_)) for id_ in done]
        return [HandedOver(id_, given.first is First.ENDED, given.moved_us) for id_, given in gone]

    def _on_accept(self, source: int, accepted: Pairs) -> None:
        for id_, slot in accepted:
            given = self._given[id_]
            if slot == NO_SLOT:
                given.receiver = _Receiver.LET_GO
                self._maybe_done.append(id_)
            else:
                given.kv, given.moves_since = Kv.MOVING, time.perf_counter()
                self.n_moving += 1
                self._core.send_kv(id_, given.instance, slot)


class HandoffReceiver:
    """The part of the generation instance's leader."""

    def __init__(self, transport: Transport, core: ReceivesKv, senders: dict[int, int]) -> None:
        """`senders`: for each rank of the transport's communicator the context instance that it leads."""
        self._transport = transport
        self._core = core
        self._senders = senders
        self._taken: dict[int, _Taken] = {}
        self._waiting: deque[_Taken] = deque()  # in order of arrival
        self._slots = list(range(_SLOTS))
        self.admitted = 0  # since the start
        self.running: set[int] = set()  # admitted; whoever sees their answers removes them
        self.announced: dict[int, int] = {}  # warm-up requests by sender
        OFFER.handle(transport, self._on_offer)
        FIRST.handle(transport, self._on_first)
        WARM_UP.handle(transport, self._on_warm_up)

    def __contains__(self, id_: int) -> bool:
        """Return whether the request was offered and is not admitted or dropped yet."""
        return id_ in self._taken

    @property
    def idle(self) -> bool:
        return not self._taken

    @property
    def n_moving(self) -> int:
        """How many KV caches arrive now, or wait for their contexts to be computed."""
        return _SLOTS - len(self._slots)

    def lost(self, instance: int) -> None:
        """Drop what a lost instance has offered; what is still arriving, once the core lets it go."""
        for id_, taken in list(self._taken.items()):
            if self._senders[taken.source] == instance:
                taken.lost = True
                self._settle(id_)

    def poll(self) -> bool:
        """Accept offers that there is room for, admit what has arrived; return whether there was any."""
        accepted: dict[int, list[tuple[int, int]]] = {}
        while self._waiting and self._slots:
            taken = self._waiting[0]
            if not self._core.receive_kv(taken.request, self._senders[taken.source], self._slots[-1]):
                break
            self._waiting.popleft()
            taken.kv, taken.slot = Kv.MOVING, self._slots.pop()
            id_ = int(taken.request.rows["id"][0])
            accepted.setdefault(taken.source, []).append((id_, taken.slot))
            if taken.cancelled:
                self._core.cancel([id_])
        for source, accepts in accepted.items():
            ACCEPT.send(self._transport, source, accepts)
        arrived = self._core.poll_kv()
        for id_ in arrived:
            self._taken[id_].kv = Kv.MOVED
            self._slots.append(self._taken[id_].slot)
            self._settle(id_)
        return bool(accepted or arrived)

    def cancel(self, ids: list[int]) -> None:
        """Cancel offered requests, wherever they are by now. The core knows those that it has room for."""
        for id_ in ids:
            if (taken := self._taken.get(id_)) is not None and taken.kv is Kv.OFFERED:
                taken.cancelled = True
            else:
                self._core.cancel([id_])

    def _settle(self, id_: int) -> None:
        """Admit the request once KV cache and first token are there, or drop it if its answer has ended."""
        taken = self._taken[id_]
        if (end := taken.end) is None:
            return
        if end is _End.ADMITTED:
            self._core.admit(taken.request, taken.first_token)
            self.admitted += 1
            self.running.add(id_)
        elif end is _End.RELEASED:
            self._core.release_kv(id_)
        else:
            self._waiting.remove(taken)
        if end is not _End.ADMITTED and not taken.lost:
            ACCEPT.send(self._transport, taken.source, [(id_, NO_SLOT)])
        del self._taken[id_]

    def _on_warm_up(self, source: int, n_requests: int) -> None:
        self.announced[source] = n_requests

    def _on_offer(self, source: int, requests: Batch) -> None:
        for request in requests.split():
            taken = _Taken(source, request)
            self._taken[int(request.rows["id"][0])] = taken
            self._waiting.append(taken)

    def _on_first(self, source: int, firsts: Pairs) -> None:
        for id_, token in firsts:
            taken = self._taken[id_]
            taken.first = First.ENDED if token == NO_TOKEN else First.GOES_ON
            taken.first_token = token
            self._settle(id_)
