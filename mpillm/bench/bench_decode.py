"""``bench engine --device cuda``: decode on one GPU; the step time over the memory's floor, and its parts."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from mpillm.bench.roofline import Roofline
from mpillm.config.core_config import CoreConfig
from mpillm.config.values import Values
from mpillm.configurator import json_output, option
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.dtypes import N_BYTES
from mpillm.engine.model.model_info import ModelInfo, check_model
from mpillm.engine.speculation.check_speculation import check_speculation
from mpillm.engine.speculation.speculative_config import EAGLE, SpeculativeConfig, decode_rows
from mpillm.engine.weights.entries import layer_bytes
from mpillm.fields import integers, not_negative, positive
from mpillm.fields.model import ModelFields

if TYPE_CHECKING:
    from mpillm.bench.decode_parts import Rates
    from mpillm.bench.decode_steps import Decoded
    from mpillm.bench.roofline import Energy, Part
    from mpillm.engine.worker import Worker

# An H200's counter of joules moves about ten times a second: over 0.1 to 0.4 s it said 270 to 852 W of a card
# whose limit is 700.
_LEAST_METERED_S = 1.0


class Options(Values, group="benchmark"):
    """Options of ``bench engine``, on CPUs and on a GPU."""

    device = ModelFields.device.but(
        "cuda: decode steps on one GPU, and their parts",
        default="cpu",
        choices=("cpu", "cuda"),
        group="benchmark",
    )
    model_path = ModelFields.model_path.but(
        "folder of a Hugging Face checkpoint; on a GPU also a preset [default there: llama3.1-8b]",
        group="benchmark",
    )
    dataset_path = option("JSONL with prompts; without it, those that come with the program")
    against = option(
        "CPU: what answers the same prompts alternating with the engine",
        default="transformers",
        choices=("transformers", "vllm"),
    )
    vllm_python = option(
        "the Python of an environment with vLLM for CPUs; make test-peers makes one",
        default=".venv-peers/bin/python",
    )
    speculative_config = ModelFields.speculative_config.but(
        "CPU: instead of others, the engine with these guesses takes turns with the engine without; GPU: also"
        " time steps that test guesses (docs/explain/speculation.md); as key:value,key:value",
        group="benchmark",
    )
    num_prompts = option("how many of the data set's prompts", positive, default=40)
    max_prompt_len = option("skip longer prompts, tokens", positive, default=96)
    output_len = option("new tokens per prompt", positive, default=32)
    dtype = option(
        "type of weights and activations [default: float32; on a GPU the checkpoint's]",
        choices=("float32", "bfloat16"),
    )
    quantization = ModelFields.quantization.but(
        "type of the layers' weights; an unquantised checkpoint is quantised as it is loaded",
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
        "requests of the engine at once", default=64, group="benchmark"
    )
    max_num_tokens = ModelFields.max_num_tokens.but(
        "tokens of one engine step", default=2048, group="benchmark"
    )
    batches = option("GPU: batch sizes, separated by commas", integers, default=(1, 64, 256, 1024))
    context_len = option("GPU: tokens in the cache of each sequence", positive, default=512)
    pieces = option(
        "GPU: tokens of a prompt in a step beside a batch, separated by commas", integers, default=(64, 256)
    )
    bandwidth = option("GPU: memory bandwidth, TB/s", not_negative, default=4.3)
    repeats = option("rounds; the median is printed", positive, default=3)


def bench_decode(config: Options) -> int:
    """Print the table: a line per batch size."""
    guesses = SpeculativeConfig.read(config.speculative_config) if config.speculative_config else None
    gpus = TorchCore.gpus()
    if not gpus:
        raise ConfigError("--device cuda: there is no NVIDIA GPU")
    core = _core(config, guesses, gpus[0].free)
    info = check_model(core)
    if info.config.latent is not None:
        raise ConfigError(
            "--model_path: the parts of latent attention are not measured", about=["model_path"]
        )
    check_speculation(core, info)

    import torch

    from mpillm.bench.decode_parts import decode_parts, measure_rates, seconds_of
    from mpillm.bench.decode_steps import WARM_UP, decode_steps
    from mpillm.engine.kernels import step_kernels

    started = time.perf_counter()
    worker = _worker(core, info)
    startup = time.perf_counter() - started
    with torch.inference_mode():  # what reading costs depends on the numbers
        for layer in (*worker.part.cache.keys, *worker.part.cache.values):
            layer.copy_(torch.randn(layer.shape, device=layer.device))
    context, n_steps = config.context_len, config.output_len
    dtypes = info.dtype if info.quantization == "none" else f"{info.dtype} with {info.quantization} weights"
    print(f"{gpus[0].name}, {core.model_path}, {dtypes}, KV cache in {info.kv_dtype}")
    print(f"{context} tokens of context, greedy; loaded, captured and warmed up in {startup:.1f} s")
    with torch.inference_mode():
        rates = measure_rates(worker.part, step_kernels)
    loads = rates.reading, rates.layers, rates.head
    roofline, energy = Roofline(*(rate.at_first for rate in loads)), rates.energy()
    explained: list[str] = []
    plain_s: dict[int, float] = {}  # a step of each batch
    figures: list[dict[str, float]] = []
    json_output.tell(figures)
    print(f"floor: bytes of weights and KV cache that a step reads / {config.bandwidth:g} TB/s")
    print(
        f"  {'batch':>6} {'step ms':>9} {'floor ms':>9} {'ratio':>6}"
        f" {'tokens/s':>9} {'attention':>10} {'products':>9}"
    )
    for batch in config.batches:
        decoded = decode_steps(worker, core, batch, context, n_steps)
        step_s, n_tokens = decoded.step_s, context + WARM_UP + n_steps // 2
        n_bytes = _weight_bytes(info, batch)
        n_bytes += batch * n_tokens * info.config.kv_bytes_per_token(info.kv_dtype)
        floor_s = n_bytes / (config.bandwidth * 1e12)
        parts = decode_parts(worker.part, batch, n_tokens, step_kernels)
        times = {part: seconds_of(part.run) for part in parts}
        attention_s, *products_s = times.values()
        print(
            f"  {batch:>6} {step_s * 1e3:>9.3f} {floor_s * 1e3:>9.3f} {step_s / floor_s:>6.2f}"
            f" {batch / step_s:>9.0f} {attention_s * 1e3:>10.3f} {sum(products_s) * 1e3:>9.3f}",
            flush=True,
        )
        figures.append(
            {
                "batch": batch,
                "step_ms": step_s * 1e3,
                "floor_ms": floor_s * 1e3,
                "attention_ms": attention_s * 1e3,
                "products_ms": sum(products_s) * 1e3,
            }
        )
        explained.append(_explained(batch, decoded, times, roofline, energy))
        plain_s[batch] = step_s
    _print_rates(rates, roofline, energy)
    print("\n".join(explained))
    _print_mixed_steps(config, worker)
    if guesses is not None:
        _print_guesses(config, guesses, core, worker, plain_s)
    return 0


def _core(config: Options, guesses: SpeculativeConfig | None, free_bytes: int) -> CoreConfig:
    """Return an engine with room for all steps that are timed."""
    from mpillm.bench.decode_steps import WARM_UP, context_steps

    batch, context = max(config.batches), config.context_len
    n_guesses = guesses.max_draft_len if guesses else 0
    core = CoreConfig(
        core_type="torch",
        model_path=config.model_path or "llama3.1-8b",
        dtype=config.dtype or "auto",
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        gpu_bytes=free_bytes,
        max_batch_size=batch,
        max_num_tokens=max(config.max_num_tokens, batch * (1 + n_guesses)),
        enable_chunked_context=True,
        speculative_config=config.speculative_config,
    )
    block = core.tokens_per_block
    longest_decoded = context + config.output_len + WARM_UP + n_guesses + 2 * block
    if guesses and guesses.decoding_type == EAGLE:
        longest_decoded += context_steps(core, batch, context)
    longest = max(longest_decoded, context + max(config.pieces) + block)
    kv_cache_tokens = batch * (longest_decoded + block) + longest
    return replace(core, max_seq_len=longest, kv_cache_tokens=kv_cache_tokens)


def _worker(core: CoreConfig, info: ModelInfo) -> Worker:
    """Return a worker that is ready."""
    import torch

    from mpillm.engine.parallel.groups import Groups
    from mpillm.engine.worker import Worker

    worker = Worker.on_gpu(
        info,
        core.tokens_per_block,
        Groups(),
        core.max_batch_size,
        dummy=info.folder is None,
        device="cuda:0",
        decode_rows=decode_rows(core),
    )
    worker.warm_up(core.max_num_tokens)
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
    from mpillm.bench.decode_steps import mixed_step

    print("steps in which one of the batch computes a piece of its prompt")
    print(f"  {'batch':>6} {'piece':>6} {'step ms':>9} {'host ms':>9}")
    for batch, piece in itertools.product(config.batches, config.pieces):
        mixed = mixed_step(worker, batch, config.context_len, piece, CoreConfig.tokens_per_block)
        print(f"  {batch:>6} {piece:>6} {mixed.step_s * 1e3:>9.2f} {mixed.host_s * 1e3:>9.2f}", flush=True)


def _print_guesses(
    config: Options,
    guesses: SpeculativeConfig,
    core: CoreConfig,
    worker: Worker,
    plain_s: Mapping[int, float],
) -> None:
    """Print what steps with guesses take; `plain_s`: without, by batch."""
    from mpillm.bench.decode_steps import Guesses, decode_steps
    from mpillm.engine.speculation.start_speculation import start_drafter

    print("steps that test wrong guesses of each sequence; guesses pay from so many right ones a step")
    print(f"  {'batch':>6} {'guesses':>7} {'step ms':>9} {'plain':>9} {'pay from':>9}")
    drafter = start_drafter(core, worker)
    for batch, n in itertools.product(config.batches, range(1, guesses.max_draft_len + 1)):
        tested_guesses = Guesses(drafter, n, guesses.max_concurrency)
        tested = decode_steps(worker, core, batch, config.context_len, config.output_len, tested_guesses)
        step_ms, plain_ms = tested.step_s * 1e3, plain_s[batch] * 1e3
        print(
            f"  {batch:>6} {n:>7} {step_ms:>9.3f} {plain_ms:>9.3f} {step_ms / plain_ms - 1:>9.2f}",
            flush=True,
        )


def _explained(
    batch: int, decoded: Decoded, times: dict[Part, float], roofline: Roofline, energy: Energy
) -> str:
    """Return what a step is made of, a line for each part."""
    lines = [f"batch {batch:<19} {'ms':>9} {'roof ms':>9} {'ratio':>6}  limit"]
    for part, seconds in times.items():
        roof, limit = roofline.seconds(part.work), roofline.limit(part.work)
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
