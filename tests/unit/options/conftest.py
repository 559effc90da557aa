"""Fixtures of the options' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.configured import command_line as command_line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a disaggregation YAML that is still to be written."""
    return tmp_path / "disagg.yaml"
