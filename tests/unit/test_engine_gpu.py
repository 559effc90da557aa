# ruff: noqa: F811 - fixtures of another file
"""The GPU's way of running steps, on a CPU: tokens that stay on the device, block tables, padded decode. Its kernels: tests/gpu."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import plain_kernels
import pytest
import torch
from test_engine_torch import N_OUTPUT, Tokens, folder, oracle, prompts  # noqa: F401 - fixtures

from mpillm.cores.base import CoreConfig
from mpillm.engine import step
from mpillm.engine.device import Sampled
from mpillm.engine.engine import Engine, EngineLimits
from mpillm.engine.gpu import GpuWorker, ladder
from mpillm.engine.model_config import check_model
from mpillm.engine.parallel import Groups
from mpillm.engine.sampler import SamplingParams
from mpillm.engine.scheduler import Sequence
from mpillm.engine.step import Step, Worker, unpack


class Late(Sampled):
    """There when somebody has looked three times: the engine goes on as far as it can before it reads."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__(tokens)
        self._looks = 0

    def ready(self) -> bool:
        self._looks += 1
        return self._looks > 3


class Repacked(GpuWorker):
    """What the other ranks of an instance get: the step out of a message."""

    tables: dict[int, list[int]]

    def run(self, step: Step) -> Sampled | None:
        told = unpack(self.message, self.tables)
        assert told == step
        return super().run(told)


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "Sampled", Late)


def make_engine(model: Path, kind: type[Worker] = GpuWorker, **options: Any) -> Engine:
    torch.set_num_threads(1)
    config = CoreConfig("torch", model_path=str(model), **({"tokens_per_block": 8, "end_ids": (), "max_seq_len": 256} | options))
    info = check_model(config)
    arguments: dict[str, Any] = {"dummy": False}
    if kind is not Worker:
        arguments |= {"max_batch_size": config.max_batch_size, "device": "cpu", "kernels": plain_kernels}
    worker = kind(info, config.tokens_per_block, Groups(), **arguments)
    return Engine(info, EngineLimits(config.max_batch_size, config.max_num_tokens, config.tokens_per_block), worker)


def answer(engine: Engine, prompts: Tokens, sampling: list[SamplingParams] | None = None, min_output: int = 0) -> Tokens:
    greedy = [SamplingParams()] * len(prompts)
    sequences = [Sequence(i, p, N_OUTPUT, min_output, s) for i, (p, s) in enumerate(zip(prompts, sampling or greedy, strict=True))]
    for sequence in sequences:
        engine.add(sequence)
    progress, most = [], 0
    while not engine.is_idle():
        progress += engine.step()
        most = max(most, len(engine._in_flight))
    assert most == 1 + engine.worker.n_ahead
    assert sorted(p.sequence.id for p in progress if p.is_final) == list(range(len(prompts)))
    assert engine.blocks.n_free == engine.blocks.n_blocks
    assert sorted(engine.scheduler._slots) == list(range(engine.limits.max_batch_size))
    return [sequence.output for sequence in sequences]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_batch_size": 1},
    {"max_batch_size": 5, "max_num_tokens": 7},
    {"tokens_per_block": 1, "kv_cache_tokens": 300, "max_num_tokens": 40},
    {"kv_cache_tokens": 160, "max_seq_len": None},
    {"kv_cache_tokens": 160, "max_seq_len": None, "max_num_tokens": 16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_fed_on_the_device_are_transformers(folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]) -> None:
    engine = make_engine(folder, **options)
    assert answer(engine, prompts) == expected
    assert ("kv_cache_tokens" in options) == (engine.scheduler.preemptions > 3)


def test_a_mixture(prompts: Tokens) -> None:
    wanted = answer(make_engine(Path("tiny-mixtral"), Worker), prompts)
    assert answer(make_engine(Path("tiny-mixtral")), prompts) == wanted


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Tokens) -> Tokens:
    return oracle(folder, prompts, N_OUTPUT, min_new_tokens=N_OUTPUT)


