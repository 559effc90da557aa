"""Detection of files and folders that other users own, who could replace them or redirect writes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def trusted_owners(folder: Path) -> tuple[int, int]:
    """Return root and this process's user, as the folder's file system numbers them.

    Raises OSError if nothing can be written in the folder.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return 0, os.fstat(file.fileno()).st_uid


def other_owner(path: Path, trusted: tuple[int, int]) -> int | None:
    """Return the owner of a file, a folder or a link, or of the link's target, unless trusted.

    Also None if there is no such path.
    """
    for status in (path.lstat, path.stat):
        try:
            owner = status().st_uid
        except FileNotFoundError:
            continue
        if owner not in trusted:
            return owner
    return None
