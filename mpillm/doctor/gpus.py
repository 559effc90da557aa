"""Checks of a node's GPUs with NVML and nvidia-smi: driver, used memory, errors, peer access, NVLink."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from mpillm.devices import Gpu, visible_gpus
from mpillm.doctor.findings import RankCounts, Status, Verdict, check, size

_TIMEOUT_S = 6.0
_QUERY = ("index", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current")
_QUERY_ERRORS = "ecc.errors.uncorrected.volatile.total"
_IDLE_USE = 0.1  # share of its memory that an idle GPU uses


class Device(NamedTuple):
    """A GPU as nvidia-smi describes it."""

    number: int
    name: str
    driver: str
    total: int  # bytes
    used: int
    mig: bool
    errors: int | None  # uncorrected memory errors; None: the GPU does not count them


class GpuFacts(NamedTuple):
    """The GPUs of the node of one rank."""

    visible: tuple[Gpu, ...]  # to this rank
    problem: str  # why no GPU is visible; "" if one is
    pytorch: str  # its version; "" if it is not installed
    peer_memory: bool | None  # RDMA devices may read GPU memory; None: there are no RDMA devices
    devices: tuple[Device, ...] = ()  # of the node; only from its first rank
    links: tuple[tuple[int, int, str], ...] = ()  # pairs, and how they are connected: NV18, PIX, SYS, …
    no_peer: tuple[tuple[int, int], ...] = ()  # pairs that cannot read each other's memory
    unanswered: str = ""  # why nvidia-smi gave no answer


def gpu_facts() -> GpuFacts:
    """Query NVML, the system and the installed packages; takes milliseconds."""
    gpus = visible_gpus() or ()
    return GpuFacts(gpus, "" if gpus else _why_none(), _pytorch(), _peer_memory())


def node_gpus(facts: GpuFacts) -> GpuFacts:
    """Return `facts` with the node's devices and links from nvidia-smi; may take seconds."""
    if not facts.visible:
        return facts
    try:
        devices = parse_devices(
            _nvidia_smi(f"--query-gpu={','.join((*_QUERY, _QUERY_ERRORS))}", "--format=csv,noheader,nounits")
        )
        links = parse_matrix(_nvidia_smi("topo", "-m"))
        peers = parse_matrix(_nvidia_smi("topo", "-p2p", "r"))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return facts._replace(unanswered=f"nvidia-smi: {error}")
    no_peer = tuple((a, b) for a, b, word in peers if word != "OK")
    return facts._replace(devices=devices, links=links, no_peer=no_peer)


# --- checks ---


def _has_gpus(facts: GpuFacts) -> bool:
    return bool(facts.visible)


@check("GPUs", of_nodes=True)
def driver(facts: GpuFacts, _: RankCounts) -> Verdict:
    """Check that GPUs are visible and that PyTorch can use them."""
    if not facts.visible:
        return Verdict(Status.SKIPPED, f"no GPU, so nothing of peers and NVLink: {facts.problem}")
    names = {gpu.name for gpu in facts.visible}
    text = f"{len(facts.visible)} visible, {', '.join(sorted(names))}"
    drivers = sorted({device.driver for device in facts.devices})
    text += f", driver {', '.join(drivers)}" if drivers else ""
    if "+cpu" in facts.pytorch:
        return Verdict(
            Status.WARNING,
            f"{text}; PyTorch {facts.pytorch} can't use them",
            "install PyTorch's CUDA build",
        )
    return Verdict(Status.OK, text)


@check("GPU memory", of_nodes=True, where=_has_gpus)
def memory(facts: GpuFacts, _: RankCounts) -> Verdict:
    """Check for memory that other processes use, and for memory errors."""
    if facts.unanswered:
        return Verdict(Status.SKIPPED, facts.unanswered)
    if broken := [device for device in facts.devices if device.errors]:
        text = ", ".join(f"GPU {device.number}: {device.errors}" for device in broken)
        return Verdict(
            Status.FAILURE,
            f"uncorrected memory errors since the last reset: {text}",
            "reset or replace it",
        )
    busy = [device for device in facts.devices if device.used > _IDLE_USE * device.total and not device.mig]
    if busy:
        text = ", ".join(f"GPU {device.number}: {size(device.used)}" for device in busy)
        return Verdict(Status.WARNING, f"memory in use: {text}", "nvidia-smi names the processes: end them")
    return Verdict(Status.OK, "no memory in use, no memory errors")


