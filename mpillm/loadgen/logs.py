"""LoadGen's logs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError

_MARKER = ":::MLLOG "
_PIECE = 1 << 20  # bytes of a log in one read

DETAIL = "mlperf_log_detail.txt"
SUMMARY = "mlperf_log_summary.txt"
ACCURACY = "mlperf_log_accuracy.json"

_CONDITIONS = {
    "Performance constraints satisfied": "latency limits",
    "Min duration satisfied": "minimum duration",
    "Min queries satisfied": "minimum query count",
    "Early stopping satisfied": "early stopping",
}


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """One entry of LoadGen's accuracy log."""

    index: int  # in the data set
    tokens: NDArray[np.int32]  # from `QuerySamplesComplete`
    first: NDArray[np.int32] | None  # from `FirstTokenComplete`; None: Offline, where LoadGen logs none
    count: int | None  # tokens counted for the rate; None: LoadGen counts none for this model


def read_detail(directory: Path) -> dict[str, Any]:
    """Return the last values in ``mlperf_log_detail.txt`` by key; empty without the file."""
    return {entry["key"]: entry["value"] for entry in _entries(directory / DETAIL)}


def quantile(values: NDArray[Any], q: float) -> float:
    """Return a quantile as LoadGen computes it: the value at floor(q * n) of n > 0 sorted values, q < 1.

    It does not interpolate: the quantile 0.99 of fewer than 100 values is the maximum.
    """
    at = int(q * len(values))
    return float(np.partition(values, at)[at])


def latencies_ms(directory: Path) -> dict[str, float] | None:
    """Return mean, p50, p90 and p99 of the samples' latencies to the last token; None if not logged."""
    detail = read_detail(directory)
    names = {"mean": "mean", "p50": "50.00_percentile", "p90": "90.00_percentile", "p99": "99.00_percentile"}
    keys = {short: f"result_{name}_latency_ns" for short, name in names.items()}
    return {short: detail[key] / 1e6 for short, key in keys.items()} if keys["p99"] in detail else None


def logged_errors(directory: Path) -> list[str]:
    """Return the entries that LoadGen marks as errors in ``mlperf_log_detail.txt``."""
    return [
        str(entry["value"])
        for entry in _entries(directory / DETAIL)
        if isinstance(metadata := entry.get("metadata"), dict) and metadata.get("is_error")
    ]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries with a key and a value; none if the file cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        if not line.startswith(_MARKER):
            continue
        try:
            entry = json.loads(line[len(_MARKER) :])
        except (ValueError, RecursionError):  # the last line of a truncated log
            continue
        if isinstance(entry, dict) and isinstance(entry.get("key"), str) and "value" in entry:
            yield entry


def read_answers(path: Path) -> list[LoggedAnswer]:
    """Return the entries, in order, of an accuracy log whose answers are int32 tokens.

    If LoadGen logs an index twice, use the first entry, as MLCommons' accuracy scripts do. Raises ConfigError
    if the file cannot be read, or is truncated, empty or damaged.
    """
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON (cut by a full disk, or truncated for a submission?): {error}"
        ) from error
    answers: dict[int, LoggedAnswer] = {}
    try:
        for entry in entries:
            answer = LoggedAnswer(
                int(entry["qsl_idx"]),
                _tokens(entry["data"]),
                _tokens(entry["token_data"]) if "token_data" in entry else None,
                int(entry["token_count"]) if "token_count" in entry else None,
            )
            answers.setdefault(answer.index, answer)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not an accuracy log of int32 tokens: {type(error).__name__}: {error}"
        ) from error
    if not answers:
        raise ConfigError(f"{path} is empty: LoadGen logged no answer")
    return list(answers.values())


def _tokens(text: str) -> NDArray[np.int32]:
    return np.frombuffer(bytes.fromhex(text), "<i4")


def digest(path: Path) -> str:
    """Return the SHA-256 of a log in hexadecimal, MLCommons' identification of an accuracy log.

    Raises ConfigError if the file cannot be read.
    """
    try:
        sha256 = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                sha256.update(piece)
        return sha256.hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def unsatisfied(directory: Path) -> list[str]:
    """Return the failed conditions of an INVALID test ("Early stopping satisfied: NO" in the summary)."""
    path = directory / SUMMARY
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    conditions = [
        line.partition(":")[0].strip() for line in lines if line.rstrip().lower().endswith((": no", ":no"))
    ]
    return [_CONDITIONS.get(condition, condition.removesuffix(" satisfied")) for condition in conditions]


def advice(directory: Path) -> list[str]:
    """Return LoadGen's advice on an INVALID test: latencies above their limits, and the missing queries.

    Source: ``result_invalid_reason`` and ``early_stopping_*result`` in the detailed log of version 6.0. Some
    tests have none.
    """
    detail = read_detail(directory)
    texts = [" ".join(text.split()) for text in str(detail.get("result_invalid_reason", "")).split(" * ")]
    for key, latency in (
        ("early_stopping_result", ""),
        ("early_stopping_ttft_result", "TTFT: "),
        ("early_stopping_tpot_result", "TPOT: "),
    ):
        if "unsuccessful" in (text := str(detail.get(key, ""))):
            texts.append(latency + " ".join(text.replace(" * ", " ").split()))
    return [text for text in texts if text]


def verdict(directory: Path, test_mode: str) -> str | None:
    """Return ``VALID`` or ``INVALID``; None if LoadGen's logs are missing or incomplete.

    LoadGen has no verdict on an accuracy test. It is VALID if the accuracy log has every sample of the data
    set, and the detailed log has no error.
    """
    detail = read_detail(directory)
    if test_mode == "PerformanceOnly":
        result = detail.get("result_validity")
        return str(result) if result in ("VALID", "INVALID") else None
    try:
        answers = json.loads((directory / ACCURACY).read_text())
    except (OSError, ValueError):
        return None
    expected = accuracy_samples(detail)
    if not answers or expected is None:
        return None
    is_complete = len({answer["qsl_idx"] for answer in answers}) == expected
    return "VALID" if is_complete and not detail.get("num_errors") else "INVALID"


def accuracy_samples(detail: dict[str, Any]) -> int | None:
    """Return the samples of an accuracy run from its detailed log; None if the log is truncated."""
    count = detail.get("effective_accuracy_sample_count", detail.get("qsl_reported_total_count"))
    return None if count is None else int(count)
