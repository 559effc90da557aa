"""The pages in a real browser: their script runs without an error, and draws."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mpillm.cli import main
from mpillm.experiments.option_grid import pareto
from mpillm.experiments.sweep_page import sweep_page
from mpillm.report.page.page import write_page
from tests.helpers.run_directories import comparable_run, make_run, write
from tests.helpers.series_pages import PAGES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: the package chromium)"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with charts, lanes, a distribution, and options with long names and values."""
    run = make_run(tmp_path / "run", result={"loadgen_result": "VALID", "test_s": 4.0})
    steps = {"start": [0.0, 2.0], "end": [1.0, 4.0], "busy_s": [1.0, 2.0], "n": [1, 9], "kind": [0, 1]}
    none: dict[str, list[float]] = {name: [] for name in steps}
    noted = {"phases": [["test", 0.0, 4.0]], "knows_steps": True, "steps": steps, "handoffs": none}
    progress = {"seconds": [0, 2, 4], "issued": [9, 9, 9], "samples": [0, 4, 9], "tokens": [0, 40, 90]}
    cdf = {"ttft": {"ms": [5.0, 10.0], "share": [0.5, 1.0]}}
    kinds = ["context", "decode", "mixed", "busy", "handoff"]
    write(run / "telemetry.json", {"kinds": kinds, "progress": progress, "cdf": cdf, "ranks": {"0": noted}})
    config = json.loads((run / "config.json").read_text())
    for i in range(4):
        value = f"/data/{i}/a-folder-with-a-long-name/of_several_words/checkpoint"
        config[f"an_option_with_a_long_name_{i}"] = {"value": value, "source": "command line"}
    write(run / "config.json", config)
    return run


def test_the_page_draws_charts_and_lanes_without_an_error(run: Path, tmp_path: Path) -> None:
    # Answered samples, the distribution, and the lanes.
    assert drawn(write_page(run), tmp_path).count("<canvas") == 3


def several_runs(folder: Path) -> dict[str, Path]:
    """Return the pages of commands that make several runs."""
    runs = [comparable_run(folder / name, ttft) for name, ttft in (("a", 0.1), ("b", 0.2))]
    assert main(["compare", *map(str, runs), "--log_dir", str(folder)]) == 0
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
    page = folder / "sweep.html"
    page.write_text(sweep_page(folder, found, pareto(found)))
    for name, make in PAGES.items():
        (folder / f"{name}.html").write_text(make(folder))
    return {name: folder / f"{name}.html" for name in ("compare", "sweep", *PAGES)}


def test_pages_of_several_runs_draw(tmp_path: Path) -> None:
    charts = {"compare": 3, "sweep": 1, "search": 2, "ab": 1, "advise": 1, "endpoint": 6}
    for name, page in several_runs(tmp_path).items():
        assert drawn(page, tmp_path).count("<canvas") == charts[name], name


def test_the_index_hides_runs_of_series_and_marks_a_table_that_goes_on(tmp_path: Path) -> None:
    for name in ("own", "a-sweep/point"):
        write(make_run(tmp_path / "runs" / name) / "plan.json", {"ranks": []})
    assert main(["runs", str(tmp_path / "runs")]) == 0
    page = tmp_path / "runs" / "index.html"
    dom = drawn(page, tmp_path)
    assert 'data-series=""' in dom and 'data-series="a-sweep"' not in dom and "1 of 2 runs" in dom
    narrow = rendered(page, tmp_path, "--window-size=500,900").stdout
    assert "goes-on" in narrow.partition("<main>")[2]


