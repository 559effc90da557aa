"""Extras of a step: its work for requests with extras, and the message to the instance's other ranks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpillm.engine.extras.lora import Adapter, AdapterTensors
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig

_COLUMNS = (2, 2, 1, 3, 1, 3)  # of the lists in a message


@dataclass
class StepExtras:
    """Work of a step for requests with extras.

    On ranks other than the root rank, the functions and the lists for logits are None.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)  # of blocks (from, to), before all else
    # Rows of the step whose logits are appended to a list.
    context_logits: list[tuple[list[NDArray[np.float32]] | None, slice]] = field(default_factory=list)
    # Indices in `Step.logits_rows`, and functions that change the logits of that row: float32 [vocab].
    adjusted: list[tuple[int, Callable[[Tensor], None] | None]] = field(default_factory=list)
    adapters: list[tuple[Adapter, slice]] = field(default_factory=list)  # with their rows of the step
    new_adapters: list[AdapterTensors] = field(default_factory=list)  # other ranks do not have them yet
    freed_adapters: list[int] = field(default_factory=list)  # numbers of adapters that other ranks can drop

    @staticmethod
    def of(step: Step) -> StepExtras:
        """Return the extras of a step on the root rank; add them if it has none."""
        if not isinstance(step.extras, StepExtras):
            step.extras = extras = StepExtras()
            return extras
        return step.extras

    def __bytes__(self) -> bytes:
        """Return a message: the lists as int32, then config and weights of each new adapter."""
        lists: tuple[list[tuple[int, ...]], ...] = (
            [*self.copies],
            [(rows.start, rows.stop) for _, rows in self.context_logits],
            [(row,) for row, _ in self.adjusted],
            [(adapter.number, rows.start, rows.stop) for adapter, rows in self.adapters],
            [(number,) for number in self.freed_adapters],
            [(number, *weights.shape) for number, weights, _ in self.new_adapters],
        )
        numbers = [*map(len, lists), *(value for rows in lists for row in rows for value in row)]
        tensors = [
            array.tobytes()
            for _, weights, config in self.new_adapters
            for array in (config.astype(np.int32), weights.astype(np.float32))
        ]
        return b"".join([np.array(numbers, np.int32).tobytes(), *tensors])


class SharedAdapters:
    """Adapters that the root rank has sent to the other ranks.

    An adapter's tensors go with the first step that needs them. When no request and no cache of the root rank
    refers to an adapter any more, the next step carries the adapter's number, and the other ranks drop it.
    """

    def __init__(self) -> None:
        self._sent: set[int] = set()
        self._freed: deque[int] = deque()

    def complete(self, step: Step) -> None:
        """Add new and freed adapters to a step that is about to be sent."""
        if step.extras is None and not self._freed:
            return
        extras = StepExtras.of(step)
        for adapter, _ in extras.adapters:
            if adapter.number not in self._sent:
                self._sent.add(adapter.number)
                assert adapter.tensors is not None
                extras.new_adapters.append(adapter.tensors)
                weakref.finalize(adapter, self._freed.append, adapter.number).atexit = False
        extras.freed_adapters = [self._freed.popleft() for _ in range(len(self._freed))]
        self._sent.difference_update(extras.freed_adapters)


class ReceivedAdapters:
    """Adapters of the root rank, on another rank of its instance."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, layout: RankLayout) -> None:
        self._model, self._dtype, self._layout = model, dtype, layout
        self._adapters: dict[int, Adapter] = {}

    def __len__(self) -> int:
        return len(self._adapters)

    def read(self, message: bytes) -> StepExtras:
        """Return the extras of a step from their message."""
        numbers = np.frombuffer(message, np.int32)
        at, lists = len(_COLUMNS), []
        for n, columns in zip(numbers[:at].tolist(), _COLUMNS, strict=True):
            lists.append(numbers[at : at + n * columns].reshape(n, columns).tolist())
            at += n * columns
        copies, context_logits, adjusted, adapters, freed, new = lists
        for (number,) in freed:
            del self._adapters[number]
        for number, n, width in new:
            config, weights = numbers[at : at + 3 * n], numbers[at + 3 * n : at + (3 + width) * n]
            at += (3 + width) * n
            tensors = weights.view(np.float32).reshape(n, width), config.reshape(n, 3)
            self._adapters[number] = Adapter(*tensors, self._model, self._dtype, self._layout)
        return StepExtras(
            [(source, target) for source, target in copies],
            [(None, slice(*rows)) for rows in context_logits],
            [(row, None) for (row,) in adjusted],
            [(self._adapters[number], slice(*rows)) for number, *rows in adapters],
        )
