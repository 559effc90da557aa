"""What a launcher leaves in the run directory whose rank 0 could not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.launcher_monitor import Cause
from mpillm.report.postmortem import amend, amend_for_rank0
from mpillm.report.run_directory import POSTMORTEM_CLAIM
from mpillm.report.run_directory import UNFINISHED as GOES_ON

UNFINISHED = {
    "status": "FAILED",
    "phase": "warmup",
    "exit_code": 5,
    "failures": [{"rank": 0, "cause": "this run goes on, or …", "traceback": ""}],
    "samples": 0,
}
LOST = Cause("host h2 (ranks 2-3): mpirun has lost its daemon on h2, and ended all ranks")


def leave(path: Path, result: dict[str, Any]) -> Path:
    (path / "result.json").write_text(json.dumps(result))
    return path


def result(path: Path) -> Any:
    return json.loads((path / "result.json").read_text())


def test_the_cause_is_in_the_result_and_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message, _ = amend(leave(tmp_path, UNFINISHED), LOST, 5)
    assert message == f"failed in phase 'warmup': {LOST.text}\n  see result.json and report.html beside it"
    failures = [{"rank": None, "cause": LOST.text, "traceback": ""}]
    assert result(tmp_path) == UNFINISHED | {"failures": failures}
    assert LOST.text in (tmp_path / "report.html").read_text()


def test_the_log_of_a_killed_rank_0_may_have_the_cause(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/rank_0000.log").write_text("Fatal Python error: Segmentation fault\n")
    message, _ = amend(leave(tmp_path, UNFINISHED), Cause("rank 0 ended without an exit code", 0), 5)
    (failure,) = result(tmp_path)["failures"]
    assert failure["rank"] == 0 and failure["cause"].splitlines()[1].startswith("SIGSEGV ended it")
    assert "\n  SIGSEGV ended it" in message


def test_a_server_that_lost_a_host_has_not_served(tmp_path: Path) -> None:
    amend(leave(tmp_path, {"status": "SERVED", "ended_by": "interrupted (SIGTERM)"}), LOST, 5)
    assert (result(tmp_path)["status"], result(tmp_path)["exit_code"]) == ("FAILED", 5)


def test_the_failure_that_rank_0_recorded_is_repeated(tmp_path: Path) -> None:
    """Mpirun drops the output of ranks that it ends."""
    known = UNFINISHED | {"failures": [{"rank": 2, "cause": "no heartbeat", "traceback": ""}]}
    assert "warmup': rank 2: no heartbeat\n" in amend(leave(tmp_path, known), None, 5)[0]
    assert result(tmp_path) == known and (tmp_path / "report.html").exists()


def test_a_run_that_ended_well_stays_as_it_is(tmp_path: Path) -> None:
    ended = {"status": "VALID", "samples": 7}
    assert amend(leave(tmp_path, ended), LOST, 5) == (f"{LOST.text}; the run had ended by then", 0)
    assert amend(leave(tmp_path, {"status": "INVALID"}), LOST, 5) == (LOST.text, 5), (
        "--require_valid may hold"
    )
    leave(tmp_path, ended)
    assert result(tmp_path) == ended and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    message, code = amend(tmp_path, LOST, 5)
    assert message.startswith(f"{LOST.text}\n  its files stay as they are: ") and code == 5
    assert amend(tmp_path / "none", None, 5)[0].startswith("the run has failed\n")


def test_one_of_the_ranks_reports_that_rank_0_has_ended(tmp_path: Path) -> None:
    """Under srun there is no launcher that could."""
    leave(tmp_path, UNFINISHED | {"failures": [{"rank": 0, "cause": GOES_ON, "traceback": ""}]})
    (tmp_path / POSTMORTEM_CLAIM).touch()
    assert amend_for_rank0(tmp_path, "h1", 7, 2, 5) == "", "another rank does"
    (tmp_path / POSTMORTEM_CLAIM).unlink()
    message = amend_for_rank0(tmp_path, "h1", 7, 1, 5)
    assert "'warmup': rank 0 on h1 (pid 7) ended without an exit code; rank 1 reports this" in message
    (failure,) = result(tmp_path)["failures"]
    assert failure["rank"] == 0 and "pid 7" in failure["cause"]
    assert (tmp_path / "report.html").exists() and not (tmp_path / POSTMORTEM_CLAIM).exists()
    assert amend_for_rank0(tmp_path / "elsewhere", "h1", 7, 1, 5) == ""


def test_a_cause_that_rank_0_has_written_stays(tmp_path: Path) -> None:
    known = UNFINISHED | {"failures": [{"rank": 2, "cause": "the process has ended", "traceback": ""}]}
    message = amend_for_rank0(leave(tmp_path, known), "h1", 7, 1, 5)
    assert "rank 2: the process has ended" in message and "pid 7" not in message
    assert result(tmp_path) == known and (tmp_path / "report.html").exists()
