"""Check that all nodes run the same code: files of the same version may be edited, or copied in part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launch.launcher import find_launcher
from launch.siblings import ranks_here

_FOLDER = Path(__file__).parents[2]
_PACKAGES = ("disagg", "launch", "mpillm")


def reports_code(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank reports its code: the first of each node, where there are several nodes.

    Reading the code takes 20 ms. A run on one node need not wait for that.
    """
    launcher = find_launcher(env)
    if launcher is None or launcher.size is None or launcher.size == ranks_here():
        return False
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    places = [env[name] for name in names if name in env]
    return launcher.first or (bool(places) and places[0] == "0")


def code_digest(folder: Path = _FOLDER) -> str:
    """Return a digest of all Python files of mpillm in `folder`, by their paths in it."""
    import hashlib  # it loads OpenSSL, which takes milliseconds

    digest = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
