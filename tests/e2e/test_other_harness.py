"""Clients of other people in LoadGen's place: what they report, and each way in which they fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpillm.experiments.commands.compare import main as compare
from mpillm.report.request_log import read_requests
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.owned import N_SYNTHETIC, PLACES, SYNTHETIC, SYNTHETIC_OUTPUT, client, server
from tests.helpers.scripted_server import (
    DONE as LAST,
)
from tests.helpers.scripted_server import (
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    choice,
    chunk,
    event,
    good,
    head,
    plain,
)
from tests.helpers.support import DONE, INSTANCE_LOST, TEST_FAILED, USAGE, Command, Starter, wait_until

N, OUTPUT = N_SYNTHETIC, SYNTHETIC_OUTPUT


def start(one: Starter, ranks: int, *options: object, core: str = "dummy") -> Command:
    return one.start(ranks, *SYNTHETIC, *options, core=core)


def of_client(command: Command) -> int:
    """Return the id of the client's process."""

    def found() -> int | None:
        for pid in command.pids():
            with contextlib.suppress(OSError):  # another one that has ended meanwhile
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                of_ours = b"server_guard" in words or b"mpillm\0" in words
                if b"tests.helpers.small_client\0" in words and not of_ours:
                    return pid
        return None

    return int(wait_until(found, "the client"))


def test_our_own_endpoint(one: Starter) -> None:
    """What the client reports is the run's result, what the endpoint counted stands beside it."""
    words = client("--concurrency", "{concurrency}")
    ended = start(one, 3, *words, "--concurrency", 4, "--price_per_gpu_hour", 2).end(60).must(DONE)
    assert "per million tokens" in (ended.log_dir / "report.html").read_text(), "it was dropped in silence"
    result = ended.result
    assert (result["status"], result["samples"], result["errors"]) == ("MEASURED", N, 0)
    assert (
        result["tokens"] == N * OUTPUT and result["harness"]["completed"] == result["harness"]["asked"] == N
    )
    assert result["harness"]["name"] == "command" and result["harness"]["version"] == "1.0"
    endpoint = result["endpoint"]
    assert (endpoint["samples"], endpoint["tokens"], endpoint["errors"]) == (N, N * OUTPUT, 0)
    assert 0 < endpoint["latency_ms"]["p50"] <= result["latency_ms"]["p50"]
    rows = read_requests(ended.log_dir)
    assert len(rows) == N and {*rows["index"].tolist()} == {*range(N)} and (rows["ttft"] > 0).all()
    assert rows["issued"].min() > 0 and rows["issued"].max() < result["test_s"], "in seconds of the test"
    assert "harness (command): 40 requests, 4 at once, through the run's own endpoint" in ended.out
    assert "command 1.0: 40 of 40 requests" in ended.out and "at the endpoint" in ended.out
    page = (ended.log_dir / "report.html").read_text()
    assert "MEASURED" in page and "command 1.0 reports 40 of 40 requests" in page
    assert ended.json("environment.json")["harness"] == "command 1.0"
    assert "enough" in (ended.log_dir / "harness.log").read_text()
    again = one.start(2, *SYNTHETIC, *words, "--concurrency", 4, core="dummy", log_dir=one.folder / "again")
    again.end(60).must(DONE)
    assert compare([str(ended.log_dir), str(one.folder / "again"), "--log_dir", str(one.folder / "c")]) == 0


