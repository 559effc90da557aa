"""Launch compiled Triton kernels without Triton's own lookup.

At each launch, Triton describes all arguments and options in a string and looks that up, which takes longer
than the launch itself. A step with contexts launches a thousand kernels. Here the key is a tuple.

A kernel whose constant EARLY is true may start before the previous kernel has ended (`early_starts`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Kernel:
    """A `triton.jit` function for one GPU, launched as in Triton: ``kernel[grid](*args, **constants)``.

    `compiled`: its compiled variants, each with the constants that follow the arguments.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[object, ...], tuple[Any, list[object]]] = {}
        names: list[str] = getattr(function, "do_not_specialize", [])  # not in Triton's interpreter
        self._unspecialized = [function.arg_names.index(name) for name in names]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        # Everything that a compiled variant may depend on, and more: Triton specializes a number only on
        # whether it is 1 or a multiple of 16.
        key = [(arg.dtype, arg.data_ptr() & 15) if isinstance(arg, Tensor) else arg for arg in args]
        for i in self._unspecialized:
            key[i] = None
        full_key = (*key, *constants.items())
        if (known := self.compiled.get(full_key)) is not None:
            compiled, trailing = known
            compiled[grid](*args, *trailing)
            return
        options = {"launch_pdl": True} if constants.get("EARLY") else {}
        compiled = self.function[grid](*args, **constants, **options)
        if compiled is not None:  # None in Triton's interpreter
            trailing = [constants[name] for name in self.function.arg_names[len(args) :]]
            self.compiled[full_key] = compiled, trailing


# Triton's own `cdiv` and `next_power_of_2`, which kernels can also call, take microseconds.


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n` (positive)."""
    return 1 << (n - 1).bit_length()
