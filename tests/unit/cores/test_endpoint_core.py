"""Cores that are clients of servers, against a scripted server in this process: requests and answers."""

from __future__ import annotations

import math

import pytest

from disagg.errors import ConfigError
from mpillm.comms.messages import RequestFlag
from mpillm.cores.clients import share_of
from mpillm.data.tokenizer import NoTokenizer
from mpillm.errors import RunError
from mpillm.experiments.loadtest.endpoint_client import EndpointClient
from mpillm.trtllm.endpoint import TrtllmEndpointCore
from tests.helpers.endpoint_cores import (
    CANCELLED,
    FINAL,
    FIRST,
    PROMPTS,
    SERVER,
    Rows,
    core_of,
    refuses,
    requests,
    sleeping,
    started,
)
from tests.helpers.scripted_server import (
    MODEL,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    answer_of,
    choice,
    chunk,
    event,
    good,
)
from tests.helpers.support import wait_until


def test_answers_in_one_piece() -> None:
    """Offline wants no first tokens, so nothing is streamed."""
    with ScriptedServer() as server, started(server) as core:
        core.enqueue(requests())
        assert sorted(Rows(core).until(4)) == [
            (10 + i, FIRST | FINAL, answer_of(prompt, 4)) for i, prompt in enumerate(PROMPTS)
        ]
        assert "stream" not in server.bodies()[-1]
        assert core.metrics() == (sum(map(len, PROMPTS)), 16, 0, 0, None)
        statistics = core.statistics()
    assert statistics["retries"] == statistics["retokenized"] == statistics["other_answer_length"] == 0
    assert 0 < statistics["client_busy_fraction"] <= 1


def test_answers_token_by_token() -> None:
    with ScriptedServer() as server, started(server, SERVER) as core:
        core.enqueue(requests())
        rows = Rows(core).until(4)
        for i, prompt in enumerate(PROMPTS):
            answer = answer_of(prompt, 4)
            assert [row[1:] for row in rows if row[0] == 10 + i] in (
                [(FIRST, answer[:1]), (FINAL, answer)],
                [(FIRST | FINAL, answer)],
            )
        assert server.bodies()[-1]["stream_options"] == {"include_usage": True}
        assert core.metrics() == (sum(map(len, PROMPTS)), 16, 0, 0, None)
        statistics = core.statistics()
    assert statistics["socket_ttft_p50_ms"] > 0


def test_the_first_token_does_not_wait_for_the_last() -> None:
    def half(request: Request) -> Reply:
        if not request.json.get("stream"):
            return good(request)
        return Reply([STREAM + chunk(event(choice([77], "a")))], "hang")

    with ScriptedServer(half) as server, started(server, SERVER) as core:
        core.enqueue(requests([[1]]))
        rows = Rows(core)
        wait_until(lambda: not rows.poll() and rows.rows, "the first token")
        assert rows.rows == [(10, FIRST, [77])]
        metrics = core.metrics()
        assert metrics is not None and (metrics.generated_tokens, metrics.running) == (1, 1)
        core.cancel([10, 11])
        assert rows.until(1)[1:] == [(10, FINAL | CANCELLED, [])]


@pytest.mark.parametrize("options", [[], [SERVER]], ids=["Offline", "Server"])
def test_a_rank_that_sleeps_is_woken(options: list[str]) -> None:
    with ScriptedServer() as server, started(server, *options) as core:
        core.enqueue(requests())
        assert set(sleeping(core, len(PROMPTS)).values()) == {1}
        assert core.quiet_s() == math.inf
        core.enqueue(requests([[1]], id=30))
        assert sleeping(core, 1) == {30: 1}


def test_a_rank_that_sleeps_is_woken_by_a_failure() -> None:
    with ScriptedServer() as server, started(server) as core:
        server.completions = refuses("prompt")
        core.enqueue(requests([[1]]))
        with pytest.raises(RunError):
            sleeping(core, 1)


STOP_WORDS = '--stop_words=["###", [13]]'


