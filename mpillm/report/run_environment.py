"""`environment.json`: the software and the machine that a run had on rank 0, so that it can be repeated."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpillm.report.machine import gpu_driver, operating_system
from mpillm.version import __version__

ENVIRONMENT = "environment.json"

_SOURCE = Path(__file__).parents[2]
# Prefixes of the environment variables of libraries.
_VARIABLES = ("CUDA_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "UCX_")
_GIT_S = 5.0


def describe_environment(mpi: str | None = None) -> dict[str, Any]:
    """Return this process's environment, ready for JSON; it takes some milliseconds.

    `mpi`: the MPI library's version, which only a rank knows.
    """
    return {
        "mpillm": __version__,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "mpi": mpi,
        "packages": _packages(),
        "gpu_driver": gpu_driver(),
        "host": platform.node(),
        "operating_system": operating_system(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], where: tuple[str, str] = ("then", "now")
) -> list[str]:
    """Return a line for each difference; values that one of the two lacks are left out."""
    first, second = where
    lines = []
    for name in (name for name in then if name in now and None not in (then[name], now[name])):
        old, new = then[name], now[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for key in sorted(old.keys() | new.keys()):
                if old.get(key) != new.get(key):
                    lines.append(f"{key}: {old.get(key, 'none')} {first}, {new.get(key, 'none')} {second}")
        elif old != new:
            lines.append(f"{name.replace('_', ' ')}: {old or 'none'} {first}, {new or 'none'} {second}")
    return lines


def _commit() -> str | None:
    """Return the commit of the source, with -dirty if a file was changed; None outside a clone."""
    if not (_SOURCE / ".git").exists():
        return None
    args = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        process = subprocess.run(
            ["git", "-C", str(_SOURCE), *args], capture_output=True, text=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


def _packages() -> dict[str, str]:
    """Return versions by package, from the names of folders: `importlib.metadata` would read every file."""
    versions: dict[str, str] = {}
    for place in sys.path:
        try:
            names = [entry.name for entry in Path(place or ".").iterdir()]
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name.removesuffix(".dist-info").rpartition("-")
                versions.setdefault(package, version)  # Python imports the first one on the path
    return dict(sorted(versions.items()))
