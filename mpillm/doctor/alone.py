"""What one process sees of its machine by itself: where MPI can't be started, and why a run failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from launch.launcher import EveryRankError, find_launcher
from launch.siblings import ranks_here, siblings
from mpillm.doctor import disk, gpus, installed, limits
from mpillm.doctor.findings import Check, Line, Status, World, judge, one_line
from mpillm.doctor.launch_checks import not_one_world

_BAD = (Status.FAILURE, Status.WARNING)


def lines_alone(error: EveryRankError, log_dir: Path) -> list[Line]:
    """Return the lines of this machine; the first says why MPI could not be started."""
    world, own = job_here(), limits.limit_facts()
    lines = [not_one_world(error), Line("network", Status.SKIPPED, "it takes MPI to measure it")]
    lines += judge(limits.CHECKS, {0: own}, world)
    lines += judge(installed.CHECKS, {0: installed.package_facts()}, world)
    lines += gpus.driver({0: gpus.gpu_facts()}, world)
    return [*lines, disk.run_directory(disk.disk_facts(log_dir))]


def explain(cause: str) -> str:
    """Return the line that explains why a run could not be set up here; "" if no check finds anything.

    `cause`: what the run reports. Checks only what can have to do with it.
    """
    said = cause.partition("\n")[0]  # what follows is a stack: its files' names say nothing
    for words, check in _EXPLAINED:
        if re.search(words, said, re.IGNORECASE):
            for line in check(said):
                if line.status in _BAD or (check is _gpus and line.status is Status.SKIPPED):
                    return one_line(line)
    return ""


def job_here() -> World:
    """Return this process's job, in which it takes the place of rank 0; all other hosts are one node."""
    launcher = find_launcher()
    size = (launcher and launcher.size) or 1
    n_here = ranks_here() or len(siblings()) or 1
    return World({rank: "here" if rank < n_here else "elsewhere" for rank in range(size)})


def _limit(check: Check[limits.LimitFacts]) -> Callable[[str], list[Line]]:
    return lambda cause: check({0: limits.limit_facts()}, job_here())


def _gpus(cause: str) -> list[Line]:
    return gpus.driver({0: gpus.gpu_facts()}, job_here())


def _gpu_memory(cause: str) -> list[Line]:
    """What a step takes is reckoned before a run (`engine.shape.memory`); others have taken some since."""
    advice = (
        "end what else runs on the GPU (nvidia-smi), or give the KV cache less"
        " (--kv_cache_free_gpu_mem_fraction, --kv_cache_tokens)"
    )
    text = "weights and KV cache leave less than the rest needs"
    return [Line("GPU memory", Status.FAILURE, text, advice)]


def _port(cause: str) -> list[Line]:
    import psutil

    found = []
    for number in {int(word) for word in re.findall(r"\b(\d{2,5})\b", cause)}:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == number
            ):
                name = psutil.Process(connection.pid).name() if connection.pid else "another user's process"
                who = f"{name}, pid {connection.pid}" if connection.pid else name
                advice = "end it, or choose another port"
                found.append(Line("ports", Status.FAILURE, f"{number} is taken by {who}", advice))
    return found


_LOST = r"process has ended|bus error|no space left"
_EXPLAINED: tuple[tuple[str, Callable[[str], list[Line]]], ...] = (
    (r"too many open files", _limit(limits.open_files)),
    (r"address already in use|port \d+ is|:\d+ is taken", _port),
    (r"can't start new thread|resource temporarily unavailable", _limit(limits.processes)),
    (rf"shared memory|/dev/shm|{_LOST}", _limit(limits.shared_memory)),
    (r"CUDA out of memory", _gpu_memory),
    (rf"cannot allocate memory|memoryerror|out of memory|{_LOST}", _limit(limits.memory)),
    (r"\bGPUs?\b|CUDA|NCCL", _gpus),
)
"""What a cause speaks of, and the check that may explain it."""
