"""Protocols of the parts of a step that are not the model's: attention, and the operations of a device."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from mpillm.engine.kernels.ops import ExpertChoice, Partial, UnscaledProduct
from mpillm.engine.shape.composition import Activation


class Attention(Protocol):
    """Attention of a step: qkv [rows, heads + 2 * kv_heads, head_dim] to [rows, heads * head_dim].

    It rotates queries and keys by their positions, stores keys and values, and attends. On a GPU qkv may be
    `UnscaledProduct`.
    """

    def __call__(self, layer: int, qkv: Any) -> Tensor: ...


class Ops(Protocol):
    """See `ops`."""

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | UnscaledProduct | Partial | None,
        weight: Tensor,
        eps: float,
        rounds: bool = False,
    ) -> Any: ...

    def gated(
        self, gate_up: Tensor | UnscaledProduct, rounds: bool = False, activation: Activation = "silu"
    ) -> Any: ...

    def scaled(self, product: Tensor | UnscaledProduct) -> Tensor: ...

    def route(self, scores: Tensor, n_chosen: int, experts: range, normed: bool = True) -> ExpertChoice: ...

    def route_grouped(
        self,
        scores: Tensor,
        bias: Tensor,
        n_chosen: int,
        experts: range,
        normed: bool,
        groups: tuple[int, int],
        factor: float,
    ) -> ExpertChoice: ...

    def combine(self, y: Tensor, weights: Tensor) -> Tensor: ...
