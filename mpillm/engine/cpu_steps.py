"""Compute steps on a CPU, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpillm.engine.cpu_layers import CpuLayers
from mpillm.engine.huge_pages import keep_freed_memory
from mpillm.engine.kernels.cpu_kernels import CpuKernels
from mpillm.engine.lora import StepAdapters
from mpillm.engine.model.attention import StepAttention
from mpillm.engine.model_part import ModelPart
from mpillm.engine.step import Step


class CpuSteps:
    """Implements `worker.Steps`. A step needs the previous step's tokens, so nothing runs ahead."""

    n_ahead = 0

    def __init__(self, part: ModelPart, kernels: CpuKernels | None = None) -> None:
        keep_freed_memory()
        self._part = part
        # The kernels read and write a cache of the rows' own dtype.
        self._kernels = kernels if part.cache.keys.dtype == part.dtype else None
        self._layers = None if self._kernels is None else CpuLayers.of(part, self._kernels)
        self._tables: dict[int, list[int]] = {}  # slot -> its sequence's blocks

    def forward(self, step: Step, layer_stored: Callable[[int], None] | None = None) -> Tensor:
        part = self._part
        if step.copies:
            part.cache.copy(step.copies)
        for span in step.spans:
            if span.blocks:
                self._tables.setdefault(span.slot, [])[span.n_told :] = span.blocks
        attention = StepAttention(
            step.spans,
            self._tables,
            part.cache,
            part.n_heads,
            part.model.rotations,
            part.dtype,
            self._kernels,
            part.model.kinds,
        )
        x = (
            part.model.embed(torch.tensor(step.tokens), attention.positions)
            if part.groups.layout.is_first_stage
            else part.receive_hidden(len(step.tokens))
        )
        wanted = torch.tensor(step.wanted, dtype=torch.int64)
        adapters = StepAdapters(step.adapters) if step.adapters else None
        at_once = None if adapters or layer_stored else attention.by_row
        if self._layers is not None and at_once is not None:
            return part.model.leave(x, self._layers(x, at_once), None if step.context_logits else wanted)
        if not step.context_logits and adapters is None:
            return part.model.forward(x, attention, wanted, layer_stored)
        x = part.model.forward(x, attention, None, layer_stored, adapters)
        return x if step.context_logits else x.index_select(0, wanted)

    def feed(self, tokens: Tensor) -> None:
        """Do nothing: the host reads a step's tokens before it plans the step that computes with them."""

    def warm_up(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        """Do nothing: no kernel is compiled."""
