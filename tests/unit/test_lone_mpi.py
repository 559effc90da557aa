"""MPI without mpirun, in tests and in programs that they start."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.lone_mpi import run_program


def test_a_program_that_imports_mpi_leaves_no_shared_memory() -> None:
    """A rank maps its segment from MPI's start on, and Open MPI leaves the one of a rank without mpirun."""
    done = run_program("import mpillm.runtime.ending; print(open('/proc/self/maps').read())")
    assert done.returncode == 0, done.stderr
    assert "/libmpi." in done.stdout
    assert "/sm_segment." not in done.stdout


def test_this_process_leaves_no_shared_memory() -> None:
    """Also if a folder that is collected before tests/unit has imported MPI."""
    assert "/sm_segment." not in Path("/proc/self/maps").read_text(encoding="utf-8")
