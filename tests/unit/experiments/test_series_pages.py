"""The pages of find-max-qps, ab, advise and bench endpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpillm.experiments.loadtest.load_test import Record
from mpillm.experiments.pages import search_page
from tests.helpers import series_pages
from tests.helpers.pages import EVIL, check_made_of, embedded, loads_nothing, words
from tests.helpers.series_pages import PAGES


def read(tmp_path: Path, name: str) -> tuple[str, dict[str, Any]]:
    text = PAGES[name](tmp_path / "runs")
    assert loads_nothing(text)
    (tmp_path / "page.html").write_text(text)
    return words(tmp_path / "page.html"), {one["name"]: one for one in json.loads(embedded(text))["charts"]}


def test_rates_have_no_exponent(tmp_path: Path) -> None:
    tests = [replace(one, rate=6172.8 * one.rate) for one in series_pages.TESTS]
    (tmp_path / "page.html").write_text(search_page(tmp_path, tests, 246_912.0, {}))
    text = words(tmp_path / "page.html")
    assert "Highest VALID rate: 123,460 requests per second. Not VALID at 246,910." in text
    assert "e+" not in text


def test_a_search_shows_latency_against_rate(tmp_path: Path) -> None:
    text, charts = read(tmp_path, "search")
    assert "Highest VALID rate: 20 requests per second. Not VALID at 40." in text
    assert "Limits: TTFT 100 ms." in text and "TTFT is <late>" in text
    curve = charts["rate-ttft"]
    assert curve["x"] == [10.0, 20.0, 40.0] and curve["x_axis"] == "requests/s offered"
    assert [line["y"] for line in curve["lines"]] == [[20.0, 90.0, None], [None, None, 4000.0]]
    assert curve["y_limit"] == ["limit", 100.0] and charts["rate-tpot"]["y_limit"] is None


def test_a_limit_far_above_the_data_leaves_no_chart_blank(tmp_path: Path) -> None:
    """It is in the caption; a near one is a line."""
    tests = [replace(one, valid=True) for one in series_pages.TESTS]
    for limit, lines in ((100_000.0, 0), (5000.0, 1)):
        text = search_page(tmp_path, tests, None, {"ttft": limit, "tpot": None})
        svg = text.partition('id="rate-ttft"')[2].partition("</svg>")[0]
        assert svg.count('class="limit" x1') == lines
        assert f"limit {limit / 1000:g} s" in svg


def test_the_page_of_ab_has_the_verdict(tmp_path: Path) -> None:
    text, charts = read(tmp_path, "ab")
    assert "B differs: -10 % paired t test" in text and "(no options)" in text
    assert "1 10 9 -10.00 %" in text
    assert [line["y"] for line in charts["pairs"]["lines"]] == [[10, 11, 12], [9, 10, 11]]
    assert charts["pairs"]["joined"] == 2, "both sides are drawn alike"


def test_the_page_of_advise_has_the_curve_and_the_proposals(tmp_path: Path) -> None:
    text, charts = read(tmp_path, "advise")
    assert "4 ways simulated, 4 on the Pareto curve" in text
    assert "1. the best" in text and "Verified error -3 %" in text
    assert charts["pareto"]["x"] == [5.0, 6.0, 7.0, 8.0]


def test_the_page_of_a_load_test_has_distributions_and_what_was_in_flight(tmp_path: Path) -> None:
    text, charts = read(tmp_path, "endpoint")
    assert "a/model · 101 requests, 10 requests/s, 1 failed" in text and "Successful requests 100" in text
    assert [label for label, _ in charts["cdf-ttft"]["marks"]] == ["p50 99.5 ms", "p90 139 ms", "p99 148 ms"]
    assert max(charts["open"]["lines"][0]["y"]) == pytest.approx(2, abs=1)
    assert charts["cdf-ttft"]["limit"] == ["limit", 500]


EVIL_NAME = EVIL.replace("/", "_")


@pytest.mark.parametrize("name", PAGES)
def test_no_element_is_made_from_data(name: str, tmp_path: Path) -> None:
    honest = PAGES[name](tmp_path / "runs")
    text = PAGES[name](tmp_path / EVIL_NAME, _evil)
    check_made_of(text, honest)
    assert "alert(1)" in text


def _evil(value: Any) -> Any:
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, Record):
        return value
    if isinstance(value, dict):
        return {name: _evil(one) for name, one in value.items()}
    return type(value)(map(_evil, value)) if isinstance(value, list | tuple) else value
