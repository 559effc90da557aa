"""Products of a model that add the changes of LoRA adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpillm.engine.extras.lora import Adapter
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.model.decoder import Decoder
from mpillm.engine.model.feed_forward import GatedMlp
from mpillm.engine.model.projections import GroupedProjections


class AdaptedProducts:
    """The products of a model on a CPU, with the adapters of the current step and the rows of each."""

    def __init__(self, model: Decoder) -> None:
        """Replace the model's products."""
        self._rows: list[tuple[Adapter, Tensor]] = []
        for i, layer in enumerate(model.layers):
            attention, feed_forward = layer.attention, layer.feed_forward
            if isinstance(attention, GroupedProjections):
                attention.product = _AdaptedLinear(self, attention.product, i, "qkv")
                attention.output.product = _AdaptedLinear(self, attention.output.product, i, "o")
            if isinstance(feed_forward, GatedMlp):
                feed_forward.gate_up = _AdaptedLinear(self, feed_forward.gate_up, i, "gate_up")
                feed_forward.down.product = _AdaptedLinear(self, feed_forward.down.product, i, "down")

    @contextlib.contextmanager
    def active(self, rows: Sequence[tuple[Adapter, slice]]) -> Iterator[None]:
        """Use adapters for one step; `rows`: for each sequence with an adapter, its adapter and rows."""
        by_adapter: dict[Adapter, list[Tensor]] = {}
        for adapter, part in rows:
            by_adapter.setdefault(adapter, []).append(torch.arange(part.start, part.stop))
        self._rows = [(adapter, torch.cat(parts)) for adapter, parts in by_adapter.items()]
        try:
            yield
        finally:
            self._rows = []

    def add(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters' changes to the product `y` [rows, out] of `x` [rows, in], in place."""
        for adapter, rows in self._rows:
            if (product := adapter.product(layer, name)) is not None:
                a, b = product
                y.index_add_(0, rows, (x.index_select(0, rows) @ a.T) @ b.T)


class _AdaptedLinear(Linear):
    """A product with the changes of the current step's adapters."""

    def __init__(self, products: AdaptedProducts, inner: Linear, layer: int, name: str) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._adapted, self._inner = products, inner
        self._place = layer, name

    def __call__(self, x: Tensor) -> Tensor:
        y = self._inner(x)
        self._adapted.add(*self._place, x, y)
        return y
