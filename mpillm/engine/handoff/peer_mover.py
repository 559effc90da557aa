"""Put KV caches into the blocks of another rank's GPU on the same host, without a buffer at either end.

Once the receiver's GPU has finished all work on the target blocks of a cache, the receiver sends their
numbers over MPI. When keys and values are computed, a kernel of the sender writes them into the target blocks
over NVLink. Then the sender's host reports the end to the receiver's host. The receiver launches nothing, and
no byte is copied twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from typing import NamedTuple, Protocol

import torch
from mpi4py import MPI

from mpillm.comms.tags import Tag
from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache
from mpillm.engine.cache.two_caches import TwoCaches
from mpillm.engine.handoff.nccl_mover import event
from mpillm.engine.handoff.notes import Notes, take_first
from mpillm.engine.kernels.puts import Put, TargetCache
from mpillm.engine.parallel.peer_memory import ExportedMemory, export, reach
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.engine_messages import PUT, TARGETS, PutTarget
from mpillm.engine.shape.layout import length
from mpillm.engine.tensors.staging import Staging, StreamEvent

_log = logging.getLogger(__name__)
_MAX_LAUNCH_BYTES = 128 << 20  # the slice that reaches this sum is the last of its launch


class CacheSlice(NamedTuple):
    """The part of a cache that moves: some layers and heads of this rank."""

    cached: CachedBlocks
    layers: slice
    heads: slice


class PutLink(Protocol):
    """One direction of transfers between this rank's GPU and another GPU. No method waits."""

    def mark(self) -> StreamEvent:
        """Return an event at the end of the GPU's work so far, except for the links' own streams."""
        ...

    def send_targets(self, targets: list[PutTarget]) -> None: ...

    def targets(self) -> list[PutTarget]:
        """Return the targets received since the last call, in order."""
        ...

    def n_bytes(self, cache_slice: CacheSlice) -> int: ...

    def put(self, slices: list[tuple[CacheSlice, PutTarget]], ready: list[StreamEvent]) -> StreamEvent:
        """Launch the copies, to begin after all events in `ready`."""
        ...

    def send_put(self, tags: list[int]) -> None: ...

    def arrived(self) -> list[int]:
        """Return the tags of the puts that the sender has reported since the last call."""
        ...


class _Pools(NamedTuple):
    """A cache of a receiver."""

    keys: ExportedMemory
    values: ExportedMemory
    shape: tuple[int, ...]  # of each


class _TargetCaches(NamedTuple):
    """A receiver's one or two caches, and the place of each layer (see `TwoCaches`)."""

    caches: list[_Pools]
    places: list[tuple[bool, int]]
    dtype: str


class _CompletedEvent:
    """Event of completed work."""

    def query(self) -> bool:
        return True


