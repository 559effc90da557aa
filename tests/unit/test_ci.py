"""What .ci/run runs where: what can't be had is said to be skipped, and is no failure; what is run again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.support import ROOT


def run_ci(folder: Path, **programs: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a copy of `.ci/run` with these programs (shell). Return also the targets that it made."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    programs["make"] = f'echo "$1" >> made; {programs["make"]}'
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([folder / ".ci/run"], env=env, capture_output=True, text=True, timeout=300)
    return done, (folder / "made").read_text().split()


@pytest.mark.parametrize("user, unshare, triton", [(0, 0, 0), (1000, 0, 1), (0, 1, 1)])
def test_what_is_run(tmp_path: Path, user: int, unshare: int, triton: int) -> None:
    """`triton`, `unshare`: the exit codes of installing it, and of making namespaces."""
    done, made = run_ci(
        tmp_path,
        id=f"echo {user}",
        unshare=f"exit {unshare}",
        make=f'test "$1" != triton || exit {triton}',
    )
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


@pytest.mark.parametrize(
    "n_failed, crashed, n_tries", [(1, False, 2), (3, False, 2), (4, False, 1), (1, True, 1)]
)
def test_a_few_failed_long_tests_run_again(
    tmp_path: Path, n_failed: int, crashed: bool, n_tries: int
) -> None:
    """Not those of a process that crashed: others have not run then. Both tries fail here."""
    failed = json.dumps(dict.fromkeys(map(str, range(n_failed)), True))
    cache = ".pytest_cache/v/cache"
    fail = f"""test "$1" != test-long && exit
mkdir -p {cache}; echo '{failed}' > {cache}/lastfailed
test {int(crashed)} = 0 || touch .pytest_cache/crashed
exit 2"""
    done, made = run_ci(tmp_path, make=fail)
    assert made == ["test"] + ["test-long"] * n_tries and done.returncode == 1, done
