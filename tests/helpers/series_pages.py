"""Pages of commands that start several runs, of made up figures.

`change`: of the texts in a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpillm.experiments.loadtest.endpoint_page import endpoint_page
from mpillm.experiments.loadtest.load_test import Record
from mpillm.experiments.loadtest.serving_report import judged, verdict_lines
from mpillm.experiments.pages import ab_page, advise_page, search_page
from mpillm.experiments.rate_search import RateTrial

TESTS = [
    RateTrial(10.0, False, True, completed=9.9, figures={"ttft_p99_ms": 20.0, "tpot_p99_ms": 5.0}),
    RateTrial(
        40.0, False, False, "TTFT is <late>", 21.0, figures={"ttft_p99_ms": 4000.0, "tpot_p99_ms": 9.0}
    ),
    RateTrial(20.0, True, True, completed=19.8, figures={"ttft_p99_ms": 90.0, "tpot_p99_ms": 6.0}),
]


Change = Callable[[Any], Any]


def unchanged(value: Any) -> Any:
    return value


def search(folder: Path, change: Change = unchanged) -> str:
    tests = [replace(one, why=change(one.why)) for one in TESTS]
    return search_page(folder, tests, 40.0, {"ttft": 100.0, "tpot": None})


def ab(folder: Path, change: Change = unchanged) -> str:
    pairs = [{"A": {"latency_mean": 10.0 + i}, "B": {"latency_mean": 9.0 + i}} for i in range(3)]
    verdict = "B differs: -10 %\npaired t test"
    sides = ("--max_batch_size 8", "")
    return ab_page(folder, change(sides), "latency_mean", change(pairs), change(verdict))


def advise(folder: Path, change: Change = unchanged) -> str:
    def figures(i: int) -> dict[str, float]:
        return {
            "tokens_per_second": 100.0 * i,
            "tokens_per_second_per_gpu": 50.0 * i,
            "tokens_per_second_per_user": 9.0 - i,
            "ttft_p99_ms": 7.0,
        }

    ways = [(f"{i} x TP1, max_batch_size {8 * i}", figures(i)) for i in range(1, 5)]
    texts = "GPU", "1. the best\n   python -m mpillm mpirun -n 3 run", "error -3 %"
    return advise_page(folder, change(ways), *change(texts))


def endpoint(_: Path, change: Change = unchanged) -> str:
    records = [
        Record(10, 0.1 * i, ttft=0.05 + 0.001 * i, latency=0.1 + 0.001 * i, output_len=5) for i in range(100)
    ]
    records.append(Record(10, error="no"))
    result = {"request_rate": 10.0, "failed": 1, "completed": 100, "model_id": "a/model", "num_prompts": 101}
    result |= judged(records, {"ttft": 500})
    lines = ["==== Serving ====", "Successful requests:        100"]
    page = "http://host:8000/v1", result, records, lines, verdict_lines(result)
    return endpoint_page(*change(page))


PAGES = {"search": search, "ab": ab, "advise": advise, "endpoint": endpoint}
