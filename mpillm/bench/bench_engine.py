"""``bench engine``: on a CPU, the engine against transformers or vLLM; on a GPU: bench_decode.py."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from launch.children import Children
from mpillm.bench.bench_decode import Options, bench_decode
from mpillm.bench.other_load import OtherLoad
from mpillm.bench.product_rates import product_rates
from mpillm.bench.transformers_baseline import TransformersBaseline
from mpillm.bench.vllm_baseline import VllmBaseline
from mpillm.config.core_config import CoreConfig
from mpillm.data.dataset import Limits, load_dataset
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.model.model_info import ModelInfo, check_model
from mpillm.engine.speculation.check_speculation import check_speculation

if TYPE_CHECKING:
    from mpillm.engine.engine import Engine
    from mpillm.engine.model.linear import Linear
    from mpillm.engine.sequence import Sequence
    from mpillm.engine.step import Step

Answer = Callable[[], list[list[int]]]

_ROWS = 1, 8, 40, 256
_SQUARE = 2048  # rows, inputs and outputs of a large product
_DECODING = 1, 8, 40  # sequences
_STATIC_BATCH = 8  # the baseline's batch size; it also takes all prompts in one batch


DESCRIPTION = (
    "Measure offline output tokens/s of the embedded engine and of transformers, vLLM or itself with guesses:"
    " greedy, all answers of one length."
)
EPILOG = """examples:
  python -m mpillm bench engine --model_path DIR
  python -m mpillm bench engine --model_path DIR --against vllm --dtype bfloat16
  python -m mpillm bench engine --model_path DIR --speculative_config decoding_type:NGram,max_draft_len:4
  python -m mpillm bench engine --device cuda --batches 1,64"""


def main(config: Options) -> int:
    """Print the table; 0 unless something could not be run."""
    if config.device == "cuda":
        return bench_decode(config)
    dtype = config.dtype or "float32"
    core = CoreConfig(
        core_type="torch",
        model_path=config.model_path,
        dtype=dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        n_threads=config.n_threads,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        enable_chunked_context=True,
    )
    info = check_model(core)
    if info.folder is None:
        raise ConfigError(f"--model_path {config.model_path}: transformers needs a folder, not a preset")
    prompts = _prompts(info, config)
    n_output = len(prompts) * config.output_len
    with_guesses = replace(core, speculative_config=config.speculative_config)
    check_speculation(with_guesses, info)

    import torch

    from mpillm.engine.dtypes import torch_dtype

    torch.set_num_threads(config.n_threads)
    engine = _Engine(core, info)
    contenders: dict[str, Answer] = {"engine": lambda: engine.answer(prompts, config.output_len)}
    guessing: _Engine | None = None
    if config.speculative_config:
        guessing = _Engine(with_guesses, check_model(with_guesses))
        guessing.answer(prompts, 2)
        contenders["engine, with guesses"] = partial(guessing.answer, prompts, config.output_len)
    load = OtherLoad()
    times: dict[str, list[float]] = {}
    answers: dict[str, list[list[int]]] = {}
    products: list[float] = []
    answering: contextlib.AbstractContextManager[dict[str, Answer]] = (
        _others(config, info, prompts) if guessing is None else contextlib.nullcontext({})
    )
    with answering as baseline:
        contenders |= baseline
        engine.answer(prompts, 2)  # warms up memory and kernels
        for i in range(config.repeats):
            for name, answer in contenders.items():
                print(f"  round {i + 1} of {config.repeats}: {name}", file=sys.stderr, flush=True)
                started = time.perf_counter()
                answers[name] = answer()
                times.setdefault(name, []).append(time.perf_counter() - started)
            products.append(engine.products())
    others = load.so_far()

    mean = statistics.mean(map(len, prompts))
    lengths = f"{mean:.0f} tokens on average, {config.output_len} new tokens each"
    print(f"{len(prompts)} prompts of {lengths}, {dtype}, {config.n_threads} threads")
    print(f"  {'':<32} {'tokens/s':>9} {'(least to most)':>18}   engine is")
    for name in contenders:
        rates = [n_output / t for t in times[name]]
        # Compare round by round: a noisy machine is noisy for both.
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(times[name], times["engine"], strict=True)
        )
        spread = f"({min(rates):.1f} to {max(rates):.1f})"
        print(f"  {name:<32} {statistics.median(rates):>9.1f} {spread:>18}   {ratio:.2f} x")
    # Disturbances only add time, and the products are short: compare the least of each, not round by round.
    seconds = min(products)
    share, rate = seconds / min(times["engine"]), engine.n_operations() / seconds / 1e9
    print(
        f"  matrix products alone, same shapes and kernels: {share:.0%} of the engine's time"
        " (least of each over the rounds),"
        f" {rate:.0f} GFLOP/s (a large square one: {engine.best_rate():.0f})"
    )
    if (both := product_rates(info.config, torch_dtype(info.dtype), _ROWS)) is not None:
        shown = ", ".join(
            f"{n:,} {'row' if n == 1 else 'rows'} {mine:.0f} ({without:.0f})"
            for n, (mine, without) in zip(_ROWS, both, strict=True)
        )
        print(f"  a layer's products, compiled (and without a compiler), GFLOP/s: {shown}")
    decoding = [n for n in _DECODING if n <= min(len(prompts), config.max_batch_size)]
    took = ", ".join(f"{n} {engine.decode_ms(prompts[:n], config.output_len):.1f}" for n in decoding)
    print(f"  a decode step, ms, by sequences: {took}")
    print(
        f"  other processes used {others.processes:.2f} cores meanwhile, the host took {others.stolen:.2f}"
        + (": the figures are disturbed" if others.degree > 1 else "")
    )
    for name in list(contenders)[1:]:
        same = sum(a == b for a, b in zip(answers["engine"], answers[name], strict=True))
        print(f"  answers equal to {name}: {same} of {len(prompts)}")
    if guessing is not None:
        right, made = guessing.guesses()
        print(f"  guesses of a round: {made:,}, of which {right:,} were right")
    return 0


@contextlib.contextmanager
def _others(config: Options, info: ModelInfo, prompts: list[list[int]]) -> Iterator[dict[str, Answer]]:
    """Yield what answers in turns with the engine, warmed up."""
    assert info.folder is not None
    dtype, n_output = config.dtype or "float32", config.output_len
    if config.against == "vllm":
        with Children() as children, tempfile.TemporaryDirectory() as folder:
            vllm = VllmBaseline(
                config.vllm_python,
                children,
                Path(folder),
                config.n_threads,
                model=str(info.folder),
                dtype=dtype,
                max_model_len=max(map(len, prompts)) + n_output,
                max_num_seqs=config.max_batch_size,
                max_num_batched_tokens=config.max_num_tokens,
                enable_prefix_caching=False,  # as in our engine: MLPerf forbids it
                disable_log_stats=True,
            )
            vllm.answer(prompts, n_output)
            yield {vllm.versions: lambda: vllm.answer(prompts, n_output)}
            vllm.close()
        return
    baseline = TransformersBaseline(info.folder, dtype)
    baseline.static(prompts[:_STATIC_BATCH], 2, _STATIC_BATCH)
    # With all prompts: these determine its cache and its threads.
    baseline.continuous(prompts, n_output)
    batches = {
        f"generate, static batches of {size}": partial(baseline.static, prompts, n_output, size)
        for size in sorted({_STATIC_BATCH, len(prompts)})
    }
    yield {**batches, "generate_batch (continuous)": lambda: baseline.continuous(prompts, n_output)}


def _prompts(info: ModelInfo, config: Options) -> list[list[int]]:
    source = Path(config.dataset_path) if config.dataset_path else None
    dataset = load_dataset(source, load_tokenizer(info.folder), Limits(info.vocab_size))
    prompts = [dataset.sample(i).tolist() for i in range(len(dataset))]
    limit = min(config.max_prompt_len, info.max_seq_len - config.output_len)
    prompts = [prompt for prompt in prompts if len(prompt) <= limit][: config.num_prompts]
    if not prompts:
        raise ConfigError(f"{dataset.name} has no prompt of at most {limit} tokens")
    return prompts


class _Engine:
    def __init__(self, core: CoreConfig, info: ModelInfo) -> None:
        from mpillm.engine.engine import Engine
        from mpillm.engine.engine_limits import EngineLimits
        from mpillm.engine.parallel.groups import Groups
        from mpillm.engine.speculation.start_speculation import start_speculation
        from mpillm.engine.worker import Worker

        limits = EngineLimits(core.max_batch_size, core.max_num_tokens, core.tokens_per_block)
        self._engine: Engine = Engine(
            info, limits, Worker.on_cpu(info, core.tokens_per_block, Groups(), dummy=False)
        )
        if core.speculative_config:
            worker = self._engine.worker
            self._engine.speculation = start_speculation(core, worker, self._engine.scheduler)
        self._steps: list[tuple[int, int]] = []  # rows, rows with logits
        steps = self._engine.worker.steps
        forward = steps.forward

        def counted(step: Step, layer_stored: Any = None) -> Any:
            self._steps.append((len(step.tokens), len(step.wanted)))
            return forward(step, layer_stored)

        steps.forward = counted  # type: ignore[method-assign]

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
        from mpillm.engine.sampler import SamplingParams
        from mpillm.engine.sequence import Sequence

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
        import torch

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
        import torch

        from mpillm.engine.model.linear import Linear

        dtype = self._engine.worker.part.dtype
        with torch.inference_mode():
            linear, x = (
                Linear(torch.randn(_SQUARE, _SQUARE).to(dtype)),
                torch.randn(_SQUARE, _SQUARE).to(dtype),
            )
            times = []
            for _ in range(3):
                started = time.perf_counter()
                linear(x)
                times.append(time.perf_counter() - started)
        return 2 * _SQUARE**3 / min(times) / 1e9

    def _products(self) -> Iterator[tuple[Linear, int]]:
        """Yield each product with weights of the last `answer`, and its rows."""
        from mpillm.engine.model.transformer import Mlp

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
