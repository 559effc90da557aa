"""A server that is not ready, or refuses everything, ends a run before its test, with one message."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable

import pytest

import disagg
from mpillm.cores.capabilities import FindsServers
from mpillm.errors import RunError
from mpillm.options.disagg_yaml import disagg_config
from mpillm.options.options import parse_run
from mpillm.runtime.core_configs import core_configs
from tests.helpers.endpoint_cores import Rows, core_of, refuses, requests, started
from tests.helpers.scripted_server import Reply, ScriptedServer, head, plain

LATE = r"was not ready within 2\.7 s \(--load_deadline\)"


def test_dead_before_ready() -> None:
    """The message says that nobody listens at the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = f"^http://{address} {LATE}: Connection refused$"
        with core_of(address, "--load_deadline=3") as core, pytest.raises(RunError, match=words):
            core.load()


def test_several_that_are_not_there_share_the_deadline() -> None:
    """Each had one of its own: the phase's ended the run before the second was named."""
    answers = iter(["503 Service Unavailable"] * 8)  # for 1.6 s at least
    health = {"/health": lambda request: plain({}, next(answers, "200 OK"))}
    with ScriptedServer(others=health) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        urls = f"{server.address},{address}"
        began = time.monotonic()
        with core_of(urls, "--load_deadline=3") as core, pytest.raises(RunError, match=address):
            core.load()
        assert time.monotonic() - began >= 2.6
        assert core.doing().startswith(f"waiting for http://{address}: Connection refused\n")
        assert "at most 3 s (--load_deadline)" in core.doing()


def test_slow_start() -> None:
    """A server that says 503 is waited for."""
    answers = iter(["503 Service Unavailable"] * 3)
    health = {"/health": lambda request: plain({}, next(answers, "200 OK"))}
    with ScriptedServer(others=health) as server, core_of(server.address) as core:
        core.load()
        assert [request.path for request in server.requests] == ["/health"] * 4


def test_a_start_that_is_too_slow() -> None:
    health = {"/health": lambda request: plain({"error": "loading"}, "503 Service Unavailable")}
    with (
        ScriptedServer(others=health) as server,
        core_of(server.address, "--load_deadline=3") as core,
        pytest.raises(
            RunError,
            match=f"^{server.url} {LATE}: GET /health: HTTP 503: loading$",
        ),
    ):
        core.load()


def test_a_server_without_health() -> None:
    health = {"/health": lambda request: plain({}, "404 Not Found")}
    with ScriptedServer(others=health) as server, started(server):
        assert server.bodies()


NONE_SENT = "no key was sent: set the environment variable OPENAI_API_KEY for all ranks$"
SENT = "the sent key is from the environment variable OPENAI_API_KEY$"


@pytest.mark.parametrize(("key", "advice"), [("", NONE_SENT), ("sk-1", SENT)])
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/completions"])
def test_a_wrong_key(monkeypatch: pytest.MonkeyPatch, key: str, advice: str, path: str) -> None:
    """The message says which key was sent, or that none was."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    denied = {path: lambda request: plain({"error": {"message": "no key"}}, "401 Unauthorized")}
    with (
        ScriptedServer(others=denied) as server,
        core_of(server.address) as core,
        pytest.raises(RunError, match=f"^{server.url}.*{path}: HTTP 401: no key; {advice}"),
    ):
        core.load()
        core.run_health_check()


@pytest.mark.parametrize("name", ["Authorization", "api-key"])
def test_a_wrong_key_in_a_header(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    denied = {"/health": lambda request: plain({}, "401 Unauthorized")}
    header = json.dumps({name: "Bearer abc"})
    with (
        ScriptedServer(others=denied) as server,
        core_of(server.address, f"--extra_headers={header}") as core,
        pytest.raises(RunError, match=r"HTTP 401: .*; the sent key is from --extra_headers$"),
    ):
        core.load()


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        ("404 Not Found", r"GET /health: HTTP 404: \{\}; GET /v1/models: HTTP 404: \{\}; .*http://.*/PATH$"),
        ("405 Method Not Allowed", r".*GET /v1/models: HTTP 405: .* add it to the URL"),
        ("403 Forbidden", "GET /health: HTTP 403: .*no key was sent"),
        ("302 Found", "GET /health: HTTP 302"),
        ("400 Bad Request", "GET /health: HTTP 400"),
        ("429 Too Many Requests", "GET /health: HTTP 429: .*it refuses every request"),
    ],
)
def test_a_server_that_refuses_is_up(monkeypatch: pytest.MonkeyPatch, status: str, cause: str) -> None:
    """The run does not wait for it until the deadline, which is 60 s."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    no = {path: lambda request: plain({}, status) for path in ("/health", "/v1/models")}
    with ScriptedServer(others=no) as server, core_of(server.address) as core:
        with pytest.raises(RunError, match=f"^{server.url}: {cause}"):
            core.load()
        assert core.doing().startswith(f"waiting for {server.url}")


