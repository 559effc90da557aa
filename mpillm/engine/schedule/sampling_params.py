"""Sampling parameters of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for the choice of a token.

    temperature 0 is greedy; top_k 0 and top_p 1 are off. top_k applies first, top_p to the tokens that are
    left.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0 or self.top_k == 1

    @property
    def is_restricted(self) -> bool:
        return self.top_k > 0 or self.top_p < 1
