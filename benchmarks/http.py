"""``benchmarks http``: what HTTP costs beside the same work through MPI, with cores of zero cost."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.endpoints import load_test, served
from benchmarks.other_clients import Load, request_rates
from disagg.errors import ConfigError, nearest
from mpillm.experiments.bench.bench_endpoint import null_server
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import positive
from mpillm.options.values import Values
from mpillm.runtime.whole_runs import run_once, served_in

# Answers of a core that takes its time: at 100 requests per second of 0.93 s, about 100 are under way.
_STREAMS = 100
_TIMED_LEN = 45
_OTHERS = {"openai": 2000, "vllm": 10_000, "aiperf": 5000}


class Options(Values):
    """Options of ``benchmarks http``."""

    parts = Field(
        "parts", "what to measure, with commas between them [default: all]", default="", group="benchmark"
    )
    repeats = Field("repeats", "of all; the median is printed", positive, default=3, group="benchmark")
    requests = Field(
        "requests",
        "of a run through HTTP; ten times as many through MPI",
        positive,
        default=8000,
        group="benchmark",
    )
    input_len = Field("input_len", "prompt tokens", positive, default=128, group="benchmark")
    output_len = Field("output_len", "answer tokens", positive, default=16, group="benchmark")
    qps = Field(
        "qps", "queries per second where latency is measured", positive, default=200, group="benchmark"
    )
    server_s = Field(
        "server_s", "length of a test at a rate, seconds", positive, default=8, group="benchmark"
    )
    max_concurrency = Field(
        "max_concurrency", "requests at once at the zero-cost server", positive, default=64, group="benchmark"
    )
    peers = Field(
        "peers",
        "an environment with openai, vllm and aiperf, as make test-peers makes it: their rates, too",
        group="benchmark",
    )
    model_path = ModelFields.model_path.but(
        "a folder with a tokenizer, which vllm and aiperf want", group="benchmark"
    )


DESCRIPTION = "Measure what HTTP adds to the same work through MPI, with cores of zero cost."
EPILOG = "example:\n  python -m benchmarks http --peers .venv-peers --model_path build/models/smollm2-135m"


class _Row(NamedTuple):
    what: str
    unit: str


def main(config: Options) -> int:
    """Print the table; 0 unless something failed."""
    if config.peers and not config.model_path:
        raise ConfigError(
            "--peers needs --model_path: vllm and aiperf want a tokenizer", about=["model_path"]
        )
    if config.model_path and not Path(config.model_path).is_dir():  # not after minutes, from vllm
        raise ConfigError(f"--model_path {config.model_path}: no such folder", about=["model_path"])
    parts = config.parts.split(",") if config.parts else [*_PARTS]
    for name in parts:
        if name not in _PARTS:
            raise ConfigError(f"--parts {name}: not one of {', '.join(_PARTS)}{nearest(name, _PARTS)}")
    found: dict[_Row, list[float]] = defaultdict(list)
    for i in range(config.repeats):
        for name in parts:
            print(f"{name}, {i + 1} of {config.repeats}", file=sys.stderr, flush=True)
            for row, value in _PARTS[name](config).items():
                found[row].append(value)
    print(
        f"zero-cost cores, {config.input_len} tokens in, {config.output_len} out;"
        f" median of {config.repeats} (least to most)"
    )
    for (what, unit), values in found.items():
        spread = f"({min(values):,.2f} to {max(values):,.2f})"
        print(f"  {what:<46} {unit:<11} {statistics.median(values):>10,.2f}  {spread}")
    return 0


def _runs(config: Options) -> dict[_Row, float]:
    """Return requests per second and time to the first token, of a test through MPI and one through HTTP."""
    data = _data(config, config.output_len)
    server = _words(scenarios="Server", server_target_qps=config.qps, min_duration=0)
    server += _words(min_query_count=config.server_s * config.qps)

    def both(n: int, **core: str) -> tuple[float, float]:
        offline = run_once(2, *_words(**core), *data, *_words(min_query_count=n))
        return offline["samples_per_second"], run_once(2, *_words(**core), *data, *server)["ttft_ms"]["p50"]

    mpi = both(10 * config.requests, core_type="dummy")
    with served(2, *_words(core_type="dummy")) as url:
        http = both(config.requests, core_type="trtllm_endpoint", trtllm_server_urls=_root(url))
    return {
        _Row("run through MPI, Offline", "requests/s"): mpi[0],
        _Row("run through HTTP: trtllm_endpoint and serve", "requests/s"): http[0],
        _Row("  MPI over HTTP", "times"): mpi[0] / http[0],
        _Row(f"run through MPI, Server at {config.qps}/s: first token", "p50, ms"): mpi[1],
        _Row("run through HTTP: first token", "p50, ms"): http[1],
        _Row("  MPI over HTTP", "part"): mpi[1] / http[1],
    }


def _first_tokens(config: Options) -> dict[_Row, float]:
    """Measure first tokens of answers that take their time, from the same core through `run` and through
    `serve`."""
    core = _words(core_type="dummy", core_options="ttft_ms:50,tpot_ms:20", max_batch_size=1024)
    n = config.server_s * _STREAMS
    rate = _words(scenarios="Server", server_target_qps=_STREAMS, min_duration=0, min_query_count=n)
    run = run_once(2, *core, *_data(config, _TIMED_LEN), *rate)
    with served(2, *core) as url:
        length = _words(input_len=config.input_len, output_len=_TIMED_LEN)
        test = load_test(url, *_words(request_rate=_STREAMS, num_prompts=n), *length)
    return {
        _Row(f"{_STREAMS} streams of 50 tokens/s: first token, run", "p50, ms"): run["ttft_ms"]["p50"],
        _Row("  the same core behind serve", "p50, ms"): test["median_ttft_ms"],
        _Row("  serve adds", "ms"): test["median_ttft_ms"] - run["ttft_ms"]["p50"],
    }


def _streams(config: Options) -> dict[_Row, float]:
    """Return the tokens per second through `serve`, of answers that are there at once, and token by token."""
    load = _words(max_concurrency=_STREAMS, num_prompts=max(_STREAMS, config.requests // 4))
    load += _words(input_len=config.input_len, output_len=128)
    every_ms = _words(core_options="ttft_ms:1,tpot_ms:1", max_batch_size=1024)
    made = {}
    for what, core in (("whole answers", []), ("a token per ms", every_ms)):
        with served(2, *_words(core_type="dummy"), *core) as url:
            test = load_test(url, *load)
        made[_Row(f"{_STREAMS} streams of 128 tokens, {what}", "tokens/s")] = test["output_throughput"]
    return made


def _clients(config: Options) -> dict[_Row, float]:
    """Measure streamed requests per second of one client rank, and of other clients, against a zero-cost
    server."""
    at_once, n = config.max_concurrency, 2 * config.requests
    made = {}
    with null_server() as url:
        words = _words(core_type="trtllm_endpoint", trtllm_server_urls=_root(url), scenarios="Server")
        words += _words(trtllm_runtime_flags=f"max_concurrency:{at_once}", server_target_qps=100_000)
        words += _words(min_duration=0, min_query_count=n)
        ours = run_once(2, *words, *_data(config, config.output_len))
        made[_Row(f"trtllm_endpoint, one rank, {at_once} at once", "requests/s")] = ours["samples_per_second"]
        if config.peers and config.model_path:
            load = Load(url, config.model_path, at_once, config.input_len, config.output_len)
            for name, rate in request_rates(Path(config.peers), load, _OTHERS):
                made[_Row(f"  {name}", "requests/s")] = rate
    return made


def _front(config: Options) -> dict[_Row, float]:
    """Measure what `serve` in front of a server adds to a first token, what it streams, and what it costs.

    Beside it a reverse proxy of aiohttp, which passes on what it does not read. The server's answers cost
    nothing: they come at once, or a token per millisecond.
    """
    length = _words(input_len=config.input_len, output_len=config.output_len)
    rate = [*_words(request_rate=config.qps, num_prompts=int(config.server_s * config.qps)), *length]
    many = _words(max_concurrency=config.max_concurrency, num_prompts=config.requests // 4)
    many += _words(input_len=config.input_len, output_len=128)
    made = {}
    with _fronts() as fronts:
        for what, (at, cpu_s) in fronts.items():
            before = cpu_s()
            test = load_test(at, *rate)
            made[_Row(f"a server {what}, {config.qps}/s: first token", "p50, ms")] = test["median_ttft_ms"]
            made[_Row(f"  CPU time {what}", "us/request")] = 1e6 * (cpu_s() - before) / test["completed"]
        alone, *others = (
            made[_Row(f"a server {what}, {config.qps}/s: first token", "p50, ms")] for what in fronts
        )
        made[_Row("  aiohttp adds", "ms")], made[_Row("  serve adds", "ms")] = (one - alone for one in others)
        for what, (at, _) in fronts.items():
            test = load_test(at, *many)
            made[_Row(f"a server {what}: tokens streamed", "tokens/s")] = test["output_throughput"]
    with _fronts("1") as fronts:
        for what, (at, cpu_s) in fronts.items():
            before = cpu_s()
            test = load_test(at, *many)
            row = f"a server {what}, a token per ms: streamed"
            made[_Row(row, "tokens/s")] = test["output_throughput"]
            made[_Row(f"  CPU time {what}", "us/token")] = (
                1e6 * (cpu_s() - before) / test["total_output_tokens"]
            )
    return made


@contextlib.contextmanager
def _fronts(*pace: str) -> Iterator[dict[str, tuple[str, Callable[[], float]]]]:
    """Yield where a server is, with nothing before it and behind others, and the CPU time of these so far."""
    with (
        null_server("mpillm.experiments.bench.null_server", *pace) as url,
        null_server("benchmarks.aiohttp_proxy", url) as proxy,
        tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder,
        served_in(
            Path(folder), ("-n", "2"), _words(core_type="trtllm_endpoint", trtllm_server_urls=_root(url))
        ) as serve,
    ):
        ranks = json.loads((Path(folder) / "ranks.json").read_text(encoding="utf-8"))
        children = psutil.Process().children()
        pids = {
            "behind aiohttp": [one.pid for one in children if "benchmarks.aiohttp_proxy" in one.cmdline()],
            "behind serve": [one["pid"] for one in ranks],
        }
        yield {
            "alone": (url, lambda: 0.0),
            **{
                what: (at, partial(_cpu_s, pids[what]))
                for what, at in (("behind aiohttp", proxy), ("behind serve", serve))
            },
        }


def _cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


_PARTS = {
    "front": _front,
    "runs": _runs,
    "first_tokens": _first_tokens,
    "streams": _streams,
    "clients": _clients,
}


def _data(config: Options, output_len: int) -> list[str]:
    length = _words(input_mean=config.input_len, output_mean=output_len, max_output_len=output_len)
    return [*_words(dataset="synthetic", num_samples=8192), *length]


def _words(**options: object) -> list[str]:
    """Return the words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _root(url: str) -> str:
    return url.removeprefix("http://").removesuffix("/v1")
