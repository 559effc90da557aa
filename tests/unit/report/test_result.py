"""The last lines of a run."""

from __future__ import annotations

from typing import Any

import pytest

from mpillm.config.options import parse_run
from mpillm.report.result import summary_rows

SLOW: dict[str, Any] = {
    "loadgen_result": "INVALID",
    "loadgen_unsatisfied": ["latency limits", "early stopping"],
    "loadgen_advice": ["TPOT constrain not met: Reduce target QPS to improve latency."],
    "lost": [],
    "samples": 100,
    "errors": 0,
    "test_s": 2.0,
    "samples_per_second": 50.0,
    "tokens_per_second": 500.0,
    "ttft_ms": {"p50": 1.0},
    "tpot_ms": None,
    "compiled_in_test": 0,
    "per_instance": [{"instance": 0, "samples": 100, "tokens": 1000, "busy_fraction": 0.5}],
}
NUMBERS: list[tuple[str, Any]] = [
    ("samples", "100 in 2.00 s, 0 errors"),
    ("samples per second", "50.00"),
    ("tokens per second", "500.0"),
    ("time to first token", "p50 1.00  ms"),
    ("instance 0", "100 samples, 1000 tokens, busy 50 %"),
]
WHY = [
    ("", "not satisfied: latency limits, early stopping"),
    ("", "TPOT constrain not met: Reduce target QPS to improve latency."),
]


@pytest.mark.parametrize(
    ("options", "why", "judge"),
    [
        ([], WHY, None),
        (["--compliance_test", "TEST06"], [("", "which means nothing for a TEST06 run")], "compliance"),
        (["--test_mode", "AccuracyOnly"], WHY, "accuracy"),
    ],
)
def test_rows(options: list[str], why: list[tuple[str, str]], judge: str | None) -> None:
    """The summary says why a test is INVALID, in LoadGen's words, and which command judges a run that LoadGen
    does not."""
    config = parse_run(
        ["--benchmarks", "llama2-70b", "--model_scale", "tiny", "--scenarios", "Server", *options]
    )
    head = ("LoadGen", f"INVALID (Server, {config.test_mode})")
    then = [("judged by", f"python -m mpillm {judge} 'my runs/a'")] if judge else []
    assert summary_rows(SLOW, config, "my runs/a") == [
        head,
        *why,
        *NUMBERS,
        *then,
        ("result", "my runs/a/result.json"),
    ]


def test_a_run_that_compiled_something_in_its_test_says_so() -> None:
    rows = dict(summary_rows(SLOW | {"compiled_in_test": 3}, parse_run(["--core_type", "dummy"]), "run"))
    assert (
        rows["compiled in the test"]
        == "3 kernels or graphs ('compiled' in result.json), which took time of the test"
    )


def test_no_accuracy_of_data_without_reference_answers() -> None:
    config = parse_run(["--core_type", "dummy", "--test_mode", "AccuracyOnly"])
    assert not [value for name, value in summary_rows(SLOW, config, "run") if name == "judged by"]


def test_evictions_are_told_with_what_avoids_them() -> None:
    instances = [{**SLOW["per_instance"][0], "preemptions": n} for n in (8, 0)]
    rows = summary_rows(SLOW | {"per_instance": instances}, parse_run(["--core_type", "dummy"]), "run")
    told = [value for _, value in rows if "evict" in value]
    assert told == [
        "its KV cache was full: 8 evictions; with --batch_scheduler_policy no_evict it starts fewer"
    ]


def test_what_was_guessed() -> None:
    instances = [
        {**SLOW["per_instance"][0], "drafted_tokens": n, "accepted_tokens": n // 3} for n in (300, 0)
    ]
    rows = summary_rows(SLOW | {"per_instance": instances}, parse_run([]), "run")
    told = [value for _, value in rows if "guessed" in value]
    assert told == ["speculation: 100 of 300 guessed tokens were right (33 %)"]


def test_a_client_that_is_the_limit_says_so() -> None:
    """So do tokens that were not the server's, and requests that were sent twice."""
    instance: dict[str, Any] = SLOW["per_instance"][0]
    client = {"client_busy_fraction": 0.91, "retokenized": 7, "retries": 2}
    result = SLOW | {
        "per_instance": [
            {**instance, **client},
            {**instance, "client_busy_fraction": 0.5, "retokenized": 0, "retries": 0},
        ]
    }
    values = [
        value for _, value in summary_rows(result, parse_run(["--core_type", "trtllm_endpoint"]), "run")
    ]
    first = values.index("100 samples, 1000 tokens, busy 50 %")
    assert values[first + 1 : -1] == [
        "its client is busy 91 % of the time: start more ranks, the servers may be faster",
        "tokens of 7 answers were made from text: the server gives no token ids",
        "2 requests were sent again: the server refused them, or closed the connection",
        "100 samples, 1000 tokens, busy 50 %",
    ]


def test_a_run_that_lost_an_instance_says_so_plainly() -> None:
    lost = {"instance": 1, "role": "gen", "at_s": 3.21, "phase": "test", "rank": 4, "retried": 7}
    lost |= {"cause": "the process has ended\nmore", "recovered_after_s": 0.52}
    rows = summary_rows({**SLOW, "lost": [lost]}, parse_run([]), "run")
    assert ("", "not to be submitted: the run went on without a part of its system") in rows
    at = rows.index(("LOST", "instance 1 (gen) at 3.2 s: rank 4: the process has ended"))
    assert rows[at + 1] == ("", "7 samples were computed again, the last was answered 0.5 s later")
    nothing = {**lost, "phase": "stop", "retried": 0, "recovered_after_s": 0.0}
    rows = summary_rows({**SLOW, "lost": [nothing]}, parse_run([]), "run")
    at = rows.index(("LOST", "instance 1 (gen) in phase stop: rank 4: the process has ended"))
    assert rows[at + 1] == ("", "it owed nothing: no samples were computed again")
