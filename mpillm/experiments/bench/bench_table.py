"""``bench table``: runs compared with the figures that NVIDIA publishes for one H200."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disagg.errors import ConfigError
from launch.safe_text import whole_number
from mpillm.cores.torch_core import TorchCore
from mpillm.devices import Gpu
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.entries import layer_bytes
from mpillm.engine.shape.model_info import model_info
from mpillm.engine.shape.read_config import load_model_config
from mpillm.experiments.bench.roofline import Energy, Roofline, Work, sample_work
from mpillm.options import json_output
from mpillm.options.field import option
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import flag_dict, positive, rate, seconds
from mpillm.options.values import Values
from mpillm.report.page.run_analysis import floats
from mpillm.report.run_directory import TELEMETRY
from mpillm.runtime.whole_runs import EndedRun, run_in


class GpuUsage(NamedTuple):
    """Means over the GPUs during the test; NaN if no driver reports them."""

    watts: float = math.nan
    sm_mhz: float = math.nan
    peak_bytes: float = math.nan  # of used memory


def max_concurrent(options: Mapping[str, Any], n_ranks: int, gpus: Sequence[Gpu]) -> int:
    """Return how many complete samples the KV caches of a run's instances hold.

    `options`: of the run, by name; `gpus`: of this machine. Raises ConfigError if the model does not fit a
    GPU, or does not exist.
    """
    tp_size, pp_size = (int(options.get(f"{name}_parallelism", 1)) for name in ("tensor", "pipeline"))
    gpu_bytes = None if options.get("device") == "cpu" else min((gpu.free for gpu in gpus), default=None)
    config = EngineConfig.of(options, gpu_bytes=gpu_bytes, tp_size=tp_size, pp_size=pp_size)
    scheduler = config.scheduler
    n_blocks = model_info(config).kv_cache_tokens // scheduler.tokens_per_block
    fit = n_blocks // math.ceil(int(options["max_seq_len"]) / scheduler.tokens_per_block)
    return min(fit, scheduler.max_batch_size) * ((n_ranks - 1) // (tp_size * pp_size))


def failed(cause: str) -> dict[str, Any]:
    return {"status": "FAILED", "failures": [{"cause": cause}]}


def _gpu_usage(telemetry: Mapping[str, Any]) -> GpuUsage:
    """Return the GPU usage during the test, from telemetry.json."""
    rows = []
    for rank in telemetry["ranks"].values():
        begin, end = next(ends for name, *ends in rank["phases"] if name == "test")
        if gpu := rank["samples"].get("gpu"):
            at, *columns = (floats(gpu[name]) for name in ("seconds", "energy_j", "sm_mhz", "memory_bytes"))
            inside = (begin <= at) & (at <= end)
            if inside.sum() > 1:
                at, joules, mhz, used = (column[inside] for column in (at, *columns))
                rows.append((float((joules[-1] - joules[0]) / (at[-1] - at[0])), mhz.mean(), used.max()))
    return GpuUsage(*map(float, np.mean(rows, axis=0))) if rows else GpuUsage()


# Output tokens/s per GPU, by tokens in/out.
# Llama 3.1 8B and Llama 3.3 70B: TensorRT-LLM 1.0 on one H200, FP8 weights and KV cache
# (https://nvidia.github.io/TensorRT-LLM/performance/perf-overview.html).
# MLPerf Inference v5.1, Offline, closed: the best result with eight H200s of 700 W, per GPU
# (github.com/mlcommons/inference_results_v5.1). Lengths are means of data sets and outputs:
# Llama 2 70B 222/292 (OpenOrca), Llama 3.1 8B 871/128 (CNN/DailyMail), Mixtral 427/146.
PUBLISHED: dict[str, dict[str, float]] = {
    "llama3.1-8b": {
        "128/128": 27_911, "128/2048": 26_221, "500/2000": 20_770, "1000/1000": 17_744,
        "2048/128": 3_538, "2048/2048": 12_194, "20000/2000": 1_804, "871/128": 8_255,
    },
    "llama3.1-70b": {
        "128/128": 3_803, "128/2048": 4_336, "500/2000": 3_666, "1000/1000": 2_909,
        "2048/128": 442, "2048/2048": 2_003, "20000/2000": 283,
        # TensorRT-LLM 1.2, TP 2.
        "1024/1024": 2_637, "1024/8192": 1_995, "8192/1024": 544, "32768/1024": 120,
    },
    "llama2-70b": {"222/292": 4_415},
    "mixtral-8x7b": {"427/146": 7_764},
    # TensorRT-LLM 1.2; gpt-oss-120b: 1.1.
    "gpt-oss-20b": {"1024/1024": 14_719, "1024/8192": 12_441, "8192/1024": 4_196, "32768/1024": 965},
    "gpt-oss-120b": {"1000/1000": 6_868},
}  # fmt: skip
# Notes on comparisons with a model's published figures.
_NOTES = {
    "llama2-70b": "llama2-70b: the published figure is an eighth of MLPerf Inference v5.1's, whose samples"
    " vary in length; here all have the mean length",
    "qwen3-0.6b": "qwen3-0.6b: 256 requests of 558/523 are similar to nano-vllm's bench.py, which"
    " publishes 1,434 tokens/s for itself and 1,362 for vLLM, on an RTX 4070 Laptop"
    " (https://github.com/GeeeekExplorer/nano-vllm)",
    "gpt-oss-20b": "gpt-oss-20b: the published figures use a bfloat16 KV cache; to compare, use"
    " --quantization auto --kv_cache_dtype auto, and --peak of bfloat16 products",
}


class Options(Values, group="benchmark"):
    """Options of ``bench table``."""

    models = option("presets or folders, separated by commas", default="llama3.1-8b")
    pairs = option("tokens in/out, separated by commas", default=",".join(PUBLISHED["llama3.1-8b"]))
    num_samples = option("samples of a run [default: rounds times the concurrent samples]", positive)
    rounds = option(
        "without num_samples: samples of a run, as a multiple of the concurrent samples",
        positive,
        default=3,
    )
    ranks = option("ranks of the mpirun: one controls, the others have a GPU each", positive, default=2)
    quantization = ModelFields.quantization.but(
        "type of the layers' weights", default="fp8", group="benchmark"
    )
    kv_cache_dtype = ModelFields.kv_cache_dtype.but("type of the KV cache", default="fp8", group="benchmark")
    max_batch_size = ModelFields.max_batch_size.but(
        "concurrent requests of an instance", default=1024, group="benchmark"
    )
    max_num_tokens = ModelFields.max_num_tokens.but(
        "tokens of one engine step; a whole prompt's if they are more and contexts are not chunked",
        default=8192,
        group="benchmark",
    )
    kv_cache_free_gpu_mem_fraction = ModelFields.kv_cache_free_gpu_mem_fraction.but(
        "as for run", default=0.9, group="benchmark"
    )
    # Measured by `benchmarks decode` on an H200 over several seconds.
    bandwidth = option("roof: memory bandwidth of a GPU, TB/s", rate, default=4.4)
    peak = option("roof: TFLOP/s of products with the layers' weights", rate, default=1260.0)
    peak_in_floats = option("roof: TFLOP/s of all else", rate, default=660.0)
    idle_watts = option("energy: what a GPU draws always, W", rate, default=124.0)
    joules_per_tb = option("energy: of reading, J/TB", rate, default=127.0)
    joules_per_tflop = option("energy: of products with the layers' weights, J/TFLOP", rate, default=0.45)
    joules_per_tflop_in_floats = option("energy: of all else", rate, default=0.86)
    extra = option("more options of run, name:value,name:value", flag_dict, default={})
    run_deadline = option("longest time for a run, seconds", seconds, default=1800.0)


DESCRIPTION = (
    "Compare output tokens/s of runs (mpirun, LoadGen, Offline; random prompts and weights) with TensorRT-LLM"
    " 1.0. Also print the tokens/s of the GPUs' roofline (roof), peak memory, mean power and clock, and the"
    " energy per token, with the part for its bytes and FLOP (alone). Unknown values are -."
)
EPILOG = """examples:
  python -m mpillm bench table --pairs 128/2048,1000/1000 --rounds 2
  python -m mpillm bench table --models llama3.1-70b --pairs 128/128 --extra enable_chunked_context:true"""


def main(config: Options, run_in: Callable[..., EndedRun] = run_in) -> int:
    """Print a line for each pair; return 1 if a run fails. `run_in`: starts one."""
    pairs = [_pair(text) for text in config.pairs.split(",")]
    print(
        f"{config.quantization} weights, KV cache {config.kv_cache_dtype}, {config.ranks} ranks,"
        f" at most {config.max_batch_size} concurrent"
    )
    print(
        f"  {'model':<14} {'in/out':>12} {'samples':>8} {'at once':>8} {'evicted':>8} {'test, s':>8}"
        f" {'output tokens/s':>16} {'published':>9} {'ratio':>6} {'roof':>7} {'of it':>5} {'GiB':>6}"
        f" {'W':>5} {'MHz':>6} {'mJ':>6} {'alone':>6}   LoadGen",
        flush=True,
    )
    n_failed = 0
    figures: list[dict[str, Any]] = []
    json_output.set_figures(figures)
    for model in config.models.split(","):
        for lengths in pairs:
            result, usage = _run(config, model, lengths, run_in)
            figures.append({"model": model, "in": lengths[0], "out": lengths[1], "result": result})
            if result["status"] == "FAILED":
                n_failed += 1
                row = f"failed: {' | '.join(failure['cause'] for failure in result['failures'])}"
            else:
                row = _row(config, model, lengths, result, usage)
            print(f"  {model:<14} {'/'.join(map(str, lengths)):>12} {row}", flush=True)
        if note := _NOTES.get(Path(model).name):
            print(f"  {note}", flush=True)
    return 1 if n_failed else 0


def _run(
    config: Options, model: str, lengths: tuple[int, int], run_in: Callable[..., EndedRun]
) -> tuple[dict[str, Any], GpuUsage]:
    """Return the run's `result.json` and GPU usage; for a run without figures, its status and cause."""
    with tempfile.TemporaryDirectory(prefix="mpillm-table-") as folder:
        path = Path(folder) / "run"
        try:
            options = run_options(config, model, lengths, TorchCore.gpus())
            args = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            ended = run_in(path, ("-n", str(config.ranks)), args, deadline_s=config.run_deadline)
        except ConfigError as error:
            return failed(str(error)), GpuUsage()
        if ended.cause:
            return failed(ended.cause.splitlines()[0]), GpuUsage()
        telemetry = json.loads((path / TELEMETRY).read_text(encoding="utf-8"))
        return ended.result, _gpu_usage(telemetry)


