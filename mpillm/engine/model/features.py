"""Outputs of some layers for each row of a step: what a head that guesses reads beside the tokens."""

from __future__ import annotations

from torch import Tensor


class Features:
    """Those of the last step, in its first rows of `rows` [most rows, layers * hidden], side by side."""

    def __init__(self, layers: tuple[int, ...], rows: Tensor) -> None:
        """`layers`: whose outputs; the number behind the last layer's means that one's, normed.

        `rows` stays where it is for graphs.
        """
        self.layers = layers
        self.rows = rows

    def note(self, layer: int, x: Tensor) -> None:
        """Keep x [n, hidden], the output of `layer`, which is one of `layers`."""
        width = x.shape[1]
        at = width * self.layers.index(layer)
        self.rows[: len(x), at : at + width] = x
