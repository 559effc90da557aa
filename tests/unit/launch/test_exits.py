"""Sentences about exits, and processes that are watched for theirs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from launch.exits import Exits, RankExit, how_ended, sentence


def test_the_sentence_of_ranks() -> None:
    assert sentence([]) == ""
    assert sentence([RankExit(2)]) == "rank 2 has ended"
    exits = [RankExit(3, "h2", 7, at=1.0), RankExit(1, "h1", how="was not started")]
    assert sentence(exits) == "rank 1 on h1 was not started, rank 3 on h2 (pid 7) has ended"
    assert sentence(map(RankExit, range(20))).endswith(", rank 7 has ended, and 12 more")


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (3, "ended with exit code 3"),
        (-signal.SIGSEGV, "was ended by signal 11 (SIGSEGV)"),
        (-99, "was ended by signal 99"),
    ],
)
def test_how_a_process_ended(status: int, how: str) -> None:
    assert how_ended(status) == how


def test_exits_are_returned_once() -> None:
    exits = Exits[str]()
    assert exits.look() == []
    with subprocess.Popen(["sleep", "120"]) as first, subprocess.Popen(["sleep", "120"]) as second:
        assert exits.watch("first", first.pid) and exits.watch("second", second.pid)
        assert exits.look() == [] and select.select([exits], [], [], 0)[0] == []
        first.kill()  # not waited for: a zombie has exited
        assert select.select([exits], [], [], 60)[0]
        assert exits.look() == ["first"] and exits.look() == []
        second.kill()
        assert select.select([exits], [], [], 60)[0]
        assert exits.look() == ["second"]
    assert not exits.watch("first", first.pid), "its pid is nobody's"


def test_what_is_closed_holds_no_file_descriptor() -> None:
    before = {*Path("/proc/self/fd").iterdir()}
    exits = Exits[int]()
    assert all(exits.watch(n, os.getpid()) for n in range(5))
    exits.close()
    del exits
    assert {*Path("/proc/self/fd").iterdir()} == before
