"""The table of requests: its columns, and paths that cannot be written."""

from __future__ import annotations

import csv
import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.conversations import Conversation
from mpillm.data.dataset import Turns
from mpillm.report.request_log import RECORD
from mpillm.report.requests_file import check_requests_file, columns_of, write_requests_file

ROWS = np.array(
    [(0.5, 0.25, 1.25, 2, 5, 0, 9, 8, 0, 1), (1.0, math.nan, 0.5, 0, 1, 1, -1, -1, 0, 0)],
    RECORD,
)
TURNS = Turns([Conversation("a"), Conversation("b")], np.array([0, 1, 3]), np.zeros(3), np.full(3, np.nan))


def test_a_row_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    write_requests_file(str(path), columns_of(ROWS, TURNS, np.array([4, 5, 6])))
    with path.open(newline="") as stream:
        first, second = csv.DictReader(stream)
    assert first == {
        "sample": "2",
        "conversation": "b",
        "session": "0",
        "turn": "1",
        "issued_s": "0.5",
        "ttft_s": "0.25",
        "latency_s": "1.25",
        "tpot_s": "0.25",
        "prompt_tokens": "9",
        "cached_tokens": "8",
        "output_tokens": "5",
        "error": "False",
    }
    unknown = [name for name, value in second.items() if value == ""]
    assert unknown == ["ttft_s", "tpot_s", "cached_tokens"]
    assert (second["prompt_tokens"], second["error"]) == ("4", "True")


def test_branches_have_the_name_of_their_parent() -> None:
    root = Conversation("a")
    turns = replace(TURNS, conversations=[root, Conversation("b", parent=root)])
    assert columns_of(ROWS, turns)["parent"] == ["a", None]


def test_without_conversations_and_without_counts() -> None:
    columns = columns_of(ROWS)
    assert "turn" not in columns and columns["prompt_tokens"] == [9, None]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="there is no pyarrow")
def test_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet

    path = tmp_path / "requests.parquet"
    check_requests_file(str(path))
    write_requests_file(str(path), columns_of(ROWS, TURNS))
    table = pyarrow.parquet.read_table(path).to_pydict()
    assert table == columns_of(ROWS, TURNS)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("requests.json", "name a file that ends in .csv or .parquet"),
        ("nowhere/requests.csv", "there is no folder nowhere"),
        ("folder.csv", "it cannot be written"),
    ],
)
def test_paths_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=f"--requests_file {path}: {problem}"):
        check_requests_file(path)
    check_requests_file("requests.csv")
