"""Servers that ranks own and load clients: the options that start them, and their processes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.support import ROOT, Command


def words_of(pid: int) -> bytes:
    """Return the command line of a process, its words apart by zeros; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def title_of(pid: int) -> str:
    """Return the beginning of a process's command line; "" if it has ended."""
    return words_of(pid).replace(b"\0", b" ").decode(errors="replace")[:60]


def started_at(pid: int) -> str:
    """Return when a process has started, which no later one with its number has; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def parent_of(pid: int) -> int:
    """Return the process that has started one which runs."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def guards(command: Command) -> list[int]:
    """Return what stands over the servers of a command."""
    return [pid for pid in command.pids() if b"server_guard" in words_of(pid)]


OUTPUT = 6  # tokens of an answer
TEST: list[object] = ["--test_mode", "AccuracyOnly", "--max_output_len", OUTPUT, "--save_outputs"]


def server(*options: object, port: str = "{port}") -> list[object]:
    """Return the options of a run whose servers are programs of this test."""
    words = [sys.executable, "-m", "tests.helpers.small_server", "--port", port, *map(str, options)]
    return ["--server", f"command:{shlex.join(words)}".replace("'{port}'", "{port}")]


def processes(command: Command, word: bytes = b"small_server") -> list[int]:
    """Return the ids of the servers' first processes that run now, or of those with another word."""
    found = []
    for pid in command.pids():
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if word in words and b"server_guard" not in words and b"mpillm\0" not in words:
                found.append(pid)
    return found


PLACES = ("--urls", "{urls}", "--bodies", "{bodies}", "--report", "{report}")


def client(*options: object, places: tuple[str, ...] = PLACES) -> list[object]:
    """Return the options of a run whose load a program of this test makes."""
    words = [sys.executable, "-m", "tests.helpers.small_client", *places, *map(str, options)]
    return ["--harness", "command:" + re.sub(r"'(\{\w+\})'", r"\1", shlex.join(words))]


N_SYNTHETIC, SYNTHETIC_OUTPUT = 40, 16
SYNTHETIC: list[object] = ["--dataset", "synthetic", "--num_samples", N_SYNTHETIC, "--input_mean", 20]
SYNTHETIC += ["--output_mean", SYNTHETIC_OUTPUT, "--max_output_len", SYNTHETIC_OUTPUT]


def put_in_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have a program `name` in PATH: its fake, the module `small_<name>` of the helpers."""
    program = folder / "bin" / name
    program.parent.mkdir()
    words = shlex.join(["exec", sys.executable, "-m", f"tests.helpers.small_{name}"])
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} {words} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
