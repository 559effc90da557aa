"""A step: what all ranks of an instance compute at once, with only the facts that they do not have yet.

The engine makes it (`Step.of`), `engine_messages.PLAN` carries it to the other ranks, `Worker` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mpillm.engine.extras.lora import Adapter, AdapterTensors
from mpillm.engine.extras.request_extras import RequestExtras
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.transfer import Transfer


@dataclass(frozen=True)
class Span:
    """A sequence's part of a step: `n_new` tokens after `n_cached`, with keys and values in its blocks.

    Each rank keeps the block table of a slot. A span names only the blocks that no earlier span of its
    sequence has named; they follow the first `n_blocks_sent`. With `n_blocks_sent` 0 they begin a new table.
    The same holds for `window_blocks`, if layers with a window have their own blocks (see `WindowBlocks`).
    """

    slot: int  # see `Sequence`
    n_cached: int
    n_new: int
    n_blocks_sent: int = 0
    blocks: list[int] = field(default_factory=list)
    is_few: bool = False  # its tokens are the last one and guesses
    n_window_blocks_sent: int = 0
    window_blocks: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether each of its tokens is computed like a single one."""
        return self.n_new == 1 or self.is_few


@dataclass
class Extra:
    """What few requests ask of a step (see `RequestExtras`, which itself never leaves the leader)."""

    specials: list[tuple[int, Sequence, int]] = field(
        default_factory=list
    )  # row of `logits_rows`, and its beam
    is_adjusted: bool = False  # `specials` has some, on the leader: it chooses from whole rows of logits
    context_logits: list[tuple[RequestExtras | None, slice]] = field(default_factory=list)  # rows of the step
    copies: list[tuple[int, int]] = field(default_factory=list)  # of blocks (from, to), before anything else
    adapters: list[tuple[Adapter, int, int]] = field(default_factory=list)  # and their rows of the step
    # The same for other ranks (see `SharedAdapters`): numbers in place of adapters, those that they do
    # not have yet, and those that they need no more.
    adapter_rows: list[tuple[int, int, int]] = field(default_factory=list)
    new_adapters: list[AdapterTensors] = field(default_factory=list)
    freed_adapters: list[int] = field(default_factory=list)


