"""The interface of a device that computes steps of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from mpillm.engine.schedule.step import Step


class Steps(Protocol):
    """Computation of steps (`CpuSteps`, `GpuSteps`), with the state of each slot on the device."""

    n_ahead: int  # steps that may start before the previous step's tokens are read

    def forward(
        self,
        step: Step,
        layer_stored: Callable[[int], None] | None = None,
        all_rows: bool = False,
        layerwise: bool = False,
    ) -> Tensor:
        """Return the rows `Step.logits_rows` for `Decoder.logits`, or all rows; see `Decoder.forward`.

        A stage before the last returns all rows for the next stage. `layerwise`: one call for each layer.
        """
        ...

    def feed(self, tokens: Tensor) -> None:
        """Take the tokens that were chosen from the last `forward`: the next step may need them."""
        ...

    def warm_up(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        """Run every kind of step (see `Worker.warm_up`). `run` is `Worker.run`."""
        ...
