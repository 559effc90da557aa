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
from mpillm.engine.tensors.staging import Sampled


@dataclass(eq=False)
class Drafting:
    """A sequence in the draft model's KV cache."""

    sequence: Sequence
    slot: int
    blocks: list[int] = field(default_factory=list)
    n_blocks_sent: int = 0  # see `Span`
    n_right: int = 0  # tokens of the sequence that this model has computed
    draft: list[int] = field(default_factory=list)  # the guesses behind them; all but the last are computed
    n_cached: int = 0  # tokens with keys and values


class Started(NamedTuple):
    """A step whose tokens may not be there yet."""

    rows: list[Drafting]  # of each token
    sampled: Sampled


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
        self._of: dict[Sequence, Drafting] = {}

    @staticmethod
    def decode_rows(config: SchedulerConfig) -> int:
        """Return the rows of the worker's largest step without contexts."""
        return max(config.max_batch_size, min(DraftModel.FEW * config.max_batch_size, config.max_num_tokens))

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        for sequence in [sequence for sequence in self._of if sequence.is_done]:
            self._forget(self._of.pop(sequence))
        drafts: list[list[int]] = []
        work: list[tuple[Drafting, int]] = []  # and how many guesses it wants
        new: list[list[int]] = []
        for sequence, most in wanted:
            n_seen = len(sequence.prompt) + len(sequence.output) - self._N_UNSEEN
            drafting = self._with_room(sequence, n_seen + most)
            drafts.append([])
            if drafting is not None:
                new.append(self._lacks(drafting))
                drafting.draft = drafts[-1]
                work.append((drafting, most))
        if work:
            self._guess(work, new)
        return drafts

    def _lacks(self, drafting: Drafting) -> list[int]:
        """Forget the wrong guesses; return the sequence's tokens to compute next, at least the last."""
        sequence, start = drafting.sequence, self._N_UNSEEN + drafting.n_right
        new = sequence.tokens(start, len(sequence.prompt) + len(sequence.output))
        n = self._n_kept(drafting, new)
        drafting.n_cached = drafting.n_right + n
        drafting.n_right += len(new)
        return new[n:]

    def _n_kept(self, drafting: Drafting, new: list[int]) -> int:
        """Return for how many of a sequence's `new` tokens keys and values are cached, as guesses."""
        n = 0
        while n < min(len(drafting.draft), len(new)) - 1 and drafting.draft[n] == new[n]:
            n += 1
        return n

    def _forget(self, ended: Drafting) -> None:
        """Give back what a sequence held that has ended."""
        self._slots.append(ended.slot)
        self._blocks.give_back(ended.blocks)

    def _guess(self, work: list[tuple[Drafting, int]], new: list[list[int]]) -> None:
        """Fill each one's draft. `new`: the tokens that each one's cache lacks."""
        waits = not self._worker.steps.n_ahead
        unread = [self._start(list(zip((drafting for drafting, _ in work), new, strict=True)))]
        for n in range(1, max(most for _, most in work)):
            if waits:
                self._read(unread)
            going_on = [drafting for drafting, most in work if most > n]
            unread.append(self._start([(one, [one.draft[-1] if waits else UNREAD]) for one in going_on]))
        self._read(unread)

    def _read(self, unread: list[list[Started]]) -> None:
        """Add a guess to each draft, from the steps that find it. Waits for them."""
        for steps in unread:
            tokens: dict[Drafting, int] = {}  # after each one's last row
            for step in steps:
                tokens |= zip(step.rows, step.sampled.take(), strict=True)
            for drafting, token in tokens.items():
                drafting.draft.append(token)
        unread.clear()

    def _with_room(self, sequence: Sequence, n: int) -> Drafting | None:
        """Return its state, with blocks for all of `n` tokens but the last; None if there are not so many."""
        drafting = self._of.get(sequence)
        more = -(-(n - 1) // self._size) - (len(drafting.blocks) if drafting else 0)
        if n > self._max_seq_len or more > self._blocks.n_free or not (drafting or self._slots):
            return None
        if drafting is None:
            drafting = self._of[sequence] = Drafting(sequence, self._slots.pop())
        drafting.blocks += self._blocks.take(max(0, more))
        return drafting

    def _start(self, work: list[tuple[Drafting, list[int]]]) -> list[Started]:
        """Add tokens to each, in as many steps as it takes."""
        started: list[Started] = []
        pieces: list[tuple[Drafting, list[int]]] = []
        left = most = self._max_num_tokens
        for drafting, new in work:
            for at in range(0, len(new), most):
                piece = new[at : at + most]
                if len(piece) > left:
                    started.append(self._run(pieces))
                    pieces, left = [], most
                pieces.append((drafting, piece))
                left -= len(piece)
        return [*started, self._run(pieces)]

    def _run(self, pieces: list[tuple[Drafting, list[int]]]) -> Started:
        """Start a step that adds a piece to each."""
        step, rows = Step(), []
        pieces.sort(key=self._is_context)
        self._give(pieces)
        for drafting, new in pieces:
            n_blocks_sent, drafting.n_blocks_sent = drafting.n_blocks_sent, len(drafting.blocks)
            span = Span(
                drafting.slot,
                drafting.n_cached,
                len(new),
                n_blocks_sent,
                drafting.blocks[n_blocks_sent:],
                is_few=1 < len(new) <= self._few,
            )
            step.spans.append(span)
            drafting.n_cached += len(new)
            step.tokens += new
            # A step with a token for each of its rows is a graph.
            n_wanted = len(new) if span.decodes else 1
            step.wanted += range(len(step.tokens) - n_wanted, len(step.tokens))
            rows += [drafting] * n_wanted
        sampled = self._worker.run(step)
        assert sampled is not None
        self._keep(rows)
        return Started(rows, sampled)

    def _give(self, pieces: list[tuple[Drafting, list[int]]]) -> None:
        """Give a step's rows what they read beside tokens."""

    def _keep(self, rows: list[Drafting]) -> None:
        """Keep what a step that runs makes of each row that gets a token."""

    def _is_context(self, piece: tuple[Drafting, list[int]]) -> bool:
        return len(piece[1]) > self._few
