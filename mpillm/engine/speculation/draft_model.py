"""Guess with a smaller model of the same vocabulary, as in Leviathan et al., 2023; its guesses are greedy.

The model is on the first rank of the instance alone, whatever the instance's layout, with a KV cache of its
own. So it computes each prompt, too, even one whose cache was handed over. On a GPU a guess stays there for
the draft model's next step, and the host reads all of them once all steps are launched.
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
    draft: list[int] = field(default_factory=list)  # the guesses behind them; all but the last are computed
    n_cached: int = 0  # tokens with keys and values


class StartedStep(NamedTuple):
    """A step whose tokens may not be there yet."""

    rows: list[DraftSequence]  # of each token
    sampled: SampledTokens


class DraftModel:
    """Implements `speculation.Drafter`."""

    FEW = 2  # tokens that the cache lacks after guesses that were all right
    _N_UNSEEN = 0  # tokens at a sequence's start that never go through this model

    def __init__(self, worker: Worker, config: SchedulerConfig) -> None:
        """`worker`: of one rank; `config`: the model's, which also bounds this one's steps."""
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
        work: list[tuple[DraftSequence, int]] = []  # and how many guesses it wants
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
        """Forget the wrong guesses; return the sequence's tokens to compute next, at least the last."""
        sequence, start = state.sequence, self._N_UNSEEN + state.n_right
        new = sequence.tokens(start, len(sequence.prompt) + len(sequence.output))
        n = self._n_cached_drafts(state, new)
        state.n_cached = state.n_right + n
        state.n_right += len(new)
        return new[n:]

    def _n_cached_drafts(self, state: DraftSequence, new: list[int]) -> int:
        """Return for how many of a sequence's `new` tokens keys and values are cached, as guesses."""
        n = 0
        while n < min(len(state.draft), len(new)) - 1 and state.draft[n] == new[n]:
            n += 1
        return n

    def _forget(self, ended: DraftSequence) -> None:
        """Give back what a sequence held that has ended."""
        self._slots.append(ended.slot)
        self._blocks.give_back(ended.blocks)

    def _draft_tokens(self, work: list[tuple[DraftSequence, int]], new: list[list[int]]) -> None:
        """Fill each one's draft. `new`: the tokens that each one's cache lacks."""
        waits = not self._worker.steps.n_ahead
        unread = [self._start(list(zip((state for state, _ in work), new, strict=True)))]
        for n in range(1, max(max_tokens for _, max_tokens in work)):
            if waits:
                self._read(unread)
            unfinished = [state for state, max_tokens in work if max_tokens > n]
            unread.append(self._start([(one, [one.draft[-1] if waits else UNREAD]) for one in unfinished]))
        self._read(unread)

    def _read(self, unread: list[list[StartedStep]]) -> None:
        """Add a guess to each draft, from the steps that find it. Waits for them."""
        for steps in unread:
            tokens: dict[DraftSequence, int] = {}  # after each one's last row
            for step in steps:
                tokens |= zip(step.rows, step.sampled.take(), strict=True)
            for state, token in tokens.items():
                state.draft.append(token)
        unread.clear()

    def _reserve(self, sequence: Sequence, n: int) -> DraftSequence | None:
        """Return its state, with blocks for all of `n` tokens but the last; None if there are not so many."""
        state = self._of.get(sequence)
        more = -(-(n - 1) // self._size) - (len(state.blocks) if state else 0)
        if n > self._max_seq_len or more > self._blocks.n_free or not (state or self._slots):
            return None
        if state is None:
            state = self._of[sequence] = DraftSequence(sequence, self._slots.pop())
        state.blocks += self._blocks.take(max(0, more))
        return state

    def _start(self, work: list[tuple[DraftSequence, list[int]]]) -> list[StartedStep]:
        """Add tokens to each, in as many steps as it takes."""
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
        """Start a step that adds a piece to each."""
        step, rows = Step(), []
        pieces.sort(key=self._is_context)
        self._give(pieces)
        for state, new in pieces:
            n_blocks_sent, state.n_blocks_sent = state.n_blocks_sent, len(state.blocks)
            span = Span(
                state.slot,
                state.n_cached,
                len(new),
                n_blocks_sent,
                state.blocks[n_blocks_sent:],
                is_few=1 < len(new) <= self._few,
            )
            step.spans.append(span)
            state.n_cached += len(new)
            step.tokens += new
            # A step with a token for each of its rows is a graph.
            n_wanted = len(new) if span.decodes else 1
            step.logits_rows += range(len(step.tokens) - n_wanted, len(step.tokens))
            rows += [state] * n_wanted
        sampled = self._worker.run(step)
        assert sampled is not None
        self._keep(rows)
        return StartedStep(rows, sampled)

    def _give(self, pieces: list[tuple[DraftSequence, list[int]]]) -> None:
        """Give a step's rows what they read beside tokens."""

    def _keep(self, rows: list[DraftSequence]) -> None:
        """Keep what a step that runs makes of each row that gets a token."""

    def _is_context(self, piece: tuple[DraftSequence, list[int]]) -> bool:
        return len(piece[1]) > self._few
