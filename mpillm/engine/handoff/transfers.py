"""This rank's part of KV cache transfers: which pieces it sends or receives, and when.

The root rank of an instance orders transfers in its step plans (see `step`), so all ranks begin them at the
same step. Before the step's own work, a rank posts receives, and sends the caches that earlier steps
completed. A cache that the step itself completes is sent in pieces (see `layout.cuts`), each when its last
layer is in the cache.

A piece is gathered into one contiguous buffer (see `KVCache.read`) and scattered into blocks on arrival, so
the two ends may have different block sizes. Between GPUs with access to each other's memory, a piece moves
directly from blocks to blocks (see `peer_mover`). A cache too small for several messages
(`Mover.min_split_bytes`) moves in one piece to each rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mpillm.comms.tags import Tag
from mpillm.engine.cache.kv_cache import CachedBlocks
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.shape.layout import MAX_PIECES, RankLayout, cuts

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.comms.mover import BlockMover, Mover, Peer, TransferHandle
    from mpillm.engine.shape.model_config import ModelConfig


class _Piece(NamedTuple):
    rank: int  # of the peer, in the handoff communicator
    layers: slice  # of this rank
    heads: slice  # of this rank


@dataclass
class _ActiveTransfer:
    """A transfer in progress, with its pieces in flight."""

    transfer: Transfer
    # Each with its buffer; None: it moves from blocks to blocks.
    pieces: deque[tuple[TransferHandle, _Piece, Tensor | None]] = field(default_factory=deque)
    n_waiting: int = 0  # pieces to send without a buffer yet

    @property
    def cached(self) -> CachedBlocks:
        return CachedBlocks(self.transfer.blocks, self.transfer.n_tokens, self.transfer.window_blocks)


class Cache(Protocol):
    """Source or target of KV caches (see `KVCache`)."""

    def piece_bytes(self, n_tokens: int, layers: slice, heads: slice) -> int: ...
    def new_piece(self, cached: CachedBlocks, layers: slice, heads: slice) -> Any: ...
    def read(self, cached: list[CachedBlocks], layers: slice, heads: slice) -> list[Any]: ...
    def write(self, cached: list[CachedBlocks], layers: slice, heads: slice, pieces: list[Any]) -> None: ...


class Transfers:
    """Starts transfers and reports completed ones."""

    def __init__(
        self,
        cache: Cache,
        config: ModelConfig,
        layout: RankLayout,
        mover: Mover,
        peers: dict[int, Peer],
        *,
        sends: bool,
        max_bytes: int | None = None,
        block_mover: BlockMover | None = None,
    ) -> None:
        """`sends`: this rank belongs to a context instance.

        `max_bytes`: limit for the buffers of pieces to send; a single piece may exceed it. `block_mover`:
        moves the pieces of the ranks that it reaches.
        """
        self._cache = cache
        self._mover = mover
        self._block_mover = block_mover
        self._reached = block_mover.ranks if block_mover is not None else frozenset()
        self._max_bytes = max_bytes
        self._pieces, self._single_pieces = (
            {peer: _pieces(config, layout, other, sends, n) for peer, other in peers.items()}
            for n in (MAX_PIECES, 1)
        )
        token_bytes = config.n_layers * config.n_kv_heads * cache.piece_bytes(1, slice(0, 1), slice(0, 1))
        # From this number of tokens on, a cache moves in several pieces. The number depends on the larger of
        # the two instances.
        self._min_split_tokens: dict[int, float] = {}
        for peer, other in peers.items():
            n_ranks = max(layout.tp_size * layout.pp_size, other.tp_size * other.pp_size)
            self._min_split_tokens[peer] = mover.min_split_bytes * n_ranks / token_bytes
        self._active: list[_ActiveTransfer] = []
        self._by_layer: list[_ActiveTransfer] = []  # of the current step
        self._to_send: deque[tuple[_ActiveTransfer, _Piece]] = deque()
        self._n_bytes = 0  # of sent buffers in flight
        self._lost: set[int] = set()  # lost peers
        self._never_done: list[object] = []  # pieces of lost peers: MPI may still use the buffers

    def start(self, transfers: list[Transfer]) -> None:
        """Begin the transfers of a step, before the step's own work."""
        self._by_layer = []
        for transfer in transfers:
            active = _ActiveTransfer(transfer)
            self._active.append(active)
            if transfer.peer in self._lost:
                continue
            if transfer.kind == Kind.SEND_LAYERS:
                self._by_layer.append(active)
                continue
            for piece in self._pieces_of(transfer):
                if transfer.kind == Kind.SEND:
                    self._to_send.append((active, piece))
                    active.n_waiting += 1
                elif piece.rank in self._reached:
                    self._move(active, piece)
                else:
                    buffer = self._cache.new_piece(active.cached, piece.layers, piece.heads)
                    handle = self._mover.receive(piece.rank, Tag.KV + transfer.slot, buffer)
                    active.pieces.append((handle, piece, buffer))
        self._gather()

    def layer_stored(self, layer: int) -> None:
        """Record that the step's keys and values of this rank's `layer` are in the cache."""
        for active in self._by_layer:
            for piece in self._pieces_of(active.transfer):
                if piece.layers.stop == layer + 1:
                    self._to_send.append((active, piece))
                    active.n_waiting += 1
        self._gather()

    def poll(self) -> list[int]:
        """Return the tickets of transfers that are complete on this rank."""
        self._mover.poll()
        if self._block_mover is not None:
            self._block_mover.poll()
        arrived: list[tuple[_ActiveTransfer, _Piece, Tensor]] = []
        done = []
        for active in self._active:
            while active.pieces and active.pieces[0][0].done():
                _, piece, buffer = active.pieces.popleft()
                if buffer is None:
                    continue
                if active.transfer.kind == Kind.RECEIVE:
                    arrived.append((active, piece, buffer))
                else:
                    self._n_bytes -= buffer.nbytes
            if not active.pieces and not active.n_waiting:
                done.append(active.transfer.ticket)
        for layers, heads, group in _alike(arrived):
            self._cache.write(
                [active.cached for active, _, _ in group], layers, heads, [buffer for _, _, buffer in group]
            )
        if done:
            self._active = [active for active in self._active if active.pieces or active.n_waiting]
        self._gather()
        return done

    def lose(self, peer: int) -> None:
        """End the transfers with a lost peer; `poll` reports them as complete."""
        self._lost.add(peer)
        self._by_layer = [active for active in self._by_layer if active.transfer.peer != peer]
        self._to_send = deque(one for one in self._to_send if one[0].transfer.peer != peer)
        for active in self._active:
            if active.transfer.peer == peer:
                if active.transfer.kind != Kind.RECEIVE:
                    self._n_bytes -= sum(one.nbytes for _, _, one in active.pieces if one is not None)
                self._never_done += active.pieces
                active.pieces.clear()
                active.n_waiting = 0

    def is_done(self) -> bool:
        """Return whether this rank has no active transfer."""
        return not self._active

    def _gather(self) -> None:
        """Send pieces within the buffers' limit. The blocks keep their content until all pieces are sent."""
        ready: list[tuple[_ActiveTransfer, _Piece]] = []
        while self._to_send:
            active, piece = self._to_send[0]
            if piece.rank in self._reached:
                active.n_waiting -= 1
                self._move(*self._to_send.popleft())
                continue
            n_bytes = self._cache.piece_bytes(active.transfer.n_tokens, piece.layers, piece.heads)
            if self._max_bytes is not None and self._n_bytes and self._n_bytes + n_bytes > self._max_bytes:
                break
            ready.append(self._to_send.popleft())
            self._n_bytes += n_bytes
        for layers, heads, group in _alike(ready):
            buffers = self._cache.read([active.cached for active, _ in group], layers, heads)
            for (active, piece), buffer in zip(group, buffers, strict=True):
                active.n_waiting -= 1
                handle = self._mover.send(piece.rank, Tag.KV + active.transfer.slot, buffer)
                active.pieces.append((handle, piece, buffer))
        if self._block_mover is not None:
            self._block_mover.poll()

    def _move(self, active: _ActiveTransfer, piece: _Piece) -> None:
        """Move a piece from blocks to blocks."""
        assert self._block_mover is not None
        tag = Tag.KV + active.transfer.slot
        handle = self._block_mover.move(piece.rank, tag, active.cached, piece.layers, piece.heads)
        active.pieces.append((handle, piece, None))

    def _pieces_of(self, transfer: Transfer) -> list[_Piece]:
        is_single = transfer.n_tokens < self._min_split_tokens[transfer.peer]
        return (self._single_pieces if is_single else self._pieces)[transfer.peer]