class PeerLink:
    """A link between two ranks of the handoff communicator, with its own stream."""

    def __init__(
        self, comm: MPI.Intracomm, peer: int, cache: KVCache | TwoCaches, target: _TargetCaches | None
    ) -> None:
        """`target`: the receiver's caches, if this end sends; `cache` is then a `KVCache`.

        Raises RuntimeError if this GPU cannot access the target.
        """
        self._targets, self._puts = Notes(comm, peer, TARGETS), Notes(comm, peer, PUT)
        if target is not None:
            assert isinstance(cache, KVCache)
            self._cache = cache
            if target.dtype != str(cache.keys.dtype):
                raise RuntimeError(f"its KV cache is {target.dtype}, this one {cache.keys.dtype}")
            self._target_caches = [
                TargetCache(*reach([pools.keys, pools.values]), *pools.shape[1:4]) for pools in target.caches
            ]
            self._places = target.places
            # High priority: a transfer's few programs run between those of a step's kernels.
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._staging = Staging(cache.keys.device)

    def mark(self) -> StreamEvent:
        stream = torch.cuda.current_stream()
        # An event costs 5 us on the host, and as much on the GPU.
        return _CompletedEvent() if stream.query() else event(stream)

    def send_targets(self, targets: list[PutTarget]) -> None:
        self._targets.send(targets)

    def targets(self) -> list[PutTarget]:
        return [target for targets in self._targets.take() for target in targets]

    def n_bytes(self, cache_slice: CacheSlice) -> int:
        return self._cache.piece_bytes(cache_slice.cached.n_tokens, cache_slice.layers, cache_slice.heads)

    @torch.inference_mode()
    def put(self, slices: list[tuple[CacheSlice, PutTarget]], ready: list[StreamEvent]) -> StreamEvent:
        for one in ready:
            if not one.query():
                self._stream.wait_event(one)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream):
            for (n_layers, n_heads), group in groupby(slices, lambda one: _size(one[0])):
                puts = [(_as_put(*one), list(one[1].window_blocks)) for one in group]
                for target, some, n in self._in_caches(puts, n_layers):
                    self._cache.put(some, target, n, n_heads, self._staging)
        done = event(self._stream)
        self._staging.read_until(done)
        return done

    def _in_caches(
        self, puts: list[tuple[Put, list[int]]], n_layers: int
    ) -> Iterator[tuple[TargetCache, list[Put], int]]:
        """Yield each target cache, its puts, and their number of layers. `puts`: each with window blocks."""
        if len(self._target_caches) == 1:
            yield self._target_caches[0], [put for put, _ in puts], n_layers
            return
        into: tuple[list[Put], list[Put]] = [], []
        for put, window_blocks in puts:
            first = window_blocks.count(NULL_BLOCK) * self._target_caches[1].tokens_per_block
            for i, (windowed, at) in enumerate(self._places[put.target_layer : put.target_layer + n_layers]):
                of_layer = put._replace(layer=put.layer + i, target_layer=at)
                into[windowed].append(
                    of_layer._replace(target_blocks=window_blocks, first=first) if windowed else of_layer
                )
        for target, some in zip(self._target_caches, into, strict=True):
            if some:
                yield target, some, 1

    def send_put(self, tags: list[int]) -> None:
        self._puts.send(tags)

    def arrived(self) -> list[int]:
        return [tag for tags in self._puts.take() for tag in tags]


def _as_put(cache_slice: CacheSlice, target: PutTarget) -> Put:
    (blocks, n_tokens, _), layers, heads = cache_slice
    return Put(n_tokens, blocks, target.blocks, layers.start, heads.start, target.layer, target.head)


def _size(cache_slice: CacheSlice) -> tuple[int, int]:
    """Return the numbers of layers and heads of a slice."""
    return length(cache_slice.layers), length(cache_slice.heads)


class SliceTransfer:
    """Transfer of a slice, in either direction."""

    def __init__(self, tag: int, cache_slice: CacheSlice) -> None:
        self.tag = tag
        self.cache_slice = cache_slice
        self.ready: StreamEvent | None = None  # end of the GPU's work that must precede the transfer
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


class PeerMover:
    """A `BlockMover` between GPUs. Slices with the same tag arrive in the order of their sends."""

    def __init__(self, links: dict[int, PutLink], *, sends: bool) -> None:
        """`links`: by rank of the handoff communicator; `connected` creates them."""
        self.ranks = frozenset(links)
        self._lanes = {rank: (_SendLane if sends else _ReceiveLane)(link) for rank, link in links.items()}

    @classmethod
    def connected(
        cls, comm: MPI.Intracomm, ranks: Iterable[int], cache: KVCache | TwoCaches, *, sends: bool
    ) -> PeerMover:
        """Create links to, or from, the `ranks` of the handoff communicator whose GPUs are accessible.

        Collective over both ends. Every rank begins with the lowest rank, which prevents a deadlock.
        """
        links: dict[int, PutLink] = {}
        for rank in sorted(ranks):
            link = _offered(comm, rank, cache) if sends else _offer(comm, rank, cache)
            if link is not None:
                links[rank] = link
        return cls(links, sends=sends)

    def move(self, rank: int, tag: int, cached: CachedBlocks, layers: slice, heads: slice) -> SliceTransfer:
        """Send or receive some layers and heads.

        The next `poll` begins the transfer, after the current stream's work so far.
        """
        transfer = SliceTransfer(tag, CacheSlice(cached, layers, heads))
        self._lanes[rank].posted.append(transfer)
        return transfer

    def poll(self) -> None:
        """Make progress; must also be called after `move`."""
        for lane in self._lanes.values():
            lane.go_on()


def _offer(comm: MPI.Intracomm, rank: int, cache: KVCache | TwoCaches) -> PeerLink | None:
    """Send this rank's cache addresses to the sender. Returns None if the sender cannot access the caches."""
    target = None
    try:
        caches, places = (cache.caches, cache.places) if isinstance(cache, TwoCaches) else ([cache], [])
        exported = [_Pools(export(one.keys), export(one.values), tuple(one.keys.shape)) for one in caches]
        target = _TargetCaches(exported, places, str(caches[0].keys.dtype))
    except RuntimeError as error:
        _log.warning("no memory of this GPU for others: %s", error)
    comm.send(target, rank, Tag.TARGETS)
    return PeerLink(comm, rank, cache, None) if comm.recv(None, rank, Tag.PUT) else None