def test_the_index_sorts_filters_and_groups(tmp_path: Path) -> None:
    results: dict[str, dict[str, object]] = {
        "mid": {"tokens_per_second": 20.0},
        "fast": {"tokens_per_second": 100.0, "doubts": ["a busy machine"]},
        "slow": {"tokens_per_second": 3.0},
        "none": {},
    }
    for name, result in results.items():
        write(make_run(tmp_path / "runs" / name, result=result) / "plan.json", {"ranks": []})
    assert main(["runs", str(tmp_path / "runs")]) == 0
    page = tmp_path / "runs" / "index.html"
    steps = """
const found = [], rows = () => [...document.querySelectorAll("table.list tbody tr")];
const note = () => found.push(rows().map(row => row.cells[0].textContent));
const head = [...document.querySelectorAll(".sorts")].find(one => one.textContent === "tokens/s");
head.click(); note();
head.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"})); note();
found.push([head.parentElement.getAttribute("aria-sort")]);
const put = (id, value) => {
  const one = document.getElementById(id); one.value = value; one.dispatchEvent(new Event("input")); };
put("filter", "FAST"); note(); found.push([document.getElementById("count").textContent]);
put("filter", ""); put("group", "1"); note();
"""
    rows = json.loads(after(page, steps, tmp_path))
    assert rows[:3] == [["fast", "mid", "slow", "none"], ["slow", "mid", "fast", "none"], ["ascending"]]
    assert rows[3:5] == [["fast"], ["1 of 4 runs"]]
    assert rows[5] == ["VALID (3)", "slow", "mid", "none", "VALID DOUBTFUL (1)", "fast"]


def after(page: Path, steps: str, folder: Path) -> str:
    """Return what a script pushes to `found`, as JSON. It runs in the page after the page's own script."""
    changed = folder / "changed.html"
    script = f"<script>{steps}document.body.textContent = '@@' + JSON.stringify(found) + '@@';</script>"
    changed.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    return html.unescape(rendered(changed, folder).stdout.split("@@")[1])


WIDTHS = (390, 800, 1000, 1280, 1600)


def test_nothing_is_wider_than_the_window_and_no_word_falls_apart(run: Path, tmp_path: Path) -> None:
    pages = {"run": write_page(run), **several_runs(tmp_path)}
    for name, page in pages.items():
        for width in WIDTHS:
            assert faults(page, width, tmp_path) == [], f"{name} at {width} pixels"


MEASURE = """
const found = [], all = frame.contentDocument, wide = frame.clientWidth;
const style = one => frame.contentWindow.getComputedStyle(one);
const rolls = at => at && (style(at).overflowX === "auto" || rolls(at.parentElement));
for (const one of all.body.querySelectorAll("*")) {
  const box = one.getBoundingClientRect();
  const seen = box.width && !one.closest(".hidden") && !rolls(one.parentElement);
  if (seen && box.right > wide + 1)
    found.push(`${one.tagName} ${one.getAttribute("class")} ends at ${box.right}`);
}
for (const one of all.body.querySelectorAll("td, th, li, p, dt, dd, h1, h2")) {
  const text = one.textContent.trim(), range = all.createRange();
  range.selectNodeContents(one);
  const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top / 4))).size;
  if (lines > 3 && text.length / lines < 4) found.push(`${one.tagName} has ${lines} lines: ${text}`);
}
"""


def faults(page: Path, width: int, folder: Path) -> list[str]:
    """Return what is too wide, or broken letter by letter, in a window of so many pixels."""
    text = json.dumps(page.read_text()).replace("<", "\\u003c")
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f'<body><iframe style="width:{width}px;height:900px;border:0"></iframe><script>'
        f"const frame = document.querySelector('iframe'); frame.srcdoc = {text};"
        f"frame.onload = () => setTimeout(() => {{ {MEASURE}"
        "document.body.textContent = '@@' + JSON.stringify(found) + '@@'; }, 300);</script></body>"
    )
    dom = rendered(wrapper, folder, f"--window-size={max(width, 520)},900").stdout
    return list(json.loads(html.unescape(dom.split("@@")[1])))


def drawn(page: Path, folder: Path) -> str:
    """Return the document after its script has run, without an error."""
    done = rendered(page, folder)
    assert '<html lang="en" class="js">' in done.stdout
    return done.stdout


def rendered(page: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--enable-logging=stderr", f"--user-data-dir={folder}/profile"]
    done = subprocess.run(
        [CHROMIUM, *options, *more, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    return done
