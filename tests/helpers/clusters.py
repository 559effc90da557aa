"""Runs on several hosts (`tools.hosts`) and under a real Slurm (`tools.slurm`)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import pytest

from launch.prctl import KEEPER
from tests.helpers.support import (
    PYTHONS,
    Command,
    Starter,
    wait_until,
)
from tools.hosts import HEAD, Hosts, NotHere
from tools.slurm import Slurm

ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# They share this machine's cores: an idle rank yields.
SHARED = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
ENDLESS = ["--scenarios", "Server", "--server_target_qps", 20, "--min_duration", 100, "--grace", 3]
H = TypeVar("H")


@contextmanager
def or_skip(made: AbstractContextManager[H]) -> Iterator[H]:
    """Give hosts to a fixture, or skip its tests if this machine can't have any."""
    try:
        with made as hosts:
            yield hosts
    except NotHere as error:
        pytest.skip(str(error))


class OnHosts:
    """Starts runs on hosts, from `head`."""

    def __init__(self, hosts: Hosts, starter: Starter) -> None:
        self.hosts = hosts
        self.starter = starter
        agent = hosts.write_remote_shell(starter.folder / "remote_shell")
        self._remote = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "plm_ssh_no_tree_spawn", 1, "-H"]
        if starter.mpi == "mpich":
            self._remote = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts"]

    def mpirun_words(self, where: str) -> list[object]:
        """Return the words by which mpirun starts a rank on each slot, as ``h1:2,h2:1``."""
        slots = sum(int(host.partition(":")[2]) for host in where.split(","))
        return ["-n", slots, *self._remote, where]

    def start(
        self,
        where: str,
        *words: object,
        plain: bool = False,
        log_dir: Path | None = None,
        exports: Mapping[str, str] = MappingProxyType({}),
    ) -> Command:
        """Start ``mpillm mpirun -H WHERE WORDS``, or plain mpirun; `where` has one rank per slot, as
        ``h1:2,h2:1``. `exports`: variables of all ranks."""
        mpillm = [self.starter.python, "-m", "mpillm"]
        options = self.mpirun_words(where)
        if self.starter.mpi == "openmpi":  # Hydra passes on everything
            options += [word for name in exports for word in ("-x", name)]
        if plain and self.starter.mpi == "openmpi" and "PYTHONPATH" not in exports:
            options += ["-x", "PYTHONPATH"]
        plain_head = [Path(self.starter.python).parent / "mpirun", *options, *mpillm]
        head = plain_head if plain else [*mpillm, "mpirun", *options]
        force = ["--force"] if log_dir is None and words[0] == "run" else []  # a test may run several times
        log_dir = log_dir or self.starter.folder / "run"
        line = [*head, *words, "--log_dir", log_dir, *force]
        env = {**ROOT_MAY, **SHARED, **exports}
        return self.starter.command(self.hosts.on(HEAD, list(map(str, line))), log_dir, env)


class UnderSlurm:
    """Starts steps with srun."""

    def __init__(self, slurm: Slurm, starter: Starter) -> None:
        self.slurm = slurm
        self.starter = starter
        self.mpi = "pmix" if starter.mpi == "openmpi" else "pmi2"

    def start(self, options: Sequence[object], *words: object, env: dict[str, str] | None = None) -> Command:
        """Start ``srun OPTIONS --mpi=… python -m mpillm WORDS``."""
        log_dir = self.starter.folder / "run"
        program = [PYTHONS[self.starter.mpi], "-m", "mpillm", *words]
        line = ["srun", *options, f"--mpi={self.mpi}", *program]
        return self.on_head(line, log_dir, env)

    def on_head(self, line: Sequence[object], log_dir: Path, env: dict[str, str] | None = None) -> Command:
        """Start any command line where a person logs in."""
        command = self.slurm.on_head(list(map(str, line)))
        return self.starter.command(command, log_dir, SHARED | (env or {}))

    def state(self, job: str) -> str:
        """Return the state of a job, in Slurm's words."""
        lines = self.slurm.run("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in lines if word.startswith("JobState="))

    def wait_for_jobs(self) -> None:
        """Wait until no job is left in the queue."""
        wait_until(lambda: not self.slurm.run("squeue", "-h"), "the end of all jobs")


def python_on(hosts: Hosts, host: str, word: str) -> list[int]:
    """Return the processes on a host that run the program with this word in their command lines."""
    found = []
    for pid in hosts.processes(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_kept = Path(f"/proc/{pid}/comm").read_text().strip() == KEEPER
        except OSError:  # it has just ended
            continue
        is_guard = any(one.endswith(b"/guard.py") for one in words)  # Hydra starts one for each rank
        if (
            b"mpillm" in words
            and word.encode() in words
            and b"python" in words[0]
            and not (is_guard or is_kept)
        ):
            found.append(pid)
    return sorted(found)


THREE_HOSTS = "h1:2,h2:2,h3:2"  # harness and leader, and two executors on each of the others


def signal_rank_on(made: Hosts, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a rank, on whichever host it is."""
    wanted = {f"{name}={rank}".encode() for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")}
    for host in made.names:
        for pid in python_on(made, host, "run"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if wanted & {*Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}:
                    os.kill(pid, number)


def kill_named(made: Hosts, host: str, *names: str) -> None:
    """Kill the processes on a host that the system calls so."""
    for pid in made.processes(host):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                os.kill(pid, signal.SIGKILL)