def _offered(comm: MPI.Intracomm, rank: int, cache: KVCache | TwoCaches) -> PeerLink | None:
    target, link = comm.recv(None, rank, Tag.TARGETS), None
    if target is not None:
        try:
            link = PeerLink(comm, rank, cache, target)
        except RuntimeError as error:
            _log.info("KV caches go to rank %d of the handoff over NCCL: %s", rank, error)
    comm.send(link is not None, rank, Tag.PUT)
    return link


class _Lane:
    """Transfers over one link."""

    def __init__(self, link: PutLink) -> None:
        self.link = link
        self.posted: list[SliceTransfer] = []  # since the last `go_on`
        self.waiting: list[SliceTransfer] = []  # for the GPU, or for targets

    def go_on(self) -> None:
        if self.posted:
            mark = self.link.mark()
            for transfer in self.posted:
                transfer.ready = mark
            self.waiting += self.posted
            self.posted = []


class _ReceiveLane(_Lane):
    def __init__(self, link: PutLink) -> None:
        super().__init__(link)
        self._expected: dict[int, deque[SliceTransfer]] = {}

    def go_on(self) -> None:
        super().go_on()
        if unused := list(takewhile(_is_ready, self.waiting)):
            del self.waiting[: len(unused)]
            for transfer in unused:
                self._expected.setdefault(transfer.tag, deque()).append(transfer)
            self.link.send_targets([_put_target(transfer) for transfer in unused])
        if self._expected:
            for tag in self.link.arrived():
                take_first(self._expected, tag).is_done = True


class _SendLane(_Lane):
    def __init__(self, link: PutLink) -> None:
        super().__init__(link)
        self._targets: dict[int, deque[PutTarget]] = {}
        self._in_flight: deque[tuple[StreamEvent, list[SliceTransfer]]] = deque()

    def go_on(self) -> None:
        super().go_on()
        if self.waiting:
            for target in self.link.targets():
                self._targets.setdefault(target.tag, deque()).append(target)
        if self._targets:
            self._put()
        left: list[int] = []
        while self._in_flight and self._in_flight[0][0].query():
            for transfer in self._in_flight.popleft()[1]:
                transfer.is_done = True
                left.append(transfer.tag)
        if left:
            self.link.send_put(left)

    def _put(self) -> None:
        """Launch the transfers whose targets have arrived."""
        waiting: list[SliceTransfer] = []
        ready: list[tuple[SliceTransfer, PutTarget]] = []
        for transfer in self.waiting:
            if transfer.tag in self._targets:
                ready.append((transfer, take_first(self._targets, transfer.tag)))
            else:
                waiting.append(transfer)
        if not ready:
            return
        self.waiting = waiting
        for transfer, target in ready:
            expected, sent = target.n_tokens, transfer.cache_slice.cached.n_tokens
            if expected != sent:
                raise RuntimeError(f"handoff, tag {transfer.tag}: {expected} tokens expected, {sent} sent")
        launch: list[tuple[SliceTransfer, PutTarget]] = []
        n_bytes = 0
        for one in ready:
            launch.append(one)
            n_bytes += self.link.n_bytes(one[0].cache_slice)
            if n_bytes >= _MAX_LAUNCH_BYTES or one is ready[-1]:
                self._launch(launch)
                launch, n_bytes = [], 0

    def _launch(self, together: list[tuple[SliceTransfer, PutTarget]]) -> None:
        marks = {id(transfer.ready): transfer.ready for transfer, _ in together if transfer.ready is not None}
        slices = [(transfer.cache_slice, target) for transfer, target in together]
        done = self.link.put(slices, list(marks.values()))
        self._in_flight.append((done, [transfer for transfer, _ in together]))


def _is_ready(transfer: SliceTransfer) -> bool:
    return transfer.ready is not None and transfer.ready.query()


def _put_target(transfer: SliceTransfer) -> PutTarget:
    (blocks, n_tokens, window_blocks), layers, heads = transfer.cache_slice
    return PutTarget(transfer.tag, layers.start, heads.start, n_tokens, blocks, window_blocks)
