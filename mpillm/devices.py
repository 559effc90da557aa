"""Which GPUs there are, and which rank gets which: known before anything is loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from disagg import WorldPlan
from disagg.errors import ConfigError
from launch.safe_text import whole_number


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    uuid: str  # the same in every process, however it numbers GPUs
    name: str
    total: int  # bytes
    free: int


class OwnGpu(NamedTuple):
    """The GPU of a rank."""

    device: int  # as that rank's process numbers GPUs
    free: int  # bytes; the least of its instance's ranks


class Memory(ctypes.Structure):
    """NVML's nvmlMemory_t: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def visible_gpus() -> tuple[Gpu, ...] | None:
    """Return the NVIDIA GPUs of this node that CUDA_VISIBLE_DEVICES leaves visible, in its order, from NVML.

    None: NVIDIA's driver is not installed, so nothing is known.
    """
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        return tuple(_read(nvml, handle) for handle in visible_handles(nvml))
    finally:
        nvml.nvmlShutdown()


def open_nvml() -> ctypes.CDLL | None:
    """Return NVML, initialized; None without NVIDIA's driver. Each call needs an ``nvmlShutdown``."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def visible_handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Return handles of the GPUs that CUDA_VISIBLE_DEVICES leaves: up to the first invalid entry."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    entries = map(str, range(count.value)) if visible is None else map(str.strip, visible.split(","))
    handles = []
    for word in entries:
        handle = ctypes.c_void_p()
        if (index := whole_number(word)) is not None:
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        if failed:
            break
        handles.append(handle)
    return handles


def as_visible(devices: Sequence[int]) -> tuple[str, ...]:
    """Return the CUDA_VISIBLE_DEVICES of a process that may use these of this process's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",")[index].strip() if visible else str(index) for index in devices)


def _read(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    uuid, name, memory = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96), Memory()
    nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(uuid.value.decode(), name.value.decode(errors="replace"), memory.total, memory.free)


def share_out(ranks: Sequence[int], gpus: Sequence[tuple[Gpu, ...]]) -> dict[int, int]:
    """Return for each of `ranks` on one node the index of its first visible GPU without an earlier rank.

    Ranks without a free GPU are left out. `gpus`: visible to each rank: all of the node's or, if the launcher
    assigns them (Slurm's --gpus-per-task), only its own.
    """
    used_uuids: set[str] = set()
    devices = {}
    for rank in ranks:
        for i, gpu in enumerate(gpus[rank]):
            if gpu.uuid not in used_uuids:
                used_uuids.add(gpu.uuid)
                devices[rank] = i
                break
    return devices


def _one_each(
    device: str, ranks_of: Mapping[str, list[int]], gpus: Sequence[tuple[Gpu, ...]]
) -> dict[int, int]:
    """Return `share_out` over all nodes. Raises ConfigError if one has too few."""
    devices: dict[int, int] = {}
    for node, ranks in ranks_of.items():
        node_devices = share_out(ranks, gpus)
        if len(node_devices) < len(ranks):
            n_gpus = len({gpu.uuid for rank in ranks for gpu in gpus[rank]})
            raise ConfigError(
                f"--device {device}: node {node} needs one GPU per worker rank ({len(ranks)}),"
                f" but the core can use {n_gpus} there: start fewer ranks, or use --device cpu",
                about=["device"],
            )
        devices |= node_devices
    return devices


def of_instance(
    device: str, ranks: Sequence[int], rank: int, nodes: Sequence[str], gpus: Sequence[tuple[Gpu, ...]]
) -> list[Gpu]:
    """Return the GPUs of an instance on the node of `rank`, one of its `ranks`: its own first; none: the CPU.

    All ranks are workers of some instance; `nodes` and `gpus`: where each is, and what it sees. Raises
    ConfigError on all of them if a node has too few.
    """
    if device == "cpu" or (device == "auto" and not any(gpus)):
        return []
    ranks_of: dict[str, list[int]] = {}
    for one, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(one)
    own = {one: gpus[one][i] for one, i in _one_each(device, ranks_of, gpus).items()}
    others = [own[one] for one in ranks if one != rank and nodes[one] == nodes[rank]]
    seen = {gpu.uuid for gpu in gpus[rank]}
    return [own[rank], *(gpu for gpu in others if gpu.uuid in seen)]


def assign(device: str, plan: WorldPlan, gpus: Sequence[tuple[Gpu, ...]]) -> dict[int, OwnGpu]:
    """Return the GPU of each worker rank; empty: the CPU.

    `gpus`: what each rank sees. `auto` is cuda if any worker sees a GPU. Raises ConfigError if a node has too
    few.
    """
    workers = [rank for rank in plan.ranks if rank.device is not None]
    if device == "cpu" or (device == "auto" and not any(gpus[rank.rank] for rank in workers)):
        return {}
    ranks_of: dict[str, list[int]] = {}
    for rank in workers:
        ranks_of.setdefault(rank.node, []).append(rank.rank)
    devices = _one_each(device, ranks_of, gpus)
    min_free = {
        instance.index: min(gpus[rank][devices[rank]].free for rank in instance.ranks)
        for instance in plan.instances
    }
    return {
        rank.rank: OwnGpu(devices[rank.rank], min_free[rank.instance])
        for rank in workers
        if rank.instance is not None
    }
