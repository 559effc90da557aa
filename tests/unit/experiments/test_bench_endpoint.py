"""Load tests over HTTP: arrivals, counts and messages, against a scripted server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpillm.cli import main
from mpillm.experiments.loadtest.load_test import Record, arrivals
from mpillm.experiments.loadtest.serving_report import DETAILS, judged, numbers, table, verdict_lines
from mpillm.report.console import Console, LoadProgress
from tests.helpers.scripted_server import (
    DONE,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    answer_of,
    choice,
    chunk,
    event,
    good,
    head,
    plain,
)


@pytest.fixture(autouse=True)
def pages_lie_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 100.0])
def test_arrivals(burstiness: float) -> None:
    """Intervals are gamma distributed and last as long as the rate says."""
    due = arrivals(20_000, 50.0, burstiness, np.random.default_rng(0))
    gaps = np.diff(due, prepend=0.0)
    assert due[-1] == pytest.approx(400.0) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_all_at_once() -> None:
    assert arrivals(3, None, 1.0, np.random.default_rng(0)).tolist() == [0, 0, 0]


RECORDS = [
    Record(10, start=1.0, ttft=0.1, itl=[0.1, 0.2], latency=0.4, output_len=3, text="a"),
    Record(20, start=1.2, ttft=0.3, itl=[], latency=0.3, output_len=1, text="b"),
    Record(30, error="no"),
]


def test_numbers() -> None:
    """A request that failed counts as failed and for nothing else.

    The expected numbers were computed by hand.
    """
    result = numbers(RECORDS, 2.0, [50, 99], {"ttft": 200, "tpot": 200})
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 4)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (
        1,
        2,
        17,
    )
    assert result["request_goodput"] == 0.5
    assert result["mean_ttft_ms"] == pytest.approx(200) and result["p50_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx(150), "an answer of one token has none"
    assert result["median_itl_ms"] == pytest.approx(150) and result["std_itl_ms"] == pytest.approx(50)
    assert result["max_concurrent_requests"] == 2 and result["max_output_tokens_per_s"] == 4
    assert result["errors"] == ["", "", "no"]


@pytest.mark.parametrize(
    ("n", "n_late", "verdict"),
    [
        (1000, 2, "Limits: met (late requests: at most 2 of 1,000)"),
        (1000, 3, "Limits: MISSED (late requests: at most 2 of 1,000)"),
        (10, 0, "Limits: met (late requests: at most 0 of 10; LoadGen requires at least 459 requests)"),
    ],
)
def test_the_verdict_on_limits(n: int, n_late: int, verdict: str) -> None:
    """As many may be late as LoadGen's early stopping allows; a failed request is late."""
    records = [Record(10, ttft=0.1, latency=0.4, output_len=3) for _ in range(n - n_late)]
    records += [Record(10, ttft=0.3, latency=0.4, output_len=3) for _ in range(max(0, n_late - 1))]
    records += [Record(10, error="no")] * min(1, n_late)
    result = numbers(records, 2.0, [99], {"ttft": 200, "e2el": 500})
    result |= judged(records, {"ttft": 200, "e2el": 500})
    lines = verdict_lines(result)
    assert lines[0] == verdict
    word = "missed" if "MISSED" in verdict else "met"
    assert lines[1:] == [
        f"  TTFT 200 ms: {word}, {n_late} late",
        f"  E2EL 500 ms: met, {min(1, n_late)} late",
    ]
    assert result["limits_met"] is ("MISSED" not in verdict)
    assert judged(records, {}) == {} and verdict_lines({}) == []


def test_a_request_that_ends_as_another_begins_is_not_beside_it() -> None:
    records = [
        Record(1, start=1.0, latency=1.0, output_len=1),
        Record(1, start=2.0, latency=1.0, output_len=1),
    ]
    assert numbers(records, 2.0, [99], {})["max_concurrent_requests"] == 1


def test_nothing_but_failures() -> None:
    result = numbers(RECORDS[2:], 1.0, [99], {})
    assert result["completed"] == result["mean_ttft_ms"] == result["max_output_tokens_per_s"] == 0
    assert result["request_goodput"] is None
    assert "\n".join(table(result, [99], None, None))


def bench(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str, str]:
    code = main(["bench", "endpoint", *map(str, options)])
    output = capsys.readouterr()
    return code, output.out, output.err


SMALL = ("--num_prompts", 12, "--input_len", 5, "--output_len", 4, "--num_warmups", 2)


def test_a_load_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    options = [
        *SMALL,
        "--max_concurrency",
        3,
        "--result_filename",
        file,
        "--save_detailed",
        *("--goodput", "e2el:60000", "tpot:59999.5"),  # as vLLM has it
    ]
    with ScriptedServer() as server:
        code, out, err = bench(capsys, "--url", server.url, *options)
        sent = [one for one in server.bodies() if one.get("stream")]
    assert (code, err) == (0, "")
    assert len(sent) == 2 + 12 and all(one["ignore_eos"] for one in sent)
    for line in (
        "Successful requests: +12 ",
        "Failed requests: +0 ",
        "Maximum request concurrency: +3 ",
        "Total generated tokens: +48 ",
        "data set synthetic:\\n.* random token ids from 0 to 255: no tokenizer here",
    ):
        assert re.search(line, out), out
    result: dict[str, Any] = json.loads(file.read_text())
    assert (result["completed"], result["num_prompts"], result["total_input_tokens"]) == (12, 12, 60)
    assert result["output_lens"] == [4] * 12 and result["max_concurrent_requests"] <= 3
    assert result["request_rate"] == "inf" and result["request_goodput"] == pytest.approx(
        result["request_throughput"]
    )
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]


