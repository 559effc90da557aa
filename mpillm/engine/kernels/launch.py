"""Launch a Triton kernel again without Triton's own search for its compiled form.

At each launch Triton describes all arguments and options in a text and looks that up, which takes longer
than the launch itself; a step with contexts launches a thousand kernels. Here the key is a tuple.

A kernel with a constant EARLY, if that is true, may start while the one before it runs (CUDA's programmatic
dependent launch), as soon as all programs of that one have called `let_next_start` or ended. It calls
`after_previous` before it touches what another kernel touches. Programs that read much, of products and of
decode attention, must be spread evenly: beside many others that still run they are not, and such a pair takes
longer (docs/engine.md).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

_EARLY_ROWS = 32  # with more, kernels are long and what is between them weighs little
_early = True


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Wait until the kernel before has ended."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel start if it can do so early. Only after `after_previous`: two may be under way."""
    if EARLY:
        cuda.gdc_launch_dependents()


def starts_early(rows: Tensor) -> bool:
    """Return whether a kernel for these rows of a step starts early."""
    return len(rows) <= _EARLY_ROWS and can_start_early(rows.device)


def can_start_early(device: torch.device) -> bool:
    """Return whether kernels can start early there: on Hopper and later."""
    return _early and _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Let no kernel that is launched or captured inside start early."""
    global _early
    _early = False
    try:
        yield
    finally:
        _early = True


class Kernel:
    """A function of `triton.jit` for one GPU, launched in the same way: ``kernel[grid](*args, **constants)``.

    `compiled`: its compiled forms, each with the constants that follow the arguments.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[object, ...], tuple[Any, list[object]]] = {}
        names: list[str] = getattr(function, "do_not_specialize", [])  # Triton's interpreter has none
        self._unspecialized = [function.arg_names.index(name) for name in names]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        # All that a compiled form may depend on, and more: of a number, Triton asks only whether it is 1 or a
        # multiple of 16.
        key = [(arg.dtype, arg.data_ptr() & 15) if isinstance(arg, Tensor) else arg for arg in args]
        for i in self._unspecialized:
            key[i] = None
        whole = (*key, *constants.items())
        if (known := self.compiled.get(whole)) is not None:
            compiled, rest = known
            compiled[grid](*args, *rest)
            return
        options = {"launch_pdl": True} if constants.get("EARLY") else {}
        compiled = self.function[grid](*args, **constants, **options)
        if compiled is not None:  # as it is in Triton's interpreter
            rest = [constants[name] for name in self.function.arg_names[len(args) :]]
            self.compiled[whole] = compiled, rest


# Triton's own, which kernels can call too, take microseconds.


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n` (positive)."""
    return 1 << (n - 1).bit_length()
