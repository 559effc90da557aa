"""Fixtures of the submission's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.submissions import Maker


@pytest.fixture
def maker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Maker]:
    yield Maker(tmp_path, capsys)
