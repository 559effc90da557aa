"""``python -m mpillm doctor`` on ranks: what it says where all is well, and where something is broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pages import report_steps
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    PYTHONS,
    USAGE,
    Ended,
    Starter,
    wait_until,
)

FAILED = 1


def lines_by_check(ended: Ended) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of the report by check."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in json.loads(ended.out)["lines"]:
        found.setdefault(line["check"], []).append(line)
    return found


def doctor(starter: Starter, n: int, *options: object, prefix: tuple[str, ...] = ()) -> Ended:
    head = [*prefix, starter.python, "-m", "mpillm", "mpirun", "-n", n, "doctor"]
    return starter.command([*head, "--json", *options]).end()


@pytest.mark.smoke
def test_ranks_of_one_node(both: Starter) -> None:
    ended = doctor(both, 3, "--log_dir", both.folder / "runs").must(DONE)
    found = lines_by_check(ended)
    assert {check for check, lines in found.items() if lines[0]["status"] == "failure"} == set()
    assert found["launcher"][0]["text"].endswith("one world of 3")
    (pair,) = found["MPI within nodes"][0]["figures"]["pairs"]
    assert pair["ranks"] == [0, 1] and pair["bytes_per_s"] > 0 and pair["latency_s"] > 0
    assert found["between nodes"][0]["status"] == "skipped"
    assert not (both.folder / "runs").exists()


def test_the_mpirun_of_another_mpi_and_a_folder_that_cannot_be_written(one: Starter) -> None:
    program = [one.python, "-m", "mpillm", "doctor", "--json", "--log_dir", "/proc/none"]
    ended = one.plain(3, *program, python=PYTHONS["mpich"]).end().must(FAILED)
    found = lines_by_check(ended)
    assert found["launcher"][0]["status"] == "failure"
    assert "mpillm mpirun -n 3 doctor" in found["launcher"][0]["advice"]
    assert found["run directory"][0]["text"].startswith("/proc can't be written")
    assert found["network"][0]["status"] == "skipped"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, for a mount")
def test_too_small_a_dev_shm(one: Starter) -> None:
    """Open MPI would end all ranks inside MPI_Init; the doctor and a run report it before that."""
    script = 'mount -t tmpfs -o size=1m none /dev/shm; exec "$@"'
    small = ("unshare", "--mount", "sh", "-c", script, "sh")
    found = lines_by_check(doctor(one, 2, prefix=small).must(FAILED))
    assert found["shared memory"][0]["status"] == "failure"
    head = [*small, one.python, "-m", "mpillm", "mpirun", "-n", 2, "run", "--core_type", "dummy"]
    ended = one.command([*head, "--log_dir", one.folder / "run"]).end()
    assert ended.code in (NOT_READY, INSTANCE_LOST), "not MPI's own"
    assert ended.messages[0].startswith("mpillm: doctor: shared memory: /dev/shm has 1.0 MB free of 1.0 MB")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to be another user")
def test_hardly_a_process_may_start(one: Starter) -> None:
    """As with ``ulimit -u 15``, for a separate user who may read all files: it counts all of a user's."""
    may = "+dac_override"
    user = [
        "setpriv",
        "--reuid=54321",
        f"--inh-caps={may}",
        f"--ambient-caps={may}",
        f"--bounding-set=-all,{may}",
    ]
    words = [one.python, "-m", "mpillm", "doctor", "--json", "--log_dir", one.folder]
    # OpenBLAS ends a process that cannot have a thread for each of more cores.
    env = {"OPENBLAS_NUM_THREADS": "1"}
    ended = one.command(["prlimit", "--nproc=15", *user, *words], env=env).end().must(DONE)
    (line,) = lines_by_check(ended)["processes"]
    assert line["status"] == "warning" and "ulimit -u" in line["advice"]
    assert "Traceback" not in ended.err


def test_a_run_without_a_gpu_is_explained(one: Starter) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    words = ["--device", "cuda", "--model_path", "tiny-llama"]
    ended = one.run(2, *words, core="torch").must(USAGE)
    assert "\n  doctor: GPUs: no GPU" in ended.message


@pytest.mark.slow
def test_a_stopped_rank_is_named(one: Starter) -> None:
    command = one.command([one.python, "-m", "mpillm", "mpirun", "-n", 3, "doctor", "--deadline", 20])
    wait_until(lambda: bool(rank_2(command.pids())), "rank 2")
    (pid,) = rank_2(command.pids())
    os.kill(pid, signal.SIGSTOP)
    ended = command.end(60, tidy=False)
    assert ended.code not in (DONE, -1)
    assert "rank 2" in ended.out + ended.err and f"kill -CONT {pid}" in ended.out + ended.err


def rank_2(pids: list[int]) -> list[int]:
    """The process of rank 2 once Python runs in it."""
    found = []
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"OMPI_COMM_WORLD_RANK=2" in environment
            and os.fsencode(sys.executable.rpartition("/")[2]) in words[0]
        ):
            found.append(pid)
    return found[:1]


def test_a_cluster_report(one: Starter) -> None:
    """Of this machine alone; of hosts in test_hosts.py, under Slurm in test_slurm.py."""
    file, secret = one.folder / "cluster.txt", "the key of this cluster"
    words = ["--cluster-report", file, "--log_dir", one.folder / "runs"]
    line = [one.python, "-m", "mpillm", "doctor", *words]
    ended = one.command(line, env={"MPILLM_API_KEY": secret}).end(240).must(DONE)
    report = file.read_text()
    found = report_steps(report)
    names = ["this machine", "hosts, by mpirun", "a test, by mpirun", "a lost rank, by mpirun"]
    assert [*found] == names and "failure" not in found.values(), ended
    assert re.search(r"LoadGen +VALID", report) and "rank 2 (executor" in report
    assert "Every step has worked" in ended.out and secret not in report
    assert not [*(one.folder / "runs").iterdir()]


def test_a_cluster_report_names_the_first_step_that_fails(one: Starter) -> None:
    file = one.folder / "cluster.txt"
    words = ["--cluster_report", file, "--log_dir", one.folder / "runs", "--mpirun", "-n 2 --no-such-option"]
    ended = one.command([one.python, "-m", "mpillm", "doctor", *words]).end(240).must(FAILED)
    assert "\nFirst: hosts, by mpirun." in ended.out
    assert "no-such-option" in file.read_text()
    assert report_steps(file.read_text())["a lost rank, by mpirun"] == "failure"


@pytest.mark.parametrize("words", ["-H h1:2", "-n 1", ""])
def test_a_cluster_report_needs_two_ranks(one: Starter, words: str) -> None:
    report = ["--cluster_report", one.folder / "cluster.txt", "--mpirun", words or "-n x"]
    ended = one.mpillm("doctor", *report)
    assert "must have -n N" in ended.must(USAGE).err and not (one.folder / "cluster.txt").exists()
