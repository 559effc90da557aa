"""Where a command is typed must not matter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["mpillm", "launch", "disagg"])
def test_a_folder_of_a_package_s_name_hides_nothing(tmp_path: Path, name: str) -> None:
    """As --log_dir disagg leaves one, or a clone its parent: with make install's kind of installation."""
    (tmp_path / name).mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", "mpillm", "--version"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and result.stdout.startswith("mpillm "), result.stderr