def test_a_server_of_another_protocol() -> None:
    other = {"/health": lambda request: Reply([b"SSH-2.0-OpenSSH_9.2\r\n"], "close")}
    words = r"not HTTP: .*SSH-2\.0.*; name the port of its HTTP API$"
    with (
        ScriptedServer(others=other) as server,
        core_of(server.address) as core,
        pytest.raises(RunError, match=words),
    ):
        core.load()


HTML = b"<!DOCTYPE html><html><body>Welcome</body></html>"
PAGE = Reply([head(Content_Length=len(HTML)) + HTML])


@pytest.mark.parametrize(
    ("path", "reply", "cause"),
    [
        (
            "/v1/models",
            PAGE,
            "an HTML page; name the URL of the API$",
        ),
        ("/v1/models", plain({}, "404 Not Found"), r"HTTP 404: \{\}: name the model with --core_options"),
        ("/v1/completions", plain({}, "404 Not Found"), "see --endpoint_type$"),
        (
            "/v1/completions",
            plain({}, "405 Method Not Allowed"),
            "see --endpoint_type$",
        ),
        ("/v1/completions", plain({"error": "full"}, "429 Too Many Requests"), "HTTP 429: full; it refuses"),
        ("/v1/completions", plain({"error": "oops"}, "500 Internal Server Error"), "HTTP 500: oops$"),
    ],
)
def test_a_healthy_server_that_refuses(path: str, reply: Reply, cause: str) -> None:
    with ScriptedServer(others={path: lambda request: reply}) as server, core_of(server.address) as core:
        core.load()
        with pytest.raises(RunError, match=f"^{server.url}{path}: .*{cause}"):
            core.run_health_check()


def test_a_server_that_answers_nothing_before_the_test() -> None:
    silent = {"/health": lambda request: Reply([], "hang")}
    with (
        ScriptedServer(others=silent) as server,
        core_of(server.address, "--load_deadline=3") as core,
        pytest.raises(
            RunError,
            match=f"^{server.url} {LATE}: no answer to GET /health within",
        ),
    ):
        core.load()


def test_a_server_whose_first_token_takes_too_long() -> None:
    """As vLLM's may, which compiles for it; half of the phase is for the token."""
    words = r"/v1/completions: no answer to POST /v1/completions within [34]\.\d+ s \(--health_deadline\)$"
    with (
        ScriptedServer(lambda _: Reply([], "hang")) as server,
        pytest.raises(RunError, match=f"^{server.url}{words}"),
        started(server, "--health_deadline=10"),
    ):
        pass


def test_a_server_that_is_up_has_30_s_for_its_first_token() -> None:
    """Unless the user says how long, or the run has started it."""

    def wait_s(*words: str) -> float | None:
        config = parse_run(["--core_type=openai", *words])
        plan = disagg.plan(disagg_config(config, 2, True), 2, ["a", "a"], 0)
        return core_configs(config, plan, [plan.instances[0].root_rank], {})[0].client.first_token_wait_s

    assert wait_s() == 30
    assert wait_s("--health_deadline=200") is None
    assert wait_s("--server=command:x {port}") is None
    words = r"/v1/completions: no answer to POST /v1/completions within 4.5 s \(--health_deadline\)$"
    with (
        ScriptedServer(lambda _: Reply([], "hang")) as server,
        pytest.raises(RunError, match=f"^{server.url}{words}"),
        started(server, first_token_wait_s=5.0),
    ):
        pass


def test_a_server_that_refuses_everything() -> None:
    no = refuses("prompt", status="422 Unprocessable Entity")
    words = (
        "refused a request of one token in every form:\n  return_token_ids: HTTP 422: unknown field prompt\n"
    )
    with ScriptedServer(no) as server, pytest.raises(RunError, match=words), started(server):
        pass


def ends_soon() -> Callable[[], None]:
    """Return a check that passes twice, and then reports that the server has ended."""
    calls = itertools.count()

    def meanwhile() -> None:
        if next(calls) == 2:
            raise LookupError("the server was ended by signal 9")

    return meanwhile


@pytest.mark.parametrize("then", ["hang", "reset"])
def test_an_own_server_that_ends_before_the_test(then: str) -> None:
    """Its owner names it, whether its client waits or has heard that there is no answer."""
    models = {"data": [{"id": "m"}]}
    others = {"/v1/models": lambda _: plain(models)}
    with (
        ScriptedServer(lambda _: Reply([], then), others) as server,
        core_of(server.address, server=0) as core,
    ):
        core.load()
        assert isinstance(core, FindsServers)
        core.find_servers({0: server.url})
        core.check_run = ends_soon()
        with pytest.raises(LookupError, match="signal 9"):
            core.run_health_check()


def test_an_own_server_that_ends_in_the_test() -> None:
    with ScriptedServer() as server, core_of(server.address, server=0) as core:
        core.load()
        assert isinstance(core, FindsServers)
        core.find_servers({0: server.url})
        core.run_health_check()
        server.stop()
        core.check_run = ends_soon()
        core.enqueue(requests())
        with pytest.raises(LookupError, match="signal 9"):
            Rows(core).until(4)
