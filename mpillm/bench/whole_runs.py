"""Whole runs and servers of ours as a benchmark's child processes: what a user would type."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.children import Child, Children
from launch.supervisor import MPIRUN_GRACE_S
from mpillm.loadgen.logs import latencies_ms

_DEADLINE_S = 600.0  # of a run, and of a server until it is ready
_LOOK_S = 0.1
_URL = re.compile(r"serving .* at (http://\S+)")


def run_once(ranks: int, *options: str) -> dict[str, Any]:
    """``run`` on `ranks` ranks with `options`; its result.json, and `latency_ms`.

    See `latencies_ms`. Raises ConfigError if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory, _children() as children:
        folder = Path(directory)
        words = [*_mpirun(ranks), "run", "--log_dir", directory, *options]
        _ended(children, children.start("a run of the benchmark", words, os.environ, folder / "output.txt"))
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return result | {"latency_ms": latencies_ms(folder)}


@contextlib.contextmanager
def served(ranks: int, *options: str) -> Iterator[str]:
    """Run ``serve`` on `ranks` ranks with `options`, and yield its URL. Raises ConfigError if it failed."""
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory, _children() as children:
        log = Path(directory) / "output.txt"
        words = [*_mpirun(ranks), "serve", "--port", "0", "--log_dir", directory, *options]
        server = children.start("a server of the benchmark", words, os.environ, log)
        end = time.monotonic() + _DEADLINE_S
        while not (ready := _URL.search(log.read_text(encoding="utf-8"))):
            if server.process.poll() is not None or time.monotonic() > end:
                raise ConfigError(f"{server.name} is not ready:\n{server.tail()}")
            time.sleep(_LOOK_S)
        yield ready[1]


def load_test(url: str, *options: str) -> dict[str, Any]:
    """``bench endpoint`` against `url`; what it writes. Raises ConfigError if a request failed."""
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory, _children() as children:
        file = Path(directory) / "result.json"
        words = [sys.executable, "-m", "mpillm", "bench", "endpoint", "--url", url, *options]
        words += ["--result_filename", str(file)]
        _ended(children, children.start("a load test", words, os.environ, Path(directory) / "output.txt"))
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result


def _mpirun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "mpillm", "mpirun", "-n", str(ranks)]


def _children() -> Children:
    return Children(MPIRUN_GRACE_S, pass_on=True)


def _ended(children: Children, child: Child) -> None:
    code = children.wait(child, _DEADLINE_S)
    if code is None:
        raise ConfigError(f"{child.name} did not end within {_DEADLINE_S:g} s")
    if code:
        raise ConfigError(f"{child.name} failed ({code}):\n{child.tail()}")
