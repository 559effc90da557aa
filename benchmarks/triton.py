"""``benchmarks triton``: requests per second to a model of zero cost, of one plain client and of triton_grpc.

What is left is the clients' cost and the server's. Beside each rate stand the cores that both used, and what
limits it, as far as that shows. One instance of a Python model hands over one response at a time, and waits
for the server each time, so there are several, for all clients alike. perf_analyzer, where it is given, asks
in the same turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.busy import Busy, cores, median, thread_times
from benchmarks.perf_analyzer import analyze
from disagg.errors import ConfigError
from launch.children import Child, Children
from mpillm.options.field import Field
from mpillm.options.fields.servers import ServerFields
from mpillm.options.parsers import positive
from mpillm.options.values import Values
from mpillm.runtime.whole_runs import run_once
from mpillm.stages.servers import Servers, check_ports
from mpillm.triton.tritonserver import Ports, find_tritonserver, read_repositories, triton_server

_DEADLINE_S = 300.0
_PLAIN = "one tritonclient object"
_TOGETHER = 2
_CLIENTS = 8  # of one frontend: the server answers each stream one response at a time
_AT_ONCE = (64, 256)  # requests open, of perf_analyzer


class Options(Values):
    """Options of ``benchmarks triton``."""

    requests = Field("requests", "of a run", positive, default=12000, group="benchmark")
    input_len = Field("input_len", "prompt tokens", positive, default=128, group="benchmark")
    output_len = Field("output_len", "answer tokens", positive, default=16, group="benchmark")
    frontends = Field("frontends", "most frontends of triton_grpc", positive, default=2, group="benchmark")
    instances = Field("instances", "of the model", positive, default=2, group="benchmark")
    repeats = Field("repeats", "of all; the median is printed", positive, default=3, group="benchmark")
    tritonserver = ServerFields.tritonserver.but(
        "the program [default: as of run-llm-server]", group="benchmark"
    )
    perf_analyzer = Field(
        "perf_analyzer", "Triton's load generator, to measure in the same turns", group="benchmark"
    )


DESCRIPTION = (
    "Measure triton_grpc against one plain tritonclient, with a model of zero cost behind tritonserver."
)
EPILOG = "example:\n  python -m benchmarks triton"


class _Measurement(NamedTuple):
    """Requests, time and CPU use of the clients in one measurement."""

    n: int  # requests
    seconds: float
    cores: list[float]  # that each of their processes used meanwhile


class _Rate(NamedTuple):
    per_second: float
    busy: Busy


def main(config: Options) -> int:
    """Print the table; 0 unless something failed."""
    found: dict[str, list[_Rate]] = defaultdict(list)
    with _served(config) as (url, model, server):
        ways: dict[str, Callable[[], _Measurement]] = {
            f"{_PLAIN}, one at a time": partial(_infer, config, url, model),
            f"{_PLAIN}, async_stream_infer": partial(_async_stream_infer, config, url, model),
            f"{_TOGETHER} of them in {_TOGETHER} processes": partial(_together, config, url, model),
        }
        if config.perf_analyzer:
            for n in _AT_ONCE:
                ways[f"perf_analyzer, {n} at once"] = partial(_perf_analyzer, config, url, model, n)
        ways["triton_grpc, 1 frontend, 1 client"] = partial(_ours, config, url, 1, 1)
        for n in range(1, config.frontends + 1):
            name = f"triton_grpc, {n} frontend{'s' if n > 1 else ''}, {_CLIENTS * n} clients"
            ways[name] = partial(_ours, config, url, n, _CLIENTS)
        for i in range(config.repeats):
            for name, way in ways.items():
                print(f"{name}, {i + 1} of {config.repeats}", file=sys.stderr, flush=True)
                before, executed = _times(server), _executed_s(url, model)
                measured = way()
                used = cores(before, _times(server), measured.seconds)
                executed = (_executed_s(url, model) - executed) / measured.seconds / config.instances
                busy = Busy(*used, sum(measured.cores), max(measured.cores), min(1.0, executed))
                found[name].append(_Rate(measured.n / measured.seconds, busy))
    print(
        f"a model of zero cost behind Triton, {config.input_len} tokens in, {config.output_len} out;"
        f" {config.instances} instances, {os.cpu_count()} cores; median of {config.repeats} (least to most)"
    )
    for name, rates in found.items():
        values = [rate.per_second for rate in rates]
        busy = median([rate.busy for rate in rates])
        spread = f"({min(values):,.0f} to {max(values):,.0f})"
        print(
            f"  {name:<44} {statistics.median(values):>8,.0f} requests/s  {spread:<18}"
            f" server: {busy.server:.2f} cores, clients: {busy.clients:.2f}\n"
            f"    limited by {busy.limit(os.cpu_count() or 1)}"
        )
    return 0


@contextlib.contextmanager
def _served(config: Options) -> Iterator[tuple[str, str, psutil.Process]]:
    """Yield the gRPC address of a tritonserver with the model, the model's name, and the server's process."""
    program = find_tritonserver(config.tritonserver)
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as name:
        folder = Path(name)
        words = ["--model_path=tiny-llama", "--scenarios=Server", f"--triton_model_repo={folder / 'repo'}"]
        words += ["--trtllm_runtime_flags=triton_backend:python,max_batch_size:64"]
        command = [sys.executable, "-m", "mpillm", "generate-triton-config", *words]
        with Children() as children:
            child: Child = children.start("generate-triton-config", command, os.environ, folder / "made.txt")
            if children.wait(child, _DEADLINE_S) != 0:
                raise ConfigError(f"generate-triton-config failed:\n{child.tail()}")
        (repo,) = read_repositories(str(folder / "repo"))
        (file,) = repo.folder.glob("*/1/model.py")
        file.write_text(file.read_text().replace("triton.models.embedded", "triton.models.null_model"))
        (description,) = repo.folder.glob("*/config.pbtxt")
        one, several = "  count: 1\n", f"  count: {config.instances}\n"
        description.write_text(description.read_text().replace(one, several))
        ports = Ports(*_free_ports(3))
        server = triton_server(0, program, repo, ports, None)
        check_ports([server])
        with Servers(folder) as running:
            log = running.start_server(server)
            running.wait_ready(_DEADLINE_S)
            # parents come first, and models' processes name the repository, too
            process = next(
                one for one in psutil.Process().children(recursive=True) if str(repo.folder) in _line(one)
            )
            print(f"tritonserver: process {process.pid}, log {log}", file=sys.stderr)
            yield f"localhost:{ports.grpc}", next(iter(repo.ranks)), process


def _line(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return " ".join(words) if words and "tritonserver" in words[0] else ""


def _free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _times(server: psutil.Process) -> dict[int, float]:
    """Return the processor time of the threads of the server and its models' processes so far."""
    return thread_times([server, *server.children(recursive=True)])


