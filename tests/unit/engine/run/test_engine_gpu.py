"""The GPU's way of running steps, on a CPU: tokens that stay on the device, block tables, padded decode.

Its kernels: tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpillm.comms.messages import ResponseFlag
from mpillm.comms.transport import Buffer
from mpillm.engine.engine import Engine
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.engine_messages import PLAN
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.model_info import check_model
from mpillm.engine.tensors.graphs import ladder, too_slow
from mpillm.engine.tensors.staging import SampledTokens
from tests.helpers import plain_kernels
from tests.helpers.engine_configs import changed, engine_config
from tests.helpers.gpu_steps_on_cpu import GpuCore, LateWorker, make_engine
from tests.helpers.oracle import Tokens, expected_tokens
from tests.helpers.torch_cores import N_OUTPUT, make_batch, make_core


class Repacked(LateWorker):
    """Takes each step out of a message, as the other ranks of an instance do."""

    message: Buffer

    def run(self, step: Step) -> SampledTokens | None:
        received = PLAN.read(self.message)
        assert received == step
        return super().run(received)


def answer(
    engine: Engine, prompts: Tokens, sampling: list[SamplingParams] | None = None, min_output: int = 0
) -> Tokens:
    greedy = [SamplingParams()] * len(prompts)
    sequences = [
        Sequence(i, p, N_OUTPUT, min_output, s)
        for i, (p, s) in enumerate(zip(prompts, sampling or greedy, strict=True))
    ]
    for sequence in sequences:
        engine.add(sequence)
    progress, most = [], 0
    while not engine.is_idle():
        progress += engine.step()
        most = max(most, len(engine._in_flight))
    assert most == 1 + engine.worker.steps.n_ahead
    assert sorted(p.sequence.id for p in progress if p.is_final) == list(range(len(prompts)))
    assert engine.blocks.n_free == engine.blocks.n_blocks
    assert sorted(engine.scheduler._slots) == list(range(engine.config.max_batch_size))
    return [sequence.output for sequence in sequences]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_batch_size": 1},
    {"max_batch_size": 5, "max_num_tokens": 7},
    {"tokens_per_block": 1, "kv_cache_tokens": 300, "max_num_tokens": 40},
    {"kv_cache_tokens": 160, "max_seq_len": None},
    {"kv_cache_tokens": 160, "max_seq_len": None, "max_num_tokens": 16},
]


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_fed_on_the_device_are_transformers(
    folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]
) -> None:
    engine = make_engine(folder, **options)
    assert answer(engine, prompts) == expected
    assert ("kv_cache_tokens" in options) == (engine.scheduler.preemptions > 3)


@pytest.mark.long
def test_a_mixture(prompts: Tokens) -> None:
    wanted = answer(make_engine(Path("tiny-mixtral"), on_gpu=False), prompts)
    assert answer(make_engine(Path("tiny-mixtral")), prompts) == wanted


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Tokens) -> Tokens:
    return expected_tokens(folder, prompts, N_OUTPUT, min_new_tokens=N_OUTPUT)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_tokens": 160, "max_seq_len": None}, {"max_batch_size": 3}], ids=str
)
def test_a_sequence_that_has_ended_when_its_next_step_runs(
    folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]
) -> None:
    """Its row is dropped, because another sequence may have its slot and blocks meanwhile."""
    ends = (expected[3][5], expected[6][2], expected[8][1])
    for min_output in (0, 9):
        wanted = answer(make_engine(folder, on_gpu=False, end_ids=ends), prompts, min_output=min_output)
        assert max(1, min_output) <= min(map(len, wanted)) < N_OUTPUT
        assert answer(make_engine(folder, end_ids=ends, **options), prompts, min_output=min_output) == wanted


@pytest.mark.long
def test_sampled_tokens_are_those_of_the_cpu(folder: Path, prompts: Tokens) -> None:
    sampling = [
        SamplingParams(i % 3 * 0.5, [0, 20][i % 2], [1, 1, 0.7, 0.9][i % 4], i) for i in range(len(prompts))
    ]
    wanted = answer(make_engine(folder, on_gpu=False), prompts, sampling)
    assert answer(make_engine(folder), prompts, sampling) == wanted
    assert answer(make_engine(folder, kv_cache_tokens=160, max_seq_len=None), prompts, sampling) == wanted


@pytest.mark.long
def test_a_follower_needs_the_message_alone(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """A follower computes steps whose tokens the host does not know and whose blocks were told once, through
    preemptions."""
    engine = make_engine(folder, Repacked, kv_cache_tokens=160, max_seq_len=None)
    worker: Any = engine.worker

    class Sending:
        def send_plan(self, step: Step) -> None:
            worker.message = PLAN.write(step)

    peers: Any = Sending()
    engine._peers = peers
    assert answer(engine, prompts) == expected
    assert engine.scheduler.preemptions > 3


def test_a_context_of_which_all_rows_are_wanted(folder: Path) -> None:
    """As benchmarks run it (agreement, precision): more rows than a decode step has room for."""
    step = Step([Span(0, 0, 40, 0, [1, 2, 3, 4, 5])], list(range(40)), list(range(40)))
    with torch.inference_mode():
        found, wanted = (
            make_engine(folder, on_gpu=on_gpu, max_batch_size=4).worker.logits(step)
            for on_gpu in (True, False)
        )
    assert torch.allclose(found, wanted, atol=1e-4)


def test_first_tokens_when_two_steps_end_between_two_looks(folder: Path, prompts: Tokens) -> None:
    """A FIRST row has one token even if the second one has come with it, as steps may be shorter than a turn
    of the rank's loop."""
    ready = False

    class Together(SampledTokens):
        def ready(self) -> bool:
            return ready

    class TogetherWorker(Worker):
        def run(self, step: Step) -> SampledTokens | None:
            sampled = super().run(step)
            return sampled and Together(sampled._tokens)

    class Core(GpuCore):
        worker_type = TogetherWorker

    core = make_core(folder, kind=Core)
    core.enqueue(make_batch(prompts[:4], max_output=[1, 2, 3, 4]))
    for _ in range(3):
        assert core.poll_responses() is None
    ready = True
    batch = core.poll_responses()
    assert batch is not None
    first, final = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL)
    rows = [(int(row["id"]), int(row["flags"]), int(row["n_tokens"])) for row in batch.rows]
    assert sorted(rows) == [(0, first | final, 1), (1, first, 1), (1, final, 2), (2, first, 1), (3, first, 1)]
    assert len(batch.tokens) == 6


