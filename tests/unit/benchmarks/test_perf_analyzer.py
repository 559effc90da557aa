"""perf_analyzer is asked for windows, and its rate is read from what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.perf_analyzer import analyze
from disagg.errors import ConfigError

# As version 2.60 prints it.
OUTPUT = """Request concurrency: 64
  Client:
    Request count: 17753
    Throughput: 2954.77 infer/sec
    Response Throughput: 2954.77 infer/sec
    Avg latency: 21302 usec (standard deviation 9115 usec)
"""


def program(folder: Path, output: str, code: int = 0) -> str:
    """Write a program that keeps its arguments and the requests, and prints `output`."""
    (folder / "says").write_text(output)
    path = folder / "perf_analyzer"
    keep = f'echo "$@" > {folder}/words; cp input.json {folder}/input.json'
    path.write_text(f"#!/bin/sh\n{keep}; cat {folder}/says; echo bad luck >&2; exit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_its_rate(tmp_path: Path) -> None:
    found = analyze(program(tmp_path, OUTPUT), "localhost:1", "llama", 5, 16, 64)
    assert found.per_second == 2954.77 and found.seconds > 0 and found.cores >= 0
    words = (tmp_path / "words").read_text()
    assert (
        "-m llama -u localhost:1 -i grpc --streaming" in words and "--concurrency-range 64 -p 2000" in words
    )
    (tensors,) = json.loads((tmp_path / "input.json").read_text())["data"]
    assert tensors["input_ids"] == {"content": [3, 4, 5, 6, 7], "shape": [5]}
    assert tensors["request_output_len"] == {"content": [16], "shape": [1]}


@pytest.mark.parametrize(("output", "code"), [(OUTPUT, 1), ("nothing", 0), ("Throughput: 0 infer/sec", 0)])
def test_it_fails(output: str, code: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"ended with exit code {code}(\n  \|.*)*\n  \| bad luck"):
        analyze(program(tmp_path, output, code), "localhost:1", "llama", 5, 16, 64)


def test_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--perf_analyzer nothing: "):
        analyze("nothing", "localhost:1", "llama", 5, 16, 64)
