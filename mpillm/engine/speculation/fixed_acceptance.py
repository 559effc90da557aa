"""Speculation with a given mean acceptance length, for comparisons that exclude the quality of draft tokens.

The definition is that of vLLM's `synthetic_acceptance_length` and SGLang's `SGLANG_SIMULATE_ACC_LEN` with
`match-expected`: the mean number of tokens of a verification step, including the model's own token. Each step
accepts one of the two whole numbers next to the mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from mpillm.engine.schedule.sequence import Sequence

_PROMPT_TOKENS = 16  # of a prompt, to distinguish its request from others
_DRAW_BYTES = 6


class FixedAcceptance:
    """Decides how many draft tokens of each step count as right.

    The decision depends only on the request and on the position in its output, not on other requests. Only
    the root rank of an instance decides. Its next step plan contains the tokens for the other ranks.
    """

    def __init__(self, length: float, end_ids: Collection[int]) -> None:
        """`length`: mean tokens of a step, at least 1; `end_ids`: the model's end tokens."""
        self._n_certain = int(length) - 1  # draft tokens that every step accepts
        self._chance = length - int(length)  # of one more
        self._end_ids = end_ids

    def completed(self, sequence: Sequence, draft: list[int], n: int) -> list[int]:
        """Return `n` draft tokens that can be accepted: a proposer may have fewer.

        The prompt's tokens stand for missing tokens: a single token would make a model of experts use few of
        them. An end token among these, or before `Sequence.min_output`, becomes the last token of the output.
        """
        prompt, n_output = sequence.prompt, len(sequence.output)
        fill = [prompt[at % len(prompt)] for at in range(n_output + len(draft), n_output + n)]
        if sequence.ignore_end:
            return draft + fill
        early = max(0, sequence.min_output - n_output)
        checked = self._without_end(draft[:early], sequence)
        return checked + draft[early:] + self._without_end(fill, sequence)

    def _without_end(self, tokens: list[int], sequence: Sequence) -> list[int]:
        return [sequence.output[-1] if token in self._end_ids else token for token in tokens]

    def n_accepted(self, sequence: Sequence, n_draft: int) -> int:
        """Return how many of a step's draft tokens count as right. `sequence`: before the step's tokens."""
        return min(n_draft, self._n_certain + (self._draw(sequence) < self._chance))

    def _draw(self, sequence: Sequence) -> float:
        """Return a number from [0, 1) for a request and its next position."""
        prompt = sequence.prompt[:: len(sequence.prompt) // _PROMPT_TOKENS + 1]
        of = (sequence.sampling.seed, len(sequence.prompt), prompt, len(sequence.output))
        digest = hashlib.blake2b(repr(of).encode(), digest_size=_DRAW_BYTES).digest()
        return int.from_bytes(digest, "little") / (1 << 8 * _DRAW_BYTES)
