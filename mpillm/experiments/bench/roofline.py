"""What a GPU's memory and arithmetic allow at most (Williams, Waterman and Patterson, 2009), and its power.

No operation is faster than the larger of its bytes over the memory's bandwidth and its floating-point
operations over the peak of their type. And a GPU at its limit of power does no more than that pays for: on an
H200 reading and products in turns draw what each draws alone, by the byte and by the operation, within 2 %
(docs/explain/engine.md; as in Choi et al., 2013, "A roofline model of energy").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.shape.tensor_shapes import tensor_shapes

if TYPE_CHECKING:
    from mpillm.engine.shape.model_config import ModelConfig


class Work(NamedTuple):
    """What an operation does at least."""

    n_bytes: float  # read and written
    n_flops: float
    in_floats: bool  # not in the type of quantised weights


@dataclass(frozen=True)
class Part:
    """An operation in all layers."""

    name: str
    run: Callable[[], None]
    work: Work


@dataclass(frozen=True)
class Roofline:
    """What a GPU reaches."""

    bandwidth: float  # bytes/s, reading
    peak: float  # FLOP/s of products with the layers' weights
    peak_in_floats: float  # of products with the head, which is never quantised

    def seconds(self, *works: Work) -> float:
        """Return the least time for operations, one after the other."""
        return sum(max(work.n_bytes / self.bandwidth, self._arithmetic_s(work)) for work in works)

    def limit(self, work: Work) -> str:
        """Return what limits it there."""
        return "memory" if work.n_bytes / self.bandwidth >= self._arithmetic_s(work) else "arithmetic"

    def _arithmetic_s(self, work: Work) -> float:
        return work.n_flops / (self.peak_in_floats if work.in_floats else self.peak)


@dataclass(frozen=True)
class Energy:
    """What a GPU draws: always, and more for all that it does."""

    idle_watts: float  # with its clocks up
    per_byte: float  # joules, read
    per_flop: float  # of products with the layers' weights
    per_flop_in_floats: float

    def joules(self, seconds: float, works: Iterable[Work]) -> float:
        """Return the least energy for operations that take so long."""
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
    """Return what a GPU does at least for a sample in a batch of `at_once`.

    It is the layers' products, the head's, and attention of prompt and answer; all else (norms, the choice of
    tokens, the steps of a batch that is not full) is left out. Prompts are counted as if their rows never
    needed weights to be read for them alone. `lengths`: tokens in and out; `layer_bytes`: of all layers'
    weights; `in_floats`: whether their products are.
    """
    n_in, n_out = lengths
    shapes = tensor_shapes(model)
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    of_row = layers - experts * (1 - model.n_experts_per_token / model.n_experts) if experts else layers
    head = model.vocab_size * model.hidden_size
    n_steps = n_out / at_once  # a sample's share of them
    width, held = model.n_heads * model.head_dim, model.kv_bytes_per_token(kv_dtype) / model.n_layers
    works = [
        Work(n_steps * layer_bytes, 2 * of_row * (n_in + n_out), in_floats),
        Work(n_steps * head * N_BYTES[model.dtype], 2 * head * n_out, in_floats=True),
    ]
    for window, n_layers in Counter(map(model.window, range(model.n_layers))).items():
        most = window or n_in + n_out  # tokens that one sees
        rows = min(n_in, most)
        # Half of a square, and what a window lets see of the rest.
        of_prompt = rows**2 / 2 + (n_in - rows) * most
        cached = sum(min(n, most) for n in range(n_in, n_in + n_out))  # that the decode steps read
        works.append(Work(0, 4 * n_layers * width * of_prompt, in_floats=True))
        works.append(Work(n_layers * cached * held, 4 * n_layers * width * cached, in_floats=True))
    return works
