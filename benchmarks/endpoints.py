"""Servers of ours, and load on any: child processes, as a person would type them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.children import Children
from mpillm.runtime.whole_runs import served_in

_DEADLINE_S = 600.0


@contextlib.contextmanager
def served(ranks: int, *options: str) -> Iterator[str]:
    """Run ``serve`` on `ranks` ranks with `options`, and yield its URL. Raises ConfigError if it failed."""
    with (
        tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory,
        served_in(Path(directory), ("-n", str(ranks)), options) as url,
    ):
        yield url


def load_test(url: str, *options: str) -> dict[str, Any]:
    """``bench endpoint`` against `url`; what it writes. Raises ConfigError if a request failed."""
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as directory, Children(pass_on=True) as children:
        file = Path(directory) / "result.json"
        words = [sys.executable, "-m", "mpillm", "bench", "endpoint", "--url", url, *options]
        words += ["--result_filename", str(file)]
        child = children.start("a load test", words, os.environ, Path(directory) / "output.txt")
        if (code := children.wait(child, _DEADLINE_S)) != 0:
            how = f"did not end within {_DEADLINE_S:g} s" if code is None else f"failed ({code})"
            raise ConfigError(f"a load test {how}:\n{child.tail()}")
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result
