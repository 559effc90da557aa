"""The embedded engine as ``bench engine`` runs it on a CPU: answers, and the matrix products behind them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

import torch

from mpillm.config.core_config import CoreConfig
from mpillm.engine.engine import Engine
from mpillm.engine.engine_limits import EngineLimits
from mpillm.engine.model.feed_forward import Mlp
from mpillm.engine.model.linear import Linear
from mpillm.engine.model.model_info import ModelInfo
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.sampler import SamplingParams
from mpillm.engine.sequence import Sequence
from mpillm.engine.speculation.start_speculation import start_speculation
from mpillm.engine.staging import Sampled
from mpillm.engine.step import Step
from mpillm.engine.worker import Worker

_SQUARE = 2048  # rows, inputs and outputs of a large product


class _CountingWorker(Worker):
    def __init__(self, plain: Worker) -> None:
        super().__init__(plain.part, plain.steps)
        self.counts: list[tuple[int, int]] = []  # of each step: rows, rows with logits

    def run(self, step: Step) -> Sampled | None:
        self.counts.append((len(step.tokens), len(step.wanted)))
        return super().run(step)


class CountedEngine:
    """The engine on a CPU, which counts what its steps compute."""

    def __init__(self, core: CoreConfig, info: ModelInfo) -> None:
        limits = EngineLimits(core.max_batch_size, core.max_num_tokens, core.tokens_per_block)
        worker = _CountingWorker(Worker.on_cpu(info, core.tokens_per_block, Groups(), dummy=False))
        self._steps = worker.counts
        self._engine = Engine(info, limits, worker)
        if core.speculative_config:
            self._engine.speculation = start_speculation(core, worker, self._engine.scheduler)

    def answer(self, prompts: list[list[int]], n_output: int) -> list[list[int]]:
        sequences = self._added(prompts, n_output)
        while not self._engine.is_idle():
            self._engine.step()
        return [sequence.output for sequence in sequences]

    def decode_ms(self, prompts: list[list[int]], n_output: int) -> float:
        """Return the median time of a step in which all answers grow; NaN if they have one token."""
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

    def guesses(self) -> tuple[int, int]:
        """Return how many of the last `answer`'s guesses were right, and how many it made."""
        speculation = self._engine.speculation
        assert speculation is not None
        return speculation.accepted_tokens, speculation.drafted_tokens

    def products(self) -> float:
        """Return the seconds for the last `answer`'s matrix products with weights, alone and one by one."""
        dtype = self._engine.worker.part.dtype
        widths = {linear.in_features for linear, _ in self._products()}
        longest = max(rows for rows, _ in self._steps)
        inputs = {width: torch.randn(longest, width).to(dtype) for width in widths}
        with torch.inference_mode():
            started = time.perf_counter()
            for linear, n in self._products():
                linear(inputs[linear.in_features][:n])
            return time.perf_counter() - started

    def n_operations(self) -> int:
        """Return the floating-point operations of these."""
        return sum(2 * n * linear.in_features * linear.out_features for linear, n in self._products())

    def best_rate(self) -> float:
        """Return the GFLOP/s of a large square product with weights, the best of three."""
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

    def _products(self) -> Iterator[tuple[Linear, int]]:
        """Yield each product with weights of the last `answer`, and its rows."""
        model = self._engine.worker.part.model
        layers = [
            (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            for layer in model.layers
            if isinstance(layer.mlp, Mlp)
        ]
        assert model.lm_head is not None
        for rows, wanted in self._steps:
            for linears in layers:
                last = wanted if linears is layers[-1] else rows
                yield from zip(linears, (rows, last, last, last), strict=True)
            yield model.lm_head, wanted
