"""Choose a step's tokens from logits whose columns are spread over the ranks of a TP group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mpillm.engine.parallel.groups import Groups
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.memory import CHOSEN_AT_ONCE
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.tensors.sampler import likeliest, sample
from mpillm.engine.tensors.staging import to_device

AdjustLogits = Callable[[Tensor, int], None]
"""Changes logits [rows, vocab] (float32) in place. The int is the index of their first row in the step."""


class TokenChooser:
    """Chooses tokens on the ranks of a TP group. All methods are collective."""

    max_rows = CHOSEN_AT_ONCE  # of one choice, if the logits are copied

    def __init__(self, info: ModelInfo, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        own_columns = groups.layout.vocabulary(info.config)
        self._first_column = own_columns.start
        self._n_columns = groups.layout.vocabulary_sizes(info.config)  # of each rank
        # End tokens among this rank's columns of the logits, and among all.
        self._own_ends, self._ends = (
            torch.tensor(
                [id_ - columns.start for id_ in info.end_ids if columns.start <= id_ < columns.stop],
                dtype=torch.int64,
                device=device,
            )
            for columns in (own_columns, range(info.config.vocab_size))
        )

    def choose(
        self, logits: Tensor, step: Step, adjust: AdjustLogits | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Choose a token for each of a step's `logits_rows`.

        Args:
            logits: This rank's columns, which may be changed: [rows, columns].
            step: Has the sampling parameters.
            adjust: Changes the logits of all columns before the choice.

        Returns:
            The tokens, and the numbers that `Worker.run` describes: int64. None on ranks without the
            columns of other ranks (see `Groups.gather`).
        """
        n = len(step.logits_rows)
        copies = adjust is not None or step.sampling is not None or step.logprobs
        if n <= self.max_rows or not copies:
            return self._choose(logits, step, 0, adjust)
        pieces = [
            self._choose(logits[first : first + self.max_rows], part, first, adjust)
            for first, part in _parts(step, self.max_rows)
        ]
        chosen = [piece for piece in pieces if piece is not None]
        if not chosen:
            return None
        tokens, numbers = map(torch.cat, zip(*chosen, strict=True))
        return tokens, numbers

    def gather(self, logits: Tensor) -> Tensor | None:
        """Return the logits of all columns (float32), or None (see `Groups.gather`)."""
        return self._groups.gather(logits.float(), self._n_columns)

    def _choose(
        self, logits: Tensor, step: Step, first: int, adjust: AdjustLogits | None
    ) -> tuple[Tensor, Tensor] | None:
        # A copy, because `adjust` and `_tokens` may change the logits.
        unchanged = self.gather(logits.clone()) if step.logprobs else None
        if adjust is not None:
            gathered = self.gather(logits)
            if gathered is None:
                return None
            adjust(gathered, first)
            logits = gathered
        tokens = self._tokens(logits, step, is_gathered=adjust is not None)
        if tokens is None:
            return None
        return tokens, tokens if unchanged is None else with_logprobs(tokens, unchanged, step.logprobs - 1)

    def _tokens(self, logits: Tensor, step: Step, *, is_gathered: bool) -> Tensor | None:
        """Return the tokens, or None. `logits`: all columns if `is_gathered`, otherwise this rank's."""
        ends = self._ends if is_gathered else self._own_ends
        if step.not_end and len(ends):
            rows = to_device(step.not_end, logits.device)
            # Assigning a number would wait for the device: PyTorch copies the number there from the host.
            logits.index_put_((rows[:, None], ends), logits.new_full((), -torch.inf))
        if step.sampling is not None:
            gathered = logits if is_gathered else self.gather(logits)
            if gathered is None:
                return None
            # A GPU's sums may differ in the last bits from rank to rank; the tokens must be equal.
            return self._groups.broadcast(sample(gathered, step.sampling, step.places))
        if is_gathered or len(self._n_columns) == 1:
            return likeliest(logits)
        return self._best_of_ranks(*logits.max(-1))

    def _best_of_ranks(self, best: Tensor, columns: Tensor) -> Tensor | None:
        """Return each row's likeliest token, from each rank's likeliest token, or None."""
        n_ranks = len(self._n_columns)
        # float64 represents logits and columns exactly.
        own_best = torch.stack([best.double(), (columns + self._first_column).double()], dim=1)
        gathered = self._groups.gather(own_best, [2] * n_ranks)
        if gathered is None:
            return None
        pairs = gathered.view(len(best), n_ranks, 2)
        return pairs[:, :, 1].gather(1, pairs[:, :, 0].argmax(1, keepdim=True))[:, 0].long()


def _parts(step: Step, max_rows: int) -> Iterator[tuple[int, Step]]:
    """Yield steps of at most `max_rows` of a step's `logits_rows`, and the index of the first row."""
    for first in range(0, len(step.logits_rows), max_rows):
        rows = slice(first, first + max_rows)
        part = Step(places=step.places[rows], logprobs=step.logprobs)
        part.not_end = [row - first for row in step.not_end if first <= row < rows.stop]
        part.sampling = None if step.sampling is None else step.sampling[rows]
        yield first, part


def with_logprobs(tokens: Tensor, logits: Tensor, k: int) -> Tensor:
    """Return the rows that `Worker.run` describes, concatenated: int64. `logits`: float32 [n, vocab]."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    numbers = torch.cat([logprobs.gather(1, tokens[:, None]), best.values], dim=1).view(torch.int32).long()
    return torch.cat([tokens[:, None], numbers[:, :1], best.indices, numbers[:, 1:]], dim=1).flatten()
