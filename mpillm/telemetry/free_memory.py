"""Free memory for a process, within the node and its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

# For cgroup v2 and v1: limit, usage, and the part of it that is cached files, which the system can drop.
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory this process can still get within the node and its cgroups (container, Slurm job)."""
    return min([int(psutil.virtual_memory().available), *_cgroup_free_bytes(cgroups, own)])


def _cgroup_free_bytes(cgroups: Path, own: Path) -> Iterator[int]:
    """Yield the free memory, cached files included, of each cgroup around this process that limits it."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        version = "memory" if "memory" in controllers.split(",") else ""
        if controllers and not version:
            continue
        limit_file, usage_file, cached = _CGROUP_FILES[version]
        top = cgroups / version
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            try:
                limit, usage = (
                    (folder / limit_file).read_text().strip(),
                    int((folder / usage_file).read_text()),
                )
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:  # the topmost group has no limit; a container does not see groups outside it
                continue
            if limit != "max":
                yield int(limit) - usage + sum(int(counts.get(name, 0)) for name in cached)
