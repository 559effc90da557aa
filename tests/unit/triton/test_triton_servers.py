"""The mpirun line of an engine's ranks behind Triton."""

from __future__ import annotations

import pytest

from launch.find_mpirun import Kind, Mpi
from mpillm.triton import tritonserver


@pytest.mark.parametrize(
    ("kind", "version", "words"),
    [
        ("openmpi", (5, 0, 11), "--prtemca ras ^slurm --prtemca plm ^slurm"),
        ("openmpi", (4, 1, 6), "--mca ras ^slurm --mca plm ^slurm"),
        ("mpich", (5, 0, 2), "-rmk user -launcher fork"),
    ],
)
def test_an_allocation_of_slurm_is_left_alone(
    kind: Kind, version: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are servers of one host."""
    mpi = Mpi(kind, version, "mpirun")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "slurm" not in " ".join(line := tritonserver.embedded_mpirun(2, mpi=mpi)) and "-rmk" not in line
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert tritonserver.embedded_mpirun(2, mpi=mpi) == [*line, *words.split()]