def test_a_rate(one: Starter) -> None:
    """Server: requests come as LoadGen's would, as many of them, and the client learns their rate."""
    bodies = client("--pause_s", "{rate}", "--concurrency", N)  # a second before each
    options = ("--scenarios", "Server", "--server_target_qps", 1, "--min_query_count", 70)
    result = start(one, 2, *bodies, *options).end(60).must(DONE).result
    assert (result["samples"], result["scenario"]) == (70, "Server")
    assert result["offered_per_second"] > 0 and result["queue_grew"] is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_foreign_servers(one: Starter, ranks: int) -> None:
    """The client asks each of the run's servers itself."""
    command = start(one, ranks, *server(), *client("--sums"), core="trtllm_endpoint")
    ended = command.end(120).must(DONE)
    where = "straight to the server" if ranks == 2 else "straight to 2 servers"
    assert where in ended.out and "endpoint" not in ended.result
    assert (ended.result["samples"], ended.result["tokens"]) == (N, N * OUTPUT)
    assert ended.result["ttft_ms"]["mean"] > 0 and ended.result["latency_ms"] is None
    assert ended.result["server_checks"]["no_cached_prompts"] is None and "not checked" in ended.out
    assert "asked by the harness itself" in ended.out and " 0 requests, 0 tokens" not in ended.out
    assert "bottleneck" not in ended.out, "the ranks have seen no request"
    assert ">0 %<" not in (ended.log_dir / "report.html").read_text()
    logs = (ended.log_dir / "harness.log").read_text()
    assert logs.splitlines()[0].count("http://127.0.0.1:") == ranks - 1


def test_a_client_that_has_ended_is_not_waited_for(one: Starter) -> None:
    """While a server took seconds to end, "test after 3 s" stood below the drain, with its last line."""
    command = start(one, 2, *server("--lingers_s", 4.5), *client(), core="trtllm_endpoint")
    ended = command.end(120).must(DONE)
    assert re.search(r"^  stop +4\.", ended.out, re.MULTILINE), ended.out
    assert "test    after" not in ended.out.partition("  drain ")[2], ended.out


def test_servers_that_are_there(one: Starter) -> None:
    """The client sends requests to the servers of --trtllm_server_urls, with their name of the model."""
    with ScriptedServer() as first, ScriptedServer() as second:
        urls = f"{first.address},{second.address}"
        ended = (
            start(one, 2, "--trtllm_server_urls", urls, *client(), core="trtllm_endpoint").end(60).must(DONE)
        )
        assert "straight to 2 servers" in ended.out and ended.result["samples"] == N
        requests_by_server = [server.requests for server in (first, second)]
    assert min(map(len, requests_by_server)) >= N // 2


def test_an_option_that_the_client_cannot_pass_on_is_refused(one: Starter) -> None:
    """The client sends its own requests, which would lack the stop words."""
    options = ("--trtllm_server_urls", "127.0.0.1:9", "--stop_words", "x")
    ended = start(one, 2, *options, *client(), core="trtllm_endpoint").end(60).must(USAGE)
    assert ": harness (command) asks its servers itself" in " ".join(ended.message.split())


def test_one_url_and_two_servers(one: Starter) -> None:
    """A client that takes one server goes through the run's endpoint, which spreads its requests."""
    places = ("--urls", "{url}", *PLACES[2:])
    words = (*server(), *client(places=places))
    refused = start(one, 3, *words, core="trtllm_endpoint").end(60).must(USAGE)
    assert re.search("no tokenizer; .* with --model_path", " ".join(refused.message.split())), "it took bytes"
    make_tokenizer(one.folder)
    ended = start(one, 3, *words, "--model_path", one.folder, core="trtllm_endpoint").end(120).must(DONE)
    assert "through the run's own endpoint, because it supports one server, not 2" in ended.out
    assert min(instance["samples"] for instance in ended.result["per_instance"]) > 0


def test_texts_without_a_tokenizer_stay_texts(one: Starter) -> None:
    """A client that sends requests to the server itself sends texts unchanged."""

    def texts(request: Request) -> Reply:
        body = request.json
        if not isinstance(body["prompt"], str):
            return plain({"error": {"message": "a text, please"}}, "400 Bad Request")
        body["prompt"] = [*body["prompt"].encode()]
        return good(replace(request, body=json.dumps(body).encode()))

    with ScriptedServer(texts) as server:
        options = ("--url", server.url, "--min_query_count", 8, "--max_output_len", 4)
        ended = one.start(2, *options, *client(), core="openai").end(60).must(DONE)
    assert (ended.result["samples"], ended.result["errors"]) == (8, 0) and "sent as text" in ended.out


