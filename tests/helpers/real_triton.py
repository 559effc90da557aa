"""Where a real tritonserver is, if `make triton` has installed one."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from mpillm.triton.tritonserver import triton_prefix
from tests.helpers.oracle import Oracle
from tests.helpers.ports import free_ports
from tests.helpers.presets import save_preset
from tests.helpers.support import (
    DONE,
    Command,
    Starter,
    wait_until,
)

TRITONSERVER = triton_prefix() / "bin" / "tritonserver"

MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(not TRITONSERVER.is_file(), reason="there is no tritonserver: make triton"),
]
"""`pytestmark` of a file whose tests start it."""


TIMEOUT_S = 180.0
# `trtllm_runtime_flags` of a repository with the embedded engine.
EMBEDDED = "triton_backend:python,max_batch_size:8"
CURL = {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": ""}


def generate(starter: Starter, *options: object, scenario: str = "Server", flags: str = EMBEDDED) -> None:
    """Write the model repositories ``repo_0``, …"""
    starter.mpillm(
        "generate-triton-config",
        "--model_path=tiny-llama",
        f"--scenarios={scenario}",
        "--triton_model_repo=repo",
        f"--trtllm_runtime_flags={flags}",
        *options,
    ).must(DONE)


def start(starter: Starter, ports: list[int], *more: object) -> Command:
    """Start ``run-llm-server`` for each repository, with these gRPC ports."""
    words = [starter.python, "-m", "mpillm", "run-llm-server", "--core_type=triton_grpc"]
    listed = ",".join(map(str, ports))
    options = [f"--triton_grpc_ports=localhost:{listed}", "--triton_model_repo=repo", "--log_dir=servers"]
    return starter.command([*words, *options, f"--tritonserver={TRITONSERVER}", *more])


def until_ready(command: Command) -> Command:
    """Wait until its servers are ready; fail, with what it has printed, if it ends instead."""
    wait_until(lambda: "ready after" in command.out or command.process.poll() is not None, "ready", TIMEOUT_S)
    assert command.process.poll() is None, f"{command.end()!r}"
    return command


@contextlib.contextmanager
def serving(starter: Starter, n: int = 1, *options: object) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the gRPC and the HTTP ports of `n` servers that are ready. They have ended afterwards."""
    ports = free_ports(n)
    command = until_ready(start(starter, ports, *options))
    logs = sorted((starter.folder / "servers").glob("*.log"))
    http = [int(log.read_text().split("--http-port=")[1].split()[0]) for log in logs]
    yield ports, http
    command.process.send_signal(signal.SIGINT)
    command.end(60).must(128 + signal.SIGINT)


def post(port: int, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(f"http://localhost:{port}/v2/models/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9, 3], [8, 8, 8, 8]]
N_OUTPUT = 8
RANKS = 2


def repository(starter: Starter, *options: object, text_models: bool = True) -> list[list[int]]:
    """Write one whose engine has two ranks; the answers to `PROMPTS`."""
    folder = starter.folder / "model"
    save_preset("tiny-llama", folder)
    more = [*options, *(["--triton_text_models"] if text_models else [])]
    generate(starter, f"--model_path={folder}", f"--tensor_parallelism={RANKS}", *more)
    oracle = Oracle(folder)
    return [oracle.tokens(prompt, N_OUTPUT) for prompt in PROMPTS]
