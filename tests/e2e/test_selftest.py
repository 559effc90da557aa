"""The self test of a kind of server: every case on a server of this test, and on one that does not start."""

from __future__ import annotations

import pytest

from tests.helpers.owned import server
from tests.helpers.pages import report_steps
from tests.helpers.support import USAGE, Starter

FAILED = 1
LOSSES = ("a wrong option", "a server killed", "a server stopped")


def words(one: Starter, *options: object) -> list[object]:
    head = [one.python, "-m", "mpillm", "selftest", "--log_dir", one.folder / "runs"]
    own = server(*options)
    return [*head, "--output", one.folder / "selftest.txt", *own, "--core_type", "trtllm_endpoint"]


def test_a_server_that_does_what_it_should(one: Starter) -> None:
    """Each loss is named; what can't be tried is skipped, with the reason; a busy machine is a warning."""
    ended = one.command(words(one, "--worker", "--pause_s", 0.05)).end(400)
    report = (one.folder / "selftest.txt").read_text()
    found = report_steps(report)
    assert ended.code == 0 and "All cases that can be tried here" in ended.out, report
    assert {found[name] for name in ("Offline", "Server", "answers", "two instances")} <= {"ok", "warning"}
    assert [found[name] for name in LOSSES] == ["ok"] * len(LOSSES), report
    skipped = [name for name, status in found.items() if status == "skipped"]
    assert skipped == ["the same answers", "TP 2", "disaggregated"]
    assert "SIGSTOP to process" in report and " is stopped: kill -CONT " in report
    assert not [*(one.folder / "runs").iterdir()]


def test_a_server_that_does_not_start(one: Starter) -> None:
    ended = one.command(words(one, "--nonsense")).end(400).must(FAILED)
    report = (one.folder / "selftest.txt").read_text()
    assert "\nFirst: Offline. It would show: all prompts are answered" in ended.out
    assert report_steps(report)["a server killed"] == "failure" and "no answer came: " in report
    assert "unrecognized arguments: --nonsense" in report


@pytest.mark.parametrize("more", [("--no-such-option", 3), ("--core_type", "none")])
def test_wrong_options_are_refused_before_anything_starts(one: Starter, more: tuple[object, ...]) -> None:
    ended = one.command([*words(one), *more]).end(60).must(USAGE)
    assert not (one.folder / "selftest.txt").exists(), ended.out
