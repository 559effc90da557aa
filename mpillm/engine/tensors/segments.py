"""How PyTorch takes a GPU's memory: in segments that grow, so that loading leaves no fragments.

A segment of a fixed size stays taken while a part of it is in use: those of matrices that loading packs and
frees left 5 GiB beside 70B's weights that no step could use. CUDA IPC exports only segments of a fixed size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments() -> None:
    """Let segments grow from now on, unless the environment says how PyTorch takes memory."""
    _set(grow=True)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Take memory in segments of a fixed size within this, for what other processes reach."""
    _set(grow=False)
    try:
        yield
    finally:
        _set(grow=True)


def _set(*, grow: bool) -> None:
    if not any(name in os.environ for name in _VARIABLES):
        # The older name warns where there is the newer one.
        of_torch = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (of_torch or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{grow}")
