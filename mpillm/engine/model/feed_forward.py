"""The feed-forward of a layer: dense, or a mixture of experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.kernels.linear import GroupedLinear, Linear
from mpillm.engine.kernels.ops import Choice, RoundedRows, UnscaledProduct
from mpillm.engine.model.step_parts import Adapters, Ops
from mpillm.engine.shape import composition
from mpillm.engine.shape.composition import CORRECTION, Activation
from mpillm.engine.weights.rank_weights import Weights


class Mlp:
    """The dense feed-forward, split over the TP group: the result is a part of a sum over it."""

    def __init__(
        self, weights: Weights, ops: Ops, gate_up: str, down: str, activation: Activation | None
    ) -> None:
        """Read the two products; without an `activation` they have biases, and GELU between them."""
        self._ops = ops
        self.activation = activation
        self.gate_up = weights.linear(gate_up)
        self.down = weights.linear(down)
        self.biases: tuple[Tensor, Tensor] | None = None  # of one that is not gated
        if activation is None:
            self.biases = weights.bias(gate_up), weights.bias(down)

    def __call__(
        self, x: Any, layer: int = 0, adapters: Adapters | None = None, residual: Tensor | None = None
    ) -> Tensor | UnscaledProduct | None:
        """Compute. With `residual` it may add the result there, and return None."""
        n_rows = len(x.numbers if isinstance(x, RoundedRows) else x)
        few = self.gate_up.few(n_rows) if self.activation == "silu" else None  # which takes SiLU along
        if self.biases is not None:
            first, second = self.biases
            hidden = F.gelu(self._ops.scaled(self.gate_up.unscaled(x)).add_(first), approximate="tanh")
            return self._ops.scaled(self.down.unscaled(hidden)).add_(second)
        if adapters is None and few is not None:
            hidden = few(x, activated=True)
        else:
            gate_up = self.gate_up.unscaled(x)
            if adapters is not None:
                adapters.add(layer, "gate_up", x, gate_up)
            assert self.activation is not None
            hidden = self._ops.gated(gate_up, self.down.rounds(n_rows), self.activation)
        if residual is not None and (few := self.down.few(n_rows)) is not None:
            few(hidden, residual=residual)
            return None
        down = self.down.unscaled(hidden)
        if adapters is not None:
            adapters.add(layer, "down", hidden, down)
        return down

    def rounds(self, n_rows: int) -> bool:
        """As `Linear.rounds`, for its input."""
        return self.gate_up.rounds(n_rows)


class Mixture:
    """A mixture of experts: the best few for each row, weighted; this rank adds its own experts' part."""

    def __init__(
        self, weights: Weights, layer: str, names: composition.Mixture, experts: range, ops: Ops
    ) -> None:
        """`layer`: the prefix of its tensors; `experts`: this rank's."""
        self._ops = ops
        self._experts = experts
        self.n_chosen = names.n_chosen
        self._normed = names.weights_add_up
        self._activation = names.activation
        # With more rows cuBLAS, expert by expert, is faster than one kernel for all, although the host waits
        # for the choice: on a GPU, in steps that are no CUDA graphs.
        self.one_by_one_above = math.inf
        router = f"{layer}.{names.prefix}.{names.router}"
        self._router_bias = weights.bias(router) if names.bias else None
        self._correction: Tensor | None = None  # of scores in groups
        self._shared: Mlp | None = None
        if (groups := names.groups) is not None:
            self.router = Linear(weights.get(router).float())
            self._correction = weights.get(f"{router}.{CORRECTION}")
            self._groups, self._factor = (groups.n_groups, groups.n_chosen), groups.factor
            shared = f"{layer}.{names.prefix}.shared_experts"
            self._shared = Mlp(
                weights, ops, f"{shared}.{names.gate_up}", f"{shared}.{names.down}", names.activation
            )
        else:
            self.router = Linear(weights.get(router))
        self.gate_up, self.down = (
            GroupedLinear(
                [weights.linear(name) for name in each],
                [weights.bias(name) for name in each] if names.bias else None,
            )
            for each in (
                [f"{layer}.{names.prefix}.experts.{i}.{part}" for i in experts]
                for part in (names.gate_up, names.down)
            )
        )

    def __call__(
        self, x: Tensor, layer: int = 0, adapters: Adapters | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Compute; no adapter changes experts, and the result is never added to `residual`."""
        choice = self._chosen(x)
        if len(x) > self.one_by_one_above and not self.gate_up.is_packed:
            combined = self._one_by_one(x, choice)
        else:
            hidden = self._ops.gated(self.gate_up(x, choice), self.down.rounds, self._activation)
            combined = self._ops.combine(self.down(hidden, choice), choice.weights)
        if self._shared is None:
            return combined
        shared = self._shared(x)
        assert shared is not None  # it is not added to a residual
        return combined.to(x.dtype).add_(self._ops.scaled(shared))

    def _chosen(self, x: Tensor) -> Choice:
        if self._correction is not None:
            how = self.n_chosen, self._experts, self._normed, self._groups, self._factor
            return self._ops.route_grouped(self.router(x.float()), self._correction, *how)
        scores = self.router(x)
        if self._router_bias is not None:
            scores = scores + self._router_bias
        return self._ops.route(scores, self.n_chosen, self._experts, self._normed)

    def _one_by_one(self, x: Tensor, choice: Choice) -> Tensor:
        """As all of the above on a GPU, with dense products of one expert after the other.

        What needs no choice on the host is launched before it waits, so that the GPU works meanwhile.
        """
        from mpillm.engine.kernels.expert_kernels import combine
        from mpillm.engine.kernels.fp8_kernels import quantize_rows

        numbers = quantize_rows(x) if self.gate_up.rounds else x
        pairs = choice.order.long().clamp_(0, len(choice.order) - 1)  # undefined after the last end
        numbers = _rows_of(numbers, pairs // self.n_chosen)
        ends = choice.ends.tolist()
        places = torch.empty_like(choice.order)  # of each pair, by experts
        places[pairs[: ends[-1]]] = torch.arange(ends[-1], dtype=places.dtype, device=places.device)
        out, start = x.new_empty(len(pairs), self.down.out_features), 0
        for expert, end in enumerate(ends):
            if end > start:
                gate_up = self.gate_up.of_expert(expert).unscaled(_part(numbers, start, end))
                gate_up = self._biased(gate_up, self.gate_up.biases, expert)
                hidden = self._ops.gated(gate_up, self.down.rounds, self._activation)
                down = self.down.of_expert(expert)(hidden)
                out[start:end] = self._biased(down, self.down.biases, expert)
            start = end
        return combine(out, choice.weights, places)

    def _biased(self, product: Any, biases: Tensor | None, expert: int) -> Any:
        return product if biases is None else self._ops.scaled(product).add_(biases[expert])

    def rounds(self, n_rows: int) -> bool:
        """Always False (see `Linear.rounds`): the router needs floats."""
        return False


def _rows_of(x: Tensor | RoundedRows, rows: Tensor) -> Any:
    if isinstance(x, RoundedRows):
        numbers = x.numbers.view(torch.uint8)[rows].view(x.numbers.dtype)
        return RoundedRows(numbers, x.scales[rows], x.dtype)
    return x[rows]


def _part(x: Tensor | RoundedRows, start: int, end: int) -> Any:
    if isinstance(
        x, RoundedRows
    ):  # whose scales cuBLAS wants at an address of their own: aligned to 16 bytes
        return RoundedRows(x.numbers[start:end], x.scales[start:end].clone(), x.dtype)
    return x[start:end]
