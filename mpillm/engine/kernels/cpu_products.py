"""`cpu_products.c`, compiled where there is a C compiler: products of a step's rows with packed weights."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.huge_pages import use_huge_pages
from mpillm.engine.kernels.c_library import address, c_library

_SOURCE = Path(__file__).with_suffix(".c")
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
# The product by which compiled ones are compared with others: what both need lies in a core's cache.
_ROWS, _OUTPUTS, _INPUTS, _ROUNDS = 64, 1024, 512, 5


class CpuProducts:
    """Packs weights of float32 or bfloat16, and multiplies rows of the same dtype with them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._multiply = library.multiply
        self._multiply.argtypes, self._multiply.restype = [*[_POINTER] * 3, *[_INT] * 3], None
        self._width = _INT.in_dll(library, "width").value

    def pack(self, weight: Tensor) -> Tensor:
        """Copy `weight` [out, in] to panels: [ceil(out / width), in, width], zeros behind the last output."""
        outputs, inputs = weight.shape
        weight = F.pad(weight, (0, 0, 0, -outputs % self._width))
        halves = weight.view(-1, 2, self._width // 2, inputs)
        # bfloat16: outputs of both halves side by side
        order = (0, 3, 2, 1) if weight.dtype == torch.bfloat16 else (0, 3, 1, 2)
        packed = halves.permute(order).clone(memory_format=torch.contiguous_format)
        packed = packed.view(-1, inputs, self._width)
        use_huge_pages(packed.data_ptr(), packed.nbytes)
        return packed

    def multiply(self, x: Tensor, packed: Tensor, n_outputs: int) -> Tensor:
        """Return x [n, in] times weights: [n, out]."""
        x = x.contiguous()
        out = x.new_empty(len(x), n_outputs)
        self._multiply(address(x), address(packed), address(out), *x.shape, n_outputs)
        return out

    def times_beside(
        self, other: Callable[[Tensor], Callable[[Tensor], Tensor]], dtype: torch.dtype
    ) -> tuple[float, float]:
        """Return the seconds that a product of some rows takes, here and by `other`.

        `other` takes weights [out, in] and returns what multiplies rows with them.
        """
        with torch.inference_mode():
            weight, x = torch.rand(_OUTPUTS, _INPUTS).to(dtype), torch.rand(_ROWS, _INPUTS).to(dtype)
            packed, product = self.pack(weight), other(weight)
            ways: tuple[Callable[[], Tensor], ...] = (
                lambda: self.multiply(x, packed, _OUTPUTS),
                lambda: product(x),
            )
            rounds = [[_seconds(way) for way in ways] for _ in range(_ROUNDS)]
        mine, others = map(min, zip(*rounds, strict=True))
        return mine, others


@functools.cache
def cpu_products(dtype: torch.dtype) -> CpuProducts | None:
    """Compile, or find, the products for `dtype`. None where that is not possible."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    library = c_library(_SOURCE, f"BF16={int(dtype == torch.bfloat16)}")
    return None if library is None else CpuProducts(library)


def _seconds(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started
