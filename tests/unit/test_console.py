"""What the console prints while a test runs."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest

from mpillm.report import console
from mpillm.report.console import Console


@pytest.mark.parametrize("steady", [False, True])
def test_steady_state_progress(monkeypatch: pytest.MonkeyPatch, steady: bool) -> None:
    """10 samples of 20 tokens a second, after 60 seconds in which nothing came: the last 30 seconds know nothing of them."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    bar = Console(out)
    for second in range(6, 121, 6):
        now[0] = float(second)
        done = 10 * max(0, second - 60)
        bar.progress(done, 1000, 20 * done, float(second), steady)
    last = out.getvalue().splitlines()[-1]
    assert re.search(r"600/1000 samples  5\.0 samples/s  100\.0 tokens/s  120 s", last)
    assert last.endswith("  last 30 s: 10.0 samples/s  200.0 tokens/s") == steady


def test_no_bar_before_the_first_query(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    bar = Console(out)
    monkeypatch.setattr(console.time, "monotonic", lambda: math.inf)
    bar.progress(0, 0, 0, 0.01)
    assert not out.getvalue()
    bar.progress(0, 64, 0, 0.01)
    assert "0/64 samples" in out.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_console_that_takes_no_more(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as out:
        console = Console(out)
        console.line("the run goes on")
        console.summary([("status", "VALID")])
