"""Put KV caches into the blocks of another rank's GPU on the same host, without a buffer at either end.

The receiver tells the sender over MPI which blocks a cache shall have (a room), once its GPU has done all
that may still touch them. When keys and values are computed, a kernel of the sender writes them there over
NVLink, and its host tells the receiver's. So the receiver launches nothing, and no byte is copied twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from typing import NamedTuple, Protocol, TypeVar

import torch
from mpi4py import MPI

from mpillm.comms.tags import Tag
from mpillm.engine.cache.kv_cache import Held, KVCache
from mpillm.engine.cache.two_caches import TwoCaches
from mpillm.engine.handoff.nccl_mover import event
from mpillm.engine.handoff.notes import Notes
from mpillm.engine.kernels.puts import CacheThere, Put
from mpillm.engine.parallel.peer_memory import Exported, export, reach
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.engine_messages import PUT, ROOM, Room
from mpillm.engine.tensors.staging import Event, Staging

_log = logging.getLogger(__name__)
T = TypeVar("T")
_TOGETHER = 128 << 20  # bytes; the part that passes it is the last of its launch


class Part(NamedTuple):
    """What of a cache moves: some layers and heads of this rank's."""

    held: Held
    layers: slice
    heads: slice


class Link(Protocol):
    """One direction between this rank's GPU and another. No method waits."""

    def mark(self) -> Event:
        """Return an event at the end of the GPU's work so far, links excluded."""
        ...

    def send_rooms(self, rooms: list[Room]) -> None: ...

    def rooms(self) -> list[Room]:
        """Return the rooms since the last call, in order."""
        ...

    def n_bytes(self, part: Part) -> int: ...

    def put(self, parts: list[tuple[Part, Room]], ready: list[Event]) -> Event:
        """Launch the copies, to begin after all of `ready`."""
        ...

    def send_put(self, tags: list[int]) -> None: ...

    def arrived(self) -> list[int]:
        """Return the tags of the puts since the last call."""
        ...


class _Pools(NamedTuple):
    """A cache of a receiver."""

    keys: Exported
    values: Exported
    shape: tuple[int, ...]  # of each


class _There(NamedTuple):
    """What a receiver tells: its cache, or both, and where each layer is (see `TwoCaches`)."""

    caches: list[_Pools]
    places: list[tuple[bool, int]]
    dtype: str


class _Passed:
    """The event of work that has ended."""

    def query(self) -> bool:
        return True


