"""Roofline model of a GPU (Williams, Waterman and Patterson, 2009), and its energy model.

The time of an operation is at least its bytes over the memory bandwidth, and its floating-point operations
over the peak of their type. A GPU at its power limit is also bounded by energy. On an H200, the energy of
alternating reads and products is the sum of both, by bytes and operations, within 2 %
(docs/explain/engine.md; see Choi et al., 2013, "A roofline model of energy").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.shape.tensor_shapes import tensor_shapes

if TYPE_CHECKING:
    from mpillm.engine.shape.model_config import ModelConfig


class Work(NamedTuple):
    """Minimum work of an operation."""

    n_bytes: float  # read and written
    n_flops: float
    in_floats: bool  # not in the type of quantized weights


@dataclass(frozen=True)
class Roofline:
    """Bandwidth and arithmetic peak of a GPU."""

    bandwidth: float  # bytes/s, reading
    peak: float  # FLOP/s of products with the layers' weights
    peak_in_floats: float  # of products with the head, which is never quantized

    def seconds(self, *works: Work) -> float:
        """Return the minimum time of operations, one after the other."""
        return sum(max(work.n_bytes / self.bandwidth, self._arithmetic_s(work)) for work in works)

    def _arithmetic_s(self, work: Work) -> float:
        return work.n_flops / (self.peak_in_floats if work.in_floats else self.peak)


@dataclass(frozen=True)
class Energy:
    """Energy model of a GPU: constant power, and energy per byte and operation."""

    idle_watts: float  # with its clocks up
    per_byte: float  # joules, read
    per_flop: float  # of products with the layers' weights
    per_flop_in_floats: float

    def joules(self, seconds: float, works: Iterable[Work]) -> float:
        """Return the minimum energy of operations within `seconds`."""
        return self.idle_watts * seconds + sum(map(self._joules, works))

    def _joules(self, work: Work) -> float:
        per_flop = self.per_flop_in_floats if work.in_floats else self.per_flop
        return work.n_bytes * self.per_byte + work.n_flops * per_flop


def sample_work(
    model: ModelConfig,
    lengths: tuple[int, int],
    at_once: float,
    layer_bytes: float,
    kv_dtype: str,
    in_floats: bool = False,
) -> list[Work]:
    """Return the minimum work of a GPU for a sample in a batch of `at_once`.

    It includes the layers' products, the head's, and attention of prompt and answer. It excludes norms,
    sampling, and the steps of a batch that is not full. Reading weights only counts for decode steps, not for
    prompts.

    Args:
        lengths: Tokens in and out.
        layer_bytes: Bytes of all layers' weights.
        in_floats: Whether the layers' products are not in the type of quantized weights.
    """
    n_in, n_out = lengths
    shapes = tensor_shapes(model)
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    of_row = layers - experts * (1 - model.n_experts_per_token / model.n_experts) if experts else layers
    head = model.vocab_size * model.hidden_size
    n_steps = n_out / at_once  # a sample's share of them
    width, kv_bytes = model.n_heads * model.head_dim, model.kv_bytes_per_token(kv_dtype) / model.n_layers
    works = [
        Work(n_steps * layer_bytes, 2 * of_row * (n_in + n_out), in_floats),
        Work(n_steps * head * N_BYTES[model.dtype], 2 * head * n_out, in_floats=True),
    ]
    for window, n_layers in Counter(map(model.window, range(model.n_layers))).items():
        n_visible = window or n_in + n_out  # tokens that a token attends to at most
        rows = min(n_in, n_visible)
        # Half of a square, and full windows for the remaining tokens.
        of_prompt = rows**2 / 2 + (n_in - rows) * n_visible
        cached = sum(min(n, n_visible) for n in range(n_in, n_in + n_out))  # read by the decode steps
        works.append(Work(0, 4 * n_layers * width * of_prompt, in_floats=True))
        works.append(Work(n_layers * cached * kv_bytes, 4 * n_layers * width * cached, in_floats=True))
    return works
