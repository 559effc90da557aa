"""The process between MPICH's launcher and a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import guard
from launch.environment import EXIT_FILE, read_signal
from tests.helpers.support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sender of a signal is known on Linux")

WAITS = """
import signal, sys
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(7))
print("waits", flush=True)
signal.pause()
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return os.environ | {EXIT_FILE: str(tmp_path / "exit_code")}


@pytest.fixture
def process(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Return a guard whose rank waits for a signal."""
    line = [sys.executable, "-I", "-S", guard.__file__, sys.executable, "-c", WAITS]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stdout.readline() == "waits\n"
        yield made
        made.kill()


def test_slurms_warning_signal_reaches_the_rank(process: subprocess.Popen[str], env: dict[str, str]) -> None:
    subprocess.run(["sh", "-c", f"kill -USR1 {process.pid}"], check=True)
    assert process.wait(60) == 7
    assert read_signal(env) == signal.SIGUSR1


def test_hydras_notice_of_a_lost_rank_does_not(process: subprocess.Popen[str], env: dict[str, str]) -> None:
    """Hydra's proxy is the parent process."""
    process.send_signal(signal.SIGUSR1)
    pending = Path(f"/proc/{process.pid}/status")
    wait_until(lambda: "ShdPnd:\t0000000000000000" in pending.read_text(), "the signal's arrival")
    assert process.poll() is None and read_signal(env) is None
    process.send_signal(signal.SIGTERM)  # Hydra also sends it to the rank's group
    assert process.poll() is None


@pytest.mark.parametrize(("command", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -USR2 $$", 140)])
def test_the_exit_code_is_the_ranks(command: str, code: int, env: dict[str, str]) -> None:
    line = [sys.executable, "-I", "-S", guard.__file__, "sh", "-c", command]
    assert subprocess.run(line, env=env, timeout=60).returncode == code
