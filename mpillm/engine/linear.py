"""The matrix product with weights laid out once for the library that runs it fastest.

On x86 that is oneDNN with packed weights: against PyTorch's default (MKL) it measured 2 to 2.5 times as fast in float32 on an AMD
EPYC with AVX-512, and 1.2 times in bfloat16. Where PyTorch has no oneDNN, `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.ops import Choice

_TYPICAL_ROWS = 64  # what the packed layout is chosen for; it serves every number of rows


class Linear:
    """``x @ weight.T``: x [n, in], weight [out, in], both of one dtype; the result is [n, out]."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` may be changed or freed afterwards when it was packed; it is kept as it is otherwise."""
        self.out_features, self.in_features = weight.shape
        one_dnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._packed = one_dnn and weight.device.type == "cpu"
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return y
        return F.linear(x, self._weight)


class GroupedLinear:
    """The products of a mixture: each pair of a row and an expert (see `Choice`) with the weights of its expert."""

    def __init__(self, linears: list[Linear]) -> None:
        """Of this rank's experts, all of one shape."""
        self.in_features, self.out_features = linears[0].in_features, linears[0].out_features
        self._linears = linears
        self._stacked: Tensor | None = None
        if linears[0]._weight.device.type != "cpu":
            self._stacked, self._linears = torch.stack([linear._weight for linear in linears]), []

    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        """x [rows, in] or [pairs, in] to [pairs, out]. For experts of other ranks: zeros on a CPU, anything on a GPU."""
        if self._stacked is not None:
            from mpillm.engine.expert_kernels import grouped_product

            return grouped_product(x, self._stacked, choice)
        out, start = x.new_zeros(len(choice.order), self.out_features), 0
        for linear, end in zip(self._linears, choice.ends.tolist(), strict=True):
            if end > start:
                pairs = choice.order[start:end]
                out[pairs] = linear(x[pairs // choice.pairs_per_row(x)])
            start = end
        return out
