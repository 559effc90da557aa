"""The lanes of conversations: a row for each, a bar for each request, and bounds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mpillm.report.page.page import page
from mpillm.report.page.run_analysis import facts_of
from mpillm.report.page.turn_lanes import turn_lanes
from mpillm.report.request_log import RECORD
from mpillm.report.run_files import RunFiles
from tests.helpers.pages import Wellformed, loads_nothing
from tests.helpers.run_directories import make_run, write_rows


def run_of(folder: Path, rows: NDArray[np.void]) -> RunFiles:
    of = {"started": 2, "ended": 2, "failed": 0, "outgrown": 0}
    result = {"status": "MEASURED", "scenario": "Offline", "conversations": of, "test_s": 10.0, "samples": 4}
    run = make_run(folder / "run", result=result)
    write_rows(run, rows)
    return RunFiles.read(run)


def lanes_of(folder: Path, rows: NDArray[np.void]) -> str:
    return turn_lanes(facts_of(run_of(folder, rows))[0])


def many(n_conversations: int, n_turns: int) -> NDArray[np.void]:
    rows = np.zeros(n_conversations * n_turns, RECORD)
    rows["issued"] = np.arange(len(rows))
    rows["session"] = 1000 + np.repeat(np.arange(n_conversations), n_turns)
    rows["turn"] = np.tile(np.arange(n_turns), n_conversations)
    rows["ttft"], rows["latency"], rows["tokens"], rows["prompt"] = 0.25, 0.5, 9, -1
    return rows


def test_a_bar_spans_a_request_and_changes_at_its_first_token(tmp_path: Path) -> None:
    rows = many(1, 3)
    rows["issued"], rows["latency"] = [2.0, 5.0, 10.0], [1.0, 2.0, 2.0]  # from 2 s to 12 s
    rows["ttft"] = [0.5, np.nan, 1.0]
    rows["error"], rows["prompt"], rows["cached"] = [0, 0, 1], [-1, 80, 80], [-1, 64, -1]
    text = lanes_of(tmp_path, rows)
    bars = re.findall(r'class="(k\d|c5)" x="([\d.]+)" width="([\d.]+)"', text)
    assert bars == [
        ("k0", "0.0", "50.0"),
        ("k1", "50.0", "50.0"),
        ("k0", "300.0", "200.0"),
        ("c5", "800.0", "200.0"),
    ]
    assert "turn 0, at 2.0 s, took 1 s, first token after 500 ms, 9 output tokens" in text
    assert "turn 1, at 5.0 s, took 2 s, 80 prompt tokens, 64 of them cached, 9 output tokens" in text
    assert "80 prompt tokens, failed" in text and "</i>failed" in text
    assert "2.0 s</span><span>12.0 s" in text and "first 1 of" not in text


def test_the_page_does_not_call_them_offline(tmp_path: Path) -> None:
    """In LoadGen's Offline, all requests exist at the start. Conversations send them later."""
    run = run_of(tmp_path, many(1, 3))
    assert not run.all_at_once
    assert "<p>conversations · 3 ranks</p>" in page(run)


def test_rows_are_in_order_of_start(tmp_path: Path) -> None:
    rows = many(3, 1)
    rows["session"] = [7, 8, 9]
    assert re.findall(r"Conversation (\d+), (\d+) requests", lanes_of(tmp_path, rows)) == [
        ("1", "1"),
        ("2", "1"),
        ("3", "1"),
    ]


@pytest.mark.parametrize(
    ("n", "turns", "rows", "note"),
    [
        (2000, 10, 40, "These are the first 40 of 2,000 conversations. requests.bin has all requests"),
        (30, 100, 12, "These are the first 12 of 30 conversations."),
        (2, 5000, 1, "the first 1 of 2 conversations. These are the first 1,200 of 5,000 requests."),
    ],
)
def test_rows_and_bytes_are_bounded(tmp_path: Path, n: int, turns: int, rows: int, note: str) -> None:
    text = lanes_of(tmp_path, many(n, turns))
    assert text.count('<div class="turns">') == rows and note in text
    assert len(text) < 350_000


def test_the_page_of_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, many(2, 2))
    text = page(run)
    assert Wellformed(text) and loads_nothing(text) and "Turns of conversations" in text
    write_rows(run.path, many(2, 2)[:0])
    assert turn_lanes(facts_of(run)[0]) == ""
    (run.path / "requests.bin").unlink()
    assert turn_lanes(facts_of(run)[0]) == ""


def test_other_tests_have_no_such_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_rows(run, many(2, 2))
    assert turn_lanes(facts_of(RunFiles.read(run))[0]) == ""
