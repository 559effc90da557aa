"""LoRA adapters on all ranks of an instance: requests bring them to the leader, which tells the others."""

from __future__ import annotations

import weakref
from collections import deque

import torch

from mpillm.engine.extras.lora import Adapter
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_config import ModelConfig


class SharedAdapters:
    """Tells the ranks that follow of a step's adapters, on the leader.

    An adapter's tensors go with the first step that needs it. When the leader has forgotten it, and no
    request has it any more, its number goes with the next step.
    """

    def __init__(self) -> None:
        self._sent_adapters: set[int] = set()
        self._freed: deque[int] = deque()

    def name(self, step: Step) -> None:
        """Name in a step what it needs, for those ranks."""
        if step.extra is None and not self._freed:
            return
        extra = step.more()
        for adapter, start, end in extra.adapters:
            tensors = adapter.tensors
            assert tensors is not None
            extra.adapter_rows.append((tensors.number, start, end))
            if tensors.number not in self._sent_adapters:
                self._sent_adapters.add(tensors.number)
                extra.new_adapters.append(tensors)
                weakref.finalize(adapter, self._freed.append, tensors.number).atexit = False
        extra.freed_adapters = [self._freed.popleft() for _ in range(len(self._freed))]
        self._sent_adapters.difference_update(extra.freed_adapters)


class ReceivedAdapters:
    """Adapters of the leader, on a rank that follows it."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, layout: RankLayout) -> None:
        self._model, self._dtype, self._layout = model, dtype, layout
        self._of: dict[int, Adapter] = {}

    def find(self, step: Step) -> None:
        """Give a step the adapters that it names."""
        if (extra := step.extra) is None:
            return
        for number in extra.freed_adapters:
            del self._of[number]
        for number, weights, config in extra.new_adapters:
            self._of[number] = Adapter(weights, config, self._model, self._dtype, self._layout)
        extra.adapters = [(self._of[number], start, end) for number, start, end in extra.adapter_rows]
