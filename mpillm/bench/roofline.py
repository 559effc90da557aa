"""What a GPU's memory and arithmetic allow at most (Williams, Waterman and Patterson, 2009).

No operation is faster than the larger of its bytes over the memory's bandwidth and its floating-point
operations over the peak of their type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpillm.engine.dtypes import N_BYTES

if TYPE_CHECKING:
    from mpillm.engine.model.model_config import ModelConfig


@dataclass(frozen=True)
class Part:
    """An operation in all layers."""

    name: str
    work: Callable[[], None]
    n_bytes: float  # that it reads and writes at least
    n_flops: float
    in_floats: bool  # not in the type of quantised weights


@dataclass(frozen=True)
class Roofline:
    """What a GPU reaches."""

    bandwidth: float  # bytes/s, reading
    peak: float  # FLOP/s of products with the layers' weights
    peak_in_floats: float  # of products with the head, which is never quantised

    def seconds(self, part: Part) -> float:
        """Return the least time for a part."""
        return self.least_s(part.n_bytes, part.n_flops, part.in_floats)

    def limit(self, part: Part) -> str:
        """Return what limits it there."""
        by_memory = part.n_bytes / self.bandwidth >= self._arithmetic_s(part.n_flops, part.in_floats)
        return "memory" if by_memory else "arithmetic"

    def least_s(self, n_bytes: float, n_flops: float, in_floats: bool) -> float:
        """Return the least time for an operation."""
        return max(n_bytes / self.bandwidth, self._arithmetic_s(n_flops, in_floats))

    def _arithmetic_s(self, n_flops: float, in_floats: bool) -> float:
        return n_flops / (self.peak_in_floats if in_floats else self.peak)


def least_sample_s(
    roof: Roofline,
    model: ModelConfig,
    lengths: tuple[int, int],
    at_once: float,
    weight_bytes: int,
    kv_dtype: str,
) -> float:
    """Return the GPU seconds that a sample takes at least in a batch of `at_once`.

    They are the seconds of the layers' products, the head's, and attention, one after the other; all else
    (norms, the choice of tokens, the steps of a batch that is not full) takes none. Prompts are counted as if
    their rows never needed weights to be read for them alone. `lengths`: tokens in
    and out; `weight_bytes`: of one of a layer's weights.
    """
    n_in, n_out = lengths
    shapes = model.tensors()
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    of_row = layers - experts * (1 - model.n_experts_per_token / model.n_experts) if experts else layers
    head = model.vocab_size * model.hidden_size
    n_steps = n_out / at_once  # a sample's share of them
    width = model.n_heads * model.head_dim * model.n_layers
    cached = sum(range(n_in, n_in + n_out))  # tokens that its decode steps read
    held = model.kv_bytes_per_token(kv_dtype)
    return (
        roof.least_s(n_steps * layers * weight_bytes, 2 * of_row * (n_in + n_out), in_floats=False)
        + roof.least_s(n_steps * head * N_BYTES[model.dtype], 2 * head * n_out, in_floats=True)
        + roof.least_s(0, 2 * width * n_in**2, in_floats=True)  # attention of the prompt
        + roof.least_s(cached * held, 4 * width * cached, in_floats=True)  # of the answer
    )
