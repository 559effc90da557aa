"""Checks of this machine by one process, without MPI: after MPI failed to start, or after a run failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from launch.launcher import EveryRankError, find_launcher
from launch.siblings import ranks_here, siblings
from mpillm.doctor import disk, gpus, installed, limits
from mpillm.doctor.findings import Line, Status, World, judge, one_line
from mpillm.doctor.launch_checks import not_one_world

_BAD = (Status.FAILURE, Status.WARNING)


def lines_alone(error: EveryRankError, log_dir: Path) -> list[Line]:
    """Return the lines of this machine; the first gives the reason why MPI did not start."""
    world, own = job_here(), limits.limit_facts()
    lines = [not_one_world(error), Line("network", Status.SKIPPED, "it takes MPI to measure it")]
    lines += judge(limits.CHECKS, {0: own}, world)
    lines += judge(installed.CHECKS, {0: installed.package_facts()}, world)
    lines += gpus.driver({0: gpus.gpu_facts()}, world)
    return [*lines, disk.disk_line(log_dir)]


def explain(cause: str, limit_facts: Callable[[], limits.LimitFacts] = limits.limit_facts) -> str:
    """Return the line that explains why a run could not be set up here; "" if no check finds anything.

    `cause`: the cause that the run reports. Only checks that can be related to it run.
    """
    summary = cause.partition("\n")[0]  # the rest is a stack trace, whose file names would match
    for pattern, check in _EXPLAINED:
        if re.search(pattern, summary, re.IGNORECASE):
            lines = check({0: limit_facts()}, job_here()) if check in limits.CHECKS else check(summary)
            for line in lines:
                if line.status in _BAD or (check is _gpus and line.status is Status.SKIPPED):
                    return one_line(line)
    return ""


def job_here() -> World:
    """Return this process's job, with this process as rank 0 and all other hosts as one node."""
    launcher = find_launcher()
    size = (launcher and launcher.size) or 1
    n_here = ranks_here() or len(siblings()) or 1
    return World({rank: "here" if rank < n_here else "elsewhere" for rank in range(size)})


def _gpus(cause: str) -> list[Line]:
    return gpus.driver({0: gpus.gpu_facts()}, job_here())


def _gpu_memory(cause: str) -> list[Line]:
    advice = (  # the run checked its own needs (`engine.shape.memory`), so another process took memory since
        "end what else runs on the GPU (nvidia-smi), or give the KV cache less"
        " (--kv_cache_free_gpu_mem_fraction, --kv_cache_tokens)"
    )
    text = "weights and KV cache leave less than the rest needs"
    return [Line("GPU memory", Status.FAILURE, text, advice)]


def _port(cause: str) -> list[Line]:
    import psutil

    lines = []
    for number in {int(word) for word in re.findall(r"\b(\d{2,5})\b", cause)}:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == number
            ):
                name = psutil.Process(connection.pid).name() if connection.pid else "another user's process"
                owner = f"{name}, pid {connection.pid}" if connection.pid else name
                advice = "end it, or choose another port"
                lines.append(Line("ports", Status.FAILURE, f"{number} is taken by {owner}", advice))
    return lines


_LOST = r"process has ended|bus error|no space left"
_EXPLAINED: tuple[tuple[str, Callable[..., list[Line]]], ...] = (
    (r"too many open files", limits.open_files),
    (r"address already in use|port \d+ is|:\d+ is taken", _port),
    (r"can't start new thread|resource temporarily unavailable", limits.processes),
    (rf"shared memory|/dev/shm|{_LOST}", limits.shared_memory),
    (r"CUDA out of memory", _gpu_memory),
    (rf"cannot allocate memory|memoryerror|out of memory|{_LOST}", limits.memory),
    (r"\bGPUs?\b|CUDA|NCCL", _gpus),
)
"""Patterns of causes, each with the check that may explain it."""
