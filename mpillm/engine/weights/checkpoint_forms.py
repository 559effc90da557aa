"""Checkpoints whose tensors are not the parameters: others' names, several parameters in one, other order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mpillm.engine.weights.entries import Entry
from mpillm.engine.weights.gpt2_names import Gpt2Names
from mpillm.engine.weights.int4 import Int4
from mpillm.engine.weights.packed_experts import PackedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from mpillm.engine.model.model_config import ModelConfig


class Form(Protocol):
    """How a model's checkpoint holds some of its parameters."""

    def holds(self, name: str) -> bool:
        """Return whether a parameter is stored in this form."""
        ...

    def entries(self) -> dict[str, Entry]:
        """Return the tensors that hold these parameters."""
        ...

    def get(
        self, name: str, rows: slice, columns: slice, read: Callable[[str, slice, slice], Tensor]
    ) -> Tensor:
        """Return a part of a parameter, from parts that `read` gives of tensors."""
        ...


def form_of(model: ModelConfig) -> Form | None:
    """Return the form of a model's checkpoint; None: its tensors are the parameters."""
    if model.quantization == "int4":
        return Int4(model)
    if model.family.learned_positions:
        return Gpt2Names(model)
    experts = model.family.experts
    return PackedExperts(model) if experts is not None and experts.packed else None
