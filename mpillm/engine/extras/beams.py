"""Beam search: the best `width` continuations of a prompt, in the blocks of one sequence.

For the scheduler, a beam search is one sequence. From its start, it holds all blocks that it can need, so it
is never preempted. Beams share the full blocks of their common tokens. Before a beam writes to a shared
block, the block is copied.

Scores, candidates and the end of a search follow transformers' `generate(num_beams=…)`. The candidates are
the best max(2, 1 + number of end tokens) × `width` continuations of all beams. If one of the first `width`
candidates ends, it is a finished answer. The first `width` candidates that do not end are the next beams. A
finished answer's score is the sum of its log probabilities, divided by its length to the power of
`length_penalty`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpillm.engine.tensors.staging import to_device


class Beam(NamedTuple):
    """An answer, finished or not."""

    tokens: list[int]
    logprobs: list[float]
    sum: float  # of `logprobs`, as the search has added them up
    score: float


class Beams:
    """The search of one sequence."""

    def __init__(
        self,
        width: int,
        max_output: int,
        ends: set[int],
        length_penalty: float,
        early_stopping: bool,
        tokens_per_block: int,
    ) -> None:
        """`ends`: tokens that end an answer. `early_stopping`: stop at `width` finished answers."""
        self.width = width
        self.is_done = False
        self.running = [Beam([], [], 0.0, 0.0)]
        self.finished: list[Beam] = []  # the best first
        self._max_output = max_output
        self._ends = ends
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._size = tokens_per_block
        self._tables: list[list[int]] = []  # block tables of the beams that ran in the last step
        self._parents = [0]  # for each running beam, its parent's index in `_tables`
        self._logprobs: list[Tensor] = []  # of the running beams, in order: see `take`

    @staticmethod
    def candidates(width: int, n_ends: int) -> int:
        """Return the number of candidates of a step."""
        return max(2, 1 + n_ends) * width

    def answers(self) -> list[Beam]:
        """Return the best `width` answers, the best first; fewer only if the search was cancelled."""
        return (self.finished if self.is_done else self.running)[: self.width]

    # --- choice ---

    @torch.inference_mode()
    def take(self, logprobs: Tensor) -> None:
        """Take a running beam's log probabilities of the next token: [vocab] (float32).

        Call it for each running beam in order. The last call continues all beams.
        """
        self._logprobs.append(logprobs)
        if len(self._logprobs) == len(self.running):
            stacked, self._logprobs = torch.stack(self._logprobs), []
            self._advance(stacked)

    def _advance(self, logprobs: Tensor) -> None:
        """Continue with log probabilities of the next token: [running beams, vocab]."""
        sums = to_device(np.array([[beam.sum] for beam in self.running], np.float32), logprobs.device)
        best = (logprobs + sums).flatten().topk(self.candidates(self.width, len(self._ends)))
        added = logprobs.flatten().gather(0, best.indices).tolist()
        n = len(self.running[0].tokens) + 1
        running: list[Beam] = []
        parents: list[int] = []
        places = zip(best.values.tolist(), best.indices.tolist(), added, strict=True)
        for rank, (total, at, logprob) in enumerate(places):
            parent, token = divmod(at, logprobs.shape[1])
            before = self.running[parent]
            ends = token in self._ends or n == self._max_output
            if (ends and rank >= self.width) or (not ends and len(running) == self.width):
                continue
            beam = Beam(
                [*before.tokens, token], [*before.logprobs, logprob], total, total / n**self._length_penalty
            )
            if ends:
                self.finished.append(beam)
            else:
                running.append(beam)
                parents.append(parent)
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: self.width]
        is_full = len(self.finished) == self.width
        self.is_done = not running or (
            is_full and (self._early_stopping or running[0].score <= self.finished[-1].score)
        )
        if not self.is_done:
            self.running, self._parents = running, parents

    # --- blocks ---

    def first_table(self, blocks: list[int], n_prompt: int) -> list[int]:
        """Return the prompt's blocks, which come first. The other blocks are for the beams' tokens."""
        return blocks[: -(-n_prompt // self._size)]

    def tables(self, blocks: list[int], n_cached: int, copies: list[tuple[int, int]]) -> Iterator[list[int]]:
        """Yield each running beam's part of the sequence's `blocks`, for `n_cached` tokens and one more.

        Appends pairs of blocks (from, to) to `copies`. They must be copied before the step writes to any
        block.
        """
        if not self._tables:
            self._tables = [self.first_table(blocks, n_cached)]
        self._tables = [[*self._tables[parent]] for parent in self._parents]
        self._parents = [*range(len(self._tables))]
        n_owners = Counter(chain(*self._tables))
        free = [block for block in blocks if block not in n_owners]
        at = n_cached // self._size
        for table in self._tables:
            if at == len(table):
                table.append(free.pop())
            elif n_owners[old := table[at]] > 1:
                n_owners[old] -= 1
                table[at] = free.pop()
                copies.append((old, table[at]))
            yield table
