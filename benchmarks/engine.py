"""``benchmarks engine``: the engine against transformers, vLLM or itself with draft tokens, on a CPU."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.left_in_shm import LeftInShm
from benchmarks.transformers_baseline import TransformersBaseline
from benchmarks.vllm_baseline import VllmBaseline
from disagg.errors import ConfigError
from launch.children import Children
from mpillm.data.dataset import PromptLimits, load_dataset, unused_lengths
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import ModelInfo, check_model
from mpillm.engine.speculation.check_speculation import check_speculation
from mpillm.engine.tensors.load_torch import load_torch
from mpillm.options import json_output
from mpillm.options.field import option
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import positive
from mpillm.options.values import Values
from mpillm.telemetry.other_load import OtherLoad

if TYPE_CHECKING:
    from benchmarks.counted_engine import CountedEngine

Answer = Callable[[], list[list[int]]]

_ENGINE = "engine"
_DECODING = 1, 8, 40  # sequences
_STATIC_BATCH = 8  # the baseline's batch size; it also takes all prompts in one batch


class Options(Values, group="benchmark"):
    """Options of ``benchmarks engine``."""

    model_path = ModelFields.model_path.but("folder of a Hugging Face checkpoint", group="benchmark")
    dataset_path = option("JSONL with prompts [default: mpillm's prompts]")
    against = option(
        "baseline that answers the same prompts alternately with the engine",
        default="transformers",
        choices=("transformers", "vllm"),
    )
    vllm_python = option(
        "the Python of an environment with vLLM for CPUs; make test-peers makes one",
        default=".venv-peers/bin/python",
    )
    speculative_config = ModelFields.speculative_config.but(
        "compare the engine with and without this speculative decoding, instead of a baseline"
        " (docs/explain/speculation.md); key:value,key:value",
        group="benchmark",
    )
    num_prompts = option("how many of the data set's prompts", positive, default=40)
    max_prompt_len = option("skip longer prompts, tokens", positive, default=96)
    output_len = option("new tokens per prompt", positive, default=32)
    dtype = option("type of weights and activations [default: float32]", choices=("float32", "bfloat16"))
    quantization = ModelFields.quantization.but(
        "type of the layers' weights; an unquantized checkpoint is quantized as it is loaded",
        default="auto",
        group="benchmark",
    )
    kv_cache_dtype = ModelFields.kv_cache_dtype.but(
        "type of the KV cache; auto: fp8 if the checkpoint has scales for it, otherwise dtype",
        default="auto",
        group="benchmark",
    )
    n_threads = option("CPU threads", positive, default=2)
    max_batch_size = ModelFields.max_batch_size.but(
        "concurrent requests of the engine", default=64, group="benchmark"
    )
    max_num_tokens = ModelFields.max_num_tokens.but(
        "tokens of one engine step", default=2048, group="benchmark"
    )
    repeats = option("rounds; the median is printed", positive, default=3)


class Rounds(NamedTuple):
    """Seconds of each round by contender, and of the engine's matrix products alone."""

    times: dict[str, list[float]]
    answers: dict[str, list[list[int]]]  # of the last round
    products: list[float]


DESCRIPTION = (
    "Measure offline output tokens/s of the embedded engine on a CPU, and of transformers, vLLM or itself"
    " with draft tokens: greedy, all answers of one length."
)
EPILOG = """examples:
  python -m benchmarks engine --model_path DIR
  python -m benchmarks engine --model_path DIR --against vllm --dtype bfloat16
  python -m benchmarks engine --model_path DIR --speculative_config decoding_type:NGram,max_draft_len:4"""


def main(config: Options) -> int:
    """Print the table."""
    dtype = config.dtype or "float32"
    values = {**config.values, "dtype": dtype, "enable_chunked_context": True}
    speculative = EngineConfig.of(values)
    plain = replace(speculative, speculative_config=None)
    info = check_model(plain)
    if info.folder is None:
        raise ConfigError(f"--model_path {config.model_path}: transformers needs a folder, not a preset")
    prompts = _prompts(info, config)
    check_speculation(speculative, info)

    load_torch()
    import torch

    from benchmarks.counted_engine import CountedEngine

    torch.set_num_threads(config.n_threads)
    engine = CountedEngine(plain, info)
    drafting: CountedEngine | None = None
    if config.speculative_config:
        drafting = CountedEngine(speculative, check_model(speculative))
    load = OtherLoad()
    rounds = _take_turns(config, info, prompts, engine, drafting)
    others = load.so_far()

    n_output = len(prompts) * config.output_len
    json_output.set_figures(
        {
            "prompts": len(prompts),
            "output_tokens": n_output,
            "tokens_per_second": {name: [n_output / t for t in ts] for name, ts in rounds.times.items()},
            "products_s": rounds.products,
            "other_load_cores": others.processes + others.stolen,
        }
    )
    mean = statistics.mean(map(len, prompts))
    lengths = f"{mean:.0f} tokens on average, {config.output_len} new tokens each"
    print(f"{len(prompts)} prompts of {lengths}, {dtype}, {config.n_threads} threads")
    _print_rates(rounds.times, n_output)
    # Disturbances only add time, and the products are short: compare minima instead of single rounds.
    seconds = min(rounds.products)
    if n_operations := engine.n_operations():
        share, rate = seconds / min(rounds.times[_ENGINE]), n_operations / seconds / 1e9
        print(
            f"  matrix products alone, same shapes and kernels: {share:.0%} of the engine's time"
            " (least of each over the rounds),"
            f" {rate:.0f} GFLOP/s (a large square one: {engine.best_rate():.0f})"
        )
    decoding = [n for n in _DECODING if n <= min(len(prompts), config.max_batch_size)]
    took = ", ".join(f"{n} {engine.decode_ms(prompts[:n], config.output_len):.1f}" for n in decoding)
    print(f"  a decode step, ms, by sequences: {took}")
    print(
        f"  other processes used {others.processes:.2f} cores, the host took {others.stolen:.2f}"
        + (": the figures are disturbed" if others.degree > 1 else "")
    )
    for name, answers in rounds.answers.items():
        if name != _ENGINE:
            same = sum(a == b for a, b in zip(rounds.answers[_ENGINE], answers, strict=True))
            print(f"  answers equal to {name}: {same} of {len(prompts)}")
    if drafting is not None:
        accepted, drafted = drafting.draft_counts()
        print(f"  draft tokens of a round: {drafted:,}, of which {accepted:,} were accepted")
    return 0


