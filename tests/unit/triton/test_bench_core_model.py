"""Bench core-model where the packages of Triton's clients are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpillm.options.command_line import Parser
from mpillm.options.values import collect
from mpillm.triton.bench.bench_core_model import Options, run_values
from mpillm.triton.bench.load_request import LoadRequest

WITHOUT = """
import sys
sys.modules["tritonclient"] = sys.modules["grpc"] = None  # as if they were not installed
from mpillm.cli import main
sys.exit(main(sys.argv[1:]))
"""


def bench(*words: str) -> str:
    command = [sys.executable, "-c", WITHOUT, "bench", "core-model", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended
    return ended.stderr


def test_a_server_s_client_names_the_extra_and_mpi_needs_none() -> None:
    assert "pip install 'mpillm[triton]'" in bench("token_norm_dist")
    assert "-i mpi needs --model_path" in bench("-i", "mpi", "token_norm_dist")


@pytest.mark.parametrize("words", [("--streaming",), ("--url", "h:1")])
def test_options_of_a_server_are_not_for_mpi(words: tuple[str, ...]) -> None:
    output = bench("-i", "mpi", "token_norm_dist", "--model_path", "tiny-llama", *words)
    assert f"-i mpi: there is no server, so {words[0]} has no effect" in output


def test_options_of_requests_reach_a_run_through_mpi() -> None:
    words = ("--seed", "7", "--stream_timeout", "9", "--concurrency", "3")
    config = collect(words, Options, Parser(prog="bench core-model"))
    requests = [LoadRequest(np.zeros(n, np.int32), n) for n in (2, 5)]
    values = run_values(config, requests, Path("requests.jsonl"))
    assert (values["seed"], values["stall_timeout"], values["max_batch_size"]) == (7, 9.0, 3)
    assert (values["min_query_count"], values["max_output_len"]) == (2, 5)
