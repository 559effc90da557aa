"""A step: tokens that all ranks of an instance compute together, and the blocks that are new to the ranks.

`Scheduler.commit` makes a step, `engine_messages.PLAN` carries it to the other ranks, `Worker` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import SupportsBytes

from mpillm.engine.schedule.host_blocks import BlockCopy
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.transfer import Transfer


@dataclass(frozen=True)
class Span:
    """A sequence's part of a step: `n_new` tokens after `n_cached`, with keys and values in its blocks.

    Each rank keeps the block table of a slot. A span contains only the blocks that follow the first
    `n_blocks_sent`, which earlier spans of the sequence contained. With `n_blocks_sent` 0, the blocks begin a
    new table. The same holds for `window_blocks`, if layers with a window have their own blocks (see
    `WindowBlocks`).
    """

    slot: int  # see `Sequence`
    n_cached: int
    n_new: int
    n_blocks_sent: int = 0
    blocks: list[int] = field(default_factory=list)
    is_few: bool = False  # its tokens are the last one and draft tokens
    n_window_blocks_sent: int = 0
    window_blocks: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether each of its tokens is computed like a single new token."""
        return self.n_new == 1 or self.is_few


@dataclass
class Step:
    """Tokens of some sequences, back to back in the order of `spans`; contexts of several tokens last."""

    spans: list[Span] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)  # rows that a token is sampled from
    # Indices in `logits_rows` that must not get an end token.
    not_end: list[int] = field(default_factory=list)
    sampling: list[SamplingParams] | None = None  # of each of `logits_rows`; None: all are greedy
    places: list[int] = field(default_factory=list)  # see `sample`
    transfers: list[Transfer] = field(default_factory=list)  # of KV caches; a step may hold nothing else
    # 0: tokens only. 1 + k: also the log probability of each, and the k likeliest tokens with their log
    # probabilities.
    logprobs: int = 0
    # An object of `engine.extras` on the root rank, its bytes on other ranks.
    extras: SupportsBytes | None = None
    # Copies from and to host memory, before anything else of the step.
    copies: list[BlockCopy] = field(default_factory=list)
    # The sequence of each of `logits_rows`, on the root rank.
    sampled: list[Sequence] = field(default_factory=list, compare=False)

    def add(self, sequence: Sequence, n: int, blocks: list[int]) -> None:
        """Add the next `n` tokens of a sequence; count them as cached, and `blocks` as sent."""
        start, end = sequence.n_cached, sequence.n_cached + n
        n_blocks_sent, n_window_blocks_sent = sequence.n_blocks_sent, sequence.n_window_blocks_sent
        draft, window_blocks = sequence.draft, sequence.window_blocks
        sequence.n_cached = end
        sequence.n_blocks_sent, sequence.n_window_blocks_sent = len(blocks), len(window_blocks)
        of_blocks = n_blocks_sent, blocks[n_blocks_sent:]
        of_window = n_window_blocks_sent, window_blocks[n_window_blocks_sent:]
        self.spans.append(Span(sequence.slot, start, n, *of_blocks, bool(draft), *of_window))
        self.tokens += sequence.tokens(start, end - len(draft))
        self.tokens += draft
        n_output = len(sequence.output) + sequence.n_unread
        if end >= len(sequence.prompt) + n_output:  # larger if there are draft tokens
            # The next token, and one after each draft token.
            n_rows, first = 1 + len(draft), len(self.sampled)
            if n_output < sequence.min_output:
                self.not_end += range(first, first + min(n_rows, sequence.min_output - n_output))
            self.logits_rows += range(len(self.tokens) - n_rows, len(self.tokens))
            self.sampled += [sequence] * n_rows
            self.places += range(n_output, n_output + n_rows)
