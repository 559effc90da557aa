"""What ends all ranks inside MPI_Init, where nobody can report it: looked for before, at next to no cost."""

from __future__ import annotations

import errno
import os
import resource

from launch.launcher import find_launcher
from launch.siblings import ranks_here

_MANY = 1024  # processes: counting those that there are takes time
_PLENTY = 256 << 20  # bytes of /dev/shm, for as many ranks as a node has


def keeps_mpi_from_starting() -> str:
    """Return the line of what this node has too little of for its ranks to start MPI; "": start it."""
    return _shared_memory() or _processes()


def is_scarce(error: BaseException) -> bool:
    """Return whether an error says that no process or thread can be started."""
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return is_thread or (isinstance(error, OSError) and error.errno == errno.EAGAIN)


def _processes() -> str:
    """Return the line of a limit on processes, which threads count as, that ranks can't start with."""
    if os.geteuid() == 0 or not 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] < _MANY:
        return ""
    from mpillm.doctor.alone import job_here
    from mpillm.doctor.findings import Status, one_line
    from mpillm.doctor.limits import limit_facts, processes

    (line,) = processes({0: limit_facts()}, job_here())
    return one_line(line) if line.status is Status.FAILURE else ""


def _shared_memory() -> str:
    """Return the line of a /dev/shm that is too small for Open MPI's ranks of one node."""
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
