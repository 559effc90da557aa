"""Steps of a GPU in which sequences generate beside a piece of a prompt, as in every test but their ends."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import NamedTuple

from mpillm.engine.staging import Sampled
from mpillm.engine.step import Span, Step
from mpillm.engine.worker import Worker

_STEPS = 12
_WARM_UP = 3


class MixedStep(NamedTuple):
    """Consecutive steps: medians."""

    step_s: float  # from one step's tokens to the next one's
    host_s: float  # until all kernels of a step are launched


def mixed_step(worker: Worker, batch: int, context: int, piece: int, tokens_per_block: int) -> MixedStep:
    """Measure steps of `batch` sequences with `context` tokens in the cache.

    All but one generate; that one computes `piece` tokens.
    """
    ends = [context + 1] * (batch - 1) + [context + piece]
    counts = [1] * (batch - 1) + [piece]
    blocks = itertools.count(1)
    tables = [list(itertools.islice(blocks, -(-end // tokens_per_block))) for end in ends]

    def step(is_first: bool) -> Step:
        spans = [
            Span(slot, context, n, 0 if is_first else len(table), table if is_first else [])
            for slot, (n, table) in enumerate(zip(counts, tables, strict=True))
        ]
        return Step(spans, [1] * sum(counts), list(itertools.accumulate(counts, initial=-1))[1:])

    times, host_times = [], []
    before: Sampled | None = None
    began = time.perf_counter()
    for i in range(_WARM_UP + _STEPS):
        launched = time.perf_counter()
        sampled = worker.run(step(i == 0))
        host_times.append(time.perf_counter() - launched)
        if before is not None:  # as the engine: a step runs while the host reads the tokens before it
            while not before.ready():
                pass
            before.take()
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        before = sampled
    return MixedStep(statistics.median(times[_WARM_UP:]), statistics.median(host_times[_WARM_UP:]))
