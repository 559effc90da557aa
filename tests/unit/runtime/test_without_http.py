"""Rank 0 reads sessions before it can say that a package is missing: they do without those of extras."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("session", ["serve_session", "harness_session"])
def test_a_session_is_read_without_aiohttp(session: str) -> None:
    program = f"import sys; sys.modules['aiohttp'] = None; import mpillm.runtime.{session}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
