"""Kernels that start while the one before them runs (CUDA's programmatic dependent launch; Hopper and later).

Such a kernel (see `launch.Kernel`) starts as soon as all programs of the one before it have called
`let_next_start` or ended, and calls `after_previous` before it touches what another kernel touches. Programs
that read much (of products, of decode attention) must be spread evenly over the multiprocessors. Beside many
others that still run they are not, and both together take longer (docs/explain/engine.md).
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
    """Return whether kernels can start early there: on Hopper and later, with a Triton that knows how."""
    return _early and _is_able(device)


@functools.cache
def _is_able(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Let no kernel that is launched or captured inside start early."""
    global _early
    _early = False
    try:
        yield
    finally:
        _early = True
