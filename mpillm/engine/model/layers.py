"""The formula of a layer: what it computes before and after attention, over the rows of a step.

x is the residual, changed in place. A norm adds the last product (`delta`) to the residual and norms the sum,
in one kernel if the device has one. So the methods return the delta that is still to be added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.kernels.ops import Partial, UnscaledProduct
from mpillm.engine.model.step_parts import LayerKind, Ops
from mpillm.engine.parallel.groups import Groups

Product = Tensor | UnscaledProduct
Delta = Product | Partial | None  # to be added to the residual; None: nothing


class Norm(Protocol):
    """A norm of the residual."""

    weight: Tensor

    def __call__(self, x: Tensor, delta: Delta = None) -> Any:
        """Add delta to x in place, and return the norm of x: rounded, if the next product accepts that."""
        ...


class Projections(Protocol):
    """The products around attention."""

    kind: LayerKind

    def rounds(self, n_rows: int) -> bool:
        """Return whether it accepts `n_rows` rounded rows (see `Linear.rounds`)."""
        ...

    def qkv(self, x: Any) -> Product:
        """Return queries, keys and values [rows, heads + 2 * kv_heads, head_dim]."""
        ...

    def output(self, attended: Tensor, onto: Tensor | None = None) -> Product | None:
        """Return this rank's part of the output. With `onto` it may add the result there and return None."""
        ...


class FeedForward(Protocol):
    """A dense feed-forward, or a mixture of experts."""

    def rounds(self, n_rows: int) -> bool:
        """Return whether it accepts `n_rows` rounded rows (see `Linear.rounds`)."""
        ...

    def __call__(self, x: Any, onto: Tensor | None = None) -> Product | None:
        """Return this rank's part of the output. With `onto` it may add the result there and return None."""
        ...


class Layer(ABC):
    """A layer of a decoder, on this rank."""

    observe: Callable[[Tensor], None] | None = None  # receives the residual that the layer reads

    def __init__(
        self, norm: Norm, attention: Projections, post_norm: Norm, feed_forward: FeedForward, tp_sum: TpSum
    ) -> None:
        self.norm, self.attention = norm, attention
        self.post_norm, self.feed_forward = post_norm, feed_forward
        self.tp_sum = tp_sum

    def before(self, x: Tensor, delta: Delta) -> Product:
        """Return queries, keys and values; delta, from the previous layer, is added to x."""
        normed = self.norm(x, delta)
        if self.observe is not None:
            self.observe(x)
        return self.attention.qkv(normed)

    @abstractmethod
    def after(self, x: Tensor, attended: Tensor) -> Delta:
        """Compute the layer after attention; return the delta that is still to be added to x."""


class PreNormLayer(Layer):
    """x += attention(norm(x)), then x += feed_forward(post_norm(x))."""

    def after(self, x: Tensor, attended: Tensor) -> Delta:
        onto = self.tp_sum.onto(x)
        delta = self.tp_sum(self.attention.output(attended, onto))
        return self.tp_sum(self.feed_forward(self.post_norm(x, delta), onto))


class SandwichNormLayer(Layer):
    """x += attention_norm(attention(norm(x))), then x += after_norm(feed_forward(post_norm(x)))."""

    def __init__(self, *parts: Any, attention_norm: Norm, after_norm: Norm) -> None:
        """`parts`: arguments of `Layer`."""
        super().__init__(*parts)
        self.attention_norm, self.after_norm = attention_norm, after_norm

    def after(self, x: Tensor, attended: Tensor) -> Delta:
        delta: Tensor = self.attention_norm(self.tp_sum.computed(self.attention.output(attended)))
        added = self.feed_forward(self.post_norm(x, delta))
        normed: Tensor = self.after_norm(self.tp_sum.computed(added))
        return normed


class TpSum:
    """The sum of a product over the ranks of a TP group, each of which has a part of it."""

    def __init__(self, groups: Groups, ops: Ops, *, norm_adds: bool) -> None:
        """`norm_adds`: the norms of the residual accept a `Partial`."""
        self._groups = groups
        self._ops = ops
        self._norm_adds = norm_adds

    def onto(self, x: Tensor) -> Tensor | None:
        """Return x if a product may add its result there: on a rank that computes the whole product."""
        return x if self._groups.layout.tp_size == 1 else None

    def __call__(self, product: Product | None) -> Delta:
        """Return the sum; None: the product is already in the residual.

        A single rank leaves the product's scales to the next norm. A rank that shares rows with others also
        leaves the sum to the next norm.
        """
        if product is None or self._groups.layout.tp_size == 1:
            return product
        shared = self._groups.shared_rows
        return Partial(product, shared) if shared is not None and self._norm_adds else self.computed(product)

    def computed(self, product: Product | None) -> Tensor:
        """Return the sum itself."""
        assert product is not None
        return self._groups.all_reduce(self._ops.scaled(product))


class AddRmsNorm:
    """The RMS norm."""

    def __init__(
        self, weight: Tensor, eps: float, ops: Ops, rounds: Callable[[int], bool] | None = None
    ) -> None:
        """`rounds`: method of the product that reads the norm; None: it reads floats."""
        self.weight = weight
        self._eps = eps
        self._ops = ops
        self._rounds = rounds

    def __call__(self, x: Tensor, delta: Delta = None) -> Any:
        rounds = self._rounds is not None and self._rounds(len(x))
        return self._ops.add_norm(x, delta, self.weight, self._eps, rounds)


class AddLayerNorm:
    """The LayerNorm, which is never rounded."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, ops: Ops) -> None:
        self.weight, self.bias = weight, bias
        self._eps = eps
        self._ops = ops

    def __call__(self, x: Tensor, delta: Delta = None) -> Any:
        assert not isinstance(delta, Partial)
        if delta is not None:
            x.add_(self._ops.scaled(delta))
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
