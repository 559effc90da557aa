"""No command line and no environment but a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["mpillm"])
    monkeypatch.delenv("TRTLLM_RUNTIME_FLAGS", raising=False)
    yield
