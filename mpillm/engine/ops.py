"""What lies between the matrix products and is no attention, in plain PyTorch. `kernels` has the same, and more, for GPUs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """x += delta, and the RMS norm of x times weight: x, delta [n, hidden]."""
    if delta is not None:
        x.add_(delta)
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [n, 2 * intermediate], the gate's columns first; gate_up may be changed."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True) * up
