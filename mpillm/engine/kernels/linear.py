"""Matrix products with weights in floats, 8 bits or 4 bits: the only place in a running model that quantizes.

On a CPU, `CpuProducts` multiplies floats, if it can be compiled and is not clearly slower than the
alternative: oneDNN with packed weights on x86, `F.linear` elsewhere. On AMD EPYCs with AVX-512, oneDNN
measured 2 to 2.5 times as fast as PyTorch's default (MKL) in float32, and 1.2 times in bfloat16. With AVX2 in
float32, oneDNN measured 1.0 to 3.2 times as fast with 4 to 100 rows, 0.5 to 1.9 times with one row, and 0.8
to 1.1 times with 250 or more rows. docs/explain/engine_cpu.md compares `CpuProducts` with oneDNN.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.kernels.cpu_products import CpuProducts, ExpertProducts, cpu_products
from mpillm.engine.kernels.huge_pages import use_huge_pages
from mpillm.engine.kernels.ops import ExpertChoice, RoundedRows, UnscaledProduct
from mpillm.engine.shape import int4, mxfp4
from mpillm.engine.tensors.rounding import dequantize_rows

if TYPE_CHECKING:
    from mpillm.engine.kernels.few_rows import FewRows

_log = logging.getLogger(__name__)
_TYPICAL_ROWS = 64  # the packed layout is chosen for it, and works for any number of rows
_FEW_ROWS = 32
_CLEARLY = 1.2
_PIECE = 1 << 20  # int8 numbers widened at a time: they fit a core's cache


class Linear:
    """``x @ weight.T``: x [n, in], weight [out, in]; the result is [n, out], with the dtype of x."""

    _few: FewRows | None = None  # on a GPU: bfloat16, fp8 or int4
    _products: CpuProducts | None = None
    _scales: Tensor | None = None  # of the weights

    def __init__(self, weight: Tensor) -> None:
        """`weight` has the dtype of x.

        If `weight` is packed, the caller may change or free it afterwards. Otherwise this object keeps it.
        """
        self.out_features, self.in_features = weight.shape
        if weight.device.type == "cpu":
            self._products = _compiled(weight.dtype, weight.dtype)
            weight = _packed(weight) if self._products is None else self._products.pack(weight)
        elif weight.dtype == torch.bfloat16:
            from mpillm.engine.kernels.few_rows import FewRows

            self._few = FewRows(weight, None)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._products is not None:
            return self._products.multiply(x, self._weight, self.out_features)
        if self._few is not None and len(x) <= self._few.max_rows:
            return self._few(x)
        return _product(x, self._weight)

    def unscaled(self, x: Tensor) -> Tensor | UnscaledProduct:
        """Return the product, or leave its scales to the next operation, which saves a pass."""
        return self(x)

    def rounds(self, n_rows: int) -> bool:
        """Return whether this product accepts `n_rows` rows as `RoundedRows`, which saves a pass over x."""
        return False

    def compiled(self) -> tuple[int | None, Tensor, Tensor | None] | None:
        """Return the address of `multiply` (cpu_products.c), weights and scales; None if it is unused."""
        return None if self._products is None else (self._products.function, self._weight, self._scales)

    def of_experts(self, linears: list[Linear]) -> ExpertProducts | None:
        """Return one product with all `linears`, which have this class; None if it is not compiled."""
        if self._products is None:
            return None
        packed = [product[1:] for linear in linears if (product := linear.compiled()) is not None]
        return self._products.experts(packed, self.out_features)

    def few(self, n_rows: int) -> FewRows | None:
        """Return the product that can be fused with the next operation, if there is one for `n_rows`."""
        return self._few if self._few is not None and n_rows <= self._few.max_fused_rows else None


class Int8Linear(Linear):
    """int8 weights with a scale per output, on a CPU.

    The weights are widened when they are read, and the outputs are scaled.
    """

    _scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """int8 [out, in], float32 [out, 1]; `dtype`: of x."""
        self.out_features, self.in_features = weight.shape
        self._products = _compiled(dtype, torch.int8)
        if self._products is None:
            self._weight, self._scales = weight, scales.view(1, -1)
        else:
            self._weight, self._scales = self._products.pack(weight), self._products.pack_scales(scales)

    def __call__(self, x: Tensor) -> Tensor:
        if self._products is not None:
            return self._products.multiply(x, self._weight, self.out_features, self._scales)
        return _product_of_int8(x, self._weight).mul_(self._scales).to(x.dtype)


class Fp8Linear(Linear):
    """float8_e4m3fn weights with a scale for each output, on a GPU.

    Rows of x are rounded to fp8, with a scale for each row, unless `FewRows` multiplies them.
    """

    _scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        """float8_e4m3fn [out, in], both multiples of 16 (`model_info` checks it); float32 [out, 1]."""
        from mpillm.engine.kernels.few_rows import FewRows

        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._scales = scales.view(1, -1)
        self._one = torch.ones((), device=weight.device)
        self._few = FewRows(weight, scales)

    def __call__(self, x: Tensor | RoundedRows) -> Tensor:
        from mpillm.engine.kernels import fp8_kernels

        return fp8_kernels.scaled(self.unscaled(x))

    def unscaled(self, x: Tensor | RoundedRows) -> Tensor | UnscaledProduct:
        from mpillm.engine.kernels import fp8_kernels

        if isinstance(x, Tensor) and (few := self.few(len(x))) is not None:
            return few(x)
        numbers, row_scales, dtype = x if isinstance(x, RoundedRows) else fp8_kernels.quantize_rows(x)
        # cuBLAS has one kernel for products with scales of rows and outputs, and many kernels for products
        # without scales. Up to 512 rows, these save 3 to 40 % of the time (docs/explain/quantization.md).
        scales_now = len(numbers) >= fp8_kernels.SCALED_ROWS
        product = torch._scaled_mm(
            numbers,
            self._weight.t(),
            scale_a=row_scales if scales_now else self._one,
            scale_b=self._scales if scales_now else self._one,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return product if scales_now else UnscaledProduct(product, row_scales, self._scales)

    def rounds(self, n_rows: int) -> bool:
        return self.few(n_rows) is None


class Mxfp4Linear(Linear):
    """Weights in MXFP4 (see `mxfp4`).

    A CPU widens the weights when it reads them. A GPU does so only in `GroupedLinear`.
    """

    _scales: Tensor

    def __init__(self, blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> None:
        """uint8 [out, in / 2] and [out, in / 32]; `dtype`: of x."""
        self.out_features, self.in_features = len(blocks), 2 * blocks.shape[1]
        self._weight, self._scales = blocks, exponents
        if blocks.device.type != "cpu":
            from mpillm.engine.kernels.expert_kernels import pack

            self._weight, self._scales = pack(blocks, exponents)
        elif (products := cpu_products(dtype, torch.uint8)) is not None:
            self._products = products
            self._weight, self._scales = products.pack(blocks), products.pack_exponents(exponents)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return packed weights and exponents for `packed_product`, on a GPU."""
        return self._weight, self._scales

    def __call__(self, x: Tensor) -> Tensor:
        if self._products is not None:
            return self._products.multiply(x, self._weight, self.out_features, self._scales)
        n = max(1, _PIECE // self.in_features)
        pieces = zip(torch.split(self._weight, n), torch.split(self._scales, n), strict=True)
        return torch.cat([F.linear(x, mxfp4.widened(*piece).to(x.dtype)) for piece in pieces], dim=1)


class Int4Linear(Linear):
    """Weights of four bits, with a scale and a zero point for each group of inputs (see `int4`).

    They are widened when they are read. On a GPU, for more rows than `FewRows` supports, they are widened to
    bfloat16 beforehand.
    """

    _scales: Tensor

    def __init__(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """uint8 [out, in / 2], float16 [out, groups, 2]; `dtype`: of x."""
        self.out_features, self.in_features = len(blocks), 2 * blocks.shape[1]
        self._weight, self._scales = blocks, scales
        group = self.in_features // scales.shape[1]
        if blocks.device.type != "cpu":
            from mpillm.engine.kernels.few_rows import FewRows
            from mpillm.engine.kernels.int4_kernels import pack

            self._weight, self._scales = pack(blocks, scales)
            self._few = FewRows(self._weight, self._scales)
        elif (products := cpu_products(dtype, torch.uint8, group)) is not None:
            self._products = products
            self._weight, self._scales = products.pack(blocks), products.pack_int4_scales(scales)

    def __call__(self, x: Tensor) -> Tensor:
        if self._products is not None:
            return self._products.multiply(x, self._weight, self.out_features, self._scales)
        if self._few is not None:
            from mpillm.engine.kernels.int4_kernels import widened

            few = len(x) <= self._few.max_rows
            return self._few(x) if few else F.linear(x, widened(self._weight, self._scales))
        n = max(1, _PIECE // self.in_features)
        pieces = zip(torch.split(self._weight, n), torch.split(self._scales, n), strict=True)
        return torch.cat([F.linear(x, int4.widened(*piece).to(x.dtype)) for piece in pieces], dim=1)


class GroupedLinear:
    """Products of a mixture of experts: each pair's row with its expert's weights (see `ExpertChoice`)."""

    def __init__(self, linears: list[Linear], biases: list[Tensor] | None = None) -> None:
        """`linears`: this rank's experts, all of one shape.

        On a GPU, one kernel computes all products, and the host never reads the choice.
        """
        first = linears[0]
        self.in_features, self.out_features = first.in_features, first.out_features
        self._linears = linears
        self.biases = None if biases is None else torch.stack(biases)  # [experts, out]
        self._stacked: Tensor | None = None
        self._scales: Tensor | None = None  # float32 [experts, out], of fp8 weights
        self._packed: tuple[Tensor, Tensor] | None = None  # in MXFP4
        self._compiled = first.of_experts(linears)
        if isinstance(first, Mxfp4Linear) and first._weight.device.type != "cpu":
            each = [linear.packed() for linear in linears if isinstance(linear, Mxfp4Linear)]
            packed, exponents = map(torch.stack, zip(*each, strict=True))
            self._packed, self._linears = (packed, exponents), []  # no other method uses them
        elif first._weight.device.type != "cpu":
            self._stacked = torch.stack([linear._weight for linear in linears])
            if isinstance(first, Fp8Linear):
                each_scales = [linear._scales for linear in linears if isinstance(linear, Fp8Linear)]
                self._scales = torch.cat(each_scales)
                scales = self._scales.unsqueeze(-1)
                self._linears = [Fp8Linear(*pair) for pair in zip(self._stacked, scales, strict=True)]
            else:
                self._linears = [Linear(weight) for weight in self._stacked]  # views of `_stacked`

    @property
    def rounds(self) -> bool:
        """Whether it accepts `RoundedRows`, which the previous operation can produce."""
        return self._scales is not None

    @property
    def is_packed(self) -> bool:
        """Whether the weights are packed, so that `of_expert` is unavailable."""
        return self._packed is not None

    def of_expert(self, expert: int) -> Linear:
        """Return the product of one of this rank's experts."""
        return self._linears[expert]

    def __call__(self, x: Tensor | RoundedRows, choice: ExpertChoice) -> Tensor:
        """Multiply x [rows, in] or [pairs, in]: [pairs, out].

        For other ranks' experts, the result is undefined on a GPU, and zero on a CPU.
        """
        if self._packed is not None:
            from mpillm.engine.kernels.expert_kernels import packed_product

            assert isinstance(x, Tensor)
            return packed_product(x, *self._packed, choice, self.biases)
        if self._stacked is not None:
            from mpillm.engine.kernels.expert_kernels import grouped_product

            return grouped_product(x, self._stacked, self._scales, choice, self.biases)
        assert isinstance(x, Tensor)
        if self._compiled is not None:
            out = self._compiled(x, choice.order, choice.ends)
            if self.biases is not None:
                n_pairs = choice.ends.diff(prepend=choice.ends.new_zeros(1))
                biases = self.biases.repeat_interleave(n_pairs, dim=0)
                out.index_add_(0, choice.order[: len(biases)], biases)
            return out
        out, start = x.new_zeros(len(choice.order), self.out_features), 0
        for i, (linear, end) in enumerate(zip(self._linears, choice.ends.tolist(), strict=True)):
            if end > start:
                pairs = choice.order[start:end]
                product = linear(x[pairs // choice.pairs_per_row(x)])
                out[pairs] = product if self.biases is None else product + self.biases[i]
            start = end
        return out


def make_linear(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Linear:
    """Return the product for x of `dtype`; with `scales`, `weight` has 8 bits, or four (`mxfp4`, `int4`).

    On a CPU, fp8 becomes floats here: CPUs have no instruction for fp8, and widening fp8 in each product took
    5 to 25 times as long as the product itself.
    """
    if scales is None:
        return Linear(weight)
    if weight.dtype == torch.int8:
        return Int8Linear(weight, scales, dtype)
    if scales.dtype == torch.float16:
        return Int4Linear(weight, scales, dtype)
    if weight.dtype == torch.uint8:
        return Mxfp4Linear(weight, scales, dtype)
    on_cpu = weight.device.type == "cpu"
    return Linear(dequantize_rows(weight, scales, dtype)) if on_cpu else Fp8Linear(weight, scales)


@functools.cache
def _compiled(dtype: torch.dtype, weight_dtype: torch.dtype) -> CpuProducts | None:
    """Return compiled products, unless `uncompiled` takes clearly less time on this machine.

    If both are about equally fast, compiled products need fewer calls. A busy machine disturbs both timings.
    """
    products = cpu_products(dtype, weight_dtype)
    if products is None:
        return None
    own_s, other_s = products.compare_times(uncompiled)
    about = dtype, weight_dtype, own_s * 1e6, other_s * 1e6
    _log.info("a product of %s with weights of %s takes %.0f us compiled, %.0f otherwise", *about)
    return products if own_s < _CLEARLY * other_s else None


def uncompiled(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the product that replaces `CpuProducts`: of rows with a CPU's weights, without scales."""
    if weight.dtype == torch.int8:
        return functools.partial(_product_of_int8, weight=weight)
    return functools.partial(_product, weight=_packed(weight))


def _packed(weight: Tensor) -> Tensor:
    """Return a CPU's weights in the format of `_product`."""
    if not _packs(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if weight.is_mkldnn or (x.device.type == "cpu" and _cpu_has("AVX512")):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return y
    return F.linear(x, weight)


def _packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN with packed weights of this dtype is faster than `F.linear` on this CPU."""
    return _cpu_has("AVX512") or (dtype == torch.float32 and _cpu_has("AVX2"))


def _product_of_int8(x: Tensor, weight: Tensor, piece: int = _PIECE) -> Tensor:
    """Multiply with int8 weights, which are widened `piece` numbers at a time.

    Up to `_FEW_ROWS` rows in bfloat16, PyTorch's own kernel is faster. In float32, that kernel measured 7 to
    40 times as slow.
    """
    # It reads 16 numbers at a time, also from behind a shorter row, and may need an address divisible by 16.
    readable = weight.shape[1] % 16 == 0 and weight.data_ptr() % 16 == 0
    if readable and x.dtype == torch.bfloat16 and len(x) <= _FEW_ROWS:
        return torch._weight_int8pack_mm(x, weight, torch.ones(len(weight), dtype=x.dtype))
    wide = x if _packs(x.dtype) else x.float()  # without AVX-512, bfloat16 is slower than float32
    rows = torch.split(weight, max(1, piece // weight.shape[1]))
    return torch.cat([_product(wide, each.to(wide.dtype)) for each in rows], dim=1)


@functools.cache
def _cpu_has(instructions: str) -> bool:
    """Return whether PyTorch has oneDNN, and `instructions` are the best that it uses on this CPU."""
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return has_onednn and torch.backends.cpu.get_cpu_capability() == instructions
