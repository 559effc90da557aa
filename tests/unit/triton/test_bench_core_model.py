"""Bench core-model where the packages of Triton's clients are not installed."""

from __future__ import annotations

import subprocess
import sys

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
