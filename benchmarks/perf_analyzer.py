"""Triton's own load generator, perf_analyzer, beside our clients: the same requests, over streams."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from disagg.errors import ConfigError

_DEADLINE_S = 120.0
# It looks once a second whether it is done: with a number of requests its rate is that number over whole
# seconds, so it is asked for windows of time. Their rates may differ as they like.
_WINDOWS = ("-p", "2000", "-r", "3", "-s", "999")


class Analyzed(NamedTuple):
    """What it found."""

    per_second: float
    seconds: float  # that it ran
    cores: float  # that it used meanwhile


def analyze(program: str, url: str, model: str, input_len: int, output_len: int, at_once: int) -> Analyzed:
    """Measure a decoupled model with `at_once` requests open all the time. Raises ConfigError."""
    values: dict[str, list[int] | list[bool]] = {
        "input_ids": [(3 + i) % 256 for i in range(input_len)],
        "input_lengths": [input_len],
        "request_output_len": [output_len],
        "streaming": [True],
    }
    tensors = {name: {"content": value, "shape": [len(value)]} for name, value in values.items()}
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder:
        file = Path(folder) / "input.json"
        file.write_text(json.dumps({"data": [tensors]}), encoding="utf-8")
        words = [program, "-m", model, "-u", url, "-i", "grpc", "--streaming", "--input-data", str(file)]
        began, before = time.monotonic(), _children_s()
        try:
            ended = subprocess.run(
                [*words, "--concurrency-range", str(at_once), *_WINDOWS],
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                cwd=folder,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--perf_analyzer {program}: {error}") from None
        seconds = time.monotonic() - began
        cores = (_children_s() - before) / seconds
    rate = re.search(r"^ *Throughput: ([\d.]+) infer/sec", ended.stdout, re.MULTILINE)
    if ended.returncode or not rate or not float(rate[1]):
        lines = [*ended.stdout.splitlines(), *ended.stderr.splitlines()][-5:]
        output = "".join(f"\n  | {line}" for line in lines)
        raise ConfigError(f"--perf_analyzer {program} ended with exit code {ended.returncode}{output}")
    return Analyzed(float(rate[1]), seconds, cores)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
