"""The engine on a CPU for ``benchmarks engine``: answers, and the matrix products of their steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mpillm.engine.engine import Engine
from mpillm.engine.kernels.linear import Linear
from mpillm.engine.kernels.ops import choice_of
from mpillm.engine.model.feed_forward import ExpertMixture, GatedMlp, PlainMlp
from mpillm.engine.model.projections import GroupedProjections
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Step
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.speculation.start_speculation import start_speculation
from mpillm.engine.tensors.staging import SampledTokens

_SQUARE = 2048  # rows, inputs and outputs of a large product


class _Product(NamedTuple):
    multiply: Callable[[Tensor], Tensor]
    inputs: int
    outputs: int  # for each row of its input
    rows: int


class _CountingWorker(Worker):
    def __init__(self, plain: Worker) -> None:
        super().__init__(plain.part, plain.steps)
        self.counts: list[tuple[int, int]] = []  # of each step: rows, rows with logits

    def run(self, step: Step) -> SampledTokens | None:
        self.counts.append((len(step.tokens), len(step.logits_rows)))
        return super().run(step)


class CountedEngine:
    """An engine on a CPU that counts the rows of its steps."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        scheduler = config.scheduler
        worker = _CountingWorker(Worker.on_cpu(config, info, Groups()))
        self._steps = worker.counts
        self._engine = Engine(info, scheduler, worker)
        if config.speculative_config:
            self._engine.speculation = start_speculation(config, worker, self._engine.scheduler)

    def answer(self, prompts: list[list[int]], n_output: int) -> list[list[int]]:
        sequences = self._added(prompts, n_output)
        while not self._engine.is_idle():
            self._engine.step()
        return [sequence.output for sequence in sequences]

    def decode_ms(self, prompts: list[list[int]], n_output: int) -> float:
        """Return the median time of a step that adds a token to all answers; NaN if they have one token."""
        self._added(prompts, n_output)
        times = []
        while not self._engine.is_idle():
            n_before, started = len(self._steps), time.perf_counter()
            self._engine.step()
            if self._steps[n_before:] == [(len(prompts), len(prompts))]:
                times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times) if times else math.nan

    def _added(self, prompts: list[list[int]], n_output: int) -> list[Sequence]:
        self._steps.clear()
        if (speculation := self._engine.speculation) is not None:
            speculation.accepted_tokens = speculation.drafted_tokens = 0
        sequences = [
            Sequence(i, prompt, n_output, n_output, SamplingParams()) for i, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            self._engine.add(sequence)
        return sequences

    def draft_counts(self) -> tuple[int, int]:
        """Return the accepted and all draft tokens of the last `answer`."""
        speculation = self._engine.speculation
        assert speculation is not None
        return speculation.accepted_tokens, speculation.drafted_tokens

    def products(self) -> float:
        """Return the seconds of the last `answer`'s matrix products with weights, computed one by one."""
        dtype = self._engine.worker.part.dtype
        products = list(self._products())  # not timed: includes the choice of experts
        max_rows: dict[int, int] = {}  # by inputs
        for each in products:
            max_rows[each.inputs] = max(each.rows, max_rows.get(each.inputs, 0))
        inputs = {width: torch.randn(rows, width).to(dtype) for width, rows in max_rows.items()}
        with torch.inference_mode():
            started = time.perf_counter()
            for each in products:
                each.multiply(inputs[each.inputs][: each.rows])
            return time.perf_counter() - started

    def n_operations(self) -> int:
        """Return the floating-point operations of these products; 0 if a layer has other products."""
        layers = self._engine.worker.part.model.layers
        if not all(isinstance(layer.attention, GroupedProjections) for layer in layers):
            return 0
        return sum(2 * each.rows * each.inputs * each.outputs for each in self._products())

    def best_rate(self) -> float:
        """Return the best GFLOP/s of three large square products with weights."""
        dtype = self._engine.worker.part.dtype
        with torch.inference_mode():
            weight, x = torch.randn(2, _SQUARE, _SQUARE).to(dtype)
            linear = Linear(weight)
            times = []
            for _ in range(3):
                started = time.perf_counter()
                linear(x)
                times.append(time.perf_counter() - started)
        return 2 * _SQUARE**3 / min(times) / 1e9

    def _products(self) -> Iterator[_Product]:
        """Yield each product with weights of the last `answer`."""
        model = self._engine.worker.part.model
        assert model.lm_head is not None
        for rows, logits_rows in self._steps:
            for layer in model.layers:
                last = logits_rows if layer is model.layers[-1] else rows
                attention, feed_forward = layer.attention, layer.feed_forward
                assert isinstance(attention, GroupedProjections)
                yield _product(attention.product, rows)
                yield _product(attention.output.product, last)
                if isinstance(feed_forward, ExpertMixture):
                    yield from _products_of_experts(feed_forward, last)
                    continue
                assert isinstance(feed_forward, (GatedMlp, PlainMlp))
                up = feed_forward.gate_up if isinstance(feed_forward, GatedMlp) else feed_forward.up
                yield from (_product(linear, last) for linear in (up, feed_forward.down.product))
            yield _product(model.lm_head, logits_rows)


def _product(linear: Linear, rows: int) -> _Product:
    return _Product(linear, linear.in_features, linear.out_features, rows)


def _products_of_experts(mixture: ExpertMixture, rows: int) -> Iterator[_Product]:
    """Yield a mixture's products, with random experts for each row."""
    n_experts, n_chosen = mixture.router.out_features, mixture.n_chosen
    chosen = torch.rand(rows, n_experts).topk(n_chosen).indices
    choice = choice_of(torch.ones(rows, n_chosen), chosen, range(n_experts))
    yield _product(mixture.router, rows)
    for grouped, pairs in ((mixture.gate_up, n_chosen), (mixture.down, 1)):  # for each row of its input
        multiply = partial(grouped, choice=choice)
        yield _Product(multiply, grouped.in_features, pairs * grouped.out_features, rows * n_chosen // pairs)