def _executed_s(url: str, model: str) -> float:
    """Return for how long the model's instances have had requests so far, all together."""
    import tritonclient.grpc as grpcclient

    with grpcclient.InferenceServerClient(url) as client:
        (statistics_,) = client.get_inference_statistics(model).model_stats
    parts = ("compute_input", "compute_infer", "compute_output")
    return float(sum(getattr(one, part).ns for one in statistics_.batch_stats for part in parts)) / 1e9


def _inputs(input_len: int, output_len: int) -> list[Any]:
    import tritonclient.grpc as grpcclient

    values = {
        "input_ids": np.arange(3, 3 + input_len, dtype=np.int32)[None] % 256,
        "input_lengths": np.array([[input_len]], np.int32),
        "request_output_len": np.array([[output_len]], np.int32),
        "streaming": np.array([[True]]),
    }
    kinds = {"int32": "INT32", "bool": "BOOL"}
    return [
        grpcclient.InferInput(name, value.shape, kinds[value.dtype.name]).set_data_from_numpy(value)
        for name, value in values.items()
    ]


def _infer(config: Options, url: str, model: str) -> _Measurement:
    """One request after another, as a decoupled model allows: each waits for its answer on the stream."""
    return _plain(url, model, config.input_len, config.output_len, max(1, config.requests // 10), 1)


def _async_stream_infer(config: Options, url: str, model: str) -> _Measurement:
    """Send all requests at once."""
    return _plain(url, model, config.input_len, config.output_len, config.requests, config.requests)


def _together(config: Options, url: str, model: str) -> _Measurement:
    """Send all requests at once from each of several processes."""
    words = (url, model, config.input_len, config.output_len, config.requests, config.requests)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        begin = manager.Barrier(_TOGETHER)
        with ProcessPoolExecutor(_TOGETHER, context) as pool:
            futures = [pool.submit(_plain, *words, begin) for _ in range(_TOGETHER)]
            answered = [one.result(2 * _DEADLINE_S) for one in futures]
    used = [core for one in answered for core in one.cores]
    return _Measurement(sum(one.n for one in answered), max(one.seconds for one in answered), used)


def _plain(
    url: str, model: str, input_len: int, output_len: int, n: int, at_once: int, begin: Barrier | None = None
) -> _Measurement:
    """Send `n` requests, `at_once` open at a time; all clients begin when all have come to `begin`."""
    import tritonclient.grpc as grpcclient

    room, errors = threading.Semaphore(at_once), []
    done = threading.Event()
    left = n

    def on_response(result: Any, error: Any) -> None:
        nonlocal left
        if error is not None:
            errors.append(error)
        else:
            result.as_numpy("output_ids")
        left -= 1
        room.release()
        if not left:
            done.set()

    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(on_response)
        if begin is not None:
            begin.wait(_DEADLINE_S)
        began, cpu = time.perf_counter(), time.process_time()
        for i in range(n):
            if not room.acquire(timeout=_DEADLINE_S):
                raise ConfigError(f"tritonserver {url} has not answered within {_DEADLINE_S:g} s")
            client.async_stream_infer(model, _inputs(input_len, output_len), request_id=str(i))
        if not done.wait(_DEADLINE_S):
            raise ConfigError(f"tritonserver {url} has not answered within {_DEADLINE_S:g} s")
        seconds = time.perf_counter() - began
        used = (time.process_time() - cpu) / seconds
        client.stop_stream()
    if errors:
        raise ConfigError(f"tritonserver {url}: {errors[0]}")
    return _Measurement(n, seconds, [used])


def _perf_analyzer(config: Options, url: str, model: str, at_once: int) -> _Measurement:
    assert config.perf_analyzer is not None
    found = analyze(config.perf_analyzer, url, model, config.input_len, config.output_len, at_once)
    return _Measurement(round(found.per_second * found.seconds), found.seconds, [found.cores])


def _ours(config: Options, url: str, frontends: int, clients: int) -> _Measurement:
    """Offline through LoadGen; the time is the test's own."""
    options = {
        "core_type": "triton_grpc",
        "triton_server_urls": url,
        "triton_num_clients_per_frontend": clients,
        "scenarios": "Offline",
        "dataset": "synthetic",
        "num_samples": 2048,
        "input_mean": config.input_len,
        "output_mean": config.output_len,
        "max_output_len": config.output_len,
        "min_query_count": config.requests,
        "min_duration": 0,
    }
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    result = run_once(1 + frontends, *words)
    if result["errors"]:
        raise ConfigError(f"{result['errors']} requests failed")
    return _Measurement(
        result["samples"], result["samples"] / result["samples_per_second"], result["rank_cores"]
    )
