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


def test_a_bar_longer_than_the_terminal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in place, a bar takes one line of any terminal: it is cut, and lines that are no bar go on in the next line again."""
    monkeypatch.setattr(console, "launcher_rank", lambda: "0")
    monkeypatch.setenv(console.TTY, "1")
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    bar = Console(out)
    for second in (1, 2, 3):
        now[0] = float(second)
        bar.progress(second, 24576, 100 * second, float(second))
    bar.line("done")
    assert screen(out.getvalue(), width=40) == ["done"]


def screen(text: str, width: int) -> list[str]:
    """The lines that a terminal shows, as long as only its last line is written to."""
    lines, wraps = [""], True
    for part in re.findall(r"\x1b\[\??\d+[A-Za-z]|[^\x1b]", text):
        if part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part.startswith("\x1b[?7"):
            wraps = part.endswith("h")
        elif part == "\n":
            lines.append("")
        elif len(lines[-1]) < width:
            lines[-1] += part
        elif wraps:
            lines.append(part)
        else:
            lines[-1] = lines[-1][:-1] + part
    return [line for line in lines if line]


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
