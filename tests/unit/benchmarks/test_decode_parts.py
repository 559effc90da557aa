"""The parts of a decode step, their roofline and energy, with plain kernels (GPU: `benchmarks decode`)."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.decode import _explained
from benchmarks.decode_parts import CudaGraphs, LayerOp, Loads, Rate, Rates, decode_parts, measure_rates
from benchmarks.decode_steps import Decoded
from benchmarks.power_readings import PowerReader, Reading
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.shape.read_config import load_model_config
from mpillm.experiments.bench.roofline import Energy, Roofline, Work, sample_work
from tests.helpers import plain_kernels
from tests.helpers.torch_cores import make_core

BATCH, N_TOKENS = 6, 40


@pytest.fixture(params=["tiny-llama", "tiny-mixtral"])
def part(request: pytest.FixtureRequest) -> ModelPart:
    core = make_core(request.param, dtype="float32")
    return core.engine.worker.part


def test_what_each_part_reads_and_computes(part: ModelPart) -> None:
    parts = {one.name: one for one in decode_parts(part, BATCH, N_TOKENS, plain_kernels)}
    with torch.inference_mode():
        for one in parts.values():
            one.run()
    c = part.info.config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    rows_per_expert = c.n_experts_per_token if c.n_experts else 1
    flops = {
        "attention": 4 * BATCH * N_TOKENS * q * c.n_layers,
        "qkv": 2 * BATCH * c.hidden_size * (q + 2 * kv) * c.n_layers,
        "o": 2 * BATCH * q * c.hidden_size * c.n_layers,
        "gate_up": 2 * BATCH * rows_per_expert * c.hidden_size * 2 * c.intermediate_size * c.n_layers,
        "down": 2 * BATCH * rows_per_expert * c.hidden_size * c.intermediate_size * c.n_layers,
        "head": 2 * BATCH * c.hidden_size * c.vocab_size,
    }
    if c.n_experts:
        flops["router"] = 2 * BATCH * c.hidden_size * c.n_experts * c.n_layers
    assert {name: one.work.n_flops for name, one in parts.items()} == flops
    assert {name for name, one in parts.items() if one.work.in_floats} == {
        "attention",
        "head",
        "router",
    } & flops.keys()
    assert parts["o"].work.n_bytes == 4 * c.n_layers * (q * c.hidden_size + BATCH * (q + c.hidden_size))
    cached = 4 * c.n_layers * 2 * BATCH * N_TOKENS * kv
    assert parts["attention"].work.n_bytes == cached + 4 * c.n_layers * BATCH * (2 * q + 2 * kv)
    all_experts = 4 * c.n_layers * c.n_experts * 3 * c.hidden_size * c.intermediate_size
    if c.n_experts:
        assert parts["gate_up"].work.n_bytes + parts["down"].work.n_bytes < all_experts, (
            "not every expert is chosen"
        )


def _nothing() -> None:
    pass


def test_the_roofline_names_the_limit() -> None:
    roofline = Roofline(bandwidth=100.0, peak=1000.0, peak_in_floats=500.0)
    reads = LayerOp("reads", _nothing, Work(200.0, 10.0, in_floats=False))
    computes = LayerOp("computes", _nothing, Work(1.0, 5000.0, in_floats=False))
    head = LayerOp("head", _nothing, Work(1.0, 5000.0, in_floats=True))
    energy = Energy(idle_watts=20.0, per_byte=2.0, per_flop=0.1, per_flop_in_floats=0.2)
    assert (roofline.seconds(reads.work), reads.limit(roofline)) == (2.0, "memory")
    assert (roofline.seconds(head.work), head.limit(roofline)) == (10.0, "arithmetic")
    assert (roofline.seconds(computes.work), computes.limit(roofline)) == (5.0, "arithmetic")
    assert energy.joules(10.0, (reads.work, head.work)) == 200 + (400 + 1) + (2 + 1000)
    decoded = Decoded(10.0, 0.5, 30.0, watts=350.0, sm_mhz=1700.0)
    text = _explained(4, decoded, {reads: 3.0, computes: 6.0}, roofline, energy)
    assert [line.split() for line in text.splitlines()][1:4] == [
        ["reads", "3000.000", "2000.000", "1.50", "memory"],
        ["computes", "6000.000", "5000.000", "1.20", "arithmetic"],
        ["the", "rest", "1000.000", *["norms,", "rotary", "embedding,", "cache,", "sampler,", "gaps"]],
    ]
    assert (
        "350 W, 1700 MHz; 3.5e+03 J a step, 8.75e+05 mJ a token; bytes and FLOP alone cost 1.1e+03 J" in text
    )
    unknown = Decoded(10.0, 0.5, metered_s=math.nan, watts=math.nan, sm_mhz=math.nan)
    assert "MHz" not in _explained(4, unknown, {reads: 3.0}, roofline, energy)
    short = Decoded(0.004, 0.001, metered_s=0.12, watts=852.0, sm_mhz=1700.0)
    last = _explained(4, short, {reads: 3.0}, roofline, energy).splitlines()[-1]
    assert last == "  1700 MHz; for watts these steps are too few: --output_len 250"


class CountedReads(TorchFunctionMode):
    """Counts how often integers are summed, which is how the loads read."""

    n = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += function is torch.Tensor.sum and args[0].dtype == torch.int64
        return function(*args, **(kwargs or {}))


class PlainRuns(CudaGraphs):
    """Runs the work itself: a CPU has no graphs."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def synchronize(self) -> None:
        """All is done."""

    def seconds_of(self, work: Callable[[], object]) -> float:
        return 0.01


