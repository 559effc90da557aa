"""How the attention of a model's layers differs from one to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerKind(NamedTuple):
    """What a layer's attention has besides queries, keys and values."""

    window: int = 0  # tokens that a token sees, itself included; 0: all before it
    first_rotation: int = 0  # where those of its positions begin in the model's table
    sinks: Tensor | None = None  # float32 [heads]: a score that takes its share of the sum, and adds nothing
    rank: int = 0  # a key's first values that are its value, too (see `latent`); 0: values are their own


PLAIN = LayerKind()
