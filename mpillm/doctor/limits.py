"""Checks of system limits per rank: open files, processes, locked and shared memory, memory, CPU cores."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import psutil

from launch.segments import left_over
from mpillm.doctor.findings import RankCounts, Status, Verdict, check, size
from mpillm.telemetry.free_memory import available_bytes

UNLIMITED = -1
_FILES = 64  # that a rank has open in addition to its connections: libraries, logs, data
_THREADS = 32  # of a rank, in addition to one per CPU core
_MIN_THREADS = 8  # without them MPI, or the rank, does not start
_SHARED = 32 << 20  # bytes of /dev/shm per rank: segments of MPI (Open MPI's are 16 MiB) and of NCCL
_MIN_SHARED = 16 << 20  # Open MPI's ranks of one node cannot connect with less
_MAX_NAMED = 8  # segments
_MIN_MEMORY = 1 << 30  # bytes per rank; `run` checks the memory for a model


class LimitFacts(NamedTuple):
    """Limits of one rank; UNLIMITED if there is none, None if the system does not report one."""

    open_files: tuple[int, int]  # soft, hard
    files_open: int  # now
    processes: int  # of this user; UNLIMITED for root, to whom the limit does not apply
    user_threads: int  # that this user runs now
    tasks: int | None  # free in the control group
    locked: int  # bytes
    rdma: bool  # there is an InfiniBand or RoCE device
    left: dict[str, int]  # bytes of MPI's segments in /dev/shm that no process uses, by name
    shm: tuple[int, int] | None  # bytes of /dev/shm: all, free
    memory: int  # bytes available within the control group's limit
    oom_kills: int  # processes of the control group that the kernel has killed for memory
    cores: int  # that this process may run on
    quota: float | None  # cores' worth of time that the control group grants


def limit_facts() -> LimitFacts:
    """Query the system; takes a few milliseconds."""
    root = os.geteuid() == 0
    processes = UNLIMITED if root else resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group = _control_group()
    pids = _tightest(group, "pids.max", "pids.current")
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
def open_files(facts: LimitFacts, place: RankCounts) -> Verdict:
    """Check the open files: a rank has up to two connections to each other rank."""
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
def processes(facts: LimitFacts, place: RankCounts) -> Verdict:
    """Check the limit on processes, which includes threads."""
    need = place.n_here * (_THREADS + facts.cores)
    free = [] if facts.processes == UNLIMITED else [facts.processes - facts.user_threads]
    free += [] if facts.tasks is None else [facts.tasks]
    if not free:
        return Verdict(Status.OK, "unlimited")
    if min(free) >= need:
        return Verdict(Status.OK, f"enough for {place.n_here} ranks per node")
    return Verdict(
        Status.FAILURE if min(free) < place.n_here * _MIN_THREADS else Status.WARNING,
        f"{max(0, min(free))} more may start; the ranks of this node may need {need}",
        "ulimit -u unlimited before the launcher, or a larger pids.max of the container or service",
    )


@check("locked memory")
def locked_memory(facts: LimitFacts, _: RankCounts) -> Verdict:
    """Check the locked memory: RDMA pins its buffers."""
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
def shared_memory(facts: LimitFacts, place: RankCounts) -> Verdict:
    """Check /dev/shm, through which MPI and NCCL move data between the ranks of a node."""
    if facts.shm is None:
        return Verdict(Status.FAILURE, "there is no /dev/shm", "mount a tmpfs there")
    total, free = facts.shm
    n = place.n_here
    want = n * _SHARED
    if free >= want:
        return Verdict(Status.OK, f"/dev/shm has at least {size(want)} free")
    mib = -(-want // (1 << 20))
    return Verdict(
        Status.FAILURE if free < _MIN_SHARED + n * (1 << 20) else Status.WARNING,
        f"/dev/shm has {size(free)} free of {size(total)}; {n} rank{'s' if n > 1 else ''} of a node"
        f" may need {size(want)}",
        f"delete what others left there, or mount -o remount,size={mib}M /dev/shm;"
        f" containers: --shm-size={mib}m",
    )


@check("left memory", of_nodes=True)
def left_memory(facts: LimitFacts, _: RankCounts) -> Verdict:
    """Check for segments of killed ranks; mpillm's start has already deleted its own on this host."""
    if not facts.left:
        return Verdict(Status.OK, "nothing of MPI's is left in /dev/shm")
    names = sorted(facts.left)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return Verdict(
        Status.WARNING,
        f"{size(sum(facts.left.values()))} in /dev/shm that no process here has:"
        f" {', '.join(names[:_MAX_NAMED])}{more}",
        "programs that were killed left them; delete them, if no other container uses them",
    )


@check("memory", of_nodes=True)
def memory(facts: LimitFacts, place: RankCounts) -> Verdict:
    """Check the available memory of the node or of its control group."""
    n = place.n_here
    killed = f"; the kernel has killed {facts.oom_kills} processes of this control group for memory"
    if facts.memory < n * _MIN_MEMORY / 8:
        status, advice = Status.FAILURE, "end what else runs there, or start fewer ranks"
    elif facts.memory < n * _MIN_MEMORY:
        status, advice = Status.WARNING, "end what else runs there, or start fewer ranks"
    else:
        status, advice = Status.OK, ""
    return Verdict(status, f"{size(facts.memory)} free{killed if facts.oom_kills else ''}", advice)


@check("cores", of_nodes=True)
def cores(facts: LimitFacts, place: RankCounts) -> Verdict:
    """Check the CPU cores that affinity and the control group's quota allow."""
    n = place.n_here
    usable = facts.cores if facts.quota is None else min(facts.quota, facts.cores)
    quota = "" if facts.quota is None else f" (a quota of {facts.quota:g} of {facts.cores})"
    text = f"{usable:g} for {n} rank{'s' if n > 1 else ''}{quota}"
    if n <= usable:
        return Verdict(Status.OK, text)
    return Verdict(Status.WARNING, text, "latencies grow: start fewer ranks per node, or grant more cores")


CHECKS = (open_files, processes, locked_memory, shared_memory, left_memory, memory, cores)


# --- the control group ---


def _control_group() -> list[Path]:
    """Return the folder of this process's control group (version 2) and its parents."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                own = root / path.lstrip("/")
                return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return [root]


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it contains ``max``."""
    try:
        text = path.read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.isdecimal() else None


def _tightest(group: list[Path], limit_file: str, usage_file: str) -> int | None:
    """Return the free amount of the tightest group; None if there is no limit."""
    left = [
        limit - (_number(folder / usage_file) or 0)
        for folder in group
        if (limit := _number(folder / limit_file)) is not None
    ]
    return min(left, default=None)


def _quota(folder: Path) -> float | None:
    """Return the CPU time of a group, in CPU cores."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = (_number(folder / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota_us / period_us if quota_us and period_us else None


def _oom_kills(group: list[Path]) -> int:
    with contextlib.suppress(OSError, IndexError):
        events = (group[0] / "memory.events").read_text(encoding="ascii").split()
        return int(events[events.index("oom_kill") + 1]) if "oom_kill" in events else 0
    return 0


def _threads_of(user: int) -> int:
    return sum(
        process.info["num_threads"] or 0
        for process in psutil.process_iter(["uids", "num_threads"])
        if process.info["uids"] and process.info["uids"].real == user
    )
