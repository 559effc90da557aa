"""A node's hardware and software, as far as an unprivileged program sees them: for a submission."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpillm.devices import Gpu

_CPU = Path("/sys/devices/system/cpu/cpu0")
_SOFTWARE = ("numpy", "transformers", "mlcommons-loadgen", "mpi4py")  # listed for every core


def describe_machine(gpus: Sequence[Gpu], packages: Sequence[str]) -> dict[str, Any]:
    """Describe this node, ready for JSON. Values that the system does not report are None or empty.

    `gpus`: GPUs available to the run; `packages`: the core's packages, whose versions matter.
    """
    return {
        "cpu": _cpu(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "storage": {"bytes": shutil.disk_usage("/").total, "disks": _disks()},
        "network": _network_cards(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total} for gpu in gpus],
        "gpu_driver": gpu_driver(),
        "operating_system": operating_system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "software": _software(packages),
    }


def _cpu() -> dict[str, Any]:
    """Return model, sockets, cores of all sockets, highest frequency, and the caches of one core."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^(?:model name|cpu model|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    sockets = re.findall(r"^physical id\s*:\s*(\d+)$", text, re.MULTILINE)
    cores = re.findall(r"^core id\s*:\s*(\d+)$", text, re.MULTILINE)
    pairs = set(zip(sockets, cores, strict=False))
    frequency = _first_line(_CPU / "cpufreq/cpuinfo_max_freq")  # kHz
    return {
        "model": model[1].strip() if model else "",
        "sockets": len(set(sockets)) or 1,
        "cores": len(pairs) or os.cpu_count(),
        "threads": os.cpu_count(),
        "max_mhz": int(frequency) // 1000 if frequency.isdecimal() else None,
        "caches": _caches(),
    }


def _caches() -> list[str]:
    caches = []
    for folder in sorted((_CPU / "cache").glob("index*")):
        level, kind, size = (_first_line(folder / name) for name in ("level", "type", "size"))
        caches.append(f"L{level}{'' if kind == 'Unified' else kind[:1].lower()} {size}")
    return caches


def _disks() -> list[dict[str, Any]]:
    """Return block devices that are backed by hardware."""
    disks = []
    for folder in sorted(Path("/sys/block").glob("*")):
        sectors = _first_line(folder / "size")  # of 512 bytes, whatever the disk's sector size
        if (folder / "device").exists() and sectors.isdecimal():
            disks.append({"name": folder.name, "bytes": int(sectors) * 512, "type": _disk_type(folder)})
    return disks


def _disk_type(folder: Path) -> str:
    for prefix, kind in (("nvme", "NVMe SSD"), ("vd", "virtual disk"), ("xvd", "virtual disk")):
        if folder.name.startswith(prefix):
            return kind
    return "HDD" if _first_line(folder / "queue/rotational") == "1" else "SSD"


def _network_cards() -> list[dict[str, Any]]:
    """Return network interfaces that are backed by hardware.

    Speeds are in Mbit/s; None without a link, or if the driver does not report the speed.
    """
    cards = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        if (folder / "device").exists():
            speed = _first_line(folder / "speed")
            kind = "InfiniBand" if _first_line(folder / "type") == "32" else "Ethernet"
            cards.append(
                {"name": folder.name, "type": kind, "mbit_per_s": int(speed) if speed.isdecimal() else None}
            )
    return cards


def gpu_driver() -> str:
    """Return the version of NVIDIA's driver; empty without one."""
    return _first_line(Path("/sys/module/nvidia/version"))


def operating_system() -> str:
    """Return the name of the distribution, with its version."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _software(packages: Sequence[str]) -> dict[str, str]:
    """Return versions of installed packages that may affect a result, without importing them."""
    from importlib import metadata  # takes 20 ms, on the first rank of a node only

    versions = {}
    for name in (*packages, *_SOFTWARE):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _first_line(path: Path) -> str:
    """Return the file's first line; empty if it is missing or unreadable (a network card without a link)."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""
