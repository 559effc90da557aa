"""Choose the sequences of the next step and their numbers of tokens; preempt sequences if blocks run out."""

from __future__ import annotations

import bisect
import time
from collections import deque

from mpillm.engine.schedule.block_allocator import NULL_BLOCK, BlockAllocator
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Step
from mpillm.engine.schedule.window_blocks import WindowBlocks
from mpillm.engine.shape.engine_config import SchedulerConfig


class Scheduler:
    """Fills a step with a token of every generating sequence, then with contexts in the order of its policy.

    Sequences start first come, first served: after all earlier sequences, when the policy finds enough free
    blocks. When a generating sequence needs a block and none is free (only with `max_util`), the youngest
    running sequence is preempted. The preempted sequence returns its blocks, and later computes its prompt
    and its output again.

    With several steps in flight, a sequence is in at most one of them, and generating sequences are spread
    over the steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockAllocator,
        n_in_flight: int = 1,
        window: int = 0,
        window_blocks: WindowBlocks | None = None,
    ) -> None:
        """Start without sequences.

        Args:
            n_in_flight: Number of steps in flight.
            window: Most tokens that a token sees in any layer, including itself; 0: all. Blocks of older
                tokens are freed.
            window_blocks: Blocks of layers with a window, if other layers have no window.
        """
        self._blocks = blocks
        self._known = blocks if isinstance(blocks, PrefixCache) else None
        self._tokens_per_block = config.tokens_per_block
        self._max_num_tokens = config.max_num_tokens
        self.context_piece = config.max_num_tokens  # limit for the tokens of contexts in a step
        self._chunked = config.enable_chunked_context
        self._window = window
        self._window_blocks = window_blocks
        self._n_in_flight = n_in_flight
        # Without prompts that begin with a received one, its blocks need no hashes.
        self._shares_received = config.max_local_prefill_length > 0
        self._has_blocks = {
            "max_util": self._has_blocks_to_start,
            "no_evict": self._has_blocks_to_end,
            "static": self._has_blocks_for_batch,
        }[config.batch_scheduler_policy]
        is_even = self._chunked and config.context_chunking_policy == "equal_progress"
        self._add_contexts = self._add_evenly if is_even else self._add_in_order
        # All sequences that fit the cache start immediately, instead of with their first step.
        self._starts_ahead = is_even or config.batch_scheduler_policy == "static"
        self._slots = list(range(config.max_batch_size))
        self._arrivals = 0
        self._reserved = 0  # sequences whose KV cache is arriving
        self._n_promised = 0  # blocks that started sequences and reservations may still need
        self._passed_over = False  # the next context did not fit into the last step beside decode
        self._batch_runs = False  # a step has run since `running` was empty
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self._stamp(sequence)
        self.waiting.append(sequence)

    def can_plan(self) -> bool:
        """Return whether `plan` would return anything."""
        return any(not s.in_flight for s in self.running) or self._can_start()

    def plan(self) -> list[tuple[Sequence, int]]:
        """Return the next step: sequences and how many tokens each adds, those with one token first."""
        while self._starts_ahead and self._can_start():
            self._start()
        plan: list[tuple[Sequence, int]] = []
        left = self._max_num_tokens - self._add_generating(plan)
        self._add_contexts(plan, min(left, self.context_piece))
        self._batch_runs = bool(self.running)
        return sorted(plan, key=lambda entry: entry[1] != 1)

    def commit(self, plan: list[tuple[Sequence, int]]) -> Step:
        """Return a plan as a step, whose tokens count as cached from now on.

        With block reuse, later sequences can find the blocks that the step fills.
        """
        if self._window_blocks is not None:
            self._window_blocks.cover(plan)
        step = Step()
        for sequence, n in plan:
            if sequence.extras is None:
                step.add(sequence, n, sequence.blocks)
            else:
                sequence.extras.add_rows(step, sequence, n)
        if all(s.sampling.is_greedy for s in step.sampled):
            step.places = []
        else:
            step.sampling = [s.sampling for s in step.sampled]
        if self._known is not None and self._known.host is not None:
            step.copies = self._known.host.take_copies()
        step.logprobs = max((s.wants_logprobs for s in step.sampled), default=0)
        if self._known is not None:
            self._known.publish(plan, None if self._window_blocks is None else self._window_blocks.known)
        return step

    def drop(self, sequence: Sequence) -> None:
        """Stop running a sequence; it keeps its blocks (see `free`)."""
        if sequence.slot < 0:  # preempted while its last token was in flight
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._give_slot_back(sequence)
        self._batch_runs &= bool(self.running)

    def free(self, sequence: Sequence) -> None:
        if not sequence.blocks:  # preempted
            return
        if self._window_blocks is not None:
            self._window_blocks.free(sequence)
        self._n_promised -= sequence.max_blocks - (len(sequence.blocks) - sequence.n_blocks_freed)
        self._blocks.give_back(sequence.blocks[sequence.n_blocks_freed :])
        sequence.blocks, sequence.n_blocks_freed = [], 0

    def start_ahead(self) -> None:
        """Give blocks to the contexts of the next steps, so that receivers are requested early.

        Covers one step more than the number of steps in flight.
        """
        left = (1 + self._n_in_flight) * self._max_num_tokens - sum(
            s.n_uncached for s in self.running if not s.in_flight
        )
        while left > 0 and self._can_start():
            left -= self._start().n_uncached

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any state; it must not be in a step in flight."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.drop(sequence)
            self.free(sequence)

    def take_ahead(self, sequence: Sequence, n: int) -> int:
        """Take blocks for up to `n` tokens after the next token of a planned sequence; return for how many.

        Leaves the blocks that other sequences may need for their next tokens.
        """
        n_free = len(sequence.blocks) * self._tokens_per_block - sequence.n_cached - 1
        while n_free < n and self._blocks.n_free > len(self.running) + self._reserved:
            if len(sequence.blocks) - sequence.n_blocks_freed >= sequence.max_blocks:
                break
            sequence.blocks += self._blocks.take(1)
            self._n_promised -= 1
            n_free += self._tokens_per_block
        return min(n_free, n)

    # --- sequences whose context was computed elsewhere ---

    def reserve(self, n_context: int, max_cached: int) -> list[int] | None:
        """Reserve blocks and a slot for an arriving sequence, or return None.

        Sequences that were preempted here come first. `max_cached`: see `Sequence`.
        """
        n = self._blocks_for(n_context)
        max_blocks = self._max_blocks(n, max_cached)
        if self.waiting or not self._fits(n, max_blocks):
            return None
        self._reserved += 1
        self._n_promised += max_blocks - n
        return self._blocks.take(n)

    def give_up(self, blocks: list[int], max_cached: int) -> None:
        """Cancel a reservation: its sequence will not run."""
        self._reserved -= 1
        self._n_promised -= self._max_blocks(len(blocks), max_cached) - len(blocks)
        self._blocks.give_back(blocks)

    def admit(self, sequence: Sequence) -> None:
        """Run a sequence that holds the blocks of a reservation."""
        self._reserved -= 1
        sequence.max_blocks = self._max_blocks(len(sequence.blocks), sequence.max_cached)
        if not self._shares_received:
            sequence.n_published = sequence.n_cached // self._tokens_per_block
        self._stamp(sequence)
        self._take_slot(sequence)
        self.running.append(sequence)

    # --- policies: whether a sequence may start with `n` blocks, and grow to `max_blocks` ---

    def _has_blocks_to_start(self, n: int, max_blocks: int) -> bool:
        """max_util: blocks for the new sequence's context, and one more for each running sequence."""
        return n + len(self.running) + self._reserved <= self._blocks.n_free

    def _has_blocks_to_end(self, n: int, max_blocks: int) -> bool:
        """no_evict: blocks for its longest answer, and the blocks that other sequences may still need."""
        return max_blocks + self._n_promised <= self._blocks.n_free

    def _has_blocks_for_batch(self, n: int, max_blocks: int) -> bool:
        """static: like no_evict; no sequence starts from a batch's first step to its last sequence's end."""
        return not self._batch_runs and self._has_blocks_to_end(n, max_blocks)

    # --- the parts of a step ---

    def _add_generating(self, plan: list[tuple[Sequence, int]]) -> int:
        """Add generating sequences; return the number of their tokens, one for each slot."""
        left, n = self._max_num_tokens, -(-len(self.running) // self._n_in_flight)
        for sequence in [s for s in self.running if s.n_uncached == 1 and not s.in_flight]:
            n_slots = 1 if sequence.extras is None else sequence.extras.n_slots
            fits = len(plan) < n and n_slots <= left
            if fits and sequence.slot >= 0 and self._grow(sequence):
                plan.append((sequence, 1))
                left -= n_slots
        return self._max_num_tokens - left

    def _add_in_order(self, plan: list[tuple[Sequence, int]], left: int) -> None:
        """Add the whole oldest context, then the next.

        Without chunking, a context that does not fit beside decode gets every other step alone. Otherwise, it
        would wait until no sequence generates. A preempted sequence's tokens may exceed a whole step. Without
        chunking, only such a context is split.
        """
        n_generating = len(plan)
        contexts = deque(s for s in self.running if s.n_uncached > 1 and not s.in_flight)
        while left > 0 and (contexts or self._can_start()):
            if contexts:
                self._reuse(contexts[0])
            n_uncached = (contexts[0] if contexts else self.waiting[0]).n_uncached
            if n_uncached > left and plan and not self._chunked:
                only_decode = len(plan) == n_generating
                if not (only_decode and self._passed_over):
                    self._passed_over = only_decode
                    break
                plan.clear()
                left = self._max_num_tokens
            self._passed_over = False
            sequence = contexts.popleft() if contexts else self._start()
            n = min(sequence.n_uncached, left)
            plan.append((sequence, n))
            left -= n

    def _add_evenly(self, plan: list[tuple[Sequence, int]], left: int) -> None:
        """Add an equal share of each context, or all of a shorter one; the remainder goes to the oldest."""
        contexts = [s for s in self.running if s.n_uncached > 1]
        n_now = -(-len(contexts) // self._n_in_flight)
        contexts = [s for s in contexts if not s.in_flight][:n_now]
        for sequence in contexts:
            self._reuse(sequence)
        level = remainder = 0
        for i, n_uncached in enumerate(sorted(s.n_uncached for s in contexts)):
            level, remainder = divmod(left, len(contexts) - i)
            if n_uncached > level:
                break
            level, left, remainder = n_uncached, left - n_uncached, 0
        for sequence in contexts:
            n = min(sequence.n_uncached, level)
            if n < sequence.n_uncached and remainder:
                n, remainder = n + 1, remainder - 1
            if n:
                plan.append((sequence, n))

    # --- inside ---

    def _stamp(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.arrival = self._arrivals

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self._tokens_per_block)

    def _demand(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return a sequence's number of blocks when it starts, the limit of its blocks, and its slots."""
        extras = sequence.extras
        if extras is not None and extras.n_slots > 1:
            n = extras.n_blocks(sequence, self._tokens_per_block)
            return n, n, extras.n_slots
        n = self._blocks_for(sequence.n_context)
        return n, self._max_blocks(n, sequence.max_cached), 1

    def _max_blocks(self, n: int, max_cached: int) -> int:
        """Return the limit for the blocks of a sequence that has `n` blocks and grows to `max_cached` tokens.

        A window limits the blocks to those that it overlaps. Both ends of the window may be inside a block.
        """
        max_blocks = self._blocks_for(max_cached)
        return min(max_blocks, max(n, self._blocks_for(self._window) + 2)) if self._window else max_blocks

    def _fits(self, n: int, max_blocks: int, n_slots: int = 1) -> bool:
        """Return whether a sequence may start with `n` blocks, and grow to `max_blocks`."""
        return len(self._slots) - self._reserved >= n_slots and self._has_blocks(n, max_blocks)

    def _can_start(self) -> bool:
        """Return whether the first waiting sequence may start.

        A preempted sequence waits until the host has read all its tokens.
        """
        if not self.waiting or self.waiting[0].n_unread:
            return False
        return self._fits(*self._demand(self.waiting[0]))

    def _start(self) -> Sequence:
        sequence = self.waiting.popleft()
        sequence.started_at = sequence.started_at or time.perf_counter()
        self._reuse(sequence)
        n, sequence.max_blocks, _ = self._demand(sequence)
        sequence.blocks += self._blocks.take(n - len(sequence.blocks))
        self._n_promised += sequence.max_blocks - len(sequence.blocks)
        self._take_slot(sequence)
        bisect.insort(self.running, sequence, key=_arrival)
        return sequence

    def _reuse(self, sequence: Sequence) -> None:
        """Replace a sequence's next blocks with blocks of other sequences with the same tokens."""
        if self._known is None or not (known := self._known.known(sequence)):
            return
        if self._window_blocks is not None:
            known = known[: self._window_blocks.reuse(sequence, len(known))]
        if known:
            known = self._known.hold_known(sequence, known)
            first = sequence.n_cached // self._tokens_per_block
            part = slice(first, first + len(known))
            self._blocks.give_back([block for block in sequence.blocks[part] if block not in known])
            sequence.blocks = [*sequence.blocks[:first], *known, *sequence.blocks[part.stop :]]
            sequence.n_cached += len(known) * self._tokens_per_block
            if not sequence.output:
                sequence.n_reused += len(known) * self._tokens_per_block
            sequence.n_blocks_sent = 0

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot, sequence.n_blocks_sent, sequence.n_window_blocks_sent = self._slots.pop(), 0, 0
        if sequence.extras is not None:
            sequence.extras.more_slots = [self._slots.pop() for _ in range(sequence.extras.n_slots - 1)]

    def _give_slot_back(self, sequence: Sequence) -> None:
        self._slots.append(sequence.slot)
        if sequence.extras is not None:
            self._slots += sequence.extras.more_slots
        sequence.slot = -1

    def _grow(self, sequence: Sequence) -> bool:
        """Give a sequence the block that its next token needs.

        Returns False if the sequence is preempted, or must wait until the youngest sequence can be preempted.
        """
        self._free_unseen(sequence)
        while len(sequence.blocks) < self._blocks_for(sequence.n_cached + 1):
            if self._blocks.n_free:
                sequence.blocks += self._blocks.take(1)
                self._n_promised -= 1
                continue
            youngest = next(s for s in reversed(self.running) if s.extras is None or s.extras.n_slots == 1)
            if youngest.in_flight:
                return False
            self.running.remove(youngest)
            self._give_slot_back(youngest)
            self.free(youngest)
            youngest.n_cached = youngest.n_published = 0
            if not youngest.output:
                youngest.n_reused = 0
            bisect.insort(self.waiting, youngest, key=_arrival)
            self.preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _free_unseen(self, sequence: Sequence) -> None:
        """Free the blocks that no later token of a generating sequence sees.

        Steps in flight may still read these blocks. These steps end before a step starts that writes to the
        blocks.
        """
        if not self._window or sequence.hands_off:
            return
        if sequence.extras is not None and sequence.extras.n_slots > 1:
            return
        n_unseen = max(0, sequence.n_cached + 1 - self._window) // self._tokens_per_block
        for i in range(sequence.n_blocks_freed, n_unseen):
            self._blocks.give_back([sequence.blocks[i]])
            sequence.blocks[i] = NULL_BLOCK
        self._n_promised += max(0, n_unseen - sequence.n_blocks_freed)
        sequence.n_blocks_freed = max(sequence.n_blocks_freed, n_unseen)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
