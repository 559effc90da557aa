"""The matrix product with weights, of floats or of 8 bits: all that a running model knows of quantisation is here.

Floats on x86 with AVX-512 go to oneDNN with packed weights: against PyTorch's default (MKL) it measured 2 to 2.5 times as fast in float32
on an AMD EPYC, and 1.2 times in bfloat16. Elsewhere `F.linear`: with AVX2 neither is faster throughout, and it needs no second copy.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.ops import Choice
from mpillm.engine.quantize import dequantize_rows

_TYPICAL_ROWS = 64  # what the packed layout is chosen for; it serves every number of rows
_FEW_ROWS = 32
_PIECE = 1 << 20  # int8 numbers that are widened at a time: what a core's cache holds


class Linear:
    """``x @ weight.T``: x [n, in], weight [out, in]; the result is [n, out], of the dtype of x."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`, of the dtype of x, may be changed or freed afterwards when it was packed; it is kept as it is otherwise."""
        self.out_features, self.in_features = weight.shape
        if weight.device.type == "cpu" and weight.is_floating_point() and _packs():
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return _product(x, self._weight)


class Int8Linear(Linear):
    """int8 weights with a scale for each output, on a CPU: widened where they are needed, a piece at a time; then outputs are scaled.

    In bfloat16, up to `_FEW_ROWS` rows, PyTorch's own kernel for it is faster; in float32 that one measured 7 to 40 times as slow.
    """

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        """int8 [out, in], float32 [out, 1]."""
        super().__init__(weight)
        self._scales = scales.view(1, -1)
        self._ones = torch.ones(self.out_features, dtype=torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and len(x) <= _FEW_ROWS:
            return torch._weight_int8pack_mm(x, self._weight, self._ones).mul_(self._scales)
        wide = x if _packs() else x.float()  # without AVX-512, bfloat16 is slower than float32
        pieces = torch.split(self._weight, max(1, _PIECE // self.in_features))
        return torch.cat([_product(wide, piece.to(wide.dtype)) for piece in pieces], dim=1).mul_(self._scales).to(x.dtype)


class Fp8Linear(Linear):
    """float8_e4m3fn weights with a scale for each output, on a GPU; rows of x, unless they are few, are rounded to fp8, each by a scale."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        """float8_e4m3fn [out, in], both multiples of 16 (see `check_fp8`); float32 [out, 1]."""
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._scales = scales.view(1, -1)
        self._arrived = torch.zeros(self.out_features // 16, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        from mpillm.engine import fp8_kernels

        if len(x) <= fp8_kernels.MOST_ROWS:
            return fp8_kernels.product(x, self._weight, self._scales, self._arrived)
        rows, row_scales = fp8_kernels.quantize_rows(x)
        # With scales for rows the result is bfloat16 always.
        return torch._scaled_mm(
            rows, self._weight.t(), scale_a=row_scales, scale_b=self._scales, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(x.dtype)


class GroupedLinear:
    """The products of a mixture: each pair of a row and an expert (see `Choice`) with the weights of its expert."""

    def __init__(self, linears: list[Linear]) -> None:
        """Of this rank's experts, all of one shape. On a GPU floats are one kernel's; with 8 bits the host looks who has chosen which."""
        self.in_features, self.out_features = linears[0].in_features, linears[0].out_features
        self._linears = linears
        self._stacked: Tensor | None = None
        if linears[0]._weight.device.type != "cpu" and type(linears[0]) is Linear:
            self._stacked, self._linears = torch.stack([linear._weight for linear in linears]), []

    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        """x [rows, in] or [pairs, in] to [pairs, out]. For experts of other ranks: zeros, or anything on a GPU."""
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


def make_linear(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Linear:
    """For x of `dtype`; with `scales`, `weight` is of 8 bits.

    fp8 on a CPU becomes floats here, once: there is no instruction for it, and widening it anew measured 5 to 25 times the product itself.
    """
    if scales is None:
        return Linear(weight)
    if weight.dtype == torch.int8:
        return Int8Linear(weight, scales)
    return Linear(dequantize_rows(weight, scales, dtype)) if weight.device.type == "cpu" else Fp8Linear(weight, scales)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if x.device.type == "cpu" and _packs():
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return y
    return F.linear(x, weight)


@functools.cache
def _packs() -> bool:
    """Whether this machine's CPU has AVX-512, and PyTorch oneDNN."""
    return bool(torch.backends.mkldnn.is_available()) and torch.backends.cpu.get_cpu_capability() == "AVX512"  # type: ignore[no-untyped-call]
