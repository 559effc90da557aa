"""The engine's side of handoffs: orders the ranks of its instance to send and receive KV caches.

A context instance asks for a receiver as soon as a sequence has blocks (`started`), and sends when it has one
(`send`). A generation instance reserves blocks for an arriving cache (`receive`) until its sequence runs
(`admit`), or its answer turns out to be complete (`release`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.schedule.window_blocks import WindowBlocks


@dataclass
class _Leaving:
    sequence: Sequence
    receiver: tuple[int, int] | None = None  # instance and slot, if its context is not computed yet


@dataclass
class _Coming:
    blocks: list[int]
    window_blocks: list[int]
    max_cached: int  # tokens cached at the end of the longest answer
    is_cancelled: bool = False


@dataclass
class _Moving:
    """A transfer that the ranks of this instance have begun, or will begin with the next step."""

    sequence_id: int
    n_tokens: int
    n_ranks: int  # that are not done


class EngineHandoffs:
    """The KV caches that leave, arrive and move, by sequence id."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        max_seq_len: int,
        max_transfer_tokens: int | None,
        window_blocks: WindowBlocks | None,
    ) -> None:
        """`max_transfer_tokens`: see `Engine`."""
        self._window_blocks = window_blocks
        self._scheduler = scheduler
        self._worker = worker
        layout = worker.part.groups.layout
        self._n_ranks = layout.tp_size * layout.pp_size
        self._max_seq_len = max_seq_len
        self._max_transfer_tokens = max_transfer_tokens
        self._leaving: dict[int, _Leaving] = {}
        self._not_started: list[int] = []  # leaving sequences that may have no blocks yet
        self._coming: dict[int, _Coming] = {}
        self._moving: dict[int, _Moving] = {}  # by ticket
        self._ordered: list[Transfer] = []  # to begin with the next step
        self._n_transfers = 0
        self.sent_tokens = 0

    # --- both sides ---

    def has_orders(self) -> bool:
        """Return whether a step is needed to begin transfers."""
        return bool(self._ordered)

    def is_moving(self) -> bool:
        """Return whether a transfer has begun and is not done on all ranks."""
        return bool(self._moving)

    def take_orders(self, sampled: list[Sequence]) -> list[Transfer]:
        """Return the transfers for a step that completes the contexts of `sampled`."""
        for sequence in sampled:
            leaving = self._leaving.get(sequence.id)
            if leaving is not None and leaving.receiver is not None:
                receiver, leaving.receiver = leaving.receiver, None
                self._order(Kind.SEND_LAYERS, sequence.id, *receiver, len(sequence.prompt), sequence.blocks)
        transfers, self._ordered = self._ordered, []
        return transfers

    def poll(self) -> list[int]:
        """Return the sequences whose KV cache has left all ranks, or has arrived on all of them."""
        if not self._moving:
            return []
        transfers, peers = self._worker.transfers, self._worker.peers
        assert transfers is not None
        tickets = transfers.poll()
        while peers is not None and (theirs := peers.take_moved()):
            tickets += theirs
        for ticket in tickets:
            self._moving[ticket].n_ranks -= 1
        return [
            self._moving.pop(ticket).sequence_id
            for ticket in dict.fromkeys(tickets)
            if self._moving[ticket].n_ranks == 0
        ]

    def release(self, sequence_id: int) -> None:
        """Give back the blocks of a sequence that has left, or that will not run here."""
        if leaving := self._leaving.pop(sequence_id, None):
            self._scheduler.free(leaving.sequence)
        else:
            coming = self._coming.pop(sequence_id)
            self._scheduler.give_up(coming.blocks, coming.max_cached)
            if self._window_blocks is not None:
                self._window_blocks.give_up(coming.window_blocks)

    # --- the context side ---

    def add(self, sequence: Sequence) -> None:
        """Hand over a sequence that has been queued."""
        self._leaving[sequence.id] = _Leaving(sequence)
        self._not_started.append(sequence.id)

    def leaves(self, sequence_id: int) -> bool:
        """Return whether its blocks come back with `release` instead of when it ends."""
        return sequence_id in self._leaving

    def has_started(self, sequence_id: int) -> bool:
        """Return whether `started` has named a sequence that leaves."""
        return sequence_id not in self._not_started

    def forget(self, sequence_id: int) -> None:
        """Hand over nothing of a sequence that was cancelled before it had blocks."""
        if self._leaving.pop(sequence_id, None):
            self._not_started.remove(sequence_id)

    def started(self) -> list[int]:
        """Return the sequences that got blocks since the last call: receivers can now be asked."""
        self._scheduler.start_ahead()
        started = [id_ for id_ in self._not_started if self._leaving[id_].sequence.blocks]
        if started:
            self._not_started = [id_ for id_ in self._not_started if id_ not in started]
        return started

    def send(self, sequence_id: int, receiver: int, slot: int) -> None:
        """Send the prompt's KV cache: at once if it is computed, else with the step that completes it."""
        leaving = self._leaving[sequence_id]
        sequence, n_prompt = leaving.sequence, len(leaving.sequence.prompt)
        self.sent_tokens += n_prompt
        if sequence.n_cached < n_prompt:
            leaving.receiver = receiver, slot
        else:
            self._order(Kind.SEND, sequence_id, receiver, slot, n_prompt, sequence.blocks)

    # --- the generation side ---

    def receive(self, sequence_id: int, n_prompt: int, max_output: int, sender: int, slot: int) -> bool:
        """Expect a prompt's KV cache.

        Returns False while there is no room. Raises ValueError if there never will be.
        """
        if n_prompt + max_output > self._max_seq_len:
            raise ValueError(
                f"request {sequence_id}: {n_prompt} prompt tokens and {max_output} output tokens"
                f" exceed max_seq_len {self._max_seq_len}"
            )
        n_moving = sum(moving.n_tokens for moving in self._moving.values())
        limit = self._max_transfer_tokens
        if n_moving and limit is not None and n_moving + n_prompt > limit:
            return False
        max_cached = n_prompt + max_output - 1
        blocks = self._scheduler.reserve(n_prompt, max_cached)
        if blocks is None:
            return False
        window_blocks = [] if self._window_blocks is None else self._window_blocks.reserve(n_prompt)
        self._coming[sequence_id] = _Coming(blocks, window_blocks, max_cached)
        self._order(Kind.RECEIVE, sequence_id, sender, slot, n_prompt, blocks, window_blocks)
        return True

    def cancel(self, sequence_id: int) -> None:
        """Mark an arriving sequence as cancelled, for `admit` to report."""
        if sequence_id in self._coming:
            self._coming[sequence_id].is_cancelled = True

    def admit(self, sequence: Sequence) -> bool:
        """Run a sequence whose KV cache has arrived; return whether it was cancelled meanwhile."""
        coming = self._coming.pop(sequence.id)
        sequence.blocks, sequence.n_cached = coming.blocks, len(sequence.prompt)
        if self._window_blocks is not None:
            self._window_blocks.admit(sequence, coming.window_blocks)
        self._scheduler.admit(sequence)
        return coming.is_cancelled

    def _order(
        self,
        kind: Kind,
        sequence_id: int,
        peer: int,
        slot: int,
        n_tokens: int,
        blocks: list[int],
        window_blocks: list[int] | None = None,
    ) -> None:
        """Order the ranks of this instance to begin a transfer with the next step."""
        self._n_transfers += 1
        ticket = self._n_transfers & 0x7FFFFFFF
        self._moving[ticket] = _Moving(sequence_id, n_tokens, self._n_ranks)
        self._ordered.append(Transfer(kind, ticket, peer, slot, n_tokens, blocks, window_blocks or []))