class PeerLink:
    """A link between two ranks of the handoff communicator, with a stream of its own."""

    def __init__(
        self, comm: MPI.Intracomm, peer: int, cache: KVCache | TwoCaches, there: _There | None
    ) -> None:
        """`there`: the other end's, if this end sends, as `cache` is one then.

        Raises RuntimeError if it cannot be reached.
        """
        self._rooms, self._puts = Notes(comm, peer, ROOM), Notes(comm, peer, PUT)
        if there is not None:
            assert isinstance(cache, KVCache)
            self._cache = cache
            if there.dtype != str(cache.keys.dtype):
                raise RuntimeError(f"its KV cache is {there.dtype}, this one {cache.keys.dtype}")
            self._there = [
                CacheThere(*reach([pools.keys, pools.values]), *pools.shape[1:4]) for pools in there.caches
            ]
            self._places = there.places
            # High priority: a transfer's few programs run between those of a step's kernels.
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._staging = Staging(cache.keys.device)

    def mark(self) -> Event:
        stream = torch.cuda.current_stream()
        # An event takes 5 us of the host, and the GPU as long to note it.
        return _Passed() if stream.query() else event(stream)

    def send_rooms(self, rooms: list[Room]) -> None:
        self._rooms.send(rooms)

    def rooms(self) -> list[Room]:
        return [room for rooms in self._rooms.take() for room in rooms]

    def n_bytes(self, part: Part) -> int:
        return self._cache.piece_bytes(part.held.n_tokens, part.layers, part.heads)

    @torch.inference_mode()
    def put(self, parts: list[tuple[Part, Room]], ready: list[Event]) -> Event:
        for one in ready:
            if not one.query():
                self._stream.wait_event(one)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):
            for (n_layers, n_heads), group in groupby(parts, lambda one: _size(one[0])):
                puts = [(_as_put(*one), list(one[1].window_blocks)) for one in group]
                for there, some, n in self._in_caches(puts, n_layers):
                    self._cache.put(some, there, n, n_heads, self._staging)
        done = event(self._stream)
        self._staging.read_until(done)
        return done

    def _in_caches(
        self, puts: list[tuple[Put, list[int]]], n_layers: int
    ) -> Iterator[tuple[CacheThere, list[Put], int]]:
        """Yield a cache there, what goes to it, and of how many layers each. `puts`: with window blocks."""
        if len(self._there) == 1:
            yield self._there[0], [put for put, _ in puts], n_layers
            return
        into: tuple[list[Put], list[Put]] = [], []
        for put, window_blocks in puts:
            first = window_blocks.count(NULL_BLOCK) * self._there[1].tokens_per_block
            for i, (windowed, at) in enumerate(self._places[put.layer_there : put.layer_there + n_layers]):
                of_layer = put._replace(layer=put.layer + i, layer_there=at)
                into[windowed].append(
                    of_layer._replace(there=window_blocks, first=first) if windowed else of_layer
                )
        for there, some in zip(self._there, into, strict=True):
            if some:
                yield there, some, 1

    def send_put(self, tags: list[int]) -> None:
        self._puts.send(tags)

    def arrived(self) -> list[int]:
        return [tag for tags in self._puts.take() for tag in tags]


def _as_put(part: Part, room: Room) -> Put:
    (blocks, n_tokens, _), layers, heads = part
    return Put(n_tokens, blocks, room.blocks, layers.start, heads.start, room.layer, room.head)


def _size(part: Part) -> tuple[int, int]:
    """Return its number of layers and of heads."""
    return part.layers.stop - part.layers.start, part.heads.stop - part.heads.start


class Moving:
    """A part that leaves or arrives."""

    def __init__(self, tag: int, part: Part) -> None:
        self.tag = tag
        self.part = part
        self.ready: Event | None = None  # the end of the GPU's work before it may leave or arrive
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


class PeerMover:
    """A `BlockMover` between GPUs. Parts with one tag arrive in the order sent."""

    def __init__(self, links: dict[int, Link], *, sends: bool) -> None:
        """`links`: by rank of the handoff communicator; `connected` makes them."""
        self.ranks = frozenset(links)
        self._lanes = {rank: (_Sending if sends else _Receiving)(link) for rank, link in links.items()}

    @classmethod
    def connected(
        cls, comm: MPI.Intracomm, ranks: Iterable[int], cache: KVCache | TwoCaches, *, sends: bool
    ) -> PeerMover:
        """Make links to those of `ranks` of the handoff communicator whose GPUs can be reached, or from them.

        Collective over both ends: every rank begins with the lowest, so that nobody waits in a circle.
        """
        links: dict[int, Link] = {}
        for rank in sorted(ranks):
            link = _offered(comm, rank, cache) if sends else _offer(comm, rank, cache)
            if link is not None:
                links[rank] = link
        return cls(links, sends=sends)

    def move(self, rank: int, tag: int, held: Held, layers: slice, heads: slice) -> Moving:
        """Send or receive some layers and heads.

        The next `poll` begins it, after the current stream's work so far.
        """
        moving = Moving(tag, Part(held, layers, heads))
        self._lanes[rank].posted.append(moving)
        return moving

    def poll(self) -> None:
        """Make progress; call this also after `move`."""
        for lane in self._lanes.values():
            lane.go_on()


