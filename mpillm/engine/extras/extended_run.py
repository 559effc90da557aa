"""Run a step with sequences that have extras (see `request_extras`)."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.extras.adapted_products import AdaptedProducts
from mpillm.engine.extras.step_extras import ReceivedAdapters, StepExtras
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.step_parts import LayerStored, Steps
from mpillm.engine.parallel.token_chooser import TokenChooser
from mpillm.engine.schedule.step import Step
from mpillm.engine.tensors.staging import SampledTokens, to_device


class ExtendedRun:
    """A rank's part of a step with extras. Extras need an instance of one stage. See `Worker.run`."""

    def __init__(self, part: ModelPart, steps: Steps, chooser: TokenChooser) -> None:
        self._part, self._steps, self._chooser = part, steps, chooser
        self._adapted: AdaptedProducts | None = None
        self.received_adapters = ReceivedAdapters(part.info.config, part.dtype, part.groups.layout)

    def run(self, step: Step, layer_stored: LayerStored) -> SampledTokens | None:
        """Run a step; return its tokens on the root rank, otherwise None."""
        extras = self._extras_of(step)
        if extras.copies:
            self._part.cache.copy(extras.copies)
        all_rows = bool(extras.context_logits or extras.adapters)
        with self._active(extras):
            x = self._steps.forward(step, layer_stored, all_rows, layerwise=bool(extras.adapters))
        is_root = not self._part.groups.layout.tp_rank
        for logits, rows in extras.context_logits:
            self._keep_logits(x[rows], logits)
        if not step.logits_rows:
            return SampledTokens(torch.empty(0, dtype=torch.int64)) if is_root else None
        if all_rows:
            x = x.index_select(0, to_device(step.logits_rows, x.device))
        adjust = functools.partial(_adjust, extras) if extras.adjusted else None
        chosen = self._chooser.choose(self._part.model.logits(x), step, adjust)
        if chosen is None:
            return None
        tokens, numbers = chosen
        self._steps.feed(tokens)
        return SampledTokens(numbers) if is_root else None

    def _extras_of(self, step: Step) -> StepExtras:
        """Return the extras of the root rank's own step, or of a step that another rank has received."""
        assert step.extras is not None
        if isinstance(step.extras, StepExtras):
            return step.extras
        return self.received_adapters.read(bytes(step.extras))

    def _active(self, extras: StepExtras) -> contextlib.AbstractContextManager[None]:
        """Use the adapters of a step. The first step with adapters replaces the model's products."""
        if not extras.adapters:
            return contextlib.nullcontext()
        if self._adapted is None:
            self._adapted = AdaptedProducts(self._part.model)
        return self._adapted.active(extras.adapters)

    def _keep_logits(self, x: Tensor, results: list[NDArray[np.float32]] | None) -> None:
        """Append the logits of all rows of `x` to `results` on the root rank, whose CPU waits. Collective."""
        for first in range(0, len(x), self._chooser.max_rows):
            some = x[first : first + self._chooser.max_rows]
            gathered = self._chooser.gather(self._part.model.logits(some))
            if results is not None and gathered is not None:
                results.append(gathered.cpu().numpy())


def _adjust(extras: StepExtras, logits: Tensor, first: int) -> None:
    """Change the logits of the step's rows from `first` on: float32 [rows, vocab]."""
    for row, adjust in extras.adjusted:
        if adjust is not None and first <= row < first + len(logits):
            adjust(logits[row - first])
