"""The feed-forward of a layer: dense, or a mixture of experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpillm.engine.kernels.linear import GroupedLinear, Linear
from mpillm.engine.kernels.ops import ExpertChoice, RoundedRows, UnscaledProduct
from mpillm.engine.model.projections import OutputProduct
from mpillm.engine.model.step_parts import Ops
from mpillm.engine.shape.composition import CORRECTION, Activation, Mixture
from mpillm.engine.weights.rank_weights import Weights


class GatedMlp:
    """down(activation(gate(x)) * up(x)): this rank's part of a sum over the TP group."""

    def __init__(self, gate_up: Linear, down: OutputProduct, activation: Activation, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._ops = ops

    def __call__(self, x: Any, onto: Tensor | None = None) -> Tensor | UnscaledProduct | None:
        """Return the result. With `onto`, it may instead add the result there, and return None."""
        n_rows = len(x.numbers if isinstance(x, RoundedRows) else x)
        # With few rows the product applies SiLU to its result.
        few = self.gate_up.few(n_rows) if self.activation == "silu" else None
        if few is not None:
            hidden = few(x, activated=True)
        else:
            rounds = self.down.product.rounds(n_rows)
            hidden = self._ops.gated(self.gate_up.unscaled(x), rounds, self.activation)
        return self.down(hidden, onto)

    def rounds(self, n_rows: int) -> bool:
        """Return whether the first product accepts `n_rows` rounded rows (see `Linear.rounds`)."""
        return self.gate_up.rounds(n_rows)


class PlainMlp:
    """down(gelu(up(x))) with biases: this rank's part of a sum over the TP group."""

    def __init__(self, up: Linear, bias: Tensor, down: OutputProduct, ops: Ops) -> None:
        self.up, self.bias = up, bias
        self.down = down
        self._ops = ops

    def __call__(self, x: Any, onto: Tensor | None = None) -> Tensor | UnscaledProduct | None:
        """Compute; the result is never added to `onto`."""
        hidden = F.gelu(self._ops.scaled(self.up.unscaled(x)).add_(self.bias), approximate="tanh")
        return self.down(hidden)

    def rounds(self, n_rows: int) -> bool:
        """Return whether the first product accepts `n_rows` rounded rows (see `Linear.rounds`)."""
        return self.up.rounds(n_rows)


class ExpertMixture:
    """A mixture of experts: the best few for each row, weighted; this rank computes its own experts' part."""

    def __init__(self, weights: Weights, prefix: str, parts: Mixture, experts: range, ops: Ops) -> None:
        """`prefix`: of its tensors; `experts`: this rank's."""
        self._ops = ops
        self._experts = experts
        self._parts = parts
        self.n_chosen = parts.n_chosen
        # For a GPU, in steps that are not CUDA graphs: with more rows, cuBLAS, expert by expert, is faster
        # than one kernel for all experts, although the host waits for the choice.
        self.one_by_one_above = math.inf
        router = f"{prefix}.{parts.router}"
        self._router_bias = weights.bias(router) if parts.bias else None
        self._correction: Tensor | None = None  # bias of the scores of grouped experts
        self._shared: GatedMlp | None = None
        if parts.groups is not None:
            self.router = Linear(weights.get(router).float())
            self._correction = weights.get(f"{router}.{CORRECTION}")
            gate_up, down = (
                weights.linear(f"{prefix}.shared_experts.{name}") for name in (parts.gate_up, parts.down)
            )
            self._shared = GatedMlp(gate_up, OutputProduct(down, None, ops), parts.activation, ops)
        else:
            self.router = Linear(weights.get(router))
        self.gate_up, self.down = (
            GroupedLinear(
                [weights.linear(name) for name in names],
                [weights.bias(name) for name in names] if parts.bias else None,
            )
            for names in (
                [f"{prefix}.experts.{i}.{product}" for i in experts]
                for product in (parts.gate_up, parts.down)
            )
        )

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Compute; the result is never added to `onto`."""
        choice = self._chosen(x)
        if len(x) > self.one_by_one_above and not self.gate_up.is_packed:
            combined = self._one_by_one(x, choice)
        else:
            hidden = self._ops.gated(self.gate_up(x, choice), self.down.rounds, self._parts.activation)
            combined = self._ops.combine(self.down(hidden, choice), choice.weights)
        if self._shared is None:
            return combined
        shared = self._shared(x)
        assert shared is not None
        return combined.to(x.dtype).add_(self._ops.scaled(shared))

    def _chosen(self, x: Tensor) -> ExpertChoice:
        common = self.n_chosen, self._experts, self._parts.weights_add_up
        if self._correction is not None:
            groups = self._parts.groups
            assert groups is not None
            how = *common, (groups.n_groups, groups.n_chosen), groups.factor
            return self._ops.route_grouped(self.router(x.float()), self._correction, *how)
        scores = self.router(x)
        if self._router_bias is not None:
            scores = scores + self._router_bias
        return self._ops.route(scores, *common)

    def _one_by_one(self, x: Tensor, choice: ExpertChoice) -> Tensor:
        """Compute on a GPU with dense products, one expert after the other.

        Kernels that do not need the choice on the host are launched before the host waits for the choice.
        """
        from mpillm.engine.kernels.expert_kernels import combine
        from mpillm.engine.kernels.fp8_kernels import quantize_rows

        numbers = quantize_rows(x) if self.gate_up.rounds else x
        pairs = choice.order.long().clamp_(0, len(choice.order) - 1)  # undefined after the last end
        numbers = _rows_of(numbers, pairs // self.n_chosen)
        ends = choice.ends.tolist()
        places = torch.empty_like(choice.order)  # of each pair, in the experts' order
        places[pairs[: ends[-1]]] = torch.arange(ends[-1], dtype=places.dtype, device=places.device)
        out, start = x.new_empty(len(pairs), self.down.out_features), 0
        for expert, end in enumerate(ends):
            if end > start:
                gate_up = self.gate_up.of_expert(expert).unscaled(_part(numbers, start, end))
                gate_up = self._biased(gate_up, self.gate_up.biases, expert)
                hidden = self._ops.gated(gate_up, self.down.rounds, self._parts.activation)
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
    if isinstance(x, RoundedRows):  # a copy, because cuBLAS requires scales aligned to 16 bytes
        return RoundedRows(x.numbers[start:end], x.scales[start:end].clone(), x.dtype)
    return x[start:end]
