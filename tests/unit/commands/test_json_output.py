"""``--json``: figures on stdout, all else on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpillm.cli import main
from mpillm.experiments.commands.bench import BENCHES
from mpillm.options import json_output
from tests.helpers.run_directories import make_run, write

COMMANDS = (
    *("plan", "find-max-qps", "ab", "sweep", "advise", "compare", "certify", "report", "runs", "accuracy"),
    *("compliance", "doctor"),
    *(f"bench {name}" for name in BENCHES),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_print_figures_have_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert "--json" in capsys.readouterr().out


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return the JSON that a command prints to stdout; all other output goes to stderr."""
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err
    return json.loads(captured.out)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "mpillm-runs/one", result={"status": "VALID", "tokens_per_second": 12.5})
    write(run / "plan.json", {"ranks": []})
    return run


def test_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = figures(capsys, "runs")
    assert one["run"] == "mpillm-runs/one" and one["status"] == "VALID"
    assert one["result"]["tokens_per_second"] == 12.5


def test_report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = figures(capsys, "report", "latest")
    assert one["result"]["tokens_per_second"] == 12.5


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--world_size=3", "--mode=disaggregated")
    plan = figures(capsys, *words)
    assert main([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan


def test_without_it_stdout_is_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures(capsys, "runs")
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.startswith("started")


def test_a_command_that_fails_has_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "there is no run" in captured.err
    print("printed")
    assert capsys.readouterr().out == "printed\n"


def test_what_a_process_of_its_prints_is_on_stderr() -> None:
    """As the runs of ab do."""
    code = (
        "import subprocess; from mpillm.options import json_output as o;"
        "o.begin(); subprocess.run(['echo', 'of a child']); print('of its own'); o.set_figures([1]); o.end()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert json.loads(done.stdout) == [1] and done.stderr.split("\n")[:2] == ["of a child", "of its own"]


def test_figures_are_not_printed_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    json_output.set_figures({"a": 1})
    json_output.end()
    assert capsys.readouterr().out == ""
