"""What ends all ranks inside MPI_Init, where nobody can report it: looked for before, at next to no cost."""

from __future__ import annotations

import os

from launch.launcher import find_launcher
from launch.siblings import ranks_here

_PLENTY = 256 << 20  # bytes of /dev/shm, for as many ranks as a node has


def keeps_mpi_from_starting() -> str:
    """Return the line of a /dev/shm that is too small for Open MPI's ranks of one node; "": start MPI."""
    try:
        disk = os.statvfs("/dev/shm")
        if disk.f_bavail * disk.f_frsize > _PLENTY:
            return ""
    except OSError:
        pass
    launcher = find_launcher()
    if launcher is None or ranks_here() != launcher.size:
        return ""  # ranks of several nodes may take another way
    from mpillm.doctor.alone import job_here
    from mpillm.doctor.findings import Status, one_line
    from mpillm.doctor.limits import limit_facts, shared_memory

    (line,) = shared_memory({0: limit_facts()}, job_here())
    return one_line(line) if line.status is Status.FAILURE else ""
