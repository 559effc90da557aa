"""What lies between the matrix products and is no attention, in plain PyTorch. `kernels` has the same, and more, for GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


class Choice(NamedTuple):
    """Which experts each row of a step has chosen. A pair is a row and one of its experts; row i's are i * chosen and those that follow."""

    weights: Tensor  # [rows, chosen], of each pair; zero where the expert is another rank's
    order: Tensor  # [rows * chosen], pairs: those of this rank's first expert, of its second, …; at last those of other ranks' experts
    ends: Tensor  # [this rank's experts], where the pairs of each end in `order`

    def pairs_per_row(self, x: Tensor) -> int:
        """Of x, which has a row for each of the step's rows, or one for each pair."""
        return self.weights.shape[1] if len(x) == len(self.weights) else 1


def route(scores: Tensor, n_chosen: int, experts: range) -> Choice:
    """The `n_chosen` best experts of each row of scores [rows, all experts], weighted by their softmax; `experts` are this rank's."""
    weights, chosen = scores.float().softmax(-1).topk(n_chosen, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(scores.dtype)
    mine = (chosen >= experts.start) & (chosen < experts.stop)
    group = torch.where(mine, chosen - experts.start, len(experts)).flatten()
    ends = torch.bincount(group, minlength=len(experts) + 1).cumsum(0)[:-1]
    return Choice(weights * mine, group.argsort(stable=True), ends)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each row's experts, of y [rows * chosen, width] (finite, or the weight is zero) and weights [rows, chosen]."""
    return (y.view(*weights.shape, y.shape[1]) * weights[:, :, None]).sum(1)