@pytest.mark.parametrize("options", [{}, {"kv_cache_tokens": 160, "max_seq_len": None}, {"max_batch_size": 3}], ids=str)
def test_a_sequence_that_has_ended_when_its_next_step_runs(
    folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]
) -> None:
    """Its row is dropped; its slot and blocks may have been given to another one meanwhile."""
    ends = (expected[3][5], expected[6][2], expected[8][1])
    for min_output in (0, 9):
        wanted = answer(make_engine(folder, Worker, end_ids=ends), prompts, min_output=min_output)
        assert max(1, min_output) <= min(map(len, wanted)) < N_OUTPUT
        assert answer(make_engine(folder, end_ids=ends, **options), prompts, min_output=min_output) == wanted


def test_sampled_tokens_are_those_of_the_cpu(folder: Path, prompts: Tokens) -> None:
    sampling = [SamplingParams(i % 3 * 0.5, [0, 20][i % 2], [1, 1, 0.7, 0.9][i % 4], i) for i in range(len(prompts))]
    wanted = answer(make_engine(folder, Worker), prompts, sampling)
    assert answer(make_engine(folder), prompts, sampling) == wanted
    assert answer(make_engine(folder, kv_cache_tokens=160, max_seq_len=None), prompts, sampling) == wanted


def test_a_follower_needs_the_message_alone(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """Tokens that nobody on the host knows, and blocks told once, through preemptions."""
    engine = make_engine(folder, Repacked, kv_cache_tokens=160, max_seq_len=None)
    worker: Any = engine.worker
    worker.tables = {}

    class Sending:
        def send_plan(self, plan: np.ndarray) -> None:
            worker.message = plan

    peers: Any = Sending()
    engine._peers = peers
    assert answer(engine, prompts) == expected
    assert engine.scheduler.preemptions > 3


def test_decode_is_padded_to_the_ladder(folder: Path, prompts: Tokens, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for graphs: rows of nobody's touch no sequence."""
    engine = make_engine(folder, max_num_tokens=100)
    worker: Any = engine.worker
    sizes = []

    class Graph:
        def __init__(self, size: int) -> None:
            self.size, self.out = size, torch.empty(size, worker._config.hidden_size)

        def replay(self) -> None:
            sizes.append(self.size)
            self.out.copy_(worker._forward_decode(self.size))

    graphs = {size: Graph(size) for size in (4, 16, 64)}  # 20 prompts
    worker._graphs = {size: (graph, graph.out) for size, graph in graphs.items()}
    assert answer(engine, prompts) == expected
    assert set(sizes) == {4, 16, 64}


def test_the_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(48) == [1, 2, 4, 8, 16, 32, 48]
    assert ladder(256) == [1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert all(b <= 1.25 * a for a, b in zip(ladder(1000)[6:], ladder(1000)[7:], strict=False))


def test_what_fits_on_a_gpu() -> None:
    from disagg.errors import ConfigError

    config = CoreConfig("torch", model_path="llama3.1-8b", gpu_bytes=139 << 30, max_batch_size=1024, max_num_tokens=8192)
    info = check_model(config)
    assert info.dtype == "bfloat16"
    assert 85 << 30 < info.kv_cache_tokens * 131072 < 0.9 * ((139 << 30) - info.n_bytes)
    half = check_model(dataclasses.replace(config, kv_cache_fraction=0.45))
    assert abs(2 * half.kv_cache_tokens - info.kv_cache_tokens) < 200
    assert check_model(dataclasses.replace(config, kv_cache_tokens=70000)).kv_cache_tokens == 70000 // 32 * 32
    small = dataclasses.replace(config, gpu_bytes=15 << 30, max_batch_size=8)
    with pytest.raises(ConfigError, match=r"llama3\.1-8b does not fit: a GPU of instance 0 has 15\.0 GiB free, and 15\.0 GiB of weights"):
        check_model(small)
    assert check_model(dataclasses.replace(small, tp_size=2)).kv_cache_tokens > 50_000
    with pytest.raises(ConfigError, match=r"KV cache of 2000000 tokens needs 244\.1 GiB on a GPU"):
        check_model(dataclasses.replace(config, kv_cache_tokens=2_000_000))
