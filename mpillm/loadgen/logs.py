"""What LoadGen's logs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MARKER = ":::MLLOG "


def read_detail(directory: Path) -> dict[str, Any]:
    """The values of ``mlperf_log_detail.txt`` by key; empty if the file is not there."""
    path = directory / "mlperf_log_detail.txt"
    values: dict[str, Any] = {}
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(_MARKER):
                try:
                    entry = json.loads(line[len(_MARKER) :])
                except json.JSONDecodeError:
                    continue  # the last line of a log that was cut off
                values[entry["key"]] = entry["value"]
    return values


def unsatisfied(directory: Path) -> list[str]:
    """Why LoadGen calls a test INVALID: the conditions of its summary that do not hold."""
    path = directory / "mlperf_log_summary.txt"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line.partition(":")[0].strip() for line in lines if line.rstrip().lower().endswith((": no", ":no"))]


def verdict(directory: Path, test_mode: str) -> str | None:
    """``VALID`` or ``INVALID``; None if LoadGen's logs are missing or incomplete.

    LoadGen gives no verdict on an accuracy test: it is VALID when the log of answers is whole and no error was logged.
    """
    detail = read_detail(directory)
    if test_mode == "PerformanceOnly":
        result = detail.get("result_validity")
        return str(result) if result in ("VALID", "INVALID") else None
    try:
        answers = json.loads((directory / "mlperf_log_accuracy.json").read_text())
    except (OSError, json.JSONDecodeError):
        return None
    if not answers or not detail:
        return None
    return "VALID" if not detail.get("num_errors") else "INVALID"
