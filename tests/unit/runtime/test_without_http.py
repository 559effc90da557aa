"""Rank 0 reads sessions before it can say that a package is missing: they do without those of extras."""

from __future__ import annotations

import pytest

from tests.helpers.lone_mpi import run_program


@pytest.mark.parametrize("session", ["serve_session", "harness_session"])
def test_a_session_is_read_without_aiohttp(session: str) -> None:
    done = run_program(f"import sys; sys.modules['aiohttp'] = None; import mpillm.runtime.{session}")
    assert done.returncode == 0, done.stderr
