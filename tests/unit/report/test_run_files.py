"""Run directories that are whole, half written or damaged, as the page and `compare` read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.experiments.compared_runs import ComparedRun
from mpillm.report.page.page import write_page
from mpillm.report.page.run_analysis import limits_ms
from mpillm.report.run_files import RunFiles
from mpillm.submission.judged_run import JudgedRun
from tests.helpers.run_directories import make_run, write


def test_a_whole_run_has_its_options_instances_and_verdict(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", result={"loadgen_result": "VALID"})
    plan = [{"rank": 0, "roles": ["harness", "leader"], "node": "n0", "instance": None}]
    plan += [
        {"rank": r, "roles": ["ctx" if r < 3 else "gen"], "node": "n0", "instance": r // 3}
        for r in range(1, 5)
    ]
    write(path / "plan.json", {"world_size": 5, "ranks": plan})
    (path / "timeline.jsonl").write_text('{"seconds": 1.0, "instance": 0}\n')
    write(path / "telemetry.json", {"ranks": {}})
    run = RunFiles.read(path)
    assert run.missing == ()
    assert run.value("core_type") == "torch"
    assert run.value("no such option") is None
    assert run.detail["result_validity"] == "VALID"
    assert [(one.role, one.ranks) for one in run.instances().values()] == [("ctx", [1, 2]), ("gen", [3, 4])]


@pytest.mark.parametrize(
    ("test_s", "missing"),
    [(0.06, ()), (30.0, ("timeline.jsonl is missing: what instances computed over time",))],
)
def test_a_test_of_no_time_has_no_timeline(tmp_path: Path, test_s: float, missing: tuple[str, ...]) -> None:
    path = make_run(tmp_path / "run", result={"loadgen_result": "VALID", "test_s": test_s})
    write(path / "plan.json", {"ranks": []})
    write(path / "telemetry.json", {"ranks": {}})
    (path / "timeline.jsonl").unlink(missing_ok=True)
    assert RunFiles.read(path).missing == missing


def test_a_half_written_run_lists_missing_files_and_keeps_the_rest(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", result={"loadgen_result": "VALID"})
    (path / "plan.json").write_text('{"ranks": [')
    (path / "ranks.json").write_text('{"not": "a list"}')
    (path / "mlperf_log_detail.txt").unlink()
    (path / "timeline.jsonl").write_text('{"seconds": 1.0, "instance": 0}\n{"seconds": 2.0, "inst')
    run = RunFiles.read(path)
    assert run.result["status"] == "VALID"
    assert (run.plan, run.ranks, run.instances(), len(run.timeline)) == ({}, [], {}, 1)
    text = "\n".join(run.missing)
    for part in (
        "plan.json:1: not valid JSON",
        "ranks.json is damaged",
        "telemetry.json is missing",
        "timeline.jsonl: 1 of 2 lines",
        "mlperf_log_detail.txt is missing",
    ):
        assert part in text


def test_a_killed_run_misses_no_machines(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "result.json").write_text(json.dumps({"status": "FAILED", "loadgen_result": None}))
    assert not any("machines" in line for line in RunFiles.read(path).missing)


def test_lines_of_loadgens_log_that_are_no_entries_are_passed_over(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", result={"loadgen_result": "VALID"})
    whole = RunFiles.read(path).detail
    bad = ('{"key": {}, "value": 1}', '{"key": "x"}', '{"value": 1}', "[1]", "7", "[" * 100_000, "{")
    with (path / "mlperf_log_detail.txt").open("a") as log:
        log.writelines(f":::MLLOG {text}\n" for text in bad)
        log.write(':::MLLOG {"key": "last", "value": 1, "metadata": []}\n')
    assert RunFiles.read(path).detail == whole | {"last": 1}


@pytest.mark.parametrize("made", ["nothing", "a file", "an empty folder"])
def test_what_is_no_run_is_refused(tmp_path: Path, made: str) -> None:
    path = tmp_path / "x"
    if made == "a file":
        path.write_text("")
    elif made == "an empty folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=r"not a run directory|no such run directory"):
        RunFiles.read(path)


def test_failures_that_are_none(tmp_path: Path) -> None:
    """Of a result.json that was damaged: what is no failure is passed over, by every reader."""
    path = make_run(tmp_path / "run")
    lists: list[Any] = ["text", 7, [1, "x", None], {"a": 1}, [{"rank": [], "cause": None}]]
    for failures in lists:
        write(path / "result.json", {"status": "FAILED", "failures": failures})
        run = RunFiles.read(path)
        assert run.stopped_by == "" and run.failed_ranks == set()
        assert "What went wrong" in write_page(path).read_text() or failures != [{"rank": [], "cause": None}]
        for read in (JudgedRun.read, ComparedRun.read):
            with pytest.raises(ConfigError, match=str(path)):
                read(path)


def test_a_time_and_limits_that_are_none(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", result={"loadgen": "text"})
    write(path / "telemetry.json", {"started": -(2**63), "ranks": {}})
    assert limits_ms(RunFiles.read(path)) == {"ttft": None, "tpot": None}
    assert "a file is damaged" in write_page(path).read_text()
