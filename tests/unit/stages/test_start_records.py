"""What `run-llm-server` leaves beside a YAML while its servers start, and what a client makes of it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mpillm.stages.start_records import RecordedStarts, StartRecord


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "disagg.yaml"
    path.write_text("{}")
    os.utime(path, (1, 1))
    return path


@pytest.fixture
def seen(yaml: Path) -> Callable[[], tuple[str, float]]:
    """Return a function for the failures that a client finds, and its wait in place of 54 s."""
    starts = RecordedStarts(yaml, 1620.0)
    starts.read_s = starts.replaced_s = 0.0
    return lambda: (starts.failures(), starts.wait_s(54.0))


def test_servers_that_start_are_waited_for(yaml: Path, seen: Callable[[], tuple[str, float]]) -> None:
    assert seen() == ("", 54)
    worker, leader = StartRecord(yaml, "worker-0"), StartRecord(yaml, "leader")
    worker.begin()
    leader.begin()
    assert seen() == ("", 1620)
    worker.end()
    assert seen() == ("", 1620)
    leader.end()
    assert seen() == ("", 54) and [*yaml.parent.iterdir()] == [yaml]


def test_a_failure_is_named_until_the_next_start(yaml: Path, seen: Callable[[], tuple[str, float]]) -> None:
    for name in ("worker-0", "worker-1", "leader"):
        record = StartRecord(yaml, name)
        record.begin()
        record.fail("no GPU here\n" if name == "leader" else "no such folder\n  | the log\x1b[2J")
        record.end()
    failures, wait_s = seen()
    assert wait_s == 54
    assert failures.count("no such folder") == 1, "each rank of a command has the same"
    for line in (
        f"run-llm-server (leader) on {socket.gethostname()} failed ",
        "run-llm-server (worker-0, worker-1) on ",
        f"as recorded in {yaml}.servers; remove it",
    ):
        assert line in failures
    assert "\x1b" not in failures
    again = StartRecord(yaml, "worker-0")
    again.begin()
    again.end()
    assert "run-llm-server (worker-1)" in seen()[0] and "worker-0" not in seen()[0]
    both = StartRecord(yaml, "servers")
    both.begin()
    assert seen() == ("", 1620)
    both.end()


def test_records_that_do_not_count(yaml: Path, seen: Callable[[], tuple[str, float]]) -> None:
    record = StartRecord(yaml, "leader")
    record.begin()
    file = Path(f"{yaml}.servers/leader.json")
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "process": 1 << 22 | 1}))  # no process has such a number
    assert seen() == ("", 54), "its command was killed"
    for text in ("{", "[]", "{}", json.dumps({**values, "state": "failed", "time": "soon"})):
        file.write_text(text)
        assert seen() == ("", 54), text
    record.fail("no GPU here")
    assert "no GPU here" in seen()[0]
    client = RecordedStarts(yaml, 1620.0)
    client.read_s, client.replaced_s = 0.0, 600.0
    assert client.failures() == "", "a command that is typed now may replace it"
    record.fail("another")
    os.utime(file, (9, 9))
    assert "another" in client.failures(), "it is new"
    os.utime(yaml)
    assert seen() == ("", 54), "it is of an earlier YAML"


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "disagg.yaml.servers").write_text("a file")
    record = StartRecord(tmp_path / "disagg.yaml", "leader")
    record.begin()
    record.fail("no GPU here")
    assert capsys.readouterr().err.count("mpillm: note: no record of the start for run-harness: ") == 2