@check("GPU peers", of_nodes=True, where=_has_gpus)
def peers(facts: GpuFacts, _: RankCounts) -> Verdict:
    """Check peer access and NVLink between the GPUs of a node."""
    if facts.unanswered:
        return Verdict(Status.SKIPPED, facts.unanswered)
    if len(facts.devices) < 2:
        return Verdict(Status.SKIPPED, "one GPU per node")
    if facts.no_peer:
        pairs = ", ".join(f"{a}-{b}" for a, b in facts.no_peer[:8])
        return Verdict(
            Status.WARNING,
            f"no peer access: {pairs}: NCCL goes through /dev/shm there",
            "check IOMMU and ACS settings (NCCL's documentation), and the container's IPC namespace",
        )
    nvlinks = sum(word.startswith("NV") for _, _, word in facts.links)
    return Verdict(
        Status.OK, f"peer access between all; NVLink between {nvlinks} of {len(facts.links)} pairs"
    )


@check("peer memory", of_nodes=True, where=_has_gpus)
def peer_memory(facts: GpuFacts, _: RankCounts) -> Verdict:
    """Check RDMA between GPU memory and network cards."""
    if facts.peer_memory is None:
        return Verdict(Status.SKIPPED, "no RDMA device")
    if facts.peer_memory:
        return Verdict(Status.OK, "network cards read GPU memory (nvidia_peermem)")
    return Verdict(
        Status.WARNING,
        "nvidia_peermem is not loaded: unless NCCL can use DMA-BUF, GPU data goes through host memory",
        "modprobe nvidia_peermem; NCCL_DEBUG=INFO says which is used",
    )


CHECKS = (driver, memory, peers, peer_memory)


# --- output of nvidia-smi, state of the system ---


def parse_devices(text: str) -> tuple[Device, ...]:
    """Parse the output of `--query-gpu`: a line per GPU. Raises ValueError."""
    try:
        rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    except csv.Error as error:  # a field of more than 128 KiB
        raise ValueError(f"unexpected line: {error}") from error
    return tuple(map(_device, rows))


def _device(row: list[str]) -> Device:
    if len(row) != len(_QUERY) + 1 or not row[0].isdecimal():
        raise ValueError(f"unexpected line: {', '.join(row)[:80]}")
    index, name, driver_version, total, used, mig, errors = row
    bytes_total, bytes_used = (int(word) << 20 if word.isdecimal() else 0 for word in (total, used))
    counted = int(errors) if errors.isdecimal() else None
    return Device(int(index), name, driver_version, bytes_total, bytes_used, mig == "Enabled", counted)


def parse_matrix(text: str) -> tuple[tuple[int, int, str], ...]:
    """Parse a matrix of `nvidia-smi topo`: pairs of GPUs with their entry (NV18, SYS, OK, …)."""
    rows: dict[int, list[str]] = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        cells = line.split()
        if cells and (match := re.fullmatch(r"GPU([0-9]{1,4})", cells[0])) and "X" in cells:
            rows[int(match[1])] = cells[1:]
    order = sorted(rows)
    return tuple(
        (a, b, rows[a][j]) for i, a in enumerate(order) for j, b in enumerate(order) if i < j < len(rows[a])
    )


def _nvidia_smi(*args: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *args],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def _why_none() -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    if not Path("/proc/driver/nvidia/version").exists():
        return "NVIDIA's driver is not loaded"
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return "the driver is loaded, but there is no /dev/nvidia0: start the container with its GPUs"
    if visible_gpus() is None:
        return "libnvidia-ml.so.1 of the driver is missing: the container lacks the driver's libraries"
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} names none"


def _pytorch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _peer_memory() -> bool | None:
    if not any(Path("/sys/class/infiniband").glob("*")):
        return None
    return any(Path("/sys/module", name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
