"""Lists of runs, their index page, and `latest`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpillm.cli import main
from tests.helpers.pages import EVIL, check_made_of, leaves, loads_nothing, poisoned, replaced, words
from tests.helpers.run_directories import make_run, write

RUNS = Path("mpillm-runs")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, the newest inside the folder of a sweep, one damaged."""
    monkeypatch.chdir(tmp_path)
    for at, (name, status) in enumerate({"old": "VALID", "bad": "VALID", "sweep/point": "INVALID"}.items()):
        run = make_run(
            RUNS / name, result={"status": status, "tokens_per_second": 1234.5, "ttft_ms": {"p99": 2500}}
        )
        write(run / "plan.json", {"ranks": []})
        os.utime(run / "plan.json", (1e9 + at, 1e9 + at))
    (RUNS / "bad/result.json").write_text("{")
    (RUNS / "sweep/sweep.html").write_text("")
    (RUNS / "old/report.html").write_text("")


def test_runs_of_series_are_listed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    (RUNS / "1-find-max-qps/02-short-8").mkdir(parents=True)  # of a search that goes on
    write(RUNS / "1-find-max-qps/02-short-8/plan.json", {"ranks": []})
    assert main(["runs"]) == 0
    output = capsys.readouterr().out
    assert "bad" in output and "point" not in output and "short" not in output
    assert "… and 2 of sweeps, searches and other series: --series true" in output
    assert main(["runs", str(RUNS / "sweep")]) == 0  # all are its own
    assert "sweep/point" in capsys.readouterr().out


def test_runs_are_listed_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--series", "true"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:6:2]] == [
        f"{RUNS}/{name}" for name in ("sweep/point", "bad", "old")
    ]
    assert "INVALID" in lines[0] and "2.5 s" in lines[0] and "no outcome" in lines[2]
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "page  mpillm-runs/index.html"


def test_a_doubtful_run_is_not_listed_as_good(capsys: pytest.CaptureFixture[str]) -> None:
    run = RUNS / "old"
    write(run / "result.json", json.loads((run / "result.json").read_text()) | {"doubts": ["the queue grew"]})
    assert main(["runs"]) == 0
    output = capsys.readouterr().out
    assert output.count("VALID DOUBTFUL") == 1 and max(map(len, output.splitlines())) <= 80
    text = (RUNS / "index.html").read_text()
    assert '<span class="">VALID DOUBTFUL</span>' in text and 'class="better"' not in text


def test_the_index_links_pages_of_runs_and_of_several_runs() -> None:
    assert main(["runs", "--most", "1"]) == 0
    text = (RUNS / "index.html").read_text()
    assert loads_nothing(text)
    assert 'href="old/report.html"' in text and 'href="sweep/sweep.html"' in text
    visible_text = words(RUNS / "index.html")
    assert (
        "3 runs, newest first" in visible_text
        and "1 runs of sweeps, searches and other series" in visible_text
    )
    assert visible_text.index("bad") < visible_text.index("old") < visible_text.index("sweep/point"), (
        "single runs first"
    )
    assert '<tr data-series="sweep"><td>' in text and text.count('<tr data-series=""><td>') == 2
    assert (
        text.index("<td>") < text.index('href="old/report.html"') < text.index("<td>", text.index("old/rep"))
    )


def test_latest_is_the_newest_run_in_every_command_that_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "latest"]) == 0
    assert capsys.readouterr().out.strip() == "mpillm-runs/sweep/point/report.html"
    for command in ("accuracy", "certify", "compliance", "rerun", "submission", "compare"):
        more = {
            "submission": ["--output", "o", "--submitter", "a", "--system_name", "b"],
            "compare": ["latest"],
        }
        main([command, "latest", *more.get(command, []), *(["--dry_run"] if command == "rerun" else [])])
        output = capsys.readouterr()
        assert "mpillm-runs/sweep/point" in output.err + output.out or command == "rerun", (command, output)
        assert "latest" not in output.err, (command, output)


def test_latest_without_runs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["report", "latest"]) == 2
    assert "latest: there is no run in mpillm-runs" in capsys.readouterr().err
    assert main(["runs"]) == 2


def test_no_element_of_the_index_is_made_from_data() -> None:
    """Names of folders, and what stands in result.json and config.json."""

    def index() -> str:
        assert main(["runs"]) == 0
        return (RUNS / "index.html").read_text()

    honest = index()
    (RUNS / "old").rename(evil := RUNS / f"javascript:{EVIL.replace('/', '_')}")
    (RUNS / "sweep").rename(RUNS / f"javascript:2{EVIL.replace('/', '_')}")
    check_made_of(text := index(), honest)
    assert "alert(1)" in text
    for name in ("result.json", "config.json"):
        value = json.loads((evil / name).read_text())
        write(evil / name, poisoned(value))
        check_made_of(index(), honest)
        for way in leaves(value):
            write(evil / name, replaced(value, way, EVIL))
            check_made_of(index(), honest)
        write(evil / name, value)
