"""Protocols for parts of a step outside the model: attention, and a device's steps and operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mpillm.engine.kernels.ops import ExpertChoice, Partial, UnscaledProduct
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.composition import Activation

# Receives each layer of this rank as soon as the cache has the layer's keys and values.
LayerStored = Callable[[int], None] | None


class LayerKind(NamedTuple):
    """Properties of a layer's attention."""

    window: int = 0  # tokens that a token sees, itself included; 0: all before it
    first_rotation: int = 0  # index in the model's table of the rotation of position 0
    sinks: Tensor | None = None  # float32 [heads]: a score in the softmax's sum that adds no value
    rank: int = 0  # number of a key's first values that are also the value (see `latent`); 0: separate


PLAIN = LayerKind()


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


class Steps(Protocol):
    """Computation of steps (`CpuSteps`, `GpuSteps`), with the state of each slot on the device."""

    n_ahead: int  # steps that may start before the previous step's tokens are read

    def forward(
        self, step: Step, layer_stored: LayerStored = None, all_rows: bool = False, layerwise: bool = False
    ) -> Tensor:
        """Return the rows `Step.logits_rows` for `Decoder.logits`, or all rows; see `Decoder.forward`.

        A stage before the last returns all rows for the next stage. `layerwise`: one call for each layer.
        """
        ...

    def feed(self, tokens: Tensor) -> None:
        """Take the tokens that were chosen from the last `forward`: the next step may need them."""
        ...

    def warm_up(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        """Run every kind of step (see `Worker.warm_up`). `run` is `Worker.run`."""
        ...