def partners(config: ModelConfig, layout: RankLayout, peers: Iterable[Peer], *, sends: bool) -> set[int]:
    """Return the ranks of the handoff communicator that this rank sends to, or receives from."""
    return {piece.rank for peer in peers for piece in _pieces(config, layout, peer, sends, 1)}


_WithPiece = TypeVar("_WithPiece", bound=tuple[Any, ...])  # the second element is a piece


def _alike(some: list[_WithPiece]) -> Iterator[tuple[slice, slice, list[_WithPiece]]]:
    """Group consecutive pieces of the same layers and heads."""
    for (layers, heads), group in itertools.groupby(some, lambda one: (one[1].layers, one[1].heads)):
        yield layers, heads, list(group)


def _pieces(config: ModelConfig, layout: RankLayout, peer: Peer, sends: bool, n_pieces: int) -> list[_Piece]:
    """Return the pieces that this rank sends to the ranks of `peer`, or receives from them."""
    own, other = (layout.tp_size, layout.pp_size), (peer.tp_size, peer.pp_size)
    own_rank = layout.pp_rank * layout.tp_size + layout.tp_rank
    first_layer, first_head = layout.layers(config).start, layout.kv_heads(config).start
    pieces = []
    for cut in cuts(config, own, other, n_pieces) if sends else cuts(config, other, own, n_pieces):
        if own_rank == (cut.source if sends else cut.dest):
            layers = slice(cut.layers.start - first_layer, cut.layers.stop - first_layer)
            heads = slice(cut.heads.start - first_head, cut.heads.stop - first_head)
            pieces.append(_Piece(peer.rank + (cut.dest if sends else cut.source), layers, heads))
    return pieces