@pytest.mark.long
def test_decode_is_padded_to_the_ladder(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """Padding rows touch no sequence; a stand-in takes the place of graphs."""
    engine = make_engine(folder, max_num_tokens=100)
    steps: Any = engine.worker.steps
    sizes = []

    class Graph:
        def __init__(self, size: int) -> None:
            self.size, self.out = size, torch.empty(size, engine.info.config.hidden_size)

        def replay(self) -> None:
            sizes.append(self.size)
            self.out.copy_(steps._forward_decode(self.size))

    graphs = {size: Graph(size) for size in (4, 16, 64)}  # 20 prompts
    steps._graphs = {size: (graph, graph.out) for size, graph in graphs.items()}
    assert answer(engine, prompts) == expected
    assert set(sizes) == {4, 16, 64}


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
@pytest.mark.long
def test_contexts_are_padded_between_attentions(model: str, folder: Path, prompts: Tokens) -> None:
    """Padding rows touch no sequence; calls take the place of graphs. Larger steps have none."""
    source = folder if model == "tiny-llama" else Path(model)
    wanted = answer(make_engine(source, on_gpu=False), prompts)
    engine = make_engine(source, max_batch_size=7, max_num_tokens=70)
    steps: Any = engine.worker.steps
    layers = steps._new_layers(64)
    for size in (16, 32, 64):
        layers.add(size)
    n_rows = []

    def noting(rows: torch.Tensor, n: int, *arguments: Any) -> torch.Tensor:
        n_rows.append((n, rows.shape[1]))
        layers._attended[n:] = 1e30  # what no row may read
        out: torch.Tensor = layers.run(rows, n, *arguments)
        return out

    steps._layers = SimpleNamespace(size_for=layers.size_for, run=noting)
    assert answer(engine, prompts) == wanted
    assert len(n_rows) > 1 and all(n <= size for n, size in n_rows)
    assert any(n < size for n, size in n_rows)


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral"])
@pytest.mark.parametrize(
    ("options", "n_prompts"),
    [
        ({}, 20),
        ({"max_batch_size": 1, "max_num_tokens": 100}, 6),
        ({"max_batch_size": 5, "max_num_tokens": 7}, 10),
        ({"max_num_tokens": 1}, 2),
    ],
    ids=str,
)
def test_the_warm_up_computes_with_all_numbers_of_rows_that_matter(
    model: str, options: dict[str, Any], n_prompts: int, prompts: Tokens
) -> None:
    """The warm-up computes with a number of rows for each power of two that a compilation may depend on, and
    leaves nothing behind."""
    rows: dict[str, set[int]] = {}

    def noting(name: str, place: int, kernel: Any) -> Any:
        def call(*arguments: Any) -> Any:
            rows.setdefault(name, set()).add(len(arguments[place]))
            return kernel(*arguments)

        return call

    places = {"embed": 1, "gated": 0, "rotate_store": 0, "decode_attention": 0, "context_attention": 0}
    noted = {name: noting(name, place, getattr(plain_kernels, name)) for name, place in places.items()}
    kernels = SimpleNamespace(**vars(plain_kernels) | noted)
    engine = make_engine(Path(model), kernels=kernels, max_seq_len=90, **options)
    engine.worker.warm_up(engine.config.max_num_tokens)
    warmed = dict(rows)
    rows.clear()
    cache = engine.worker.part.cache
    assert all(not pool[:, 1:].any() for pool in (cache.keys, cache.values)), (
        "it wrote to a block that somebody could have"
    )
    prompts = [prompt[:60] for prompt in prompts[:n_prompts]]
    sampling = [SamplingParams(i % 2 * 0.7, i % 3 * 5, 1 - i % 5 * 0.1, i) for i in range(len(prompts))]
    answers = answer(engine, prompts, sampling)
    for name, numbers in rows.items():
        # How decode is split changes at powers of two, tiles of other kernels behind them.
        behind = int(name != "decode_attention")
        classes, met = ({(n - behind).bit_length() for n in some} for some in (warmed[name], numbers))
        assert met <= classes, (name, sorted(numbers), sorted(warmed[name]))
    assert answers == answer(make_engine(Path(model), max_seq_len=90, **options), prompts, sampling)


@pytest.mark.long
def test_contexts_behind_cached_tokens_may_be_multiplied_in_fp8(folder: Path) -> None:
    """Of layers and contexts whose rows are copied; the stand-in multiplies them in float32."""
    long = [[(i * 7 + j * j) % 500 + 3 for j in range(300 + i)] for i in range(3)]
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "max_seq_len": 400, "max_num_tokens": 150}
    wanted = answer(make_engine(folder, **options), long)
    calls: list[int] = []
    attention = plain_kernels.fp8_context_attention

    def noting(*arguments: Any) -> None:
        calls.append(len(arguments[8]))
        attention(*arguments)

    kernels = SimpleNamespace(**vars(plain_kernels) | {"fp8_context_attention": noting})
    engine = make_engine(folder, kernels=kernels, **options)
    assert answer(engine, long) == wanted and not calls
    steps: Any = engine.worker.steps
    steps._fp8_contexts = True
    assert answer(engine, long) == wanted and calls


