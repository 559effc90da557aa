"""The engine's part of handoffs: orders the ranks of its instance to send and receive KV caches.

A context instance requests a receiver as soon as a sequence has blocks (`started`), and then sends (`send`).
A generation instance reserves blocks for an arriving cache (`receive`). The reservation ends when the cache's
sequence runs (`admit`), or when it is certain that the sequence will not run (`release`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.transfer import Kind, Transfer
from mpillm.engine.schedule.window_blocks import WindowBlocks


@dataclass
class _OutgoingCache:
    sequence: Sequence
    receiver: tuple[int, int] | None = None  # instance and slot, while the sequence's context is not computed


@dataclass
class _IncomingCache:
    blocks: list[int]
    window_blocks: list[int]
    max_cached: int  # tokens cached at the end of the longest output
    is_cancelled: bool = False


@dataclass
class _TransferProgress:
    """A transfer that the ranks of this instance have started, or will start with the next step."""

    sequence_id: int
    n_tokens: int
    n_ranks: int  # that have not finished


class EngineHandoffs:
    """Outgoing and incoming KV caches of an engine, by sequence id."""

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
        self._outgoing: dict[int, _OutgoingCache] = {}
        self._not_started: list[int] = []  # outgoing sequences that may have no blocks yet
        self._incoming: dict[int, _IncomingCache] = {}
        self._transfers: dict[int, _TransferProgress] = {}  # by ticket
        self._ordered: list[Transfer] = []  # to start with the next step
        self._n_transfers = 0
        self.sent_tokens = 0

    # --- both sides ---

    def has_orders(self) -> bool:
        """Return whether a step is needed to start transfers."""
        return bool(self._ordered)

    def has_transfers(self) -> bool:
        """Return whether a transfer is ordered or running."""
        return bool(self._transfers)

    def take_orders(self, sampled: list[Sequence]) -> list[Transfer]:
        """Return the transfers for a step that completes the contexts of `sampled`."""
        for sequence in sampled:
            outgoing = self._outgoing.get(sequence.id)
            if outgoing is not None and outgoing.receiver is not None:
                receiver, outgoing.receiver = outgoing.receiver, None
                self._order(Kind.SEND_LAYERS, sequence.id, *receiver, len(sequence.prompt), sequence.blocks)
        transfers, self._ordered = self._ordered, []
        return transfers

    def poll(self) -> list[int]:
        """Return the sequences whose transfer is complete on all ranks."""
        if not self._transfers:
            return []
        transfers, peers = self._worker.transfers, self._worker.peers
        assert transfers is not None
        tickets = transfers.poll()
        while peers is not None and (peer_tickets := peers.take_moved()):
            tickets += peer_tickets
        for ticket in tickets:
            self._transfers[ticket].n_ranks -= 1
        return [
            self._transfers.pop(ticket).sequence_id
            for ticket in dict.fromkeys(tickets)
            if self._transfers[ticket].n_ranks == 0
        ]

    def release(self, sequence_id: int) -> None:
        """Free the blocks of a sequence that has been sent, or that will not run here."""
        if outgoing := self._outgoing.pop(sequence_id, None):
            self._scheduler.free(outgoing.sequence)
        else:
            incoming = self._incoming.pop(sequence_id)
            self._scheduler.give_up(incoming.blocks, incoming.max_cached)
            if self._window_blocks is not None:
                self._window_blocks.give_up(incoming.window_blocks)

    # --- the context side ---

    def add(self, sequence: Sequence) -> None:
        """Register a queued sequence for a handoff."""
        self._outgoing[sequence.id] = _OutgoingCache(sequence)
        self._not_started.append(sequence.id)

    def is_outgoing(self, sequence_id: int) -> bool:
        """Return whether the sequence's blocks are freed by `release`, not when the sequence ends."""
        return sequence_id in self._outgoing

    def has_started(self, sequence_id: int) -> bool:
        """Return whether `started` has returned this outgoing sequence."""
        return sequence_id not in self._not_started

    def forget(self, sequence_id: int) -> None:
        """Drop the handoff of a sequence that was cancelled before it had blocks."""
        if self._outgoing.pop(sequence_id, None):
            self._not_started.remove(sequence_id)

    def started(self) -> list[int]:
        """Return the sequences that got blocks since the last call: receivers can now be requested."""
        self._scheduler.start_ahead()
        started = [id_ for id_ in self._not_started if self._outgoing[id_].sequence.blocks]
        if started:
            self._not_started = [id_ for id_ in self._not_started if id_ not in started]
        return started

    def send(self, sequence_id: int, receiver: int, slot: int) -> None:
        """Send the prompt's KV cache: now if it is computed, else with the step that completes it."""
        outgoing = self._outgoing[sequence_id]
        sequence, n_prompt = outgoing.sequence, len(outgoing.sequence.prompt)
        self.sent_tokens += n_prompt
        if sequence.n_cached < n_prompt:
            outgoing.receiver = receiver, slot
        else:
            self._order(Kind.SEND, sequence_id, receiver, slot, n_prompt, sequence.blocks)

    # --- the generation side ---

    def receive(self, sequence_id: int, n_prompt: int, max_output: int, sender: int, slot: int) -> bool:
        """Expect a prompt's KV cache.

        Returns False while there is not enough free capacity. Raises ValueError if there can never be enough.
        """
        if n_prompt + max_output > self._max_seq_len:
            raise ValueError(
                f"request {sequence_id}: {n_prompt} prompt tokens and {max_output} output tokens"
                f" exceed max_seq_len {self._max_seq_len}"
            )
        n_transferring = sum(transfer.n_tokens for transfer in self._transfers.values())
        limit = self._max_transfer_tokens
        if n_transferring and limit is not None and n_transferring + n_prompt > limit:
            return False
        max_cached = n_prompt + max_output - 1
        blocks = self._scheduler.reserve(n_prompt, max_cached)
        if blocks is None:
            return False
        window_blocks = [] if self._window_blocks is None else self._window_blocks.reserve(n_prompt)
        self._incoming[sequence_id] = _IncomingCache(blocks, window_blocks, max_cached)
        self._order(Kind.RECEIVE, sequence_id, sender, slot, n_prompt, blocks, window_blocks)
        return True

    def cancel(self, sequence_id: int) -> None:
        """Mark an arriving sequence as cancelled, for `admit` to report."""
        if sequence_id in self._incoming:
            self._incoming[sequence_id].is_cancelled = True

    def admit(self, sequence: Sequence) -> bool:
        """Run a sequence whose KV cache has arrived; return whether it was cancelled before."""
        incoming = self._incoming.pop(sequence.id)
        sequence.blocks, sequence.n_cached = incoming.blocks, len(sequence.prompt)
        if self._window_blocks is not None:
            self._window_blocks.admit(sequence, incoming.window_blocks)
        self._scheduler.admit(sequence)
        return incoming.is_cancelled

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
        """Order the ranks of this instance to start a transfer with the next step."""
        self._n_transfers += 1
        ticket = self._n_transfers & 0x7FFFFFFF
        self._transfers[ticket] = _TransferProgress(sequence_id, n_tokens, self._n_ranks)
        self._ordered.append(Transfer(kind, ticket, peer, slot, n_tokens, blocks, window_blocks or []))
