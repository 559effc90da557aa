"""A run whose page can't be written: its summary says so in red."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from mpillm.report.console import NO_PAGE, Console
from mpillm.report.page import page
from tests.helpers.run_directories import make_run


def test_a_full_disk_is_a_row_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(page, "write_text", full)
    row = page.leave_page(run, lambda path: None)
    assert row == (NO_PAGE, f"{run / 'report.html'}: No space left on device")
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    Console(out).summary([("samples", 1), row])
    plain, red = out.getvalue().splitlines()[1:3]
    assert plain == "  samples                1"
    assert red.startswith("\x1b[1;31m  NO PAGE") and red.endswith("\x1b[0m")