def _row(
    config: Options, model: str, lengths: tuple[int, int], result: Mapping[str, Any], usage: GpuUsage
) -> str:
    measured, instances, n_gpus = result["tokens_per_second"], result["per_instance"], config.ranks - 1
    published = PUBLISHED.get(Path(model).name, {}).get("/".join(map(str, lengths)), math.nan)
    evicted = sum(instance["preemptions"] for instance in instances)
    at_once = sum(instance["metrics"]["running"]["peak"] for instance in instances)
    roof = alone = math.nan
    if at_once:  # telemetry may count no sequences in a short run
        works, n_out = _works(config, model, lengths, at_once / len(instances)), lengths[1]
        roof = n_gpus * n_out / _roofline(config).seconds(*works)
        if not math.isnan(usage.watts):
            alone = _energy(config).joules(n_gpus * n_out / measured, works) / n_out
    return (
        f"{result['samples']:>8} {at_once:>8,.0f} {evicted:>8} {result['test_s']:>8.1f} {measured:>16,.0f}"
        f" {_number_text(published):>9} {_number_text(measured / n_gpus / published, 2):>6}"
        f" {_number_text(roof):>7} {_number_text(measured / roof, 2):>5}"
        f" {_number_text(usage.peak_bytes / 2**30, 1):>6}"
        f" {_number_text(usage.watts):>5} {_number_text(usage.sm_mhz):>6}"
        f" {_number_text(1e3 * usage.watts * n_gpus / measured, 1):>6} {_number_text(1e3 * alone, 1):>6}"
        f"   {result['loadgen_result']}"
    )