class CountedPower(PowerReader):
    """Only reading takes energy, a joule."""

    def __init__(self, reads: CountedReads) -> None:
        self._reads = reads

    def read(self) -> Reading:
        return Reading(time.perf_counter(), self._reads.n, sm_mhz=1500.0)


def test_loads_are_measured_alone_and_in_turns(part: ModelPart) -> None:
    loads = Loads(1 << 16, n_rows=64, n_logits_rows=8, settle_s=0.01, on_end_s=0.05, idle_s=0.01)
    with torch.inference_mode(), CountedReads() as reads:
        rates = measure_rates(part, plain_kernels, PlainRuns(), CountedPower(reads), loads)
    assert rates.reading.on_end == pytest.approx(rates.reading.watts * (1 << 16))
    assert rates.layers.watts == rates.head.watts == rates.idle_watts == 0
    n_bytes = rates.bytes_per_flop * rates.in_turns.on_end
    assert n_bytes == pytest.approx(rates.in_turns.watts * (1 << 16))
    assert rates.in_turns_by_energy() == pytest.approx(rates.in_turns.watts)


def test_loads_in_turns_draw_what_each_draws_alone() -> None:
    reading, layers, head = (
        Rate(0.0, *each, sm_mhz=1500.0) for each in ((4.0, 500.0), (10.0, 600.0), (5.0, 700.0))
    )
    in_turns = Rate(0.0, 5.0, 555.0, sm_mhz=1500.0)
    rates = Rates(reading, layers, head, in_turns, bytes_per_flop=0.4, idle_watts=100.0)
    assert rates.energy() == Energy(100.0, 100.0, 50.0, 120.0)
    assert rates.in_turns_by_energy() == 100 + 2 * 100 + 5 * 50


@pytest.mark.parametrize(("preset", "chosen", "held"), [("tiny-llama", 1, 1), ("tiny-mixtral", 2, 8)])
def test_the_least_that_a_sample_takes(preset: str, chosen: int, held: int) -> None:
    """Of a mixture a row uses the chosen experts, and a batch reads all."""
    c = load_model_config(preset)
    attention = 2 * c.hidden_size * c.head_dim * (c.n_heads + c.n_kv_heads)
    others = c.n_experts * c.hidden_size + 2 * c.hidden_size  # router and norms

    def layers(n: int) -> float:
        return c.n_layers * (attention + others + n * 3 * c.hidden_size * c.intermediate_size)

    n_in, n_out, at_once = 10, 3, 6.0
    cached = n_in + (n_in + 1) + (n_in + 2)
    width = c.n_layers * c.n_heads * c.head_dim
    head = c.vocab_size * c.hidden_size
    flops = 2 * layers(chosen) * 13 / 10 + (2 * head * n_out + 2 * width * n_in**2 + 4 * width * cached) / 5
    works = sample_work(c, (n_in, n_out), at_once, layers(held), "fp8")
    assert Roofline(math.inf, 10.0, 5.0).seconds(*works) == pytest.approx(flops)
    read = 0.5 * (layers(held) + head * 4) + cached * 2 * c.n_layers * c.n_kv_heads * c.head_dim
    assert Roofline(7.0, math.inf, math.inf).seconds(*works) == pytest.approx(read / 7)


def test_what_windows_leave_out() -> None:
    """Half of gpt-oss's layers see 128 tokens, of a prompt and of what is cached."""
    c = load_model_config("gpt-oss-20b")
    all_seen = dataclasses.replace(c, windows=())
    kept, whole = (
        sum(work.n_bytes for work in sample_work(model, (1024, 1024), 1.0, 0.0, "bfloat16")[2:])
        for model in (c, all_seen)
    )
    seen = sum(range(1024, 2048))
    assert kept / whole == pytest.approx((seen + 1024 * 128) / (2 * seen))
