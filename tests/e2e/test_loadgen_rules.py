"""What LoadGen's rules make of the options of a test: told before it starts, and true when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.support import DONE, USAGE, Starter

SERVER = ("--scenarios", "Server", "--max_output_len", 2)


def test_server_needs_a_rate(one: Starter, tmp_path: Path) -> None:
    """LoadGen's own rate is one query per second, with which a test takes minutes, and a full workload
    hours."""
    ended = one.run(2, *SERVER).must(USAGE)
    assert ended.message == (
        "mpillm: failed before anything was loaded\n"
        "  --scenarios Server needs --server_target_qps: how many queries per second to send. At"
        " LoadGen's own rate:"
        " Server: 459 queries at 1 per second take 472 s; early stopping needs 459 at p99: enough\n"
    )
    conf = tmp_path / "user.conf"
    conf.write_text("*.Offline.target_qps = 100\n*.Server.min_query_count = 10\n")
    assert (
        "needs --server_target_qps"
        in one.run(2, *SERVER, "--user_conf", conf, "--min_query_count", 5).must(USAGE).message
    )
    conf.write_text("mpillm.*.target_qps = 0\n")
    assert (
        "needs --server_target_qps"
        in one.run(2, *SERVER, "--user_conf", conf, "--min_query_count", 5).must(USAGE).message
    )
    assert (
        "needs --server_target_qps" in one.run(2, *SERVER, "--test_mode", "AccuracyOnly").must(USAGE).message
    )
    conf.write_text("*.*.target_qps = 2000\n")
    ended = one.run(2, *SERVER, "--user_conf", conf, "--min_query_count", 5, "--min_duration", 0).must(DONE)
    assert "Server: 5 queries at 2000 per second take 0.0 s" in ended.out


@pytest.mark.parametrize(("queries", "result"), [(458, "INVALID"), (459, "VALID"), (None, "VALID")])
def test_early_stopping(one: Starter, queries: int | None, result: str) -> None:
    """One query below what early stopping needs is too few. Without an option a test has enough."""
    least = ("--min_query_count", queries) if queries else ()
    ended = one.run(2, *SERVER, "--server_target_qps", 1000, *least).must(DONE)
    assert (
        f"  Server: {queries or 459} queries at 1000 per second take 0.5 s; early stopping needs 459 at p99:"
        in ended.out
    )
    assert ended.result["loadgen_result"] == result
    assert ended.result["loadgen"]["expected_queries"] == ended.result["samples"] == (queries or 459)
    assert ended.result["loadgen"]["early_stopping_queries"] == 459
    note = (
        "this test can't become VALID: early stopping needs 459 queries at p99, and the test has 458: give"
        " --min_query_count 459 or more"
    )
    assert (note in ended.out) == (result == "INVALID")
    assert ended.result["loadgen_unsatisfied"] == (["early stopping"] if result == "INVALID" else [])
    assert ("not satisfied: early stopping\n" in ended.out) == (result == "INVALID")


@pytest.mark.parametrize(("queries", "result"), [(63, "INVALID"), (64, "VALID")])
def test_early_stopping_in_single_stream(one: Starter, queries: int, result: str) -> None:
    ended = one.run(
        2, "--scenarios", "SingleStream", "--max_output_len", 2, "--min_query_count", queries
    ).must(DONE)
    assert (
        f"  SingleStream: {queries} queries, one after the other; early stopping needs 64 at p90:"
        in ended.out
    )
    assert ended.result["loadgen_result"] == result and ended.result["loadgen"]["target_qps"] is None


def test_a_compliance_run_has_no_note_on_early_stopping(one: Starter) -> None:
    tiny = (
        "--benchmarks",
        "llama2-70b",
        "--model_scale",
        "tiny",
        "--scenarios",
        "Server",
        "--server_target_qps",
        500,
    )
    ended = one.run(2, *tiny, "--compliance_test", "TEST06").must(DONE)
    assert "workload llama2-70b (tiny)" in ended.out and "early stopping needs" not in ended.out


SLOTS = ("--core_type", "dummy", "--core_options", "ttft_ms:20", "--max_batch_size", 4)  # 200 a second


@pytest.mark.parametrize("rate", [400, 75])
def test_an_overloaded_server_run_is_reported(one: Starter, rate: int) -> None:
    """Without limits LoadGen calls both VALID."""
    ended = one.run(2, *SERVER, *SLOTS, "--server_target_qps", rate).must(DONE)
    overloaded = rate > 200
    assert ended.result["status"] == "VALID" and ended.result["queue_grew"] is overloaded
    doubts = ended.result["doubts"]  # that others use this machine, too, perhaps
    assert any("the queue grew" in doubt for doubt in doubts) is overloaded
    assert ("DOUBTFUL" in ended.out) == bool(doubts)
    assert f"the queue {'grew' if overloaded else 'did not grow'}" in ended.flowing
    assert "no latency limit was set" in ended.flowing and ended.result["latency_limits"] is False
    assert ended.result["offered_per_second"] == pytest.approx(rate, rel=0.2)
    page = (ended.log_dir / "report.html").read_text()
    assert ('class="verdict valid"' in page) == (not doubts)


def test_run_takes_limits(one: Starter) -> None:
    """Of the whole answer, too, which LoadGen does not know."""
    limits = ("--goodput", "ttft:60000", "e2el:1")
    ended = one.run(2, *SERVER, *SLOTS, "--server_target_qps", 75, *limits).must(DONE)
    assert ended.result["loadgen"]["ttft_latency_ms"] == 60_000 and ended.result["latency_limits"] is True
    assert ended.result["goodput"]["late"] == {"ttft": 0, "e2el": ended.result["samples"]}
    assert ended.result["status"] == "VALID" and "answers were later than 1 ms" in ended.flowing
    assert "no latency limit" not in ended.flowing