def test_sizes_that_a_larger_one_beats() -> None:
    assert too_slow({1: 2.0, 2: 2.5, 4: 3.0, 8: 2.01}) == [4, 2]
    assert too_slow({}) == []


def test_the_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(48) == [1, 2, 4, 8, 16, 32, 48]
    assert ladder(256) == [1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert all(b <= 1.25 * a for a, b in zip(ladder(1000)[6:], ladder(1000)[7:], strict=False))


def test_what_fits_on_a_gpu() -> None:
    from disagg.errors import ConfigError

    config = engine_config("llama3.1-8b", gpu_bytes=139 << 30, max_batch_size=1024, max_num_tokens=8192)
    info = check_model(config)
    assert info.dtype == "bfloat16"
    assert 75 << 30 < info.kv_cache_tokens * 131072 < 0.8 * ((139 << 30) - info.n_bytes)
    half = check_model(changed(config, kv_cache_free_gpu_mem_fraction=0.4))
    assert abs(2 * half.kv_cache_tokens - info.kv_cache_tokens) < 200
    assert check_model(changed(config, kv_cache_tokens=70000)).kv_cache_tokens == 70000 // 32 * 32
    small = changed(config, gpu_bytes=15 << 30, max_batch_size=8)
    with pytest.raises(
        ConfigError,
        match=r"llama3\.1-8b does not fit: a GPU of instance 0 has 15\.0 GiB free, and 15\.0 GiB of weights",
    ):
        check_model(small)
    assert check_model(changed(small, tp_size=2)).kv_cache_tokens > 50_000
    with pytest.raises(ConfigError, match=r"KV cache of 2000000 tokens needs 244\.1 GiB on a GPU"):
        check_model(changed(config, kv_cache_tokens=2_000_000))
