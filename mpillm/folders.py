"""Folders that are replaced whole."""

from __future__ import annotations

import contextlib
from pathlib import Path


def replace_folder(made: Path, target: Path, aside: Path) -> None:
    """Rename the folder `made` to `target`. What was there goes to `aside`, and comes back if anything, a signal included, gets in between.

    All three lie in one file system. OSError: it can't be done.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            target.rename(aside)
        made.rename(target)
    finally:
        if aside.exists() and not target.exists():
            aside.rename(target)