VLLM_BENCH = """\
import json, sys, time, urllib.request
options = dict(zip(sys.argv[1:], sys.argv[2:]))
rows = [json.loads(line) for line in open(options["--dataset-path"])]
lengths, began = [], time.time()
for row in rows:
    body = {"model": options["--model"], "prompt": row["prompt"], "max_tokens": row["output_tokens"]}
    url, data = options["--base-url"] + "/v1/completions", json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data)) as reply:
        answer = json.load(reply)
    lengths.append(answer.get("usage", {}).get("completion_tokens") or len(answer["choices"][0]["text"]))
n = len(rows)
report = {"completed": n, "failed": 0, "duration": 1.0, "total_output_tokens": sum(lengths)}
report |= {"start_times": [began] * n, "ttfts": [0.01] * n, "latencies": [0.02] * n, "errors": [""] * n}
json.dump(report | {"output_lens": lengths}, open(f"{options['--result-dir']}/vllm-bench.json", "w"))
"""


@pytest.mark.parametrize("has_usage", [True, False])
def test_a_client_that_counts_tokens_itself(
    one: Starter, has_usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without usage, vLLM's client counts the tokens of the answers' text."""
    counted = [0]

    def texts(request: Request) -> Reply:
        asked = request.json
        if not isinstance(asked["prompt"], str):
            return plain({"error": {"message": "a text, please"}}, "400 Bad Request")
        counted[0] += 2 * asked["max_tokens"]  # as if another client had sent each request again
        usage = {"usage": {"completion_tokens": asked["max_tokens"]}} if has_usage else {}
        text = choice(text="ab" * asked["max_tokens"], reason="length")
        if not asked.get("stream"):
            return plain({**text, **usage})
        return Reply([STREAM, chunk(event(text)), chunk(event({"choices": [], **usage})) + LAST])

    def metrics(_: Request) -> Reply:
        text = f"vllm:generation_tokens_total {counted[0]}\n".encode()
        return Reply([head(Content_Length=len(text)) + text])

    program = one.folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{VLLM_BENCH}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    make_tokenizer(one.folder)
    with ScriptedServer(texts, {"/metrics": metrics}) as server:
        options = ("--url", server.url, "--model_path", one.folder, "--harness", "vllm-bench")
        ended = start(one, 2, *options, core="openai").end(60).must(DONE)
    itself = "vllm-bench counts the tokens of 40 answers itself: it has no counts of the server"
    too_many = "it counts 1,280 tokens in 40 answers of at most 640 together"
    others = "servers count 624 tokens more than vllm-bench requested: others used them"
    page, doubts = (ended.log_dir / "report.html").read_text(), " ".join(ended.result["doubts"])
    text = " ".join(ended.out.split())
    assert (itself in text) == (itself[1:] in page) == (too_many in doubts) == (not has_usage)
    assert (others in doubts) == has_usage and ("whether others used the servers" in text) == (not has_usage)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--code", 3), "harness (command): ended with exit code 3\nthe end of "),
        (("--nonsense",), "it does not know one of its options: look at --harness_args"),
        (("--report_text", "{"), "but its report can't be read: "),
        (("--report_text", '{"completed": 3}'), "but its report can't be read: KeyError('failed')"),
        (("--breaks", N), f"reports no request that was answered ({N} failed)"),
        (("--hangs", "--stall_timeout", 2), "has printed and computed nothing for 2 s (--stall_timeout)"),
    ],
)
def test_a_client_that_fails(one: Starter, options: tuple[object, ...], message: str) -> None:
    mine = [word for word in options if word not in ("--stall_timeout", 2)]
    ours = [word for word in options if word in ("--stall_timeout", 2)]
    ended = start(one, 2, *client(*mine), *ours).end(60).must(TEST_FAILED)
    lines = [line.strip() for line in ended.message.splitlines()]
    assert message in "\n".join(lines), repr(ended)
    assert lines[0] == "mpillm: failed in phase 'test'" and lines[1].startswith("rank 0 (")
    assert ended.result["status"] == "FAILED" and (ended.log_dir / "report.html").exists()


def test_a_report_of_an_earlier_run_is_not_read(one: Starter) -> None:
    start(one, 2, *client()).end(60).must(DONE)
    ended = start(one, 2, *client("--silent"), "--force").end(60).must(TEST_FAILED)
    assert "its report can't be read: it has left no report (report.json)" in ended.message, repr(ended)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_killed_or_stopped(both: Starter, number: int) -> None:
    command = start(both, 2, *client("--worker", "--hangs"))
    pid = of_client(command)
    os.kill(pid, number)
    ended = command.end(60, lingers=5).must(TEST_FAILED)
    how = f"is stopped: kill -CONT {pid}" if number == signal.SIGSTOP else "was ended by signal 9 (SIGKILL)"
    assert how in ended.message, repr(ended)


def test_a_signal_while_the_client_sends_requests(both: Starter) -> None:
    command = start(both, 2, *client("--worker", "--hangs"))
    of_client(command)
    command.process.send_signal(signal.SIGINT)
    ended = command.end(60, lingers=5).must(128 + signal.SIGINT)
    assert ended.result["status"] == "FAILED" and "interrupted" in ended.message, repr(ended)


def test_an_instance_that_is_lost_while_the_client_sends_requests(one: Starter) -> None:
    """The run ends, and the client with it."""
    command = start(one, 2, *client("--worker", "--hangs"))
    of_client(command)
    os.kill(command.wait_rank(1), signal.SIGKILL)
    assert "rank 1" in command.end(60, lingers=5).must(INSTANCE_LOST).message


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        (("--breaks", 2), "command reports 2 failed requests"),
        (("--sends", N - 1), "command reports 39 of the 40 requests to send"),
        (("--min_duration", 3), "s, less than --min_duration 3"),
    ],
)
def test_what_is_doubtful(one: Starter, options: tuple[object, ...], doubt: str) -> None:
    ours = ("--min_duration", "--offline_expected_qps")
    mine = () if options[0] in ours else options
    more = (*options, "--offline_expected_qps", 1) if options[0] in ours else ()
    ended = start(one, 2, *client(*mine), *more).end(60).must(DONE)
    assert any(doubt in one_ for one_ in ended.result["doubts"]), ended.result["doubts"]
    assert "DOUBTFUL" in ended.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--harness", "jmeter"),
            "expected conversations, inference-endpoint, aiperf, guidellm, vllm-bench, or command:WORDS",
        ),
        (("--harness", "command:x {url}"), "expected command:WORDS, with {url} and {report} in them"),
        (("--harness", "command:x {url} {report} {color}"), "{color} is none of {url}, {urls}"),
        (("--harness", "command:no-such-client {url} {report}"), "there is no no-such-client beside"),
        ((*client(), "--concurrency", 3), "has no place for --concurrency: write {concurrency}"),
        ((*client("--pause_s", "{rate}"),), "has {rate}, which is known in scenario Server"),
        (
            (*client(), "--test_mode", "AccuracyOnly"),
            "exclude each other: its report has no answers to score",
        ),
        ((*client(), "--scenarios", "SingleStream"), "--concurrency 1 keeps one request open"),
        (("--concurrency", 3), "has no effect without --harness"),
        (("--harness", "vllm-bench"), "counts tokens with a tokenizer: name a folder"),
    ],
)
def test_what_is_refused(one: Starter, options: tuple[object, ...], message: str) -> None:
    ended = start(one, 2, *options).end(60).must(USAGE)
    assert message in " ".join(ended.message.split()), repr(ended)
    assert not (one.folder / "run" / "result.json").exists() or ended.result["status"] == "FAILED"
