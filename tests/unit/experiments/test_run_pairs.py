"""Pairs of `ab` whose runs lack the figure that decides, or fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.errors import StageError
from mpillm.experiments import run_pairs
from mpillm.experiments.commands import ab
from mpillm.runtime.whole_runs import EndedRun

Result = Callable[[str], dict[str, Any]]


def measured(**more: Any) -> dict[str, Any]:
    figures = {"samples_per_second": 1.0, "tokens_per_second": 20.0, "doubts": []}
    return {"status": "VALID", **figures, "ttft_ms": {"mean": 5.0}, "tpot_ms": None, **more}


class Command:
    """`ab` with runs whose result.json is `result(name of the run)`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, result: Result) -> None:
        self.runs: list[str] = []
        self._folder, self._result = folder, result
        patch.setattr(run_pairs, "run_in", self._run_in)

    def _run_in(self, folder: Path, *_: object) -> EndedRun:
        folder.mkdir(parents=True)
        self.runs.append(folder.name)
        return EndedRun(folder, 4, self._result(folder.name), message="it broke")

    def run(self, *args: str) -> None:
        words = ["-n=2", "--core_type=dummy", "--pairs=3", f"--log_dir={self._folder / 'ab'}"]
        ab.main(["--seed 1", "--seed 2", *words, f"--output={self._folder / 'ab.json'}", *args])

    def saved(self) -> Any:
        return json.loads((self._folder / "ab.json").read_text())


def test_a_figure_that_the_first_run_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs ran before the error."""
    command = Command(tmp_path, monkeypatch, lambda _: measured())
    with pytest.raises(
        ConfigError, match=r"^--metric tpot_mean: the first run of A does not have it; it has"
    ):
        command.run("--metric=tpot_mean")
    assert command.runs == ["warm-up"]


def test_what_was_measured_before_a_failure_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(tmp_path, monkeypatch, lambda name: {} if name == "02-A" else measured())
    with pytest.raises(StageError, match="run A of pair 2 failed"):
        command.run()
    assert command.runs[-1] == "02-A"
    assert [pair["B"]["tokens_per_second"] for pair in command.saved()["pairs"]] == [20.0]


def test_a_figure_that_is_zero_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first run of A it may be zero: its caches are cold."""
    zero = {"mean": 0.0}
    command = Command(
        tmp_path,
        monkeypatch,
        lambda name: measured(ttft_ms=zero) if name in ("warm-up", "03-B") else measured(),
    )
    with pytest.raises(ConfigError, match=r"^--metric ttft_mean: it is 0 in a run, so there is no ratio"):
        command.run("--metric=ttft_mean")
    assert len(command.saved()["pairs"]) == 3
