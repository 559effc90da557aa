"""Segments of PyTorch's GPU memory: they grow, so that loading leaves no fragments.

A segment of a fixed size stays allocated while a part of it is in use. Loading packs and frees matrices, and
with fixed segments, 5 GiB beside the weights of a 70B model were unusable. CUDA IPC exports only segments of
a fixed size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments() -> None:
    """Make later segments growable, unless the environment configures PyTorch's allocator."""
    _set(grow=True)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Allocate segments of a fixed size inside, for memory that other processes access."""
    _set(grow=False)
    try:
        yield
    finally:
        _set(grow=True)


def _set(*, grow: bool) -> None:
    if not any(name in os.environ for name in _VARIABLES):
        # The older name warns in versions that have the newer name.
        of_torch = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (of_torch or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{grow}")
