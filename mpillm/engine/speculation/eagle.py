"""Guess with an EAGLE-3 head (`eagle_head`): it reads what the model thought of each token.

The head's row i is token i + 1 with the hidden state of token i. So for a sequence it is a draft model that
never sees the first token. Rows of guesses have its own hidden states; they are computed again with the
model's, once the model has tested them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mpillm.engine.graphs import ladder
from mpillm.engine.model.eagle_head import EagleHead
from mpillm.engine.model.features import Features
from mpillm.engine.sequence import Sequence
from mpillm.engine.speculation.draft_model import Drafting, DraftModel, Started
from mpillm.engine.step import Step
from mpillm.engine.worker import Worker


class _HiddenStates:
    """The model's hidden states of a sequence's tokens, from the first that the head has yet to read."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Tensor]] = []  # the first position of each, and its rows
        self.end = 0  # there are none at and behind this position
        self._is_whole = True

    def add(self, start: int, rows: Tensor) -> None:
        """Take `rows` from position `start`, in place of those that were there: of wrong guesses."""
        self._is_whole &= start <= self.end
        while self._pieces and self._pieces[-1][0] >= start:
            self._pieces.pop()
        if self._pieces:
            first, last = self._pieces[-1]
            self._pieces[-1] = first, last[: start - first]
        self._pieces.append((start, rows))
        self.end = start + len(rows)

    def take(self, start: int, end: int) -> Tensor | None:
        """Return the rows [start, end), or None if some are missing; those before `start` are forgotten."""
        self._pieces = [(first, rows) for first, rows in self._pieces if first + len(rows) > start]
        if not self._is_whole or not self._pieces or self._pieces[0][0] > start or self.end < end:
            return None
        first = self._pieces[0][0]
        return torch.cat([rows for _, rows in self._pieces])[start - first : end - first]


class EagleDrafter(DraftModel):
    """Implements `speculation.Drafter`."""

    _N_UNSEEN = 1

    def __init__(
        self,
        worker: Worker,
        head: EagleHead,
        features: Features,
        tokens_per_block: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_draft_len: int,
    ) -> None:
        """`worker` runs `head`; `features`: the model's."""
        super().__init__(worker, tokens_per_block, max_batch_size, max_num_tokens)
        self._few = 1 + max_draft_len  # the tokens of a step whose guesses were all right
        self._head = head
        self._features = features
        self._seen: dict[Sequence, _HiddenStates] = {}
        self._lacked: dict[Drafting, Tensor] = {}  # hidden states of the rows to compute
        self._made: dict[Drafting, Tensor] = {}  # what the head made of each one's last row: [hidden]

    def warm_up(self) -> None:
        """Run every kind of step, and `fuse`, so that tests compile nothing."""
        self._worker.warm_up(self._max_num_tokens)
        rows = self._features.rows
        with torch.inference_mode():
            for n in ladder(len(rows)):
                self._head.fuse(rows[:n])

    @torch.inference_mode()
    def computed(self, step: Step, sequences: Mapping[int, Sequence]) -> None:
        """Keep what the model thought in a step. `sequences`: those that may want guesses, by slot."""
        for ended in [sequence for sequence in self._seen if sequence.is_done]:
            del self._seen[ended]
        if not sequences:
            return
        hidden, at = self._head.fuse(self._features.rows[: len(step.tokens)]), 0
        for span in step.spans:
            if (sequence := sequences.get(span.slot)) is not None:
                seen = self._seen.setdefault(sequence, _HiddenStates())
                seen.add(span.n_cached, hidden[at : at + span.n_new])
            at += span.n_new

    def _forget(self, ended: Drafting) -> None:
        super()._forget(ended)
        self._made.pop(ended, None)

    @torch.inference_mode()
    def _lacks(self, sequence: Sequence, drafting: Drafting) -> list[int] | None:
        n, new, seen = drafting.n_right, self._new(sequence, drafting), self._seen.get(sequence)
        hidden = None if seen is None else seen.take(n, n + len(new))
        if hidden is None:
            return None
        self._lacked[drafting] = hidden
        drafting.n_cached = n
        drafting.n_right += len(new)
        return new

    @torch.inference_mode()
    def _run(self, pieces: list[tuple[Drafting, list[int]]]) -> Started:
        pieces.sort(key=self._is_context)
        hidden = torch.cat([self._hidden_of(drafting, len(new)) for drafting, new in pieces])
        self._head.hidden[: len(hidden)] = hidden
        started = super()._run(pieces)
        self._made |= zip(started.rows, self._head.hidden[: len(started.rows)].clone(), strict=True)
        return started

    def _hidden_of(self, drafting: Drafting, n: int) -> Tensor:
        """Return the hidden states that a sequence's next `n` rows read."""
        if drafting not in self._lacked:
            return self._made[drafting][None]
        lacked = self._lacked[drafting]
        if n < len(lacked):
            self._lacked[drafting] = lacked[n:]
        else:
            del self._lacked[drafting]
        return lacked[:n]
