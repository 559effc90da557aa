"""Runs side by side, and run directories that can't be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mpillm.cli import main
from mpillm.experiments.compare_page import headline
from mpillm.report.request_log import RECORD
from tests.helpers.growth import grows_faster
from tests.helpers.pages import (
    EVIL,
    check_made_of,
    embedded,
    leaves,
    loads_nothing,
    poisoned,
    replaced,
    words,
)
from tests.helpers.run_directories import comparable_run as run
from tests.helpers.run_directories import make_run, read_rows, write, write_rows


@pytest.fixture(autouse=True)
def pages_lie_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_differences_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", 0.1, core_options={"ttft_ms": 100, "tpot_ms": 10}, max_batch_size=8)
    b = run(tmp_path / "b", 0.2, seed=1, core_options={"ttft_ms": 200, "tpot_ms": 10}, max_batch_size=8)
    assert main(["compare", str(a), str(b), "--output", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "core_options.ttft_ms  100  200" in out and "max_batch_size" not in out
    assert out.index("core_options.ttft_ms") < out.index("TTFT mean")
    assert re.search(r"\nB against A: .*TTFT p99 \+\d+\s% \(worse\)", " ".join(out.split(" ")))
    assert "\n* the interval of the change excludes 0; " in out
    comparison = json.loads((tmp_path / "out.json").read_text())
    cells = {one["figure"]: one["runs"][1] for one in comparison["figures"]}
    assert cells["TTFT mean"]["differs"] and cells["TTFT mean"]["change"] == pytest.approx(1.0, abs=0.05)
    assert not cells["TPOT mean"]["differs"]


def test_answers_that_came_whole_have_no_first_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record has the time of the last token as that of the first; this is not a figure."""
    a, b = run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.1)
    result = json.loads((b / "result.json").read_text())
    write(b / "result.json", {**result, "streamed": False})
    assert main(["compare", str(a), str(b), "--output", str(tmp_path / "out.json")]) == 0
    comparison = json.loads((tmp_path / "out.json").read_text())
    cells = {one["figure"]: one["runs"][1] for one in comparison["figures"]}
    assert cells["TPOT mean"] is None and cells["TTFT p99"] is None
    assert cells["latency mean"] is not None and cells["tokens/s"] is not None


def conversation_run(path: Path, later_ttft_s: float) -> Path:
    """Make a run of 500 conversations of two turns, 8 at a time. First turns take 0.1 s."""
    run(path, 0.1, scenario="Offline")
    rows = read_rows(path)
    rows["session"], rows["turn"] = 1 + np.arange(len(rows)) // 2, np.arange(len(rows)) % 2
    rows["ttft"][1::2] *= later_ttft_s / 0.1
    write_rows(path, rows)
    result = {"samples": len(rows), "status": "MEASURED", "scenario": "Offline", "conversations": {}}
    write(path / "result.json", result)
    return path


def test_conversations_are_compared_by_turns(tmp_path: Path) -> None:
    """They have no LoadGen's verdict, and latencies even if all are open from the start."""
    a, b = conversation_run(tmp_path / "a", 0.05), conversation_run(tmp_path / "b", 0.1)
    assert main(["compare", str(a), str(b), "--output", str(tmp_path / "out.json")]) == 0
    comparison = json.loads((tmp_path / "out.json").read_text())
    cells = {one["figure"]: one["runs"][1] for one in comparison["figures"]}
    assert cells["TTFT mean, later turns"]["change"] == pytest.approx(1.0, abs=0.05)
    assert cells["TTFT mean, later turns"]["differs"] and not cells["TTFT mean, first turns"]["differs"]
    assert cells["TTFT mean"]["differs"] and cells["interactivity, tokens/s"]["change"] == 0
    other = run(tmp_path / "c", 0.1, scenario="Offline")
    assert main(["compare", str(other), str(other), "--output", str(tmp_path / "out.json")]) == 0
    figures = [one["figure"] for one in json.loads((tmp_path / "out.json").read_text())["figures"]]
    assert not [one for one in figures if "turns" in one or "interactivity" in one]


def figures_of(path: Path) -> dict[str, float]:
    """Return the figures of a run, as `compare` has them."""
    assert main(["compare", str(path), str(path), "--output", "out.json"]) == 0
    figures = json.loads(Path("out.json").read_text())["figures"]
    return {one["figure"]: one["runs"][0]["value"] for one in figures if one["runs"][0]}


def failing(path: Path) -> Path:
    """Let every tenth request of a run fail after 30 s."""
    rows = read_rows(path)
    rows["error"][::10], rows["latency"][::10], rows["tokens"][::10] = 1, 30.0, 0
    write_rows(path, rows)
    return path


