"""The matrix product with weights laid out once for the library that runs it fastest.

On x86 that is oneDNN with packed weights: against PyTorch's default (MKL) it measured 2 to 2.5 times as fast in float32 on an AMD
EPYC with AVX-512, and 1.2 times in bfloat16. Where PyTorch has no oneDNN, `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
