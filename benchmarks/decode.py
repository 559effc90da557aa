"""``benchmarks decode``: decode on one GPU; the step time over the memory's floor, and its parts."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.engine import Options as OfEngine
from benchmarks.power_readings import PowerReader
from disagg.errors import ConfigError
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.shape.dtypes import N_BYTES
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig
from mpillm.engine.shape.entries import layer_bytes
from mpillm.engine.shape.model_info import ModelInfo, check_model
from mpillm.engine.shape.speculative_config import EAGLE, SpeculativeConfig
from mpillm.engine.speculation.check_speculation import check_speculation
from mpillm.experiments.bench.roofline import Roofline
from mpillm.options.field import option
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import integers, not_negative, positive
from mpillm.options.values import Values

if TYPE_CHECKING:
    from benchmarks.decode_parts import CudaGraphs, LayerOp, Rates
    from benchmarks.decode_steps import Decoded
    from mpillm.engine.run.worker import Worker
    from mpillm.experiments.bench.roofline import Energy

# An H200's counter of joules moves about ten times a second: over 0.1 to 0.4 s it said 270 to 852 W of a card
# whose limit is 700.
_LEAST_METERED_S = 1.0


class Options(Values, group="benchmark"):
    """Options of ``benchmarks decode``."""

    model_path = ModelFields.model_path.but(
        "folder of a Hugging Face checkpoint, or a preset", default="llama3.1-8b", group="benchmark"
    )
    dtype = OfEngine.dtype.but("type of weights and activations [default: the checkpoint's]")
    quantization = OfEngine.quantization
    kv_cache_dtype = OfEngine.kv_cache_dtype
    speculative_config = ModelFields.speculative_config.but(
        "also time steps that test guesses (docs/explain/speculation.md); as key:value,key:value",
        group="benchmark",
    )
    max_num_tokens = OfEngine.max_num_tokens
    output_len = option("steps that are timed", positive, default=32)
    batches = option("batch sizes, separated by commas", integers, default=(1, 64, 256, 1024))
    context_len = option("tokens in the cache of each sequence", positive, default=512)
    pieces = option(
        "tokens of a prompt in a step beside a batch, separated by commas", integers, default=(64, 256)
    )
    bandwidth = option("memory bandwidth, TB/s", not_negative, default=4.3)


DESCRIPTION = (
    "Measure decode steps of the embedded engine on one GPU: a step beside the memory's floor, each part of"
    " it beside the roofline."
)
EPILOG = """example:
  python -m benchmarks decode --quantization fp8 --batches 1,64"""


def main(config: Options) -> int:
    """Print the table: a line per batch size."""
    gpus = TorchCore.gpus()
    if not gpus:
        raise ConfigError("benchmarks decode: there is no NVIDIA GPU")
    engine = engine_config(config, gpus[0].free)
    info = check_model(engine)
    if info.config.latent is not None:
        raise ConfigError(
            "--model_path: the parts of latent attention are not measured", about=["model_path"]
        )
    check_speculation(engine, info)

    import torch

    from benchmarks.decode_parts import CudaGraphs, Loads, measure_rates
    from mpillm.engine.kernels import step_kernels

    started = time.perf_counter()
    worker = _worker(engine, info)
    startup = time.perf_counter() - started
    with torch.inference_mode():  # what reading costs depends on the numbers
        for layer in (*worker.part.cache.keys, *worker.part.cache.values):
            layer.copy_(torch.randn(layer.shape, device=layer.device))
    dtypes = info.dtype if info.quantization == "none" else f"{info.dtype} with {info.quantization} weights"
    print(f"{gpus[0].name}, {engine.model_path}, {dtypes}, KV cache in {info.kv_dtype}")
    print(
        f"{config.context_len} tokens of context, greedy; loaded, captured and warmed up in {startup:.1f} s"
    )
    graphs = CudaGraphs()
    with torch.inference_mode():
        rates = measure_rates(worker.part, step_kernels, graphs, PowerReader(), Loads())
    print_steps(config, engine, worker, step_kernels, rates, graphs)
    return 0


def print_steps(
    config: Options, engine: EngineConfig, worker: Worker, kernels: Any, rates: Rates, graphs: CudaGraphs
) -> None:
    """Print steps of each batch size beside the roofline, with pieces of prompts and with guesses."""
    from benchmarks.decode_parts import decode_parts
    from benchmarks.decode_steps import WARM_UP, decode_steps

    info, context, n_steps = worker.part.info, config.context_len, config.output_len
    loads = rates.reading, rates.layers, rates.head
    roofline, energy = Roofline(*(rate.at_first for rate in loads)), rates.energy()
    explained: list[str] = []
    plain_s: dict[int, float] = {}  # a step of each batch
    print(f"floor: bytes of weights and KV cache that a step reads / {config.bandwidth:g} TB/s")
    print(
        f"  {'batch':>6} {'step ms':>9} {'floor ms':>9} {'ratio':>6}"
        f" {'tokens/s':>9} {'attention':>10} {'products':>9}"
    )
    for batch in config.batches:
        decoded = decode_steps(worker, engine, batch, context, n_steps)
        step_s, n_tokens = decoded.step_s, context + WARM_UP + n_steps // 2
        n_bytes = _weight_bytes(info, batch)
        n_bytes += batch * n_tokens * info.config.kv_bytes_per_token(info.kv_dtype)
        floor_s = n_bytes / (config.bandwidth * 1e12)
        parts = decode_parts(worker.part, batch, n_tokens, kernels)
        times = {part: graphs.seconds_of(part.run) for part in parts}
        attention_s, *products_s = times.values()
        print(
            f"  {batch:>6} {step_s * 1e3:>9.3f} {floor_s * 1e3:>9.3f} {step_s / floor_s:>6.2f}"
            f" {batch / step_s:>9.0f} {attention_s * 1e3:>10.3f} {sum(products_s) * 1e3:>9.3f}",
            flush=True,
        )
        explained.append(_explained(batch, decoded, times, roofline, energy))
        plain_s[batch] = step_s
    _print_rates(rates, roofline, energy)
    print("\n".join(explained))
    _print_mixed_steps(config, worker)
    if config.speculative_config:
        guesses = SpeculativeConfig.read(config.speculative_config)
        _print_guesses(config, guesses, engine, worker, plain_s)


def engine_config(config: Options, free_bytes: int) -> EngineConfig:
    """Return an engine with room for all steps that are timed."""
    from benchmarks.decode_steps import WARM_UP, context_steps

    guesses = SpeculativeConfig.read(config.speculative_config) if config.speculative_config else None
    batch, context = max(config.batches), config.context_len
    n_guesses = guesses.max_draft_len if guesses else 0
    scheduler = SchedulerConfig(
        max_batch_size=batch,
        max_num_tokens=max(config.max_num_tokens, batch * (1 + n_guesses)),
        enable_chunked_context=True,
    )
    engine = EngineConfig(
        scheduler,
        model_path=config.model_path,
        dtype=config.dtype or "auto",
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        speculative_config=config.speculative_config,
        gpu_bytes=free_bytes,
    )
    block = scheduler.tokens_per_block
    longest_decoded = context + config.output_len + WARM_UP + n_guesses + 2 * block
    if guesses and guesses.decoding_type == EAGLE:
        longest_decoded += context_steps(engine, batch, context)
    longest = max(longest_decoded, context + max(config.pieces) + block)
    kv_cache_tokens = batch * (longest_decoded + block) + longest
    return replace(engine, max_seq_len=longest, kv_cache_tokens=kv_cache_tokens)


def _worker(engine: EngineConfig, info: ModelInfo) -> Worker:
    """Return a worker that is ready."""
    import torch

    from mpillm.engine.parallel.groups import Groups
    from mpillm.engine.run.worker import Worker

    worker = Worker.on_gpu(engine, info, Groups())
    worker.warm_up(engine.scheduler.max_num_tokens)
    torch.cuda.synchronize()
    return worker


def _print_rates(rates: Rates, roofline: Roofline, energy: Energy) -> None:
    print(
        f"roofline, measured: {roofline.bandwidth / 1e12:.2f} TB/s reading; products of many rows"
        f" {roofline.peak / 1e12:.0f} TFLOP/s, of the head {roofline.peak_in_floats / 1e12:.0f}"
    )
    for what, rate in (
        ("reading", rates.reading),
        ("products of many rows", rates.layers),
        ("of the head", rates.head),
        ("reading and products in turns", rates.in_turns),
    ):
        drawn = f"{rate.watts:.0f} W, {rate.sm_mhz:.0f} MHz"
        print(f"  for seconds on end, {what}: {rate.on_end / 1e12:.2f} ({drawn})")
    if not math.isnan(energy.idle_watts):
        print(
            f"energy: {energy.idle_watts:.0f} W always; reading {1e12 * energy.per_byte:.0f} J/TB, products"
            f" of many rows {1e12 * energy.per_flop:.3f} J/TFLOP, of the head"
            f" {1e12 * energy.per_flop_in_floats:.3f}; so in turns {rates.in_turns_by_energy():.0f} W"
        )


def _print_mixed_steps(config: Options, worker: Worker) -> None:
    from benchmarks.decode_steps import mixed_step

    print("steps in which one of the batch computes a piece of its prompt")
    print(f"  {'batch':>6} {'piece':>6} {'step ms':>9} {'host ms':>9}")
    for batch, piece in itertools.product(config.batches, config.pieces):
        mixed = mixed_step(worker, batch, config.context_len, piece, SchedulerConfig.tokens_per_block)
        print(f"  {batch:>6} {piece:>6} {mixed.step_s * 1e3:>9.2f} {mixed.host_s * 1e3:>9.2f}", flush=True)


def _print_guesses(
    config: Options,
    guesses: SpeculativeConfig,
    engine: EngineConfig,
    worker: Worker,
    plain_s: Mapping[int, float],
) -> None:
    """Print what steps with guesses take; `plain_s`: without, by batch."""
    from benchmarks.decode_steps import Guesses, decode_steps
    from mpillm.engine.speculation.start_speculation import start_drafter

    print("steps that test wrong guesses of each sequence; guesses pay from so many right ones a step")
    print(f"  {'batch':>6} {'guesses':>7} {'step ms':>9} {'plain':>9} {'pay from':>9}")
    drafter = start_drafter(engine, worker)
    for batch, n in itertools.product(config.batches, range(1, guesses.max_draft_len + 1)):
        tested_guesses = Guesses(drafter, n, guesses.max_concurrency)
        tested = decode_steps(worker, engine, batch, config.context_len, config.output_len, tested_guesses)
        step_ms, plain_ms = tested.step_s * 1e3, plain_s[batch] * 1e3
        print(
            f"  {batch:>6} {n:>7} {step_ms:>9.3f} {plain_ms:>9.3f} {step_ms / plain_ms - 1:>9.2f}",
            flush=True,
        )


def _explained(
    batch: int, decoded: Decoded, times: dict[LayerOp, float], roofline: Roofline, energy: Energy
) -> str:
    """Return what a step is made of, a line for each part."""
    lines = [f"batch {batch:<19} {'ms':>9} {'roof ms':>9} {'ratio':>6}  limit"]
    for part, seconds in times.items():
        roof, limit = roofline.seconds(part.work), part.limit(roofline)
        ratio = f"{seconds / roof:.2f}"
        lines.append(f"  {part.name:<23} {seconds * 1e3:>9.3f} {roof * 1e3:>9.3f} {ratio:>6}  {limit}")
    rest = decoded.step_s - sum(times.values())
    lines.append(f"  {'the rest':<23} {rest * 1e3:>9.3f}   norms, rotary embedding, cache, sampler, gaps")
    lines.append(f"  {'on the host':<23} {decoded.host_s * 1e3:>9.3f}   beside the step before it")
    if decoded.metered_s < _LEAST_METERED_S:
        n_steps = math.ceil(_LEAST_METERED_S / decoded.step_s)
        lines.append(f"  {decoded.sm_mhz:.0f} MHz; for watts these steps are too few: --output_len {n_steps}")
    elif not math.isnan(joules := decoded.watts * decoded.step_s):
        least = energy.joules(decoded.step_s, (part.work for part in times))
        lines.append(
            f"  {decoded.watts:.0f} W, {decoded.sm_mhz:.0f} MHz; {joules:.3g} J a step,"
            f" {1e3 * joules / batch:.3g} mJ a token; bytes and FLOP alone cost {least:.3g} J a step"
        )
    return "\n".join(lines)


def _weight_bytes(info: ModelInfo, batch: int) -> int:
    """Return the bytes of weights that a step reads.

    Of the embedding the rows of its tokens; of a mixture the experts that random choices hit, on average.
    """
    c, width = info.config, N_BYTES[info.dtype]
    n_bytes = info.n_bytes - (0 if c.tie_word_embeddings else (c.vocab_size - batch) * c.hidden_size * width)
    if c.n_experts:
        _, experts = layer_bytes(c, info.dtype, info.quantization)
        n_bytes -= round(experts * (1 - c.n_experts_per_token / c.n_experts) ** batch)
    return n_bytes
