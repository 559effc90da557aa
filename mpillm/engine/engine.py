"""The engine: turns requests into tokens, one step at a time.

It decides which sequences a step contains. `Worker` runs the step, on this rank and on the instance's other
ranks.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from mpillm.engine.engine_handoffs import EngineHandoffs
from mpillm.engine.extras.step_extras import SharedAdapters
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.block_allocator import BlockAllocator
from mpillm.engine.schedule.host_blocks import HostBlocks
from mpillm.engine.schedule.prefix_cache import PrefixCache
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Progress, Sequence, SequenceExtras
from mpillm.engine.schedule.window_blocks import WindowBlocks
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.speculation.speculation import Speculation
from mpillm.engine.tensors.staging import SampledTokens
from mpillm.telemetry.recorder import Recorder


class StepCounts(NamedTuple):
    """Counts of a step: sequences in the context phase, generating sequences, and context tokens.

    A pair is a new token and one token that it attends to.
    """

    contexts: int
    generations: int
    context_tokens: int
    context_pairs: int = 0
    generation_pairs: int = 0

    @staticmethod
    def of(plan: list[tuple[Sequence, int]]) -> StepCounts:
        """Count a plan that is not committed yet."""
        contexts = context_tokens = context_pairs = generation_pairs = 0
        for sequence, n in plan:
            pairs = n * (2 * sequence.n_cached + n + 1) // 2
            if sequence.n_cached < len(sequence.prompt):
                contexts += 1
                context_tokens += n
                context_pairs += pairs
            else:
                generation_pairs += pairs
        return StepCounts(contexts, len(plan) - contexts, context_tokens, context_pairs, generation_pairs)


class InFlight(NamedTuple):
    """A step that is being computed."""

    sequences: list[Sequence]
    sampled: list[Sequence]  # see `Step`
    tokens: SampledTokens | None  # None with several stages
    started_at: float
    counts: StepCounts


class Engine:
    """One copy of a model, on this rank alone or also on the ranks of its followers (`worker.Follower`)."""

    def __init__(
        self, info: ModelInfo, config: SchedulerConfig, worker: Worker, max_transfer_tokens: int | None = None
    ) -> None:
        """`max_transfer_tokens`: limit for the tokens of all KV caches that are arriving; None: no limit."""
        self.info = info
        self.config = config
        self.worker = worker
        self._peers = worker.peers
        self._n_stages = worker.part.groups.layout.pp_size
        size = config.tokens_per_block

        def allocator(n_tokens: int) -> BlockAllocator:
            n_blocks = n_tokens // size
            if not config.enable_kv_cache_reuse:
                return BlockAllocator(n_blocks)
            return PrefixCache(n_blocks, size, HostBlocks(info.host_blocks) if info.host_blocks else None)

        self.blocks = allocator(info.kv_cache_tokens)
        self.window_blocks: WindowBlocks | None = None
        if info.window_cache_tokens:
            self.window_blocks = WindowBlocks(
                allocator(info.window_cache_tokens), info.config.partial_window, size
            )
        self.scheduler = Scheduler(
            config,
            self.blocks,
            self._n_stages,
            # A draft head's only layer sees all tokens, and its cache has as many blocks as the model's.
            0 if info.feature_layers else info.config.widest_window,
            self.window_blocks,
        )
        self.speculation: Speculation | None = None
        self._adapters = SharedAdapters()
        self.handoffs = EngineHandoffs(
            self.scheduler, worker, info.max_seq_len, max_transfer_tokens, self.window_blocks
        )
        self._end_ids = set(info.end_ids)
        self._stops: dict[int, list[list[int]]] = {}  # last token -> stop words
        for tokens in info.stop_words:
            self._stops.setdefault(tokens[-1], []).append(list(tokens))
        self._in_flight: deque[InFlight] = deque()
        self._ended = 0.0  # when the last step's tokens arrived
        self._goes_on = False  # the next step could be planned at `_ended`
        self.recorder: Recorder | None = None
        self._arrived: list[int] | None = None  # tokens of the oldest step in flight
        # Tokens computed: of contexts (counted again after a preemption), and of outputs.
        self.prompt_tokens = self.generated_tokens = 0
        self.n_steps = 0  # with sequences
        self.last_step = StepCounts(0, 0, 0)
        self._cancelled: list[Sequence] = []  # not returned by `step` yet

    # --- work ---

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `refusal` accepts."""
        if sequence.extras is not None:
            sequence.extras.prepare(sequence, self._end_ids, self.config.tokens_per_block)
        self.scheduler.add(sequence)
        if sequence.hands_off and sequence.max_output > 1:
            self.handoffs.add(sequence)

    def reset_prefix_cache(self) -> None:
        """Let no later sequence find blocks that are cached now. Running sequences keep their blocks."""
        window = self.window_blocks.known if self.window_blocks is not None else None
        for blocks in (self.blocks, window):
            if isinstance(blocks, PrefixCache):
                blocks.forget_all()

    def has_work(self) -> bool:
        """Return whether `step` has something to do now."""
        can_plan = self._may_start() and self.scheduler.can_plan()
        return can_plan or self.handoffs.has_orders() or self._has_tokens() or bool(self._cancelled)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory that this process has reserved; 0 on a CPU."""
        return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0

    def is_idle(self) -> bool:
        """Return whether no step is in flight, and `has_work` stays False until something is added."""
        is_busy = self._in_flight or self._cancelled or self.handoffs.has_orders()
        return not (is_busy or self.scheduler.can_plan())

    def is_quiet(self) -> bool:
        """Return whether the engine is idle and no transfer is in progress."""
        return self.is_idle() and not self.handoffs.has_transfers()

    def cancel(self, sequence_id: int) -> None:
        """End a sequence in any state: queued, in its context phase, generating, or with its cache arriving.

        `step` returns the sequence once. A sequence in flight ends with its step, which still writes to the
        sequence's blocks. A sequence that has ended or is being handed over does not change. The receiver
        must cancel a sequence that is being handed over, and `EngineHandoffs.release` frees the blocks.
        """
        self.handoffs.cancel(sequence_id)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            if sequence.id == sequence_id and not self._is_handed_over(sequence):
                sequence.is_cancelled = True
                if not sequence.in_flight:
                    self._end_cancelled(sequence)

    def _is_handed_over(self, sequence: Sequence) -> bool:
        """Return whether a sequence has blocks for its receiver, or had blocks before a preemption."""
        return self.handoffs.is_outgoing(sequence.id) and (
            bool(sequence.blocks) or self.handoffs.has_started(sequence.id)
        )

    def _end_cancelled(self, sequence: Sequence) -> None:
        sequence.is_done = True
        self.scheduler.remove(sequence)
        self._cancelled.append(sequence)
        self.handoffs.forget(sequence.id)

    def step(self) -> list[Progress]:
        """Start a step of at most `max_num_tokens` tokens if one more may be in flight; collect ended steps.

        Returns the `Progress` of the steps that ended. As many steps are in flight as there are stages, each
        with different sequences, so that every stage has work. A worker that feeds a token to the next step
        by itself (`n_ahead`) gets the next step before the host reads the token. If the token ends its
        sequence, the engine drops the sequence's result of that next step. By then, the sequence's blocks may
        already belong to another sequence of a later step. All tokens must be read before a step that
        verifies draft tokens, and again after it.
        """
        plan = self.scheduler.plan() if self._may_start() else []
        if plan and self.speculation is not None:
            plan = self.speculation.add_drafts(plan)
        if plan or self.handoffs.has_orders():
            self._launch(plan)
        progress: list[Progress] = []
        while self._has_tokens():
            progress += self._collect()
            self._goes_on = self.scheduler.can_plan()
        progress += [Progress(sequence, is_first=False, is_final=True) for sequence in self._cancelled]
        self._cancelled.clear()
        return progress

    def _launch(self, plan: list[tuple[Sequence, int]]) -> None:
        """Commit a plan, which may be empty, and start to compute it on all ranks."""
        counts = StepCounts.of(plan)
        step = self.scheduler.commit(plan)
        step.transfers = self.handoffs.take_orders(step.sampled)
        if self._peers is not None:
            self._adapters.complete(step)
            self._peers.send_plan(step)
        for sequence in step.sampled:
            sequence.n_unread += 1
        for sequence, _ in plan:
            max_output = 1 if sequence.hands_off else sequence.max_output
            waits = not self.worker.steps.n_ahead or (sequence.extras is not None and sequence.n_unread > 0)
            sequence.in_flight = waits or sequence.n_output >= max_output
        self.prompt_tokens += counts.context_tokens
        started_at = time.perf_counter()
        tokens = self.worker.run(step)
        if not plan:
            return
        if self.speculation is not None:
            self.speculation.computed(step, plan)
        self.n_steps += 1
        self.last_step = counts
        sequences = [sequence for sequence, _ in plan]
        self._in_flight.append(InFlight(sequences, step.sampled, tokens, started_at, counts))

    def _collect(self) -> list[Progress]:
        """Take the tokens of the oldest step in flight, which have arrived."""
        numbers, self._arrived = self._arrived or [], None
        step = self._in_flight.popleft()
        self._note_step(step)
        for sequence in step.sampled:
            sequence.n_unread -= 1
        for sequence in step.sequences:
            sequence.in_flight &= sequence.n_unread > 0
            if sequence.is_cancelled and not sequence.is_done and not sequence.in_flight:
                self._end_cancelled(sequence)
        width = len(numbers) // len(step.sampled) if step.sampled else 1  # 1 without log probabilities
        places = zip(step.sampled, range(0, len(numbers), width), strict=True)
        accepted = self.speculation.accepted(places, numbers) if self.speculation else places
        results = (
            self._append(sequence, numbers[at], numbers[at + 1 : at + width]) for sequence, at in accepted
        )
        return [progress for progress in results if progress is not None]

    def _may_start(self) -> bool:
        """Return whether another step may be in flight."""
        waits = self.speculation is not None and self.speculation.waits()
        return len(self._in_flight) < self._n_stages + (0 if waits else self.worker.steps.n_ahead)

    def _note_step(self, step: InFlight) -> None:
        """Record an ended step.

        If it started before the previous step ended, its time counts from that end.
        """
        now, started_at = time.perf_counter(), max(step.started_at, self._ended)
        if self.recorder is not None:
            self.recorder.step(started_at, now, *step.counts[:3])
            self.recorder.costs.add(now - (self._ended if self._goes_on else started_at), *step.counts)
        self._ended = now

    def _has_tokens(self) -> bool:
        if self._arrived is None and self._in_flight:
            tokens = self._in_flight[0].tokens
            if self._n_stages > 1 and self._peers is not None:
                self._arrived = self._peers.take_tokens()
            elif tokens is not None and tokens.ready():
                self._arrived = tokens.take()
        return self._arrived is not None

    def _append(self, sequence: Sequence, token: int, logprobs: list[int]) -> Progress | None:
        """Append a token; return its progress, if any.

        `logprobs`: the numbers after the token (see `Worker.run`). They may cover more tokens than requested.
        """
        if sequence.is_done or sequence.is_cancelled:
            return None
        if sequence.extras is not None and sequence.extras.n_slots > 1:
            return self._update(sequence, sequence.extras)
        sequence.output.append(token)
        if sequence.wants_logprobs:
            n, k = len(logprobs) // 2, sequence.wants_logprobs - 1
            sequence.logprobs.append(logprobs[: 1 + k] + logprobs[1 + n : 1 + n + k])
        self.generated_tokens += 1
        n = len(sequence.output)
        is_end = token in self._end_ids and not sequence.ignore_end
        is_final = is_end or n >= sequence.max_output or self._is_stopped(sequence)
        sequence.is_done = is_final
        if is_final or sequence.hands_off:
            self.scheduler.drop(sequence)
            if not self.handoffs.is_outgoing(sequence.id):
                self.scheduler.free(sequence)
        return Progress(sequence, n == 1, is_final) if n == 1 or is_final or sequence.stream else None

    def _update(self, sequence: Sequence, extras: SequenceExtras) -> Progress | None:
        """Update a sequence with several slots; return its progress if it has ended, else None."""
        self.generated_tokens += 1
        sequence.is_done = extras.update_output(sequence)
        if not sequence.is_done:
            return None
        self.scheduler.drop(sequence)
        self.scheduler.free(sequence)
        return Progress(sequence, is_first=True, is_final=True)

    def _is_stopped(self, sequence: Sequence) -> bool:
        """Return whether the output ends with a stop word and is long enough to end."""
        output = sequence.output
        stop_words = () if sequence.ignore_stop else self._stops.get(output[-1], ())
        return len(output) >= sequence.min_output and any(output[-len(word) :] == word for word in stop_words)

    def poll_kv(self) -> list[int]:
        """Return the sequences whose KV cache transfer is complete."""
        return self.handoffs.poll()

    def admit(self, sequence: Sequence) -> None:
        """Continue a sequence whose KV cache has arrived and whose `output` holds its first token."""
        if self.handoffs.admit(sequence):
            self.cancel(sequence.id)
