"""The products around grouped-query attention, and the product that is added to the residual."""

from __future__ import annotations

from torch import Tensor

from mpillm.engine.kernels import ops as plain
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.kernels.ops import UnscaledProduct
from mpillm.engine.model.step_parts import LayerKind, Ops


class OutputProduct:
    """A product whose result is added to the residual; for few rows, the product's kernel adds it."""

    def __init__(self, product: Linear, bias: Tensor | None, ops: Ops) -> None:
        self.product = product
        self.bias = bias
        self._ops = ops

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor | UnscaledProduct | None:
        """Return the product. With `onto` it may add the result there and return None."""
        if onto is not None and (few := self.product.few(len(onto))) is not None:
            few(x, residual=onto)
            if self.bias is not None:
                onto.add_(self.bias)
            return None
        product = self.product.unscaled(x)
        return product if self.bias is None else self._ops.scaled(product).add_(self.bias)


class GroupedProjections:
    """Implements `layers.Projections` for heads with keys and values of their own, or of their group."""

    def __init__(
        self,
        qkv: Linear,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        output: OutputProduct,
        kind: LayerKind,
        heads: tuple[int, int, int],
        eps: float,
        ops: Ops,
    ) -> None:
        """`norms`: of each head of q and of k; `heads`: numbers of q heads, KV heads, values per head."""
        self.product = qkv
        self.output = output
        self.kind = kind
        self._bias = bias
        self._norms = norms
        self._n_q, self._n_kv, self._head_dim = heads
        self._eps = eps
        self._ops = ops

    def rounds(self, n_rows: int) -> bool:
        return self.product.rounds(n_rows)

    def qkv(self, x: Tensor) -> Tensor | UnscaledProduct:
        qkv = self.product.unscaled(x)
        if self._bias is not None:
            qkv = self._ops.scaled(qkv).add_(self._bias)
        if self._norms is not None:
            return self._normed(self._ops.scaled(qkv), *self._norms)
        if isinstance(qkv, UnscaledProduct):
            return qkv._replace(numbers=self._by_head(qkv.numbers))
        return self._by_head(qkv)

    def _normed(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        heads, n_q = self._by_head(qkv), self._n_q
        for part, weight in ((heads[:, :n_q], q_norm), (heads[:, n_q : n_q + self._n_kv], k_norm)):
            part.copy_(plain.norm(part, weight, self._eps))
        return heads

    def _by_head(self, qkv: Tensor) -> Tensor:
        return qkv.view(-1, self._n_q + 2 * self._n_kv, self._head_dim)