def test_failed_requests_are_left_out_where_the_run_leaves_them_out(tmp_path: Path) -> None:
    loadgen, client = (failing(run(tmp_path / name, 0.1)) for name in ("loadgen", "client"))
    result = json.loads((client / "result.json").read_text())
    write(client / "result.json", {**result, "harness": {"name": "aiperf"}, "samples_per_second": 7.0})
    assert figures_of(client)["latency p99"] < 1e3 and figures_of(client)["samples/s"] == 7
    assert main(["compare", str(client), str(client), "--log_dir", "page"]) == 0
    charts = {
        one["name"]: one for one in json.loads(embedded(Path("page/compare.html").read_text()))["charts"]
    }
    assert charts["cdf-latency"]["x"][-1] < 1e3
    assert figures_of(loadgen)["latency p99"] == pytest.approx(30e3), "LoadGen counts them"


def test_the_figures_of_turns_are_those_of_their_window(tmp_path: Path) -> None:
    path = conversation_run(tmp_path / "a", 0.05)
    rows = read_rows(path)
    rows["issued"] = np.arange(len(rows)) / len(rows)
    late = rows["issued"] > 0.5
    rows["ttft"][late], rows["latency"][late] = 9.0, 10.0
    write_rows(path, rows)
    result = json.loads((path / "result.json").read_text())
    write(path / "result.json", {**result, "conversations": {"window_s": [0.0, 0.5]}})
    figures = figures_of(path)
    assert figures["TTFT mean, first turns"] < 200 and figures["TTFT mean, later turns"] < 200
    assert figures["interactivity, tokens/s"] > 11 / 0.3
    assert figures["TTFT mean"] > 1e3, "the figures of the whole test"


def test_the_page_shows_options_figures_and_distributions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path / "a <run>", 0.1, max_batch_size=8)
    b = run(tmp_path / "b", 0.2, seed=1, max_batch_size=16)
    (b / "report.html").touch()
    assert main(["compare", str(a), str(b), "--log_dir", "page"]) == 0
    assert capsys.readouterr().out.endswith("page  page/compare.html\n")
    text = (tmp_path / "page" / "compare.html").read_text()
    assert loads_nothing(text)
    page = words(tmp_path / "page" / "compare.html")
    assert page.index("Options that differ") < page.index("max_batch_size 8 16") < page.index("Figures")
    assert "A a <run>: VALID, 1,000 samples, 0 errors" in page
    assert re.search(r"TTFT mean ms 100\S* ± \S+ 20\d\S* ± \S+ \+10\d ± \d % \*", page), page
    # B has a page, A has none; B's first tokens are late, their intervals leave out 0.
    assert 'href="../b/report.html"' in text and text.count("<a ") == 1
    assert text.count('class="change worse"') >= 3 and 'class="change better"' not in text
    assert "B against A: " in page and re.search(r"TTFT p99 \+\d+ % \(worse\)", page), page
    assert re.search(r"-1?\d\d % 0 \+1?\d\d %", page), "the axis of the changes"
    charts = {one["name"]: one for one in json.loads(embedded(text))["charts"]}
    ttft = charts["cdf-ttft"]
    (_, first, _), (_, second, _) = ((one["label"], one["y"], one["colour"]) for one in ttft["lines"])
    at = next(i for i, x in enumerate(ttft["x"]) if x > 140)
    assert first[at] > 95 and second[at] < 5, "within 140 ms nearly all of A, hardly any of B"