def with_cached(request: Request) -> Reply:
    """Reply to a stream as a server that has two of the prompt's five tokens in its cache."""
    body = request.json
    if not body.get("stream"):
        return good(request)
    tokens = answer_of(body["prompt"], body["max_tokens"])
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": len(tokens),
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    pieces = [chunk(event(choice([token], "t"))) for token in tokens[:-1]]
    pieces.append(chunk(event(choice(tokens[-1:], "t", "length"))))
    return Reply([STREAM, *pieces, chunk(event({"choices": [], "usage": usage})) + DONE])


def metrics(cached: int) -> Callable[[Request], Reply]:
    """Return a page of counts that grow from one reading to the next one."""
    readings = itertools.count()

    def reply(_: Request) -> Reply:
        n = next(readings)
        text = f"vllm:prompt_tokens_total {60 * n}\nvllm:prefix_cache_hits_total {cached * n}\n"
        return Reply([head(Content_Length=len(text)) + text.encode()])

    return reply


@pytest.mark.parametrize(
    ("server", "share", "line"),
    [
        (
            {"completions": with_cached},
            0.4,
            "warning: the server had 40 % of the prompt",
        ),
        ({"others": {"/metrics": metrics(15)}}, 0.25, "warning: the server had 25 % of the prompt tokens"),
        ({"others": {"/metrics": metrics(0)}}, 0.0, ""),
        ({}, None, "warning: the server may have prompts of earlier requests in its prefix cache"),
    ],
)
def test_prompts_that_the_server_had_cached(
    server: dict[str, Any],
    share: float | None,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "result.json"
    with ScriptedServer(**server) as scripted:
        code, out, _ = bench(capsys, "--url", scripted.url, *SMALL, "--result_filename", file)
    assert code == 0 and json.loads(file.read_text())["cached_prompt_share"] == share
    assert (line in out) if line else "warning" not in out


def test_a_salt_separates_tests(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        outs = [bench(capsys, "--url", server.url, *SMALL, "--cache_salt", "test")[1] for _ in range(2)]
        salts = [one.get("cache_salt") for one in server.bodies() if one.get("stream")]
    assert "warning" not in "".join(outs)
    assert len(salts) == 2 * 14 and len({*salts}) == 2 and None not in salts


def test_requests_that_fail_are_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other requests are measured."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input_tokens": [i]}) + "\n" for i in range(12)))

    def fails(request: Request) -> Reply:
        wrong = request.json["prompt"] in ([3], [7]) and request.json.get("stream")
        return plain({"error": "no"}, "500 Internal Server Error") if wrong else good(request)

    file, details = tmp_path / "result.json", tmp_path / "details.json"
    with ScriptedServer(fails) as server:
        options = ["--dataset_path", data, *SMALL[:2], "--output_len", 4, "--result_filename"]
        bench(capsys, "--url", server.address, *options, details, "--save_detailed")
        code, out, err = bench(capsys, "--url", server.address, *options, file)
    starts = json.loads(details.read_text())["start_times"]
    assert max(starts) - min(starts) < 600, "all were sent"
    assert code == 4 and err == f"mpillm: {server.url}/v1/completions: HTTP 500: no\n"
    assert re.search("Successful requests: +10 ", out) and re.search("Failed requests: +2 ", out)
    assert not {*DETAILS} & {*json.loads(file.read_text())}


def test_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        code, out, _ = bench(
            capsys, "--url", server.address, *SMALL, "--request_rate", 100, "--burstiness", 0.5
        )
    assert code == 0 and re.search(r"Request rate configured \(RPS\): +100.00 ", out)


def test_the_clients_own_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures the client against a server that it starts and ends."""
    code, out, err = bench(capsys, "--null", "--num_prompts", 100)
    assert (code, err) == (0, "")
    assert re.search("Successful requests: +100 ", out) and re.search("Total generated tokens: +1600 ", out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "bench endpoint needs one of --url URL and --null"),
        (["--null", "--url", "a:1"], "bench endpoint needs one of --url URL and --null"),
        (
            ["--url", "ftp://a"],
            "--url ftp://a is not host:port, or a URL of http or https without user and query",
        ),
        (
            ["--null", "--goodput", "tfft:1"],
            r"--goodput tfft:1: .*no latency 'tfft' \(did you mean 'ttft'\?\)",
        ),
        (["--null", "--goodput", "ttft:soon"], "--goodput ttft:soon: expected limits in milliseconds"),
        (
            ["--null", "--metric_percentiles", "50;99"],
            "--metric_percentiles 50;99: expected numbers from 0 to 100",
        ),
    ],
)
def test_wrong_options(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = bench(capsys, *options)
    assert (code, out) == (2, "") and re.match(f"mpillm: {words}", err)


def test_progress_is_displayed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The console has the progress during the test."""
    updates: list[LoadProgress] = []
    monkeypatch.setattr(Console, "progress", lambda self, now: updates.append(now))
    with ScriptedServer(good) as server:
        code, _, _ = bench(
            capsys, "--url", server.address, "--num_prompts", 40, "--request_rate", 40, "--output_len", 3
        )
    assert code == 0
    test = [one for one in updates if one.planned == 40]
    assert {one.lasts_s for one in test} == {1.0} and test[-1][:3] == (40, 40, 120)
    assert any(0 < one.done < 40 for one in test)


def test_the_awaited_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        server.stop()
        code, out, _ = bench(capsys, "--url", server.address, "--ready_deadline", 5)
    assert code == 3
    assert re.match(rf"  ready   after \d s  waiting for {server.url}: Connection refused\n", out)


def test_a_missing_server(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        server.stop()
        code, out, err = bench(capsys, "--url", server.address, "--ready_deadline", 0.5)
    assert (code, out) == (
        3,
        "",
    ) and err == f"mpillm: {server.url} was not ready within 0.5 s (--ready_deadline): Connection refused\n"
