"""A folder in which `make` finds everything installed: the Makefile, and this Python as .venv/bin/python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.helpers.support import ROOT


def make_folder(folder: Path) -> None:
    """Copy the Makefile and what it reads. A `make` there installs nothing."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
        os.utime(folder / name, (0, 0))  # older than the installation
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / "installed").write_text(f"{folder}\n")