@dataclass
class Step:
    """Tokens of some sequences, back to back in the order of `spans`; contexts of several tokens last."""

    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)  # rows that a token is sampled from
    not_end: list[int] = field(
        default_factory=list
    )  # indices in `logits_rows` that must not get an end token
    sampling: list[SamplingParams] | None = None  # of each wanted row; None: all are greedy
    places: list[int] = field(default_factory=list)  # see `sample`
    transfers: list[Transfer] = field(default_factory=list)  # of KV caches; a step may hold nothing else
    # 0: tokens only. 1 + k: also the log probability of each, and the k likeliest tokens with theirs.
    logprobs: int = 0
    extra: Extra | None = None

    @staticmethod
    def of(plan: list[tuple[Sequence, int]]) -> tuple[Step, list[Sequence]]:
        """Make a plan a step; return it and the sequence of each row that gets a token.

        Counts their tokens as cached and their blocks as told.
        """
        step = Step()
        sampled: list[Sequence] = []
        places: list[int] = []
        for sequence, n in plan:
            start, sequence.n_cached = sequence.n_cached, sequence.n_cached + n
            if sequence.width > 1 and start >= len(sequence.prompt):
                step.add_beams(sequence, start, sampled)
                places += [sequence.n_output] * (len(sampled) - len(places))
                continue
            table = sequence.blocks
            if sequence.width > 1:
                assert sequence.special is not None and sequence.special.beams is not None
                table = sequence.special.beams.first_table(table, len(sequence.prompt))
            n_blocks_sent, sequence.n_blocks_sent = sequence.n_blocks_sent, len(table)
            n_window_blocks_sent, sequence.n_window_blocks_sent = (
                sequence.n_window_blocks_sent,
                len(sequence.window_blocks),
            )
            draft, window_blocks = sequence.draft, sequence.window_blocks[n_window_blocks_sent:]
            blocks = table[n_blocks_sent:]
            step.spans.append(
                Span(
                    sequence.slot,
                    start,
                    n,
                    n_blocks_sent,
                    blocks,
                    bool(draft),
                    n_window_blocks_sent,
                    window_blocks,
                )
            )
            step.tokens += sequence.tokens(start, start + n - len(draft))
            step.tokens += draft
            if sequence.special is not None:
                step.keep_context_logits(sequence, start, n)
                step.add_adapter(sequence, n)
            if sequence.n_uncached <= 0:  # below 0 by the draft
                if sequence.special is not None:
                    step.adjust(len(sampled), sequence)
                n_wanted = 1 + len(draft)  # the token after the last one, and after each guess
                place, at = sequence.n_output, len(sampled)
                if place < sequence.min_output and sequence.width == 1:
                    step.not_end += range(at, at + min(n_wanted, sequence.min_output - place))
                step.logits_rows += range(len(step.tokens) - n_wanted, len(step.tokens))
                sampled += [sequence] * n_wanted
                places += range(place, place + n_wanted)
        if not all(s.sampling.is_greedy for s in sampled):
            step.sampling = [s.sampling for s in sampled]
            step.places = places
        step.logprobs = max((s.wants_logprobs for s in sampled), default=0)
        return step, sampled

    @property
    def is_adjusted(self) -> bool:
        return self.extra is not None and self.extra.is_adjusted

    def more(self) -> Extra:
        """Return the step's `extra`, which it has from now on."""
        self.extra = self.extra or Extra()
        return self.extra

    def adjust(self, row: int, sequence: Sequence, beam: int = 0) -> None:
        """Note that what a row of `logits_rows` chooses from is to be adjusted."""
        self.more().specials.append((row, sequence, beam))
        self.more().is_adjusted = True

    def choices(self, most: int) -> Iterator[tuple[slice, Step]]:
        """Yield rows of `logits_rows`, and a step that says how their tokens are chosen.

        `most` rows at once, where choosing takes copies of their logits.
        """
        n = len(self.logits_rows)
        copies = self.is_adjusted or self.sampling is not None or self.logprobs
        if n <= most or not copies:
            yield slice(n), self
            return
        for start in range(0, n, most):
            rows = slice(start, start + most)
            part = Step(
                not_end=[at - start for at in self.not_end if start <= at < rows.stop],
                sampling=None if self.sampling is None else self.sampling[rows],
                places=self.places[rows],
                logprobs=self.logprobs,
            )
            if self.extra is not None and self.is_adjusted:
                specials = self.extra.specials
                mine = [(at - start, s, beam) for at, s, beam in specials if start <= at < rows.stop]
                part.extra = Extra(mine, is_adjusted=True)
            yield rows, part

    def add_beams(self, sequence: Sequence, n_cached: int, sampled: list[Sequence]) -> None:
        """Add a row for each running beam."""
        assert sequence.special is not None and sequence.special.beams is not None
        beams, slots = sequence.special.beams, (sequence.slot, *sequence.more_slots)
        tables = beams.tables(sequence.blocks, n_cached, self.more().copies)
        n_before = len(self.tokens)
        for beam, table in enumerate(tables):
            self.spans.append(Span(slots[beam], n_cached, 1, 0, table))
            self.logits_rows.append(len(self.tokens))
            self.tokens.append(beams.running[beam].tokens[-1])
            self.adjust(len(sampled), sequence, beam)
            sampled.append(sequence)
        self.add_adapter(sequence, len(self.tokens) - n_before)

    def add_adapter(self, sequence: Sequence, n: int) -> None:
        """Note that the step's last `n` rows are of `sequence`, if it has an adapter."""
        if sequence.special is not None and sequence.special.adapter is not None:
            end = len(self.tokens)
            self.more().adapters.append((sequence.special.adapter, end - n, end))

    def keep_context_logits(self, sequence: Sequence, start: int, n: int) -> None:
        """Note what is wanted of the step's last `n` rows: a sequence's tokens from `start`."""
        assert sequence.special is not None
        if rows := sequence.special.rows_to_keep(len(sequence.prompt), start, start + n):
            shift = len(self.tokens) - n - start
            kept = slice(rows.start + shift, rows.stop + shift)
            self.more().context_logits.append((sequence.special, kept))
