"""Products of a step's rows with packed weights on CPUs: `cpu_products.c`, compiled at load."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.kernels.c_library import INT, POINTER, address, c_function, c_library
from mpillm.engine.kernels.huge_pages import use_huge_pages
from mpillm.engine.shape.entries import BLOCK
from mpillm.engine.shape.mxfp4 import numbers_of

_SOURCE = Path(__file__).with_suffix(".c")
# The product for comparing compiled code with PyTorch's: its data fit in a core's cache.
_ROWS, _OUTPUTS, _INPUTS, _ROUNDS = 64, 1024, 512, 5


class CpuProducts:
    """Packs weights, and multiplies rows with them.

    Rows are float32 or bfloat16. Weights have the same type, or int8, or four bits (`mxfp4`, `int4`).
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
        self._multiply = c_function(library, "multiply", *[POINTER] * 4, *[INT] * 3)
        self._multiply_experts = c_function(library, "multiply_experts", *[POINTER] * 6, *[INT] * 5)
        self._width = INT.in_dll(library, "width").value
        library.multiple_of_inputs.restype = INT
        self._multiple = library.multiple_of_inputs()
        self.function = ctypes.cast(self._multiply, POINTER).value
        self._dtype, self._weight_dtype = dtype, weight_dtype

    def pack(self, weight: Tensor) -> Tensor:
        """Copy `weight` [out, in] to panels: [ceil(out / width), in, width], padded with zero outputs.

        For instructions on matrices or pairs of bfloat16, inputs are also padded, and lie in pairs.
        """
        if weight.dtype == torch.uint8:
            return self._pack_bytes(weight)
        weight = F.pad(weight, (0, -weight.shape[1] % self._multiple, 0, -len(weight) % self._width))
        inputs = weight.shape[1]
        if self._multiple > 1:
            packed = weight.reshape(-1, self._width, inputs // 2, 2).transpose(1, 2)
        else:
            split_rows = weight.reshape(-1, 2, self._width // 2, inputs)
            # bfloat16: outputs i and i + width / 2 side by side
            packed = split_rows.permute((0, 3, 2, 1) if weight.dtype == torch.bfloat16 else (0, 3, 1, 2))
        packed = packed.clone(memory_format=torch.contiguous_format).view(-1, inputs, self._width)
        use_huge_pages(packed.data_ptr(), packed.nbytes)
        return packed

    def _pack_bytes(self, blocks: Tensor) -> Tensor:
        """Copy bytes [out, in / 2] to panels: [ceil(out / width), in, width / 2].

        A byte contains one number of each half of a panel's row.
        """
        numbers = numbers_of(F.pad(blocks, (0, 0, 0, -len(blocks) % self._width)))
        inputs, multiple = numbers.shape[1], self._multiple
        rows = numbers.view(-1, self._width, inputs // multiple, multiple).transpose(1, 2)
        rows = rows.reshape(-1, inputs, self._width)
        lower, upper = rows.reshape(len(rows), -1, 2, self._width * multiple // 2).unbind(2)
        packed = (lower | upper << 4).contiguous()
        use_huge_pages(packed.data_ptr(), packed.nbytes)
        return packed

    def pack_exponents(self, exponents: Tensor) -> Tensor:
        """Copy exponents of MXFP4 [out, blocks] to panels: [ceil(out / width), blocks, width]."""
        padded = F.pad(exponents, (0, 0, 0, -len(exponents) % self._width))
        return padded.view(-1, self._width, exponents.shape[1]).transpose(1, 2).contiguous()

    def pack_int4_scales(self, scales: Tensor) -> Tensor:
        """Copy factors and zeros [out, blocks, 2] to float32 [ceil(out / width), blocks, 2, width]."""
        padded = F.pad(scales.float(), (0, 0, 0, 0, 0, -len(scales) % self._width))
        return padded.view(-1, self._width, *scales.shape[1:]).permute(0, 2, 3, 1).contiguous()

    def pack_scales(self, scales: Tensor) -> Tensor:
        """Copy one scale for each output to float32 [panels * width]."""
        return F.pad(scales.flatten().float(), (0, -scales.numel() % self._width)).clone()

    def multiply(self, x: Tensor, packed: Tensor, n_outputs: int, scales: Tensor | None = None) -> Tensor:
        """Return x [n, in] times weights times `scales` (both packed): [n, out]."""
        x = x.contiguous()
        out = x.new_empty(len(x), n_outputs)
        factors = None if scales is None else address(scales)
        self._multiply(address(x), address(packed), factors, address(out), *x.shape, n_outputs)
        return out

    def experts(self, packed: list[tuple[Tensor, Tensor | None]], n_outputs: int) -> ExpertProducts:
        """Return a function for products with the weights and scales of experts, all of one shape."""
        return ExpertProducts(self._multiply_experts, packed, n_outputs)

    def compare_times(self, other: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> tuple[float, float]:
        """Return the seconds that a product takes with this class and with `other`.

        `other` receives weights [out, in] and returns a function that multiplies rows with them.
        """
        with torch.inference_mode():
            own = torch.Generator().manual_seed(0)  # leaves PyTorch's global generator unchanged
            weight = torch.randint(-127, 128, (_OUTPUTS, _INPUTS), generator=own).to(self._weight_dtype)
            x = torch.rand(_ROWS, _INPUTS, generator=own).to(self._dtype)
            packed, product = self.pack(weight), other(weight)
            rounds = [
                (_seconds(lambda: self.multiply(x, packed, _OUTPUTS)), _seconds(lambda: product(x)))
                for _ in range(_ROUNDS)
            ]
        own_s, other_s = map(min, zip(*rounds, strict=True))
        return own_s, other_s


class ExpertProducts:
    """The products of a mixture of experts, in one call."""

    def __init__(
        self, multiply: Callable[..., None], packed: list[tuple[Tensor, Tensor | None]], n_outputs: int
    ) -> None:
        self._multiply, self._packed, self._n_outputs = multiply, packed, n_outputs
        pointers = POINTER * len(packed)
        self._weights = pointers(*(address(weight) for weight, _ in packed))
        scales = [address(scales) for _, scales in packed if scales is not None]
        self._scales = pointers(*scales) if scales else None

    def __call__(self, x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        """Multiply each pair's row with its expert's weights: [pairs, out], zero for other ranks' experts.

        x: [rows, in] or [pairs, in]; `order` and `ends`: see `ExpertChoice`.
        """
        x = x.contiguous()
        out = x.new_empty(len(order), self._n_outputs)
        sizes = len(order), len(ends), len(order) // max(1, len(x)), x.shape[1], self._n_outputs
        arrays = address(out), address(order), address(ends), *sizes
        self._multiply(address(x), self._weights, self._scales, *arrays)
        return out


@functools.cache
def cpu_products(
    dtype: torch.dtype, weight_dtype: torch.dtype, int4_block: int | None = None
) -> CpuProducts | None:
    """Compile or load the products of rows of `dtype`. None if that is not possible.

    Weights of uint8 have four bits: MXFP4, or int4 if `int4_block` (number of inputs that share a scale) is
    set.
    """
    if dtype not in (torch.float32, torch.bfloat16) or weight_dtype not in (dtype, torch.int8, torch.uint8):
        return None
    four_bits = weight_dtype == torch.uint8
    macros = {
        "BF16": dtype == torch.bfloat16,
        "INT8": weight_dtype == torch.int8,
        "MXFP4": four_bits and int4_block is None,
        "INT4": four_bits and int4_block is not None,
        **({"BLOCK": int4_block or BLOCK} if four_bits else {}),
    }
    library = c_library(_SOURCE, *(f"{name}={value:d}" for name, value in macros.items()))
    return None if library is None else CpuProducts(library, dtype, weight_dtype)


def _seconds(compute: Callable[[], object]) -> float:
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
