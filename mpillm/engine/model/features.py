"""Outputs of some layers for each row of a step, which a draft head reads besides the tokens."""

from __future__ import annotations

from torch import Tensor


class Features:
    """Outputs of the last step, side by side in the first rows of `rows` [max rows, layers * hidden]."""

    def __init__(self, layers: tuple[int, ...], rows: Tensor) -> None:
        """`layers`: their numbers; the number after the last layer's means the normed output of the last one.

        `rows` stays where it is for graphs.
        """
        self.layers = layers
        self.rows = rows

    def note(self, layer: int, x: Tensor) -> None:
        """Keep x [n, hidden], the output of `layer`, which is one of `layers`."""
        width = x.shape[1]
        at = width * self.layers.index(layer)
        self.rows[: len(x), at : at + width] = x
