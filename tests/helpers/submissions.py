"""Submissions of runs that are made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpillm import cli
from mpillm.loadgen.logs import digest
from mpillm.workloads import get
from tests.helpers.run_directories import FULL_SIZE, log_entry, make_run

EOS = 2
GOOD = {"rouge1": 44.4, "rouge2": 22.1, "rougeL": 28.6, "tokens_per_sample": 290.5}


class Maker:
    """Makes runs, and submissions of them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def runs(self, scenario: str = "Offline", name: str = "", **config: Any) -> list[Path]:
        """Make the three runs of one result, judged: accuracy.txt is written by hand, as its scores do not
        matter here."""
        first = None if scenario == "Offline" else [5]
        answers = [log_entry(i, [5, *range(10, 30), EOS], first) for i in range(50)]
        samples = get((config.get("benchmarks") or ["llama2-70b"])[0]).n_samples
        counts = {
            f"effective_{kind}": samples
            for kind in ("performance_sample_count", "accuracy_sample_count", "samples_per_query")
        }
        detail = FULL_SIZE | counts | config.pop("detail", {})
        paths = [
            make_run(
                self.folder / f"{name}{scenario}-{kind}",
                kind,
                scenario,
                answers if kind != "performance" else (),
                detail=detail,
                **config,
            )
            for kind in ("performance", "accuracy", "TEST06")
        ]
        self.scored(paths[1], GOOD)
        assert cli.main(["compliance", str(paths[2])]) == 0
        return paths

    def scored(self, run: Path, scores: dict[str, float]) -> None:
        """Write an accuracy.txt with these scores."""
        (run / "accuracy.txt").write_text(f"{scores}\n\nhash={digest(run / 'mlperf_log_accuracy.json')}\n")

    def submit(self, *words: object, code: int = 0) -> str:
        """Return what is printed; with exit code 2, the message."""
        head = ["submission", "--output", self.folder / "out", "--submitter", "Us", "--system_name", "8xH200"]
        self.capsys.readouterr()
        assert cli.main([str(word) for word in [*head, *words]]) == code
        captured = self.capsys.readouterr()
        return captured.err if code == 2 else captured.out

    @property
    def tree(self) -> Path:
        return self.folder / "out" / "closed" / "Us"


MEASURED = {"starting_weights_filename": "llama", "weight_data_types": "fp8"}


def measured(maker: Maker) -> list[object]:
    file = maker.folder / "measurements.json"
    file.write_text(json.dumps(MEASURED))
    return ["--measurements", file]


STOPPED = "Run unsuccessful. Processed 100 queries."


def problems_of(out: str) -> list[str]:
    """Return the list of what is wrong."""
    return [
        line.strip()
        for line in out.splitlines()
        if line.startswith(("  rejected by the checker", "  against the rules"))
    ]
