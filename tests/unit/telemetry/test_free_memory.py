"""What control groups leave of a node's memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from mpillm.telemetry.free_memory import available_bytes


def available(folder: Path, lines: str, files: dict[str, str]) -> int:
    """Return `available_bytes` of a process whose control groups are `lines`, with these files under their
    root."""
    (folder / "own").write_text(lines)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return available_bytes(folder / "cgroup", folder / "own")


def test_control_groups_limit_memory(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert 1 << 20 < available_bytes(tmp_path / "none", tmp_path / "nor this") < total
    stat = "anon 5\ninactive_file 30\nactive_file 20"
    version_2 = {
        "job/step/memory.max": "max",
        "job/step/memory.current": "100",
        "job/step/memory.stat": stat,
        "job/memory.max": "500",
        "job/memory.current": "200",
        "job/memory.stat": stat,
    }
    assert available(tmp_path, "0::/job/step\n", version_2) == 500 - 200 + 50
    assert 1 << 20 < available(tmp_path, "0::/outside/of/this/container\n", {}) < total
    version_1 = {
        "memory/job/memory.limit_in_bytes": "700",
        "memory/job/memory.usage_in_bytes": "300",
        "memory/job/memory.stat": "cache 9\ntotal_inactive_file 1\ntotal_active_file 2",
    }
    assert available(tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n", version_1) == 700 - 300 + 3
