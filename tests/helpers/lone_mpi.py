"""MPI in a process without mpirun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def leaving_nothing() -> Iterator[dict[str, str]]:
    """Yield the variables with which Open MPI leaves no files, for the time of MPI's start or of a process.

    It would leave 16 MB of shared memory, which one process does not need, in /dev/shm, and a folder in /tmp.
    """
    with tempfile.TemporaryDirectory(prefix="mpillm-") as folder:
        yield {"OMPI_MCA_btl": "self", "TMPDIR": folder}


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that imports MPI."""
    with leaving_nothing() as variables:
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