def _take_turns(
    config: Options,
    info: ModelInfo,
    prompts: list[list[int]],
    engine: CountedEngine,
    drafting: CountedEngine | None,
) -> Rounds:
    """Measure the engine and its baselines alternately with all prompts, after a warm-up."""
    rounds = Rounds({}, {}, [])
    contenders: dict[str, Answer] = {_ENGINE: lambda: engine.answer(prompts, config.output_len)}
    if drafting is not None:
        drafting.answer(prompts, 2)
        contenders["engine, with draft tokens"] = partial(drafting.answer, prompts, config.output_len)
    answering: contextlib.AbstractContextManager[dict[str, Answer]] = (
        _others(config, info, prompts) if drafting is None else contextlib.nullcontext({})
    )
    with answering as baseline:
        engine.answer(prompts, 2)  # warms up memory and kernels
        for i in range(config.repeats):
            for name, answer in (contenders | baseline).items():
                print(f"  round {i + 1} of {config.repeats}: {name}", file=sys.stderr, flush=True)
                started = time.perf_counter()
                rounds.answers[name] = answer()
                rounds.times.setdefault(name, []).append(time.perf_counter() - started)
            rounds.products.append(engine.products())
    return rounds


def _print_rates(times: dict[str, list[float]], n_output: int) -> None:
    print(f"  {'':<32} {'tokens/s':>9} {'(least to most)':>18}   engine is")
    for name, seconds in times.items():
        rates = [n_output / t for t in seconds]
        # Compare within rounds, in which a noisy machine disturbs both.
        ratio = statistics.median(other / own for other, own in zip(seconds, times[_ENGINE], strict=True))
        spread = f"({min(rates):.1f} to {max(rates):.1f})"
        print(f"  {name:<32} {statistics.median(rates):>9.1f} {spread:>18}   {ratio:.2f} x")


@contextlib.contextmanager
def _others(config: Options, info: ModelInfo, prompts: list[list[int]]) -> Iterator[dict[str, Answer]]:
    """Yield the baselines, warmed up."""
    assert info.folder is not None
    dtype, n_output = config.dtype or "float32", config.output_len
    if config.against == "vllm":
        with LeftInShm() as left, Children() as children, tempfile.TemporaryDirectory() as folder:
            try:
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
                    enable_prefix_caching=False,  # like in the engine: MLPerf forbids it
                    disable_log_stats=True,
                )
                vllm.answer(prompts, n_output)
                yield {vllm.versions: lambda: vllm.answer(prompts, n_output)}
            finally:
                left.note(child.process.pid for child in children.running())
            vllm.close()
        return
    baseline = TransformersBaseline(info.folder, dtype)
    baseline.static(prompts[:_STATIC_BATCH], 2, _STATIC_BATCH)
    # All prompts, because they determine the cache and the threads.
    baseline.continuous(prompts, n_output)
    batches = {
        f"generate, static batches of {size}": partial(baseline.static, prompts, n_output, size)
        for size in sorted({_STATIC_BATCH, len(prompts)})
    }
    yield {**batches, "generate_batch (continuous)": lambda: baseline.continuous(prompts, n_output)}


def _prompts(info: ModelInfo, config: Options) -> list[list[int]]:
    source = Path(config.dataset_path) if config.dataset_path else None
    dataset = load_dataset(source, load_tokenizer(info.folder), PromptLimits(info.vocab_size))
    if dataset.output_lengths is not None:
        print(f"mpillm: {unused_lengths(dataset)}", file=sys.stderr)
    prompts = [dataset.sample(i).tolist() for i in range(len(dataset))]
    limit = min(config.max_prompt_len, info.max_seq_len - config.output_len)
    prompts = [prompt for prompt in prompts if len(prompt) <= limit][: config.num_prompts]
    if not prompts:
        raise ConfigError(f"{dataset.name} has no prompt of at most {limit} tokens")
    return prompts
