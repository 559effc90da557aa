"""Operations between matrix products, except attention, in PyTorch; `step_kernels` has them for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.shape.composition import CLAMP, SWISH, Activation

if TYPE_CHECKING:
    from mpillm.engine.parallel.shared_rows import SharedRows


class RoundedRows(NamedTuple):
    """Rows in fp8, each with its scale: the input of a product with fp8 weights."""

    numbers: Tensor  # float8_e4m3fn [n, width]
    scales: Tensor  # float32 [n, 1]
    dtype: torch.dtype  # of the original rows and of the product


class UnscaledProduct(NamedTuple):
    """A product with fp8 weights before its scales are applied: the next operation that reads it does so."""

    numbers: Tensor  # floats [n, out]
    row_scales: Tensor  # float32 [n, 1], of the input's rows
    scales: Tensor  # float32 [1, out], of the weights


class Partial(NamedTuple):
    """This rank's part of a sum over its TP group, on GPUs. The operation that reads it adds the parts."""

    product: Tensor | UnscaledProduct
    shared: SharedRows


def scaled(product: Tensor | UnscaledProduct) -> Tensor:
    """Apply a product's scales: [n, out]. Only GPUs have unscaled products."""
    assert isinstance(product, Tensor)
    return product


def add_norm(
    x: Tensor,
    delta: Tensor | UnscaledProduct | Partial | None,
    weight: Tensor,
    eps: float,
    rounds: bool = False,
) -> Tensor:
    """Add delta to x in place and return the RMS norm of x times weight: x, delta [n, hidden].

    `rounds` (see `Linear.rounds`) and `Partial` are for GPUs.
    """
    assert not rounds and not isinstance(delta, Partial)
    if delta is not None:
        x.add_(scaled(delta))
    return norm(x, weight, eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x times weight, over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def gated(gate_up: Tensor | UnscaledProduct, rounds: bool = False, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up of gate_up [n, 2 * intermediate], the gate's columns first.

    gate_up may be changed. `rounds` as in `add_norm`.
    """
    assert not rounds
    gate, up = scaled(gate_up).chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        return gate * torch.sigmoid(gate * SWISH) * (up + 1)
    return F.silu(gate, inplace=True) * up


class ExpertChoice(NamedTuple):
    """The experts that each row of a step chooses.

    A pair is a row and one of its experts; row i's pairs begin at i * chosen.
    """

    weights: Tensor  # [rows, chosen], of each pair; zero if the expert is another rank's
    order: Tensor  # [rows * chosen], pairs in the order of this rank's experts, then other ranks' pairs
    ends: Tensor  # [this rank's experts], where each expert's pairs end in `order`

    def pairs_per_row(self, x: Tensor) -> int:
        """Return how many pairs share a row of x.

        x has a row for each row of the step, or for each pair.
        """
        return self.weights.shape[1] if len(x) == len(self.weights) else 1


def route(scores: Tensor, n_chosen: int, experts: range, normed: bool = True) -> ExpertChoice:
    """Choose the `n_chosen` best experts of each row of scores [rows, all experts], weighted by softmax.

    `experts`: of this rank. `normed`: a row's weights add up to 1.
    """
    weights, chosen = scores.float().softmax(-1).topk(n_chosen, dim=-1)
    if normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return choice_of(weights.to(scores.dtype), chosen, experts)


def route_grouped(
    scores: Tensor,
    bias: Tensor,
    n_chosen: int,
    experts: range,
    normed: bool,
    groups: tuple[int, int],
    factor: float,
) -> ExpertChoice:
    """Choose experts by sigmoids of float32 scores plus a bias [all experts]; weigh them by the sigmoids.

    Experts form `groups[0]` groups. A row chooses from the `groups[1]` groups whose two best experts have the
    highest sums. Weights are multiplied by `factor`. Other arguments: see `route`.
    """
    each, ranked = in_groups(scores, bias, groups)
    chosen = ranked.topk(n_chosen, dim=-1).indices
    weights = each.gather(1, chosen)
    if normed:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return choice_of(weights * factor, chosen, experts)


def in_groups(scores: Tensor, bias: Tensor, groups: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return sigmoids, and values to rank by: sigmoids plus bias, -inf in groups that are not chosen."""
    each = scores.sigmoid()
    ranked = (each + bias).view(len(scores), groups[0], len(bias) // groups[0])
    best = ranked.topk(min(2, ranked.shape[2]), dim=-1).values.sum(-1).topk(groups[1], dim=-1).indices
    is_open = torch.zeros_like(ranked[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
    return each, ranked.masked_fill(~is_open[:, :, None], -torch.inf).flatten(1)


def choice_of(weights: Tensor, chosen: Tensor, experts: range) -> ExpertChoice:
    """Return the choice of experts `chosen` [rows, n] with their weights; `experts`: of this rank."""
    is_own = (chosen >= experts.start) & (chosen < experts.stop)
    group = torch.where(is_own, chosen - experts.start, len(experts)).flatten()
    ends = torch.bincount(group, minlength=len(experts) + 1).cumsum(0)[:-1]
    return ExpertChoice(weights * is_own, group.argsort(stable=True), ends)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row's experts: y [rows * chosen, width], weights [rows, chosen].

    Each y must be finite. The GPU kernel also accepts other values with weight zero.
    """
    return (y.view(*weights.shape, y.shape[1]) * weights[:, :, None]).sum(1)
