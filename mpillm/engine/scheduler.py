"""Which sequences run in the next step, with how many tokens, and who gives way when the KV cache is full."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field

from mpillm.engine.kv_cache import BlockAllocator
from mpillm.engine.sampler import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A request under way. Its context is the prompt and the answer so far; `n_cached` tokens of it are in the KV cache."""

    id: int
    prompt: list[int]
    max_output: int
    min_output: int
    sampling: SamplingParams
    hand_over: bool = False  # stops after its first token and keeps its blocks until they are released
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    n_cached: int = 0
    in_flight: bool = False  # in a step whose tokens have not come back
    slot: int = -1  # while it runs: a number below max_batch_size of its own
    n_told: int = 0  # of its blocks, how many the other ranks of the instance know

    @property
    def n_context(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def n_uncached(self) -> int:
        return len(self.prompt) + len(self.output) - self.n_cached

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of the context."""
        n = len(self.prompt)
        if start >= n:
            return self.output[start - n : end - n]
        return self.prompt[start:end] + self.output[: max(0, end - n)]


class Scheduler:
    """First come, first served. A step holds a token of every sequence that generates, then contexts, cut to what is left of its size.

    A context starts when there are blocks for all of it and one to spare for each running sequence. When a sequence that generates finds
    no block, the youngest running one gives its blocks back and computes its context, answer so far included, again later.

    With several steps in flight, a sequence is in one of them at most, and those that generate are spread over them.
    """

    def __init__(
        self, blocks: BlockAllocator, tokens_per_block: int, max_batch_size: int, max_num_tokens: int, chunked: bool, n_in_flight: int = 1
    ) -> None:
        self._blocks = blocks
        self._tokens_per_block = tokens_per_block
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._chunked = chunked
        self._n_in_flight = n_in_flight
        self._slots = list(range(max_batch_size))
        self._arrivals = 0
        self._reserved = 0  # sequences whose KV cache is on its way
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self._stamp(sequence)
        self.waiting.append(sequence)

    def can_plan(self) -> bool:
        """Whether `plan` would give anything."""
        return any(not s.in_flight for s in self.running) or (bool(self.waiting) and self._fits(self.waiting[0].n_context))

    def plan(self) -> list[tuple[Sequence, int]]:
        """The next step: sequences and how many tokens each adds, those with one token first."""
        plan: list[tuple[Sequence, int]] = []
        left = self._max_num_tokens
        n_generating = min(left, -(-len(self.running) // self._n_in_flight))
        for sequence in [s for s in self.running if s.n_uncached == 1 and not s.in_flight]:
            if len(plan) < n_generating and sequence.slot >= 0 and self._grow(sequence):
                plan.append((sequence, 1))
                left -= 1
        contexts = deque(s for s in self.running if s.n_uncached > 1 and not s.in_flight)
        while contexts or (self.waiting and self._fits(self.waiting[0].n_context)):
            sequence = contexts[0] if contexts else self.waiting[0]
            n = min(sequence.n_uncached, left) if self._chunked else sequence.n_uncached
            if n == 0 or (n > left and plan):  # unchunked, a context longer than a step has one for itself
                break
            if contexts:
                contexts.popleft()
            else:
                self._start(self.waiting.popleft())
            plan.append((sequence, n))
            left = max(0, left - n)
        return sorted(plan, key=lambda entry: entry[1] != 1)

    def drop(self, sequence: Sequence) -> None:
        """It runs no more; its blocks stay its own (see `free`)."""
        self.running.remove(sequence)
        self._give_slot_back(sequence)

    def free(self, sequence: Sequence) -> None:
        self._blocks.give_back(sequence.blocks)
        sequence.blocks = []

    def start_ahead(self) -> None:
        """Give blocks to the contexts of the next steps, one more than can be in flight: their receivers can be asked meanwhile."""
        left = (1 + self._n_in_flight) * self._max_num_tokens - sum(s.n_uncached for s in self.running if not s.in_flight)
        while left > 0 and self.waiting and self._fits(self.waiting[0].n_context):
            sequence = self.waiting.popleft()
            self._start(sequence)
            left -= sequence.n_uncached

    # --- sequences whose context was computed elsewhere ---

    def reserve(self, n_context: int) -> list[int] | None:
        """Blocks and a place for a sequence to come, or None. Those that were preempted here come first."""
        if self.waiting or not self._fits(n_context):
            return None
        self._reserved += 1
        return self._blocks.take(self._blocks_for(n_context))

    def give_up(self, blocks: list[int]) -> None:
        """The sequence that `reserve` gave these to will not run."""
        self._reserved -= 1
        self._blocks.give_back(blocks)

    def admit(self, sequence: Sequence) -> None:
        """Run a sequence that holds the blocks which `reserve` gave."""
        self._reserved -= 1
        self._stamp(sequence)
        self._take_slot(sequence)
        self.running.append(sequence)

    # --- inside ---

    def _stamp(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._tokens_per_block)

    def _fits(self, n_context: int) -> bool:
        n_running = len(self.running)
        if n_running + self._reserved >= self._max_batch_size:
            return False
        return self._blocks_for(n_context) + n_running + self._reserved <= self._blocks.n_free

    def _start(self, sequence: Sequence) -> None:
        sequence.blocks = self._blocks.take(self._blocks_for(sequence.n_context))
        self._take_slot(sequence)
        bisect.insort(self.running, sequence, key=_arrival)

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot, sequence.n_told = self._slots.pop(), 0

    def _give_slot_back(self, sequence: Sequence) -> None:
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _grow(self, sequence: Sequence) -> bool:
        """Give `sequence` the block that its next token needs; False if it had to give way itself, or has to wait for who will."""
        while len(sequence.blocks) < self._blocks_for(sequence.n_cached + 1):
            if self._blocks.n_free:
                sequence.blocks += self._blocks.take(1)
                continue
            if self.running[-1].in_flight:
                return False
            youngest = self.running.pop()
            self._give_slot_back(youngest)
            self.free(youngest)
            youngest.n_cached = 0
            bisect.insort(self.waiting, youngest, key=_arrival)
            self.preemptions += 1
            if youngest is sequence:
                return False
        return True


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
