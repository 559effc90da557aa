"""How a step's kernels attend with contexts (several new tokens of a sequence): tiles, and sources of keys.

A context's keys and values of its own step are rows of the step. Its earlier keys and values are in the
cache's blocks. A program that reads the blocks looks each key up, and widens it from fp8, again for each tile
of queries. So if a context has many queries, its whole sequence is copied into rows first, once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpillm.engine.schedule.step import Span
from mpillm.engine.shape.memory import padded

MIN_QUERIES = 128  # of a context whose sequence is copied


@dataclass(frozen=True)
class ContextPlan:
    """Arguments of `attention_kernels.context_attention` and `copied_rows` for a step."""

    tiles: tuple[NDArray[np.int64], ...]  # each [m, 6]: without a cache, with a copied cache, in blocks
    copies: NDArray[np.int64]  # [m, 3]
    n_copied: int  # rows
    longest: int  # tokens of the longest copied sequence

    @staticmethod
    def of(spans: Sequence[Span], starts: Sequence[int], n_queries: int, max_copied: int) -> ContextPlan:
        """Plan for `spans`, each with its first row of the step.

        A tile has at most `n_queries` query tokens; at most `max_copied` rows are copied.
        """
        tiles: tuple[list[tuple[int, ...]], ...] = [], [], []
        copies: list[tuple[int, int, int]] = []
        n_copied = longest = 0
        for span, start in zip(spans, starts, strict=True):
            n, n_cached, first, kind = span.n_cached + span.n_new, span.n_cached, start, 0
            if n_cached:
                kind = 2
                if span.n_new >= MIN_QUERIES and n_copied + padded(n) <= max_copied:
                    kind, n_cached, first = 1, 0, n_copied
                    copies.append((span.slot, n, n_copied))
                    n_copied, longest = n_copied + padded(n), max(longest, n)
            tiles[kind].extend(
                (start + at, min(n_queries, span.n_new - at), span.n_cached + at, span.slot, n_cached, first)
                for at in range(0, span.n_new, n_queries)
            )
        arrays = (
            np.array(sorted(some, key=lambda tile: -tile[2]), np.int64).reshape(-1, 6)  # the longest first
            for some in tiles
        )
        return ContextPlan(tuple(arrays), np.array(copies, np.int64).reshape(-1, 3), n_copied, longest)