def _offer(comm: MPI.Intracomm, rank: int, cache: KVCache | TwoCaches) -> PeerLink | None:
    """Tell the sender where this rank's cache is; None if it cannot reach it."""
    there = None
    try:
        caches, places = (cache.caches, cache.places) if isinstance(cache, TwoCaches) else ([cache], [])
        told = [_Pools(export(one.keys), export(one.values), tuple(one.keys.shape)) for one in caches]
        there = _There(told, places, str(caches[0].keys.dtype))
    except RuntimeError as error:
        _log.warning("no memory of this GPU for others: %s", error)
    comm.send(there, rank, Tag.ROOM)
    return PeerLink(comm, rank, cache, None) if comm.recv(None, rank, Tag.PUT) else None


def _offered(comm: MPI.Intracomm, rank: int, cache: KVCache | TwoCaches) -> PeerLink | None:
    there, link = comm.recv(None, rank, Tag.ROOM), None
    if there is not None:
        try:
            link = PeerLink(comm, rank, cache, there)
        except RuntimeError as error:
            _log.info("KV caches go to rank %d of the handoff over NCCL: %s", rank, error)
    comm.send(link is not None, rank, Tag.PUT)
    return link


class _Lane:
    """The transfers over one link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.posted: list[Moving] = []  # since the last `go_on`
        self.waiting: list[Moving] = []  # for the GPU, or for rooms

    def go_on(self) -> None:
        if self.posted:
            mark = self.link.mark()
            for moving in self.posted:
                moving.ready = mark
            self.waiting += self.posted
            self.posted = []


class _Receiving(_Lane):
    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._expected: dict[int, deque[Moving]] = {}

    def go_on(self) -> None:
        super().go_on()
        if unused := list(takewhile(_is_ready, self.waiting)):
            del self.waiting[: len(unused)]
            for moving in unused:
                self._expected.setdefault(moving.tag, deque()).append(moving)
            self.link.send_rooms([_room(moving) for moving in unused])
        if self._expected:
            for tag in self.link.arrived():
                _take(self._expected, tag).is_done = True


class _Sending(_Lane):
    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._rooms: dict[int, deque[Room]] = {}
        self._leaving: deque[tuple[Event, list[Moving]]] = deque()

    def go_on(self) -> None:
        super().go_on()
        if self.waiting:
            for room in self.link.rooms():
                self._rooms.setdefault(room.tag, deque()).append(room)
        if self._rooms:
            self._put()
        left: list[int] = []
        while self._leaving and self._leaving[0][0].query():
            for moving in self._leaving.popleft()[1]:
                moving.is_done = True
                left.append(moving.tag)
        if left:
            self.link.send_put(left)

    def _put(self) -> None:
        """Launch what has room."""
        waiting: list[Moving] = []
        leaving: list[tuple[Moving, Room]] = []
        for moving in self.waiting:
            if moving.tag in self._rooms:
                leaving.append((moving, _take(self._rooms, moving.tag)))
            else:
                waiting.append(moving)
        if not leaving:
            return
        self.waiting = waiting
        for moving, room in leaving:
            if room.n_tokens != moving.part.held.n_tokens:
                sent = moving.part.held.n_tokens
                raise RuntimeError(f"handoff, tag {moving.tag}: {room.n_tokens} tokens expected, {sent} sent")
        launch: list[tuple[Moving, Room]] = []
        n_bytes = 0
        for one in leaving:
            launch.append(one)
            n_bytes += self.link.n_bytes(one[0].part)
            if n_bytes >= _TOGETHER or one is leaving[-1]:
                self._launch(launch)
                launch, n_bytes = [], 0

    def _launch(self, together: list[tuple[Moving, Room]]) -> None:
        marks = {id(moving.ready): moving.ready for moving, _ in together if moving.ready is not None}
        done = self.link.put([(moving.part, room) for moving, room in together], list(marks.values()))
        self._leaving.append((done, [moving for moving, _ in together]))


def _is_ready(moving: Moving) -> bool:
    return moving.ready is not None and moving.ready.query()


def _room(moving: Moving) -> Room:
    held, layers, heads = moving.part
    return Room(moving.tag, layers.start, heads.start, held.n_tokens, held.blocks, held.window_blocks)


def _take(queues: dict[int, deque[T]], tag: int) -> T:
    """Return the first of a tag's."""
    queue = queues[tag]
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first
