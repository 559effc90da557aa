"""The pages in a real browser: their script runs without an error, and draws."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mpillm.cli import main
from mpillm.experiments.option_grid import pareto
from mpillm.experiments.sweep_page import sweep_page
from mpillm.report.page.page import write_page
from tests.helpers.run_directories import comparable_run, make_run, write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: the package chromium)"),
]


def test_the_page_draws_charts_and_lanes_without_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", result={"loadgen_result": "VALID", "test_s": 4.0})
    steps = {"start": [0.0, 2.0], "end": [1.0, 4.0], "busy_s": [1.0, 2.0], "n": [1, 9], "kind": [0, 1]}
    none: dict[str, list[float]] = {name: [] for name in steps}
    noted = {"phases": [["test", 0.0, 4.0]], "knows_steps": True, "steps": steps, "handoffs": none}
    progress = {"seconds": [0, 2, 4], "issued": [9, 9, 9], "samples": [0, 4, 9], "tokens": [0, 40, 90]}
    cdf = {"ttft": {"ms": [5.0, 10.0], "share": [0.5, 1.0]}}
    kinds = ["context", "decode", "mixed", "busy", "handoff"]
    write(run / "telemetry.json", {"kinds": kinds, "progress": progress, "cdf": cdf, "ranks": {"0": noted}})
    dom = drawn(write_page(run), tmp_path)
    # Answered samples, the distribution, and the lanes.
    assert dom.count("<canvas") == 3


def test_pages_of_several_runs_draw(tmp_path: Path) -> None:
    runs = [comparable_run(tmp_path / name, ttft) for name, ttft in (("a", 0.1), ("b", 0.2))]
    assert main(["compare", *map(str, runs), "--log_dir", str(tmp_path)]) == 0
    # Three distributions.
    assert drawn(tmp_path / "compare.html", tmp_path).count("<canvas") == 3
    found = [
        {
            "options": {"max_batch_size": str(i)},
            "run": f"/{i}",
            "status": "VALID",
            "tokens_per_second_per_gpu": 10.0 * i,
            "tokens_per_second_per_user": 9.0 - i % 7,
        }
        for i in range(1, 10)
    ]
    page = tmp_path / "sweep.html"
    page.write_text(sweep_page(tmp_path, found, pareto(found)))
    assert drawn(page, tmp_path).count("<canvas") == 1


def drawn(page: Path, folder: Path) -> str:
    """Return the document after its script has run, without an error."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--enable-logging=stderr", f"--user-data-dir={folder}/profile"]
    done = subprocess.run(
        [CHROMIUM, *options, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    assert '<html lang="en" class="js">' in done.stdout
    return done.stdout
