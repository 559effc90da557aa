"""Decode steps of a GPU through the whole engine, with or without guesses to test."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.power_readings import PowerReader, Reading
from disagg.errors import ConfigError
from mpillm.engine.engine import Engine
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.block_allocator import NULL_BLOCK
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.schedule.window_blocks import n_unseen
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.speculation.eagle import EagleDrafter
from mpillm.engine.speculation.speculation import Drafter, Speculation
from mpillm.engine.tensors.staging import SampledTokens

WARM_UP = 4  # steps
_PAUSE_S = 50e-6
_DEADLINE_S = 600.0  # of a batch's steps


class Decoded(NamedTuple):
    """Consecutive steps of the whole engine: medians."""

    step_s: float  # from one step's tokens to the next one's
    host_s: float  # this process's work for a step
    metered_s: float  # how long watts were metered; NaN where the driver does not say, as what follows
    watts: float
    sm_mhz: float  # half way


class Guesses(NamedTuple):
    """What guesses, and how many tokens for each sequence, while at most so many run."""

    drafter: Drafter
    n: int
    max_concurrency: int | None


class _WrongGuesses:
    """Works as `drafter` does and guesses as many tokens as it may, but never what follows."""

    def __init__(self, drafter: Drafter, never: int) -> None:
        self._drafter = drafter
        self._never = never

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        self._drafter.draft(wanted)
        return [[self._never] * most for _, most in wanted]


def decode_steps(
    worker: Worker,
    config: EngineConfig,
    batch: int,
    context: int,
    n_steps: int,
    guesses: Guesses | None = None,
) -> Decoded:
    """Measure steps of `batch` sequences with `context` tokens in the cache.

    With `guesses` each step tests so many for each sequence, of which none is right; none if the batch is
    larger than their `max_concurrency`. For a head the contexts are computed first: it reads what the model
    thought of them.
    """
    info = worker.part.info
    scheduler = dataclasses.replace(config.scheduler, max_batch_size=batch, enable_chunked_context=True)
    engine = Engine(info, scheduler, worker)
    begin: Callable[[Engine, Sequence], None] = _admit
    n_output = WARM_UP + n_steps + 1
    if guesses is not None:
        drafter = _WrongGuesses(guesses.drafter, info.vocab_size - 1)
        watch = guesses.drafter.computed if isinstance(guesses.drafter, EagleDrafter) else None
        limits = config.scheduler.max_num_tokens, guesses.n, guesses.max_concurrency
        engine.speculation = Speculation(drafter, engine.scheduler, *limits, watch)
        n_output += guesses.n
        if watch is not None:
            begin = Engine.add
            n_output += context_steps(config, batch, context)
    sequences = [Sequence(i, [1 + i] * context, n_output, 0, SamplingParams()) for i in range(batch)]
    for sequence in sequences:
        begin(engine, sequence)
    end = time.perf_counter() + _DEADLINE_S
    while not all(sequence.output for sequence in sequences):
        _go_on(engine, batch, end)
    power = PowerReader()
    arrivals: list[float] = []
    host_times: list[float] = []
    readings: list[Reading] = []
    host_s, n_before = 0.0, len(sequences[0].output)
    seen = n_before
    while not engine.is_idle():
        if not engine.has_work():
            time.sleep(_PAUSE_S)
        began = time.perf_counter()
        _go_on(engine, batch, end)
        host_s += time.perf_counter() - began
        if len(sequences[0].output) == seen:
            continue
        seen = len(sequences[0].output)
        arrivals.append(time.perf_counter())
        host_times.append(host_s)
        host_s = 0.0
        if seen - n_before in (WARM_UP, WARM_UP + n_steps // 2, WARM_UP + n_steps):
            readings.append(power.read())
    metered_s = watts = sm_mhz = math.nan
    if len(readings) == 3 and not math.isnan(readings[0].joules):
        first, half_way, last = readings
        metered_s, watts, sm_mhz = last.at - first.at, last.watts_since(first), half_way.sm_mhz
    steps = [b - a for a, b in itertools.pairwise(arrivals)][WARM_UP - 1 :]
    return Decoded(
        statistics.median(steps), statistics.median(host_times[WARM_UP:]), metered_s, watts, sm_mhz
    )


def _go_on(engine: Engine, batch: int, end: float) -> None:
    if time.perf_counter() > end:
        raise ConfigError(f"steps of {batch} sequences did not end within {_DEADLINE_S:g} s")
    engine.step()


def context_steps(config: EngineConfig, batch: int, context: int) -> int:
    """Return in how many steps at most the contexts of a batch are computed.

    At most half of each step is decode.
    """
    return 1 + math.ceil(2 * batch * context / config.scheduler.max_num_tokens)


def _admit(engine: Engine, sequence: Sequence) -> None:
    """Begin in generation, as if handed over by a context instance."""
    sequence.output, sequence.n_cached = [2 + sequence.id], len(sequence.prompt)
    blocks = engine.scheduler.reserve(len(sequence.prompt), sequence.max_cached)
    assert blocks is not None
    sequence.blocks = blocks
    engine.scheduler.admit(sequence)


def _window_tables(part: ModelPart, n_cached: int, ends: list[int], size: int) -> list[list[int]]:
    """Return the window blocks of sequences with so many tokens that grow to `ends`, if the model has any."""
    if part.window_cache is None:
        return []
    blocks, n_gone = itertools.count(1), n_unseen(n_cached, part.info.config.partial_window, size)
    return [[NULL_BLOCK] * n_gone + list(itertools.islice(blocks, -(-end // size) - n_gone)) for end in ends]


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

    window_tables = _window_tables(worker.part, context, ends, tokens_per_block)

    def step(is_first: bool) -> Step:
        spans = [
            Span(
                slot,
                context,
                n,
                0,
                table,
                n_window_blocks_sent=0,
                window_blocks=window_tables[slot] if window_tables else [],
            )
            if is_first
            else Span(slot, context, n, len(table))
            for slot, (n, table) in enumerate(zip(counts, tables, strict=True))
        ]
        return Step(spans, [1] * sum(counts), list(itertools.accumulate(counts, initial=-1))[1:])

    times, host_times = [], []
    before: SampledTokens | None = None
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
