"""What the system lets a rank have: open files, processes, locked and shared memory, memory, cores."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import psutil

from launch.segments import left_over
from mpillm.doctor.findings import Place, Status, Verdict, check, size
from mpillm.telemetry.free_memory import available_bytes

UNLIMITED = -1
_FILES = 64  # that a rank has open beside its connections: libraries, logs, data
_THREADS = 32  # of a rank, beside one for each core
_THREADS_LEAST = 8  # without them MPI, or the rank, does not start
_SHARED = 32 << 20  # bytes of /dev/shm per rank: segments of MPI (Open MPI's are 16 MiB) and of NCCL
_SHARED_LEAST = 16 << 20  # without it Open MPI makes no segment, and its ranks of one node can't meet
_NAMED = 8  # segments
_MEMORY_LEAST = 1 << 30  # bytes per rank; a model needs more, which `run` checks itself


class LimitFacts(NamedTuple):
    """The limits of one rank; UNLIMITED where there is none, None where the system does not say."""

    open_files: tuple[int, int]  # soft, hard
    files_open: int  # now
    processes: int  # of this user; UNLIMITED for root, whom the limit does not bind
    user_threads: int  # that this user runs now
    tasks: int | None  # that the control group leaves free
    locked: int  # bytes
    rdma: bool  # there is an InfiniBand or RoCE device
    left: dict[str, int]  # bytes of MPI's segments in /dev/shm that no process has, by name
    shm: tuple[int, int] | None  # bytes of /dev/shm: all, free
    memory: int  # bytes available, the control group's limit included
    oom_kills: int  # processes of the control group that the kernel has killed for memory
    cores: int  # that this process may run on
    quota: float | None  # cores' worth of time that the control group grants


def limit_facts() -> LimitFacts:
    """Ask the system; takes a few milliseconds."""
    root = os.geteuid() == 0
    processes = UNLIMITED if root else resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group = _control_group()
    pids = _least(group, "pids.max", "pids.current")
    quotas = [quota for folder in group if (quota := _quota(folder)) is not None]
    shm: tuple[int, int] | None = None
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        shm = usage.total, usage.free
    return LimitFacts(
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        files_open=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        processes=processes,
        user_threads=0 if processes == UNLIMITED else _threads_of(os.getuid()),
        tasks=pids,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=any(Path("/sys/class/infiniband").glob("*")),
        shm=shm,
        left=left_over(),
        memory=available_bytes(),
        oom_kills=_oom_kills(group),
        cores=len(os.sched_getaffinity(0)),
        quota=min(quotas, default=None),
    )


# --- checks ---


@check("open files")
def open_files(facts: LimitFacts, place: Place) -> Verdict:
    """Connections to other ranks take files: rank 0 has up to two to each, another at most as many."""
    n = place.n_ranks
    soft, hard = facts.open_files
    need = _FILES + 2 * n
    if soft == UNLIMITED or soft >= need:
        return Verdict(Status.OK, "unlimited" if soft == UNLIMITED else f"at most {soft}")
    rises = hard == UNLIMITED or hard >= need
    advice = "in limits.conf, or in the unit that starts the launcher: the hard limit is too low, too"
    return Verdict(
        Status.FAILURE if soft < facts.files_open + n else Status.WARNING,
        f"at most {soft}; one of {n} ranks may need {need}",
        f"ulimit -n {need} before the launcher" if rises else f"set nofile to {need} {advice}",
    )


@check("processes")
def processes(facts: LimitFacts, place: Place) -> Verdict:
    """Threads count as processes."""
    need = place.n_here * (_THREADS + facts.cores)
    free = [] if facts.processes == UNLIMITED else [facts.processes - facts.user_threads]
    free += [] if facts.tasks is None else [facts.tasks]
    if not free:
        return Verdict(Status.OK, "unlimited")
    if min(free) >= need:
        return Verdict(Status.OK, f"enough for {place.n_here} ranks per node")
    return Verdict(
        Status.FAILURE if min(free) < place.n_here * _THREADS_LEAST else Status.WARNING,
        f"{max(0, min(free))} more may start; the ranks of this node may need {need}",
        "ulimit -u unlimited before the launcher, or a larger pids.max of the container or service",
    )


@check("locked memory")
def locked_memory(facts: LimitFacts, _: Place) -> Verdict:
    """RDMA pins its buffers."""
    if facts.locked == UNLIMITED:
        return Verdict(Status.OK, "unlimited")
    if not facts.rdma:
        return Verdict(Status.OK, f"at most {size(facts.locked)}; no RDMA device here needs more")
    return Verdict(
        Status.WARNING,
        f"at most {size(facts.locked)}; RDMA devices need it unlimited",
        "set memlock to unlimited in limits.conf, or LimitMEMLOCK=infinity for slurmd",
    )


@check("shared memory", of_nodes=True)
def shared_memory(facts: LimitFacts, place: Place) -> Verdict:
    """MPI and NCCL move data between the ranks of a node through /dev/shm."""
    if facts.shm is None:
        return Verdict(Status.FAILURE, "there is no /dev/shm", "mount a tmpfs there")
    total, free = facts.shm
    n = place.n_here
    want = n * _SHARED
    if free >= want:
        return Verdict(Status.OK, f"/dev/shm has at least {size(want)} free")
    mib = -(-want // (1 << 20))
    return Verdict(
        Status.FAILURE if free < _SHARED_LEAST + n * (1 << 20) else Status.WARNING,
        f"/dev/shm has {size(free)} free of {size(total)}; {n} rank{'s' if n > 1 else ''} of a node"
        f" may need {size(want)}",
        f"delete what others left there, or mount -o remount,size={mib}M /dev/shm;"
        f" containers: --shm-size={mib}m",
    )


@check("left memory", of_nodes=True)
def left_memory(facts: LimitFacts, _: Place) -> Verdict:
    """Segments whose ranks were killed: a start of mpillm on that host has swept those of its own ranks."""
    if not facts.left:
        return Verdict(Status.OK, "nothing of MPI's is left in /dev/shm")
    names = sorted(facts.left)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return Verdict(
        Status.WARNING,
        f"{size(sum(facts.left.values()))} in /dev/shm that no process here has:"
        f" {', '.join(names[:_NAMED])}{more}",
        "programs that were killed left them; delete them, if no other container uses them",
    )


@check("memory", of_nodes=True)
def memory(facts: LimitFacts, place: Place) -> Verdict:
    """Of the node, or of its control group."""
    n = place.n_here
    killed = f"; the kernel has killed {facts.oom_kills} processes of this control group for memory"
    if facts.memory < n * _MEMORY_LEAST / 8:
        status, advice = Status.FAILURE, "end what else runs there, or start fewer ranks"
    elif facts.memory < n * _MEMORY_LEAST:
        status, advice = Status.WARNING, "end what else runs there, or start fewer ranks"
    else:
        status, advice = Status.OK, ""
    return Verdict(status, f"{size(facts.memory)} free{killed if facts.oom_kills else ''}", advice)


@check("cores", of_nodes=True)
def cores(facts: LimitFacts, place: Place) -> Verdict:
    """Affinity, and the quota of the control group."""
    n = place.n_here
    usable = facts.cores if facts.quota is None else min(facts.quota, facts.cores)
    quota = "" if facts.quota is None else f" (a quota of {facts.quota:g} of {facts.cores})"
    told = f"{usable:g} for {n} rank{'s' if n > 1 else ''}{quota}"
    if n <= usable:
        return Verdict(Status.OK, told)
    return Verdict(Status.WARNING, told, "latencies grow: start fewer ranks per node, or grant more cores")


CHECKS = (open_files, processes, locked_memory, shared_memory, left_memory, memory, cores)


# --- the control group ---


def _control_group() -> list[Path]:
    """Return the folders of this process's control group (version 2) and those above it."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                own = root / path.lstrip("/")
                return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return [root]


def _number(path: Path) -> int | None:
    """Return the number in a file; None without one: no such file, or ``max``."""
    try:
        text = path.read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.isdecimal() else None


def _least(group: list[Path], most: str, used: str) -> int | None:
    """Return how much the tightest of the groups leaves; None: there is no limit."""
    left = [
        limit - (_number(folder / used) or 0)
        for folder in group
        if (limit := _number(folder / most)) is not None
    ]
    return min(left, default=None)


def _quota(folder: Path) -> float | None:
    """Return how many cores' worth of time a group has."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = (_number(folder / "cpu" / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    return quota_us / period_us if quota_us and period_us else None


def _oom_kills(group: list[Path]) -> int:
    with contextlib.suppress(OSError, IndexError):
        words = (group[0] / "memory.events").read_text(encoding="ascii").split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    return 0


def _threads_of(user: int) -> int:
    return sum(
        process.info["num_threads"] or 0
        for process in psutil.process_iter(["uids", "num_threads"])
        if process.info["uids"] and process.info["uids"].real == user
    )
