"""Cheap checks before MPI_Init for shortages that would end all ranks inside it, without a report."""

from __future__ import annotations

import errno
import os
import resource

from launch.launcher import find_launcher
from launch.siblings import ranks_here

_AMPLE_PROCESSES = 1024  # skips the slow count of the user's processes
_AMPLE_SHARED = 256 << 20  # bytes of /dev/shm, for all ranks of a node


def find_start_problem() -> str:
    """Return the line on a shortage that keeps this node's ranks from starting MPI; "" if there is none."""
    return _shared_memory() or _processes()


def is_thread_shortage(error: BaseException) -> bool:
    """Return whether an error reports that no process or thread can start."""
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    return is_thread or (isinstance(error, OSError) and error.errno == errno.EAGAIN)


def _processes() -> str:
    """Return the line on a limit of processes, including threads, that is too low for the ranks to start."""
    if os.geteuid() == 0 or not 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] < _AMPLE_PROCESSES:
        return ""
    from mpillm.doctor.findings import Status, one_line
    from mpillm.doctor.limits import limit_facts, processes
    from mpillm.doctor.local_checks import job_here

    (line,) = processes({0: limit_facts()}, job_here())
    return one_line(line) if line.status is Status.FAILURE else ""


def _shared_memory() -> str:
    """Return the line on a /dev/shm that is too small for Open MPI's ranks of one node."""
    try:
        disk = os.statvfs("/dev/shm")
        if disk.f_bavail * disk.f_frsize > _AMPLE_SHARED:
            return ""
    except OSError:
        pass
    launcher = find_launcher()
    if launcher is None or ranks_here() != launcher.size:
        return ""  # ranks of several nodes may use another transport
    from mpillm.doctor.findings import Status, one_line
    from mpillm.doctor.limits import limit_facts, shared_memory
    from mpillm.doctor.local_checks import job_here

    (line,) = shared_memory({0: limit_facts()}, job_here())
    return one_line(line) if line.status is Status.FAILURE else ""
