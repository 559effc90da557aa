"""Programs that tests start without mpirun."""

from __future__ import annotations

from tests.helpers.support import run_program


def test_a_program_that_imports_mpi_leaves_no_shared_memory() -> None:
    """A rank maps its segment from MPI's start on, and Open MPI leaves the one of a rank without mpirun."""
    done = run_program("import mpillm.runtime.ending; print(open('/proc/self/maps').read())")
    assert done.returncode == 0, done.stderr
    assert "mpi" in done.stdout
    assert "/sm_segment." not in done.stdout
