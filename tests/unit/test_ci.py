"""What .ci/run runs where: what can't be had is said to be skipped, and is no failure."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.helpers.support import ROOT


@pytest.mark.parametrize("user, unshare, triton", [(0, 0, 0), (1000, 0, 1), (0, 1, 1)])
def test_what_is_run(tmp_path: Path, user: int, unshare: int, triton: int) -> None:
    """`triton`, `unshare`: the exit codes of installing it, and of making namespaces."""
    programs = {
        "id": f"echo {user}",
        "unshare": f"exit {unshare}",
        "make": f'echo "$@" >> {shlex.quote(str(tmp_path / "made"))}; test "$1" != triton || exit {triton}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci/run"], env=env, capture_output=True, text=True, timeout=300)
    made = [line.split()[0] for line in (tmp_path / "made").read_text().splitlines()]
    hosts = user == 0 and unshare == 0
    wanted = [
        "test",
        "test-long",
        "test-mpi",
        "test-wheel",
        "audit",
        "fuzz",
        "triton",
        *["test-triton"] * (not triton),
    ]
    assert made == wanted + ["test-hosts", "test-slurm"] * hosts, done
    assert done.returncode == 0
    assert ("tests of hosts and of Slurm, which need root" in done.stdout) == (not hosts)
    assert ("SKIPPED: the tests with a real tritonserver" in done.stdout) == bool(triton)
