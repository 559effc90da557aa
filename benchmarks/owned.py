"""``benchmarks owned``: a server that a rank owns beside the same one started by hand, in turns."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.endpoints import load_test
from disagg.errors import ConfigError
from launch.command import find_program
from launch.environment import clean_environment
from launch.reserved_port import ReservedPort
from mpillm.experiments.intervals import paired_test
from mpillm.options.field import Field
from mpillm.options.parsers import positive
from mpillm.options.values import Values
from mpillm.programs.servers.kinds import kind_of
from mpillm.runtime.whole_runs import served_in

_ALPHA = 0.05
_END_S = 30.0
_OURS = f"{shlex.join((sys.executable, '-m', 'mpillm'))} mpirun -n 2 serve --core_type dummy --port {{port}}"
_FIGURES = {
    "requests/s, {max_concurrency} at once": "request_throughput",
    "first token at {qps}/s, p50, ms": "median_ttft_ms",
    "first token at {qps}/s, p99, ms": "p99_ttft_ms",
    "a token after the first at {qps}/s, p50, ms": "median_tpot_ms",
}


class Options(Values):
    """Options of ``benchmarks owned``."""

    server = Field(
        "server", "its command line, with {port} in it [default: serve with a core of zero cost]",
        default=_OURS, group="benchmark",
    )  # fmt: skip
    pairs = Field("pairs", "of both; which is first changes", positive, default=5, group="benchmark")
    requests = Field("requests", "of each load", positive, default=2000, group="benchmark")
    max_concurrency = Field(
        "max_concurrency", "requests at once, for their rate", positive, default=64, group="benchmark"
    )
    qps = Field("qps", "requests per second, for latencies", positive, default=100, group="benchmark")
    input_len = Field("input_len", "prompt tokens", positive, default=128, group="benchmark")
    output_len = Field("output_len", "answer tokens", positive, default=16, group="benchmark")


DESCRIPTION = (
    "Measure whether a server is slower if a rank owns it: `bench endpoint` asks it at its own address."
)
EPILOG = (
    "example:\n  python -m benchmarks owned --server 'vllm serve FOLDER --port {port}' --requests 200 --qps 5"
)


def main(config: Options) -> int:
    """Print a line for each figure; 0 unless something failed."""
    try:
        kind_of(f"command:{config.server}")
    except ValueError as error:
        raise ConfigError(f"--server {config.server}: {error}", about=["server"]) from None
    ways = {"by hand": _by_hand, "owned": _owned}
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in _FIGURES} for way in ways}
    for pair in range(config.pairs):
        for way in [*ways][:: -1 if pair % 2 else 1]:
            print(f"pair {pair + 1} of {config.pairs}, {way}", file=sys.stderr, flush=True)
            with ways[way](config.server) as url:
                for name, value in _measured(config, url).items():
                    found[way][name].append(value)
    print(f"{config.server}: {config.pairs} pairs, in turns")
    for name in _FIGURES:
        a, b = found["by hand"][name], found["owned"][name]
        line = f"  {name.format(**config.values):<46} by hand {statistics.median(a):>10,.2f}"
        line += f"  owned {statistics.median(b):>10,.2f}"
        if config.pairs > 1:
            test = paired_test(a, b, _ALPHA)
            line += f"  {test.ratio:.3f} times ({test.low:.3f} to {test.high:.3f}, p {test.p:.2f})"
        print(line)
    return 0


def _measured(config: Options, url: str) -> dict[str, float]:
    length = ["--input_len", str(config.input_len), "--output_len", str(config.output_len)]
    length += ["--num_prompts", str(config.requests)]
    rate = load_test(url, *length, "--max_concurrency", str(config.max_concurrency))
    latency = load_test(url, *length, "--request_rate", str(config.qps))
    return {name: (rate if key == "request_throughput" else latency)[key] for name, key in _FIGURES.items()}


@contextlib.contextmanager
def _by_hand(server: str) -> Iterator[str]:
    port = ReservedPort("127.0.0.1")
    port.release()
    program, *words = shlex.split(server.replace("{port}", str(port.number)))
    process = subprocess.Popen(
        [find_program(program, "name it by its path", typed=True), *words],
        env=clean_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"http://127.0.0.1:{port.number}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _owned(server: str) -> Iterator[str]:
    """Yield the address of the server itself, not that of `serve` in front of it."""
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory:
        folder = Path(directory)
        words = ("--core_type", "trtllm_endpoint", "--server", f"command:{server}")
        with served_in(folder, ("-n", "2"), words):
            started = (folder / "server_0.log").read_text(errors="replace").partition("\n")[0]
            command = shlex.split(server)
            place = next(i for i, word in enumerate(command) if "{port}" in word) - len(command)
            before, _, after = command[place].partition("{port}")
            word = shlex.split(started)[place]
            yield f"http://127.0.0.1:{word[len(before) : len(word) - len(after)]}"
