"""Outputs of some layers for each row of a step: what an EAGLE head reads beside the tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class Features:
    """Those of the last step: `rows` [n, layers * hidden], side by side."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """`layers`: whose outputs, of which none is the model's last."""
        self.layers = layers
        self.rows = torch.empty(0)

    def begin(self, x: Tensor) -> None:
        """Make room for a step with rows like x [n, hidden]."""
        self.rows = x.new_empty(len(x), len(self.layers) * x.shape[1])

    def note(self, layer: int, x: Tensor) -> None:
        """Keep x [n, hidden], the output of `layer`, if it is one of `layers`."""
        if layer in self.layers:
            width = x.shape[1]
            at = width * self.layers.index(layer)
            self.rows[:, at : at + width] = x
