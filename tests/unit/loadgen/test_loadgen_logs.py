"""LoadGen's logs are read as they were written, and what was cut or is something else is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.loadgen.logs import (
    advice,
    latencies_ms,
    quantile,
    read_answers,
    read_detail,
    unsatisfied,
    verdict,
)
from tests.helpers.run_directories import log_entry, make_run, write


def test_answers(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    write(log, [log_entry(7, [1, -2, 2**31 - 1], [1]), log_entry(3, [5]), log_entry(7, [9])])
    first, second = read_answers(log)
    assert (first.index, first.tokens.tolist(), first.first, first.count) == (
        7,
        [1, -2, 2**31 - 1],
        np.array([1]),
        3,
    )
    assert (second.index, second.tokens.tolist(), second.first, second.count) == (3, [5], None, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{ "seq_id" : 0, "qsl_id', "is not valid JSON"),
        ('[{"qsl_idx": 0, "data": "0102"}]', "not an accuracy log of int32 tokens: ValueError"),
        ('[{"qsl_idx": 0, "data": "xyzw"}]', "not an accuracy log of int32 tokens: ValueError"),
        ('[{"data": "01020304"}]', "not an accuracy log of int32 tokens: KeyError: 'qsl_idx'"),
        ("{}[", "is not valid JSON"),
        ("[1]", "not an accuracy log of int32 tokens: TypeError"),
        ('[{"qsl_idx": Infinity, "data": ""}]', "not an accuracy log of int32 tokens: OverflowError"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_bad_log(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "log.json"
    log.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_answers(log)
    assert str(log) in str(error.value)


def test_missing_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_answers(tmp_path / "none.json")


def test_detail_of_a_cut_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    log = run / "mlperf_log_detail.txt"
    log.write_text(log.read_text() + ':::MLLOG {"key": "num_err')
    assert read_detail(run)["loadgen_version"] == "6.0.17"
    assert read_detail(tmp_path) == {}


@pytest.mark.parametrize(
    ("n_answers", "n_samples", "errors", "expected"),
    [(3, 3, 0, "VALID"), (2, 3, 0, "INVALID"), (3, 3, 1, "INVALID"), (0, 0, 0, None)],
)
def test_verdict_on_an_accuracy_run(
    tmp_path: Path, n_answers: int, n_samples: int, errors: int, expected: str | None
) -> None:
    run = make_run(
        tmp_path / "run",
        "accuracy",
        answers=[log_entry(i, [i]) for i in range(n_answers)],
        n_samples=n_samples,
        detail={"num_errors": errors},
    )
    assert verdict(run, "AccuracyOnly") == expected


def test_no_verdict_on_a_cut_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "accuracy", answers=[log_entry(0, [1])])
    (run / "mlperf_log_accuracy.json").write_text("[\n")
    assert verdict(run, "AccuracyOnly") is None
    assert verdict(run, "PerformanceOnly") is None


STOPPED = (
    " * Run unsuccessful.  * Processed 528 queries.  * Would need to run at least 4605 more queries, "
    " with the run being successful."
)


def test_advice(tmp_path: Path) -> None:
    """LoadGen 6.0.17's own words on a Server test that was too slow are kept, without its bullets."""
    slow = (
        "TTFT constrain not met: Reduce target QPS to improve latency.  * TPOT constrain not met: Reduce"
        " target QPS to improve latency. "
    )
    detail = {
        "result_invalid_reason": slow,
        "early_stopping_ttft_result": " * Run successful.",
        "early_stopping_tpot_result": STOPPED,
    }
    assert advice(make_run(tmp_path / "run", "performance", "Server", detail=detail)) == [
        "TTFT constrain not met: Reduce target QPS to improve latency.",
        "TPOT constrain not met: Reduce target QPS to improve latency.",
        "TPOT: Run unsuccessful. Processed 528 queries. Would need to run at least 4605 more queries, with"
        " the run being successful.",
    ]
    assert advice(tmp_path) == []


def test_unsatisfied(tmp_path: Path) -> None:
    """LoadGen 6.0.17's summary names what should hold; the result names what does not."""
    summary = tmp_path / "mlperf_log_summary.txt"
    head = "Result is : INVALID\n  Performance constraints satisfied : "
    summary.write_text(
        head
        + "NO\n  Min duration satisfied : NO\n  Min queries satisfied : NO\n  Early stopping satisfied: NO\n "
        " New satisfied: NO\n"
    )
    assert unsatisfied(tmp_path) == [
        "latency limits",
        "minimum duration",
        "minimum query count",
        "early stopping",
        "New",
    ]
    summary.write_text(
        head + "Yes\n  Min duration satisfied : Yes\n  Min queries satisfied : Yes\n  Early stopping"
        " satisfied: NO\n"
    )
    assert unsatisfied(tmp_path) == ["early stopping"]
    assert unsatisfied(tmp_path / "none") == []


def test_latencies_of_whole_answers(tmp_path: Path) -> None:
    """LoadGen logs them in ns, each under its key."""
    keys = {"mean": 2.5, "50.00_percentile": 2.0, "90.00_percentile": 4.0, "99.00_percentile": 7.0}
    lines = [
        f':::MLLOG {{"key": "result_{key}_latency_ns", "value": {ms * 1e6}}}' for key, ms in keys.items()
    ]
    assert latencies_ms(tmp_path) is None
    (tmp_path / "mlperf_log_detail.txt").write_text("\n".join(lines))
    assert latencies_ms(tmp_path) == {"mean": 2.5, "p50": 2.0, "p90": 4.0, "p99": 7.0}


def test_a_quantile_is_one_of_the_values() -> None:
    """As LoadGen takes it, so that no two figures of one run differ by how they interpolate."""
    for n, q, at in (
        (1, 0.99, 0),
        (4, 0.5, 2),
        (5, 0.5, 2),
        (64, 0.99, 63),
        (100, 0.99, 99),
        (200, 0.99, 198),
    ):
        values = np.random.default_rng(n).permutation(n).astype(np.float32)
        assert quantile(values, q) == at
