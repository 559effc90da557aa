"""Other people's load clients against one server: the requests per second of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.environment import clean_environment

LOOP = Path(__file__).with_name("openai_loop.py")
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Load:
    """The same for each client; streamed."""

    url: str  # without /v1
    model_path: str  # a folder with a tokenizer, which vLLM and AIPerf want
    at_once: int
    input_len: int
    output_len: int


def request_rates(folder: Path, load: Load, requests: dict[str, int]) -> Iterator[tuple[str, float]]:
    """Of those clients of `requests` (how many each sends) that the environment `folder` has."""
    programs = folder / "bin"
    for name, n in requests.items():
        if (programs / _PROGRAMS[name]).exists():
            yield name, _RATES[name](programs / _PROGRAMS[name], load, n)


def _openai(program: Path, load: Load, n: int) -> float:
    words = [program, LOOP, load.url, n, load.at_once, load.input_len, load.output_len]
    return float(_run(words).split()[-1])


def _vllm(program: Path, load: Load, n: int) -> float:
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder:
        words = [program, "bench", "serve", "--backend", "openai", "--base-url", load.url]
        words += ["--tokenizer", load.model_path, "--dataset-name", "random", "--ignore-eos"]
        words += ["--random-input-len", load.input_len, "--random-output-len", load.output_len]
        words += ["--num-prompts", n, "--max-concurrency", load.at_once, "--model", _model(load)]
        words += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        _run(words)
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
        if result["completed"] != n:
            raise ConfigError(f"vllm bench serve: {n - result['completed']} of {n} requests failed")
        return float(result["request_throughput"])


def _aiperf(program: Path, load: Load, n: int) -> float:
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder:
        words = [program, "profile", "--model", _model(load), "--url", load.url, "--ui", "none"]
        words += ["--endpoint-type", "completions", "--streaming", "--tokenizer", load.model_path]
        words += ["--concurrency", load.at_once, "--request-count", n, "--artifact-dir", folder]
        words += ["--synthetic-input-tokens-mean", load.input_len, "--output-tokens-mean", load.output_len]
        _run(words)
        result = json.loads((Path(folder) / "profile_export_aiperf.json").read_text(encoding="utf-8"))
        return float(result["request_throughput"]["avg"])


_PROGRAMS = {"openai": "python", "vllm": "vllm", "aiperf": "aiperf"}
_RATES = {"openai": _openai, "vllm": _vllm, "aiperf": _aiperf}


def _model(load: Load) -> str:
    from urllib.request import urlopen

    with urlopen(f"{load.url}/v1/models", timeout=_DEADLINE_S) as reply:
        models: dict[str, Any] = json.load(reply)
    return str(models["data"][0]["id"])


def _run(words: list[Any]) -> str:
    """Return what it prints. Raises ConfigError if it failed."""
    argv = [str(word) for word in words]
    name = " ".join(Path(word).name for word in argv[:3])
    print(f"  {name}", file=sys.stderr, flush=True)
    env = clean_environment(os.environ)
    try:
        ended = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name} did not end within {_DEADLINE_S:g} s") from None
    if ended.returncode:
        raise ConfigError(f"{name} failed ({ended.returncode}):\n{ended.stderr[-2000:]}")
    return ended.stdout
