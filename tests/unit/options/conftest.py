"""Fixtures of the options' tests: no command line and no environment but a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["mpillm"])
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS", raising=False)
    yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a disaggregation YAML that is still to be written."""
    return tmp_path / "disagg.yaml"
