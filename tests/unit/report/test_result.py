"""The last lines of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpillm.comms.messages import DrainReport
from mpillm.options.options import parse_run
from mpillm.report import result as results
from mpillm.report.page.run_analysis import Facts
from mpillm.report.result import conversation_facts, goodput_rows, summary_rows
from mpillm.report.run_files import RunFiles
from mpillm.report.timeline import Timeline
from mpillm.roles.harness import Totals
from mpillm.telemetry.cpu_use import CpuUse

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
    ("time to first token", "p50 1 ms"),
    ("instance 0", "100 samples, 1,000 tokens, holding requests 50 %"),
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


def test_a_test_of_conversations_reports_interactivity_and_good_conversations() -> None:
    of = {"ended": 4, "started": 4, "failed": 0, "outgrown": 0, "e2e_avg_interactivity": 187.55}
    assert conversation_facts(of)[1:] == [("tokens/s per user", "187.6 over all requests (MLPerf Endpoints)")]
    both = conversation_facts(of | {"e2e_normalized_interactivity_p90": 50.0})
    assert both[1][1].endswith(", 50 at p90 (InferenceX)")
    outgrown = of | {"outgrown": 2, "outgrown_at": ["f.jsonl:3", "f.jsonl:9"]}
    fits = "2: the next prompt did not fit the model; the first: f.jsonl:3, f.jsonl:9"
    assert ("  outgrown", fits) in conversation_facts(outgrown)
    goodput = {"limits_ms": {"ttft": 500.0}, "good_requests_per_second": 2.0}
    assert goodput_rows({}) == []
    assert goodput_rows({"goodput": goodput}) == [("good requests", "2 per second, within TTFT 500 ms")]
    goodput |= {"conversations": 8, "good_conversations": 6, "good_conversations_per_second": 0.5}
    assert goodput_rows({"goodput": goodput})[1] == ("good conversations", "6 of 8 (75 %), 0.5 per second")


def test_a_server_test_has_its_rates_and_doubts() -> None:
    config = parse_run(["--core_type", "dummy", "--scenarios", "Server"])
    rates = {"offered_per_second": 300.0, "answered_per_second": 179.0, "queue_grew": True}
    rows = summary_rows(SLOW | rates | {"doubts": ["the queue grew"], "latency_limits": False}, config, "run")
    assert ("DOUBTFUL", "the queue grew") in rows
    assert (
        "rate",
        "300 queries/s offered, 179 answered, the time of one answer aside; the queue grew",
    ) in rows
    assert any("no latency limit was set" in value for _, value in rows)
    rows = summary_rows(SLOW | rates | {"queue_grew": False, "latency_limits": True}, config, "run")
    assert (
        "rate",
        "300 queries/s offered, 179 answered, the time of one answer aside; the queue did not grow",
    ) in rows
    assert not any("limit was set" in str(value) or name == "DOUBTFUL" for name, value in rows)


def test_compilation_in_the_test_is_reported() -> None:
    rows = dict(summary_rows(SLOW | {"compiled_in_test": 3}, parse_run(["--core_type", "dummy"]), "run"))
    assert (
        rows["compiled in the test"]
        == "3 kernels or graphs ('compiled' in result.json), which took time of the test"
    )


def test_no_accuracy_of_data_without_reference_answers() -> None:
    config = parse_run(["--core_type", "dummy", "--test_mode", "AccuracyOnly"])
    assert not [value for name, value in summary_rows(SLOW, config, "run") if name == "judged by"]


def test_evictions_are_reported_with_a_remedy() -> None:
    instances = [{**SLOW["per_instance"][0], "preemptions": n} for n in (8, 0)]
    rows = summary_rows(SLOW | {"per_instance": instances}, parse_run(["--core_type", "dummy"]), "run")
    notes = [value for _, value in rows if "evict" in value]
    assert notes == [
        "its KV cache was full: 8 evictions; with --batch_scheduler_policy no_evict it starts fewer"
    ]


def test_draft_tokens_are_counted() -> None:
    instances = [
        {**SLOW["per_instance"][0], "drafted_tokens": n, "accepted_tokens": n // 3} for n in (300, 0)
    ]
    rows = summary_rows(SLOW | {"per_instance": instances}, parse_run([]), "run")
    notes = [value for _, value in rows if "draft tokens" in value]
    assert notes == ["speculation: 100 of 300 draft tokens were accepted (33 %)"]


def test_a_client_that_is_the_limit_is_reported() -> None:
    """Tokens that the server did not count and requests that were sent twice are reported as well."""
    instance: dict[str, Any] = SLOW["per_instance"][0]
    client = {"client_busy_fraction": 0.91, "retokenized": 7, "other_text_length": 3, "retries": 2}
    result = SLOW | {
        "per_instance": [
            {**instance, **client},
            {**instance, "client_busy_fraction": 0.5, "retokenized": 0, "retries": 0},
        ]
    }
    values = [
        value for _, value in summary_rows(result, parse_run(["--core_type", "trtllm_endpoint"]), "run")
    ]
    first = values.index("100 samples, 1,000 tokens, holding requests 50 %")
    assert values[first + 1 : -1] == [
        "its client is busy 91 % of the time: start more ranks, the servers may be faster",
        "tokens of 7 answers are counted from their text: the server gives no token ids; its usage gives 3 of"
        " them another number of tokens",
        "2 requests were sent again: the server refused them, or closed the connection",
        "100 samples, 1,000 tokens, holding requests 50 %",
    ]


def test_requests_that_a_killed_server_had_not_answered() -> None:
    """The summary names how the server ended, not only what its client saw of that."""
    why = "process 77 (vllm serve) was ended by signal 9 (SIGKILL)"
    server = {"index": 0, "restarts": [{"at_s": 3.2, "why": why, "back_after_s": 71.5}]}
    result = SLOW | {"per_instance": [{**SLOW["per_instance"][0], "retries": 9, "server": server}]}
    values = [
        value for _, value in summary_rows(result, parse_run(["--core_type", "trtllm_endpoint"]), "run")
    ]
    assert f"9 requests were sent again: server 0: {why}" in values


def test_a_lost_instance_is_reported() -> None:
    lost = {"instance": 1, "role": "gen", "at_s": 3.21, "phase": "test", "rank": 4, "retried": 7}
    lost |= {"cause": "the process has ended\nmore", "recovered_after_s": 0.52}
    rows = summary_rows({**SLOW, "lost": [lost]}, parse_run([]), "run")
    assert ("", "not to be submitted: the run went on without a part of its system") in rows
    at = rows.index(("LOST", "instance 1 (gen) at 3.2 s: rank 4: the process has ended"))
    assert rows[at + 1] == ("", "7 samples were computed again, the last was answered 0.5 s later")
    nothing = {**lost, "phase": "stop", "retried": 0, "recovered_after_s": 0.0}
    rows = summary_rows({**SLOW, "lost": [nothing]}, parse_run([]), "run")
    at = rows.index(("LOST", "instance 1 (gen) in phase stop: rank 4: the process has ended"))
    assert rows[at + 1] == ("", "no request was outstanding: no samples were computed again")


def test_numbers_have_one_style() -> None:
    """Thousands, and seconds above 1,000 ms."""
    large = SLOW | {"samples": 24576, "tokens_per_second": 31234.56, "ttft_ms": {"p50": 12.34, "p99": 3641.2}}
    rows = dict(summary_rows(large, parse_run(["--core_type", "dummy"]), "run"))
    assert rows["samples"] == "24,576 in 2.00 s, 0 errors"
    assert rows["tokens per second"] == "31,234.6"
    assert rows["time to first token"] == "p50 12.3 ms  p99 3.64 s"


def test_answers_that_are_not_streamed_have_no_first_token() -> None:
    """Offline over HTTP, the figures would be 3,641 ms for the whole answer and 0 per token."""
    totals, timeline = Totals(started=1.0, ended=3.0, samples=2, issued=2), Timeline([0], None)
    for histogram, ms in ((totals.ttft, 3641.0), (totals.tpot, 0.0), (totals.latency, 3641.0)):
        histogram.add_one(ms / 1000)
    role = {
        "instance": 0,
        "samples": 2,
        "tokens": 8,
        "test_s": 2.5,
        "metrics": None,
        "streamed": False,
    }
    noted = {"knows_steps": False, "steps": {"start": [0.0], "end": [1.5], "busy_s": [1.5]}}
    report = DrainReport([role], CpuUse(10.0, 1.0, (0,), None), None, 0, 0, None, noted)
    result = results.test_result(totals, {0: report}, timeline, 1)
    (instance,) = result["per_instance"]
    assert (instance["busy_fraction"], instance["busy_with"]) == (0.75, "holding requests")
    assert result["ttft_ms"] is None and result["tpot_ms"] is None and result["latency_ms"]["p50"] > 3000
    assert totals.ttft.summary_ms() is None, "the page has none either"
    full_result = SLOW | result | {"lost": [], "loadgen_result": "VALID"}
    rows = dict(summary_rows(full_result, parse_run(["--core_type", "dummy"]), "run"))
    assert (
        rows["time to first token"] == rows["time per output token"] == "-  (the answers were not streamed)"
    )


def test_the_console_names_instances_as_the_page_does() -> None:
    """With its shares of what they computed, and what limited the test."""
    ranks = [{"rank": rank, "instance": rank - 1, "roles": [role]} for rank, role in ((1, "ctx"), (2, "gen"))]
    plan = {
        "ranks": ranks,
        "instances": [{"index": i, "role": role, "ranks": [i + 1]} for i, role in enumerate(("ctx", "gen"))],
    }
    for busy, more, limit in (
        (0.2, {}, "bottleneck: context 0"),
        (1.6, {"queue_grew": True}, "context and generation are both saturated; most of all context 0"),
        (
            1.6,
            {"queue_grew": False, "loadgen_unsatisfied": []},
            "no limit reached: the system kept up with the rate",
        ),
    ):
        noted = {
            str(rank): {"knows_steps": True, "steps": {"start": [0.0], "end": [s], "busy_s": [s]}}
            for rank, s in ((1, 1.8), (2, busy))
        }
        instances = [
            {"instance": i, "samples": 5, "tokens": 5, "busy_fraction": s / 2, "busy_with": "computing"}
            for i, s in enumerate((1.8, busy))
        ]
        result = SLOW | {"per_instance": instances} | more
        facts = Facts(RunFiles(Path("run"), result, plan=plan, telemetry={"ranks": noted}))
        rows = dict(summary_rows(result, parse_run(["--core_type", "dummy"]), "run", facts))
        assert rows["context 0"] == "5 samples, 5 tokens, computing 90 %"
        assert rows["generation 1"] == f"5 samples, 5 tokens, computing {50 * busy:.0f} %"
        assert rows["limit"] == limit


TIMES = (0.5, 1.0, 1.5, 2.0)


def test_who_holds_requests_all_the_time_is_not_no_bottleneck() -> None:
    """A server that is not ours tells neither its steps nor its queue."""
    plan = {"ranks": [{"rank": 1, "instance": 0, "roles": ["executor"]}]}
    held = {"instance": 0, "busy_fraction": 1.0}
    for scenario, grew, limit in (
        ("Offline", None, "bottleneck: executor 0"),
        ("Server", True, "bottleneck: executor 0"),
        ("Server", None, ""),  # too few requests
        ("Server", False, "no limit reached: the system kept up with the rate"),
        (None, None, ""),  # what served: clients asked as they liked
    ):
        result = {"scenario": scenario, "test_s": 2.0, "per_instance": [held]}
        result |= {"queue_grew": grew} if scenario == "Server" else {}
        for waiting in (0, 5):  # for a while: vLLM computes no more than 128 sequences at once on a CPU
            rows = [{"seconds": s, "instance": 0, "running": 9, "waiting": waiting * (s < 1)} for s in TIMES]
            facts = Facts(RunFiles(Path("run"), result, plan=plan, timeline=rows))
            assert facts.limit() == limit, (scenario, grew, waiting)


def test_who_rarely_holds_requests_is_no_bottleneck() -> None:
    """A core may count waiting requests only when one comes."""
    plan = {"ranks": [{"rank": 1, "instance": 0, "roles": ["executor"]}]}
    rows = [{"seconds": s, "instance": 0, "running": 0, "waiting": 1} for s in TIMES]
    for share, limit in ((0.01, ""), (0.9, "bottleneck: executor 0")):
        instance = {"instance": 0, "busy_fraction": share}
        result = {"scenario": "Offline", "conversations": {}, "test_s": 2.0, "per_instance": [instance]}
        facts = Facts(RunFiles(Path("run"), result, plan=plan, timeline=rows))
        assert facts.limit() == limit, share


@pytest.mark.parametrize(
    ("ttft", "unsatisfied", "missed"),
    [
        ({"p99": 6400.0}, "latency limits", "TTFT p99 6.4 s of 3 s"),
        ({"p99": None, "mean": 6400.0}, "latency limits", "TTFT mean 6.4 s of 3 s"),
        ({"p99": 900.0}, "latency limits", "a latency limit"),
        ({"p99": 900.0}, "early stopping", ""),
    ],
)
def test_a_rate_that_was_kept_at_too_high_latencies(
    ttft: dict[str, float], unsatisfied: str, missed: str
) -> None:
    result = SLOW | {
        "scenario": "Server",
        "queue_grew": False,
        "loadgen_unsatisfied": [unsatisfied],
        "loadgen": {"ttft_latency_ms": 3000.0, "tpot_latency_ms": None},
        "ttft_ms": ttft,
    }
    arrival_figures = "the system kept up with the rate"
    expected = f"{arrival_figures}, but missed {missed}" if missed else f"no limit reached: {arrival_figures}"
    assert Facts(RunFiles(Path("run"), result)).limit() == expected


def test_a_server_does_not_speak_of_a_test() -> None:
    result = SLOW | {"compiled_in_test": 2, "aborted": 0}
    text = str(results.served_rows(result, "run"))
    assert "compiled while it served" in text and "100 requests, 1,000 tokens" in text
    assert "test" not in text and "samples" not in text
