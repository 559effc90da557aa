"""Kernels that start while the previous one runs (CUDA's programmatic dependent launch; Hopper and later).

Such a kernel (see `launch.Kernel`) starts as soon as all programs of the previous kernel have called
`let_next_start` or ended. It calls `after_previous` before it accesses memory that other kernels use.
Programs that read much (products, decode attention) must be spread evenly over the multiprocessors. If many
programs of the previous kernel still run, they are spread unevenly, and both kernels take longer than one
after the other (docs/explain/engine.md).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

_EARLY_ROWS = 32  # with more rows, kernels are long, and the gaps between them matter little
_early = True


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel start early if it can.

    Call `after_previous` before: only two kernels may overlap.
    """
    if EARLY:
        cuda.gdc_launch_dependents()


def starts_early(rows: Tensor) -> bool:
    """Return whether a kernel for these rows of a step starts early."""
    return len(rows) <= _EARLY_ROWS and can_start_early(rows.device)


def can_start_early(device: torch.device) -> bool:
    """Return whether kernels can start early on `device`: Hopper or later, and Triton supports it."""
    return _early and _is_able(device)


@functools.cache
def _is_able(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Prevent early starts of kernels that are launched or captured inside."""
    global _early
    _early = False
    try:
        yield
    finally:
        _early = True
