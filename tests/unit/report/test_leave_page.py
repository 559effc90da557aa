"""A run whose page can't be written: its summary says so in red."""

from __future__ import annotations

import io
from pathlib import Path

from mpillm.report.console import NO_PAGE, Console
from mpillm.report.page import page
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.run_directories import make_run


def test_a_full_disk_is_a_row_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with files_of_at_most(4096):
        row = page.leave_page(run, lambda path: None)
    assert row == (NO_PAGE, f"{run / 'report.html'}: File too large")
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    Console(out).summary([("samples", 1), row])
    plain, red = out.getvalue().splitlines()[1:3]
    assert plain == "  samples                1"
    assert red.startswith("\x1b[1;31m  NO PAGE") and red.endswith("\x1b[0m")
