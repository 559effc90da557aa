"""A piece of context is as small as the rate of computing prompts allows."""

from __future__ import annotations

import pytest

from mpillm.engine.schedule.context_piece import context_piece


@pytest.mark.parametrize(
    ("fixed_s", "per_token_s", "most", "piece"),
    [
        (0.0, 1e-3, 8192, 32),  # no cost of a step itself: the smallest
        (0.016, 1e-4, 8192, 2048),  # 70B on one GPU, about: 16 ms for the weights, 100 us per token
        (0.016, 1e-4, 1024, 1024),
        (0.016, 1e-4, 1000, 1000),  # a limit is reached while doubling still pays
        (0.0, 1e-3, 20, 20),
    ],
)
def test_a_piece_is_where_doubling_gains_little(
    fixed_s: float, per_token_s: float, most: int, piece: int
) -> None:
    measured: list[int] = []

    def seconds(n: int) -> float:
        measured.append(n)
        return fixed_s + n * per_token_s

    assert context_piece(seconds, most) == piece
    assert measured == [32 << i for i in range(len(measured))]
    assert all(n <= min(2 * piece, most) for n in measured)