def test_the_fields_of_a_request() -> None:
    with ScriptedServer() as server, started(server, SERVER, "--end_ids=9", STOP_WORDS) as core:
        core.enqueue(requests([[1, 2]], temperature=0.5, top_k=3, top_p=0.75, seed=7, min_output=2))
        core.enqueue(requests([[3]], id=20, flags=RequestFlag.IGNORE_STOP))
        Rows(core).until(2)
        first, second = sorted(server.bodies()[-2:], key=lambda one: -len(one["prompt"]))
    common = {
        "model": MODEL,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    drawn = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 7, "min_tokens": 2}
    assert first == {**common, **drawn, "prompt": [1, 2], "stop": ["###"], "stop_token_ids": [13, 9]}
    assert second == {**common, "prompt": [3], "temperature": 0, "stop_token_ids": [9]}


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ScriptedServer() as server, started(server):
        assert {request.headers.get("authorization") for request in server.requests} == {"Bearer secret"}


@pytest.mark.parametrize("key", ["s3same\n", " s3same", "\N{LEFT DOUBLE QUOTATION MARK}s3same", "s3\x1bsame"])
def test_a_key_that_cannot_be_a_header(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server printed it in its answer to the malformed request."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    expected = "OPENAI_API_KEY: its value must be printable ASCII text without blanks around it"
    with pytest.raises(ConfigError) as caught, core_of("localhost:1"):
        pass
    assert str(caught.value) == expected
    with pytest.raises(ConfigError) as caught:
        EndpointClient("localhost:1", NoTokenizer(""), None, None, 1.0, 1.0)
    assert str(caught.value) == expected


def test_connections_are_kept() -> None:
    with ScriptedServer() as server, started(server) as core:
        rows = Rows(core)
        for n in range(1, 6):
            core.enqueue(requests([[n]], id=n))
            rows.until(n)
        assert (
            len({request.connection for request in server.requests if request.path == "/v1/completions"}) == 2
        ), "the probe's, and one"


def test_several_servers() -> None:
    with (
        ScriptedServer() as one,
        ScriptedServer() as other,
        core_of(f"{one.address},{other.address}", SERVER) as core,
    ):
        core.load()
        core.run_health_check()
        probes = len(one.bodies()), len(other.bodies())
        core.enqueue(requests([[i] for i in range(1, 21)]))
        Rows(core).until(20)
        n_requests = len(one.bodies()) - probes[0], len(other.bodies()) - probes[1]
    assert sum(n_requests) == 20 and min(n_requests) > 0


@pytest.mark.parametrize(
    ("n_clients", "shares"),
    [
        (1, [(["a", "b", "c"], 8)]),
        (2, [(["a", "c"], 8), (["b"], 8)]),
        (3, [(["a"], 8), (["b"], 8), (["c"], 8)]),
        (5, [(["a"], 4), (["b"], 4), (["c"], 8), (["a"], 4), (["b"], 4)]),
        (7, [(["a"], 3), (["b"], 4), (["c"], 4), (["a"], 3), (["b"], 4), (["c"], 4), (["a"], 2)]),
    ],
)
def test_clients_share_servers(n_clients: int, shares: list[tuple[list[str], int]]) -> None:
    """Each server has its limit, however many clients there are."""
    assert [share_of("abc", 8, i, n_clients) for i in range(n_clients)] == shares


@pytest.mark.parametrize(
    ("options", "credits"),
    [
        ([], 2 * 1024),
        (["--max_batch_size=8"], 16),
        (["--trtllm_runtime_flags=max_concurrency:3", "--max_batch_size=8"], 6),
    ],
)
def test_credits(options: list[str], credits: int) -> None:
    with (
        ScriptedServer() as one,
        ScriptedServer() as other,
        core_of(f"{one.address},{other.address}", *options) as core,
    ):
        core.load()
        assert core.credits().requests == credits


def test_a_core_that_was_never_loaded_stops() -> None:
    with core_of("localhost:1") as core:
        assert isinstance(core, TrtllmEndpointCore)
        assert not core.has_work()
