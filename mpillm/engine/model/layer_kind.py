"""How the attention of a model's layers differs from one to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerKind(NamedTuple):
    """Properties of a layer's attention."""

    window: int = 0  # tokens that a token sees, itself included; 0: all before it
    first_rotation: int = 0  # index in the model's table of the rotation of position 0
    sinks: Tensor | None = None  # float32 [heads]: a score that takes its share of the sum, and adds nothing
    rank: int = 0  # first values of a key that are also the value (see `latent`); 0: values are separate


PLAIN = LayerKind()