def test_tokens_that_come_at_once_count_in_the_distribution(tmp_path: Path) -> None:
    """A client whose server sends whole answers has a time per output token of 0, as the table says."""
    names = [str(run(tmp_path / name, 0.1)) for name in "ab"]
    rows = read_rows(tmp_path / "b")
    rows["latency"][: len(rows) * 3 // 5] = rows["ttft"][: len(rows) * 3 // 5]
    write_rows(tmp_path / "b", rows)
    assert main(["compare", *names, "--log_dir", str(tmp_path)]) == 0
    charts = {
        one["name"]: one for one in json.loads(embedded((tmp_path / "compare.html").read_text()))["charts"]
    }
    chart = charts["cdf-tpot"]
    assert chart["x"][0] > 0, "the scale is logarithmic"
    (_, line) = chart["lines"]
    assert line["label"].startswith("B: p50 0 µs, p90 10 ms") and 60 <= line["y"][0] < 61
    assert "TPOT p50 ms 10 " in words(tmp_path / "compare.html")


def test_tokens_that_all_come_at_once_have_no_chart(tmp_path: Path) -> None:
    """It was empty: a scale of powers has no 0."""
    for name in "ab":
        run(tmp_path / name, 0.1)
        rows = read_rows(tmp_path / name)
        rows["latency"] = rows["ttft"]
        write_rows(tmp_path / name, rows)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--log_dir", str(tmp_path)]) == 0
    charts = json.loads(embedded((tmp_path / "compare.html").read_text()))["charts"]
    assert [one["name"] for one in charts] == ["cdf-ttft", "cdf-latency"]


def test_runs_that_are_alike_seldom_differ(tmp_path: Path) -> None:
    differ = total = 0
    first = str(run(tmp_path / "first", 0.1))
    for seed in range(1, 9):
        other = str(run(tmp_path / f"other{seed}", 0.1, seed=seed))
        assert main(["compare", first, other, "--output", str(tmp_path / "out.json")]) == 0
        for one in json.loads((tmp_path / "out.json").read_text())["figures"]:
            total += 1
            differ += bool(one["runs"][1]["differs"])
    assert differ < 0.2 * total  # 5 % each; the first run is in all


def test_rates_are_those_of_the_result(tmp_path: Path) -> None:
    """They count from the test's start: in a short test, LoadGen's first query comes much later."""
    rows = np.zeros(160, RECORD)
    rows["issued"], rows["ttft"], rows["latency"], rows["tokens"] = 0.006, 0.019, 0.019, 4
    a = make_run(
        tmp_path / "a",
        scenario="Offline",
        result={
            "loadgen_result": "VALID",
            "samples": 160,
            "samples_per_second": 6400.0,
            "tokens_per_second": 25600.0,
        },
    )
    write_rows(a, rows)
    assert main(["compare", str(a), str(a), "--output", str(tmp_path / "out.json")]) == 0
    cells = {
        one["figure"]: one["runs"][1] for one in json.loads((tmp_path / "out.json").read_text())["figures"]
    }
    assert (cells["samples/s"]["value"], cells["tokens/s"]["value"]) == (6400.0, 25600.0)
    assert cells["samples/s"]["change"] == 0


def test_the_rate_of_a_test_that_was_kept_up_with_is_no_merit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the rate that was offered."""
    names = []
    for name, n in (("a", 1000), ("b", 2000)):
        path = run(tmp_path / name, 0.1, n=n)
        rows = read_rows(path)
        rows["issued"] = np.linspace(0, 10, n)
        write_rows(path, rows)
        result = json.loads((path / "result.json").read_text())
        write(path / "result.json", {**result, "queue_grew": False})
        names.append(str(path))
    assert main(["compare", *names]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"B against A: samples/s \+99.8\s% \(as offered\)", out), out
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    write(tmp_path / "b" / "result.json", {**result, "queue_grew": True})
    assert main(["compare", *names]) == 0
    assert re.search(r"samples/s \+99.8\s% \(better\)", " ".join(capsys.readouterr().out.split()))


def test_offline_has_no_first_tokens_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All is issued at once: how long a sample waits is its place in the queue."""
    names = [str(run(tmp_path / name, 0.1, "Offline")) for name in "ab"]
    assert main(["compare", *names]) == 0
    out = capsys.readouterr().out
    assert "options  all alike" in out and "tokens/s" in out and "TTFT" not in out


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = run(tmp_path / "good", 0.1)
    half = run(tmp_path / "half", 0.1)
    (half / "requests.bin").write_bytes((half / "requests.bin").read_bytes()[:100])
    old = run(tmp_path / "old", 0.1)
    (old / "requests.bin").unlink()
    offline = run(tmp_path / "offline", 0.1, "Offline")
    failed = make_run(
        tmp_path / "failed", result={"status": "FAILED", "failures": [{"cause": "rank 2 is gone"}]}
    )
    served = make_run(tmp_path / "served", result={"status": "SERVED"})
    broken = run(tmp_path / "broken", 0.1)
    (broken / "result.json").write_text('{"status": "VAL')
    options = run(tmp_path / "options", 0.1)
    (options / "config.json").unlink()
    empty = run(tmp_path / "empty", 0.1)
    (empty / "config.json").write_text("{}")
    for path, message in (
        (empty, "this run can't be compared: its config.json is empty"),
        (half, "requests.bin has 2 records, result.json counts 1000: it is half written"),
        (old, "has no requests.bin"),
        (offline, "runs of different scenarios (Offline, Server)"),
        (failed, "this run can't be compared: rank 2 is gone"),
        (served, "this run can't be compared: it ended as SERVED, without a test's figures"),
        (broken, "result.json:1: not valid JSON"),
        (options, "config.json is missing"),
        (tmp_path / "none", "no such run directory"),
        (tmp_path, "not a run directory"),
    ):
        assert main(["compare", str(good), str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("mpillm:") == 1
    assert main(["compare", str(good)]) == 2
    assert "two or more run directories" in capsys.readouterr().err


def test_other_environments_and_doubts_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with the same options may still differ."""
    a, b = run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.2)
    for folder, commit, torch in ((a, "1111", "2.12"), (b, "2222", "2.13")):
        environment = {"commit": commit, "packages": {"torch": torch, "numpy": "2.4"}, "host": "n0"}
        (folder / "environment.json").write_text(json.dumps(environment))
    result = json.loads((b / "result.json").read_text())
    (b / "result.json").write_text(json.dumps(result | {"doubts": ["the queue grew"]}))
    assert main(["compare", str(a), str(b), "--log_dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "commit: 1111 in A, 2222 in B" in out and "torch: 2.12 in A, 2.13 in B" in out
    assert "numpy" not in out and "host" not in out and out.count("doubtful: the queue grew") == 1
    page = (tmp_path / "compare.html").read_text()
    assert "torch: 2.12 in A, 2.13 in B" in page and page.count("doubtful: the queue grew") == 1


def test_few_requests_are_no_sameness(tmp_path: Path) -> None:
    """A headline said that there is no difference where figures differed by 14,188 %."""
    runs = [run(tmp_path / name, ttft, n=n) for name, ttft, n in (("a", 0.1, 48), ("b", 0.2, 48))]
    assert main(["compare", *map(str, runs), "--log_dir", str(tmp_path)]) == 0
    assert "B against A: too few requests." in (tmp_path / "compare.html").read_text()


def test_no_difference_is_claimed_where_a_star_shows_one() -> None:
    """The headline named rates and tails only: "no difference" above a TPOT mean of +190 %, starred."""
    cells = {"TPOT mean": (1.9, True), "TPOT p99": (0.1, False)}
    figures = [
        {"figure": name, "runs": [None, {"change": change, "error": 0.2, "differs": differs}]}
        for name, (change, differs) in cells.items()
    ]
    assert re.fullmatch(
        r"B against A: TPOT mean \+190\s% \(worse\)\.", headline({"figures": figures}, ("A", "B"))
    )


def test_a_change_of_thousands_of_percent_is_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The headline and the table write +8,224 %, not +8.22e+03 %."""
    runs = [run(tmp_path / name, ttft, n=2000) for name, ttft in (("a", 0.01), ("b", 0.82))]
    assert main(["compare", *map(str, runs), "--log_dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out + (tmp_path / "compare.html").read_text()
    assert re.search(r"TTFT p99\s\+[78],\d{3}\s%", output) and not re.search(r"\de\+\d+\s%", output)


@pytest.mark.long
def test_no_element_of_the_page_is_made_from_data(tmp_path: Path) -> None:
    """Names of folders, options, and whatever stands in result.json: all texts, and a text for each value."""

    def page() -> str:
        assert main(["compare", str(a), str(b), "--log_dir", "page"]) == 0
        return (tmp_path / "page" / "compare.html").read_text()

    a = run(tmp_path / "a", 0.1, max_batch_size=8)
    b = run(tmp_path / "b", 0.2, seed=1, max_batch_size=16, dtype="float16")
    (b / "report.html").touch()
    honest = page()
    b = b.rename(tmp_path / EVIL.replace("/", "_"))
    before = {name: json.loads((b / name).read_text()) for name in ("result.json", "config.json")}
    for name, value in before.items():
        write(b / name, poisoned(value) if name == "config.json" else value | {"mode": EVIL, EVIL: EVIL})
        check_made_of(text := page(), honest)
        assert "alert(1)" in text
        write(b / name, value)
        for way in leaves(value):
            write(b / name, replaced(value, way, EVIL))
            if main(["compare", str(a), str(b), "--log_dir", "page"]) == 0:
                check_made_of((tmp_path / "page" / "compare.html").read_text(), honest)
        write(b / name, value)


@pytest.mark.long
def test_pages_of_long_names_take_linear_time(tmp_path: Path) -> None:
    """Names of dashes made `compare` and `report` search each from all of its characters."""
    a, b = run(tmp_path / "a", 0.1, n=40), run(tmp_path / "b", 0.2, n=40)
    config = json.loads((b / "config.json").read_text())
    result = json.loads((b / "result.json").read_text())

    def pages(n: int) -> None:
        name = piece * (n // len(piece))
        write(b / "config.json", config | {"system_name": {"value": name, "source": name}})
        write(b / "result.json", result | {"model": name, "doubts": [name]})
        assert main(["compare", str(a), str(b), "--log_dir", str(tmp_path / "page")]) == 0
        assert main(["report", str(b)]) == 0

    for piece in ("-", "/-", "a-", "_ ", "&"):
        assert grows_faster(pages, (2_000, 30_000)) == "", piece
