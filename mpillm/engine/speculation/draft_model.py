"""Drafts from a smaller model of the same vocabulary, as in Leviathan et al., 2023. Drafts are greedy.

The draft model runs only on the root rank of the instance, for every layout, with its own KV cache. So it
also computes each prompt, even after a handoff. On a GPU, a draft token stays on the device for the draft
model's next step. The host reads all draft tokens after it has launched all steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.block_allocator import BlockAllocator
from mpillm.engine.schedule.sequence import UNREAD, Sequence
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.tensors.staging import SampledTokens


@dataclass(eq=False)
class DraftSequence:
    """A sequence in the draft model's KV cache."""

    sequence: Sequence
    slot: int
    blocks: list[int] = field(default_factory=list)
    n_blocks_sent: int = 0  # see `Span`
    n_right: int = 0  # tokens of the sequence that this model has computed
    draft: list[int] = field(default_factory=list)  # draft tokens after those; all but the last are computed
    n_cached: int = 0  # tokens with keys and values


class StartedStep(NamedTuple):
    """A launched step, whose tokens may not be available yet."""

    rows: list[DraftSequence]  # sequence of each token
    sampled: SampledTokens


class DraftModel:
    """Implements `speculation.Drafter`."""

    FEW = 2  # tokens missing in the cache after a fully accepted draft
    _N_UNSEEN = 0  # tokens at a sequence's start that this model does not compute

    def __init__(self, worker: Worker, config: SchedulerConfig) -> None:
        """`worker`: of one rank; `config`: the target model's, which also limits the draft model's steps."""
        self._worker = worker
        self._few = self.FEW
        self._size = config.tokens_per_block
        self._max_num_tokens = config.max_num_tokens
        info = worker.part.info
        self._max_seq_len = info.max_seq_len
        self._blocks = BlockAllocator(info.kv_cache_tokens // self._size)
        self._slots = list(range(config.max_batch_size))
        self._of: dict[Sequence, DraftSequence] = {}

    @staticmethod
    def decode_rows(config: SchedulerConfig) -> int:
        """Return the rows of the worker's largest step without contexts."""
        return max(config.max_batch_size, min(DraftModel.FEW * config.max_batch_size, config.max_num_tokens))

    def draft(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        for sequence in [sequence for sequence in self._of if sequence.is_done]:
            self._forget(self._of.pop(sequence))
        drafts: list[list[int]] = []
        work: list[tuple[DraftSequence, int]] = []  # with the maximum number of draft tokens
        new: list[list[int]] = []
        for sequence, max_tokens in requests:
            n_seen = len(sequence.prompt) + len(sequence.output) - self._N_UNSEEN
            state = self._reserve(sequence, n_seen + max_tokens)
            drafts.append([])
            if state is not None:
                new.append(self._lacks(state))
                state.draft = drafts[-1]
                work.append((state, max_tokens))
        if work:
            self._draft_tokens(work, new)
        return drafts

    def _lacks(self, state: DraftSequence) -> list[int]:
        """Discard rejected draft tokens; return the sequence's tokens to compute next, at least the last."""
        sequence, start = state.sequence, self._N_UNSEEN + state.n_right
        new = sequence.tokens(start, len(sequence.prompt) + len(sequence.output))
        n = self._n_cached_drafts(state, new)
        state.n_cached = state.n_right + n
        state.n_right += len(new)
        return new[n:]

    def _n_cached_drafts(self, state: DraftSequence, new: list[int]) -> int:
        """Return how many of a sequence's `new` tokens are cached as draft tokens."""
        n = 0
        while n < min(len(state.draft), len(new)) - 1 and state.draft[n] == new[n]:
            n += 1
        return n

    def _forget(self, ended: DraftSequence) -> None:
        """Free the slot and the blocks of a finished sequence."""
        self._slots.append(ended.slot)
        self._blocks.give_back(ended.blocks)

    def _draft_tokens(self, work: list[tuple[DraftSequence, int]], new: list[list[int]]) -> None:
        """Fill the draft of each sequence. `new`: tokens missing in each sequence's cache."""
        waits = not self._worker.steps.n_ahead
        unread = [self._start(list(zip((state for state, _ in work), new, strict=True)))]
        for n in range(1, max(max_tokens for _, max_tokens in work)):
            if waits:
                self._read(unread)
            unfinished = [state for state, max_tokens in work if max_tokens > n]
            unread.append(self._start([(one, [one.draft[-1] if waits else UNREAD]) for one in unfinished]))
        self._read(unread)

    def _read(self, unread: list[list[StartedStep]]) -> None:
        """Wait for the steps, and add their tokens to the drafts."""
        for steps in unread:
            tokens: dict[DraftSequence, int] = {}  # of each sequence's last row
            for step in steps:
                tokens |= zip(step.rows, step.sampled.take(), strict=True)
            for state, token in tokens.items():
                state.draft.append(token)
        unread.clear()

    def _reserve(self, sequence: Sequence, n: int) -> DraftSequence | None:
        """Return a sequence's state with blocks for `n - 1` tokens; None without enough free blocks."""
        state = self._of.get(sequence)
        more = -(-(n - 1) // self._size) - (len(state.blocks) if state else 0)
        if n > self._max_seq_len or more > self._blocks.n_free or not (state or self._slots):
            return None
        if state is None:
            state = self._of[sequence] = DraftSequence(sequence, self._slots.pop())
        state.blocks += self._blocks.take(max(0, more))
        return state

    def _start(self, work: list[tuple[DraftSequence, list[int]]]) -> list[StartedStep]:
        """Launch steps that add tokens to the sequences."""
        started: list[StartedStep] = []
        pieces: list[tuple[DraftSequence, list[int]]] = []
        left = max_tokens = self._max_num_tokens
        for state, new in work:
            for at in range(0, len(new), max_tokens):
                piece = new[at : at + max_tokens]
                if len(piece) > left:
                    started.append(self._run(pieces))
                    pieces, left = [], max_tokens
                pieces.append((state, piece))
                left -= len(piece)
        return [*started, self._run(pieces)]

    def _run(self, pieces: list[tuple[DraftSequence, list[int]]]) -> StartedStep:
        """Launch a step that adds a piece to each sequence."""
        step, rows = Step(), []
        pieces.sort(key=self._is_context)
        self._give(pieces)
        for state, new in pieces:
            n_sent, state.n_blocks_sent = state.n_blocks_sent, len(state.blocks)
            is_few = 1 < len(new) <= self._few
            span = Span(state.slot, state.n_cached, len(new), n_sent, state.blocks[n_sent:], is_few)
            step.spans.append(span)
            state.n_cached += len(new)
            step.tokens += new
            # A step with a token for each of its rows is a CUDA graph.
            n_rows = len(new) if span.decodes else 1
            step.logits_rows += range(len(step.tokens) - n_rows, len(step.tokens))
            rows += [state] * n_rows
        sampled = self._worker.run(step)
        assert sampled is not None
        self._keep(rows)
        return StartedStep(rows, sampled)

    def _give(self, pieces: list[tuple[DraftSequence, list[int]]]) -> None:
        """Prepare the inputs of a step's rows other than tokens."""

    def _keep(self, rows: list[DraftSequence]) -> None:
        """Store the outputs of a launched step for each row with a token."""

    def _is_context(self, piece: tuple[DraftSequence, list[int]]) -> bool:
        return len(piece[1]) > self._few