def _pair(text: str) -> tuple[int, int]:
    n_in, _, n_out = map(whole_number, text.partition("/"))
    if not n_in or not n_out:
        raise ConfigError(f"--pairs {text}: expected tokens in/out, such as 128/2048")
    return n_in, n_out


def _works(config: Options, model: str, lengths: tuple[int, int], batch: float) -> list[Work]:
    """Return a sample's work; `batch`: sequences of an instance."""
    of = load_model_config(model)
    quantization = config.quantization
    if quantization == "auto":
        quantization = "mxfp4" if of.stored == "mxfp4" else of.quantization
    kv_dtype = of.kv_quantization if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if quantization == "int4" and not of.group:
        of = replace(of, group=-1)
    n_bytes, _ = layer_bytes(of, of.dtype, quantization)
    kv_dtype = of.dtype if kv_dtype == "none" else kv_dtype
    return sample_work(
        of, lengths, batch, n_bytes, kv_dtype, in_floats=quantization in ("none", "mxfp4", "int4")
    )


def _roofline(config: Options) -> Roofline:
    return Roofline(1e12 * config.bandwidth, 1e12 * config.peak, 1e12 * config.peak_in_floats)


def _energy(config: Options) -> Energy:
    per_flop, in_floats = config.joules_per_tflop, config.joules_per_tflop_in_floats
    return Energy(config.idle_watts, *(1e-12 * each for each in (config.joules_per_tb, per_flop, in_floats)))


def run_options(config: Options, model: str, lengths: tuple[int, int], gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the options of a run, by name. Raises ConfigError as `max_concurrent`."""
    n_in, n_out = lengths
    is_chunked = config.extra.get("enable_chunked_context") is True  # otherwise a prompt must fit a step
    options = {
        "model_path": model,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "dataset": "synthetic",
        "input_mean": n_in,
        "output_mean": n_out,
        "max_output_len": n_out,
        "min_output_len": n_out,
        "max_seq_len": n_in + n_out,
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens if is_chunked else max(config.max_num_tokens, n_in),
        "kv_cache_free_gpu_mem_fraction": config.kv_cache_free_gpu_mem_fraction,
        "batch_scheduler_policy": "no_evict",  # like in the published runs
        **config.extra,
    }
    n_samples = config.num_samples or config.rounds * max_concurrent(options, config.ranks, gpus)
    return {**options, "num_samples": n_samples}


def _number_text(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"
