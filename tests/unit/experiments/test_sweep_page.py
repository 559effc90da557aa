"""The page of a sweep: its curve, its table, and what failed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from mpillm.experiments.option_grid import pareto
from mpillm.experiments.sweep_page import sweep_page
from mpillm.report.page import svg
from mpillm.report.page.document import document
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


def point(size: int, per_user: float | None, per_gpu: float, **more: Any) -> dict[str, Any]:
    return {
        "options": {"max_batch_size": str(size)},
        "run": f"/runs/{size}",
        "status": "VALID",
        "tokens_per_second": 4 * per_gpu,
        "tokens_per_second_per_gpu": per_gpu,
        "tokens_per_second_per_user": per_user,
        "of": "GPU",
        **more,
    }


def test_conversations_have_columns_and_a_curve_with_first_tokens_in_it(tmp_path: Path) -> None:
    """The two curves differ: the point that decodes fastest has the slowest first tokens."""
    found = [
        point(4, 90.0, 100.0, e2e_normalized_interactivity_p90=10.0, first_turns_ttft_p90_ms=70.0),
        point(8, 50.0, 200.0, e2e_normalized_interactivity_p90=20.0, first_turns_ttft_p90_ms=None),
    ]
    text = sweep_page(tmp_path, found, pareto(found))
    (tmp_path / "sweep.html").write_text(text)
    page = words(tmp_path / "sweep.html")
    assert "first turns TTFT p90 ms interactivity p90 Pareto 1 4 VALID" in page and "cached share" not in page
    first, second = json.loads(embedded(text))["charts"]
    assert second["title"] == "output tokens/s per GPU, against tokens/s per user end to end, p90"
    assert [line["label"] for line in first["lines"]] == ["Pareto curve"]
    assert [(one["label"], one["y"]) for one in second["lines"]] == [
        ("Pareto curve", [None, 200.0]),
        ("other points", [100.0, None]),
    ]


FAILED = {
    "options": {"max_batch_size": "32"},
    "run": "/runs/32",
    "status": "FAILED",
    "why": "rank 2 is <gone>",
}


def test_the_curve_joins_the_points_that_no_other_beats(tmp_path: Path) -> None:
    found = [point(4, 90.0, 100.0), point(8, 50.0, 12_340.0), point(16, 40.0, 50.0), FAILED]
    text = sweep_page(tmp_path / "runs", found, pareto(found))
    (tmp_path / "sweep.html").write_text(text)
    page = words(tmp_path / "sweep.html")
    assert loads_nothing(text)
    for part in (
        "4 points, 2 on the Pareto curve, 1 failed",
        "output tokens/s per GPU, against output tokens/s per user",
        "2 8 VALID - 49,360 12,340 50 - - ★",
        "3 16 VALID - 200 50 40 - - 4",
        "32 FAILED",
        "What failed 4 max_batch_size=32 rank 2 is <gone>",
    ):
        assert part in page, page
    (chart,) = json.loads(embedded(text))["charts"]
    assert chart["x"] == [40.0, 50.0, 90.0]
    assert [line["y"] for line in chart["lines"]] == [[None, 12_340.0, 100.0], [50.0, None, None]]
    assert chart["names"][0] == "3 max_batch_size=16"
    # Without JavaScript: a line through two points, and three points with their numbers.
    assert text.count("<polyline") == 1 and text.count("<circle") == 3


def test_each_kind_of_server_has_a_curve(tmp_path: Path) -> None:
    """Though one of them beats the other everywhere."""
    rates = {"vllm": ((90.0, 100.0), (50.0, 300.0), (40.0, 50.0)), "mpillm": ((80.0, 90.0), (45.0, 200.0))}
    found = [
        point(i, *rate, options={"server": kind, "max_batch_size": str(i)})
        for kind, some in rates.items()
        for i, rate in enumerate(some)
    ]
    text = sweep_page(tmp_path / "runs", found, pareto(found))
    (chart,) = json.loads(embedded(text))["charts"]
    assert chart["x"] == [40.0, 45.0, 50.0, 80.0, 90.0] and chart["joined"] == 2
    assert {line["label"]: line["y"] for line in chart["lines"]} == {
        "vllm": [None, None, 300.0, None, 100.0],
        "mpillm": [None, 200.0, None, 90.0, None],
        "other points": [50.0, None, None, None, None],
    }
    assert text.count("<polyline") == 2 and text.count("<circle") == 5


def test_without_times_per_token_there_is_no_curve(tmp_path: Path) -> None:
    found = [point(4, None, 100.0), point(8, None, 200.0)]
    text = sweep_page(tmp_path, found, [])
    (tmp_path / "sweep.html").write_text(text)
    assert "No Pareto curve" in words(tmp_path / "sweep.html")
    assert json.loads(embedded(text))["charts"] == []


def test_invalid_points_are_marked(tmp_path: Path) -> None:
    found = [point(4, 50.0, 100.0), point(8, 60.0, 90.0) | {"status": "INVALID"}, point(16, 90.0, 20.0)]
    text = sweep_page(tmp_path, found, pareto(found))
    assert text.count('<path class="cross"') == 1 and "✕ INVALID" in text
    assert "3 on the Pareto curve (<strong>1 of these INVALID</strong>)" in text
    assert json.loads(embedded(text))["charts"][0]["crossed"] == [1]


def test_texts_at_the_right_edge_do_not_overlap() -> None:
    """These stand left of their points."""
    points = [(395.0, 50.0, "111"), (380.0, 52.0, "222")]
    assert svg.labels(points, 7, 400) == [(395.0, 50.0, "111, 222")]


def test_points_over_each_other_share_a_text(tmp_path: Path) -> None:
    found = [point(4, 50.0, 100.0), point(8, 50.01, 100.01), point(16, 90.0, 20.0)]
    assert ">1, 2</text>" in sweep_page(tmp_path, found, pareto(found))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ("3", "3"),
        ("2 1", "1, 2"),
        ("4 1 3 2 7", "1 to 4, 7"),
        ("1 2 3 5 6 7 9 10", "1 to 3, 5 to 7, 9, 10"),
        ("a 1", "a, 1"),
    ],
)
def test_many_numbers_take_little_room(numbers: str, text: str) -> None:
    assert svg.numbers_text(numbers.split()) == text


def test_no_texts_of_points_overlap() -> None:
    """In the pages of find-max-qps they did, where the last tests lie close to each other."""
    points = [(100 + 9.0 * i, 50 + 7.0 * (i % 3), str(i + 1)) for i in range(12)]
    points += [(300.0, 50.0, "13"), (330.0, 55.0, "14"), (300.0, 90.0, "15")]
    texts = svg.labels(points, 7, 400)
    assert texts[-3:] == [(300.0, 50.0, "13"), (330.0, 55.0, "14"), (300.0, 90.0, "15")]
    assert 1 < len(texts) < 10
    boxes = [(x, y, x + 7 * len(text), y + 12) for x, y, text in texts]
    for i, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_data_can_t_end_the_script_of_a_page() -> None:
    text = document("</title><script>", ["</main>"], [], {"rows": ["</script>"]})
    assert json.loads(embedded(text))["lanes"] == {"rows": ["</script>"]}
    assert "<title>&lt;/title&gt;" in text


def test_no_element_is_made_from_data(tmp_path: Path) -> None:
    """Whatever texts the points have, and for each value a text in turn."""
    found = [point(4, 90.0, 100.0), point(8, 50.0, 200.0), {**FAILED}]
    fixed = {"dtype": "bfloat16"}
    honest = "".join(sweep_page(tmp_path / "runs", found, front, fixed) for front in (pareto(found), [0]))
    evil = sweep_page(tmp_path / EVIL.replace("/", "_"), poisoned(found), pareto(found), poisoned(fixed))
    check_made_of(evil, honest)
    assert "alert(1)" in evil
    for i in range(3):
        for way in leaves(found[i]):
            bad = [*found[:i], replaced(found[i], way, EVIL), *found[i + 1 :]]
            with contextlib.suppress(TypeError, ValueError):  # what should be a number
                check_made_of(sweep_page(tmp_path / "runs", bad, [0], fixed), honest)
