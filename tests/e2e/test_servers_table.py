"""The table of docs/howto/endpoint.md: servers that a run meets, and its one message."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.helpers.ports import free_port
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, choice, good, head, plain
from tests.helpers.support import DONE, NOT_READY, ROOT, USAGE, Starter

PAGE = b"<!DOCTYPE html><html><body>Welcome</body></html>"
READY = ("/health", "/v1/models")


class Case(NamedTuple):
    """A server, and the message of a run against it."""

    words: tuple[str, ...]  # {url}: the server's
    code: int
    message: str  # a pattern
    others: dict[str, Callable[[Request], Reply]] | None = None
    completions: Callable[[Request], Reply] = good


def always(reply: Reply, *paths: str) -> dict[str, Callable[[Request], Reply]]:
    return {path: lambda request: reply for path in paths}


def refusing(status: str, *paths: str) -> dict[str, Callable[[Request], Reply]]:
    return always(plain({"error": {"message": "no"}}, status), *(paths or READY))


def texts(request: Request) -> Reply:
    """Answer in text, without usage."""
    if not isinstance(request.json["prompt"], str) or "return_token_ids" in request.json:
        return plain({"error": "no"}, "400 Bad Request")
    return plain(choice(None, "t", "length"))


URL = ("--url", "{url}")
# By the first column of the table.
CASES = {
    "wrong path": Case(URL, NOT_READY, r"HTTP 404: .*the server is up: .*add it to the URL, as in http://\S+/PATH",
                       refusing("404 Not Found")),
    "another method": Case(URL, NOT_READY, "HTTP 405: .*the server is up",
                           refusing("405 Method Not Allowed")),
    "no key": Case(URL, NOT_READY, "HTTP 401: no; no key was sent: set .*OPENAI_API_KEY",
                   refusing("401 Unauthorized")),
    "wrong key": Case(URL, NOT_READY, "HTTP 403: no; no key was sent", refusing("403 Forbidden")),
    "too many requests": Case(URL, NOT_READY, "HTTP 429: no; it refuses every request",
                              refusing("429 Too Many Requests")),
    "an error of its own": Case((*URL, "--load_deadline", "6"), NOT_READY,
                                r"not ready within 5\.4 s \(--load_deadline\): GET /health: HTTP 500: no",
                                refusing("500 Internal Server Error")),
    "closed port": Case(("--url", "{closed}", "--load_deadline", "6"), NOT_READY,
                        r"not ready within 5\.4 s \(--load_deadline\): Connection refused"),
    "accepts, never answers": Case((*URL, "--load_deadline", "6"), NOT_READY,
                                   r"not ready within 5\.4 s \(--load_deadline\): no answer to GET /health",
                                   always(Reply([], "hang"), "/health")),
    "healthy, POST is silent": Case((*URL, "--health_deadline", "6"), NOT_READY,
                                    r"no answer to POST /v1/completions within \S+ s \(--health_deadline\)",
                                    None, lambda request: Reply([], "hang")),
    "a website": Case(URL, NOT_READY, "not a list of models: an HTML page; name the URL of the API",
                      always(Reply([head(Content_Length=len(PAGE)) + PAGE]), *READY)),
    "another protocol": Case(URL, NOT_READY, "not HTTP: .*SSH-2.0.*; name the port of its HTTP API",
                             always(Reply([b"SSH-2.0-OpenSSH_9.2\r\n"], "close"), *READY)),
    "chats only": Case(URL, NOT_READY, "does not take requests at /v1/completions, which mpillm needs",
                       refusing("404 Not Found", "/v1/completions")),
    "several models": Case(URL, NOT_READY, "lists a, b: name one with --core_options model:NAME",
                           always(plain({"data": [{"id": "a"}, {"id": "b"}]}), "/v1/models")),
    "text, no usage": Case(URL, NOT_READY, "neither token ids nor usage.*with --model_path", None, texts),
    "missing folder": Case((*URL, "--model_path", "Org/Model"), USAGE,
                           "--model_path Org/Model: no such folder; .*hf download Org/Model"),
    "missing folder, own server": Case(("--server", "vllm", "--model_path", "DIR"), USAGE,
                                       "--model_path DIR: no such folder"),
    "not a URL": Case(("--url", "ftp://host"), USAGE, "--trtllm_server_urls ftp://host: expected host:port"),
}  # fmt: skip
SHORT = ("wrong path", "closed port", "missing folder")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in CASES]
)
def test_each_row(one: Starter, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    case = CASES[name]
    with ScriptedServer(case.completions, case.others or {}) as server:
        places = {"url": server.url, "closed": f"127.0.0.1:{free_port()}"}
        words: list[Any] = [word.format(**places) for word in case.words]
        command = [one.python, "-m", "mpillm", "mpirun", "-n", 2, "run", *words, "--min_query_count", 8]
        ended = one.command([*command, "--log_dir", one.folder / "run"]).end(120)
    assert ended.code == case.code, ended
    assert re.search(case.message, " ".join(ended.message.split())), ended
    assert "Traceback" not in ended.out + ended.err and 'File "' not in ended.out + ended.err


def test_a_url_alone_is_enough(one: Starter) -> None:
    """The model's name is what the server lists; the prompts go as text, and the server counts."""

    def vllm(request: Request) -> Reply:
        n = request.json["max_tokens"]
        assert isinstance(request.json["prompt"], str)
        counts = {"prompt_tokens": 7, "completion_tokens": n}
        return plain({**choice([*range(n)], "t" * n, "length"), "usage": counts})

    with ScriptedServer(vllm) as server:
        words = ["run", "--url", server.url, "--min_query_count", 8, "--max_output_len", 5]
        command = [one.python, "-m", "mpillm", "mpirun", "-n", 2, *words, "--log_dir", one.folder / "run"]
        ended = one.command(command).end(120).must(DONE)
    assert (ended.result["errors"], ended.result["tokens"]) == (0, 5 * ended.result["samples"])
    assert "sent as text" in ended.out and "prompt_tokens" not in ended.result  # its bytes are no tokens


def test_the_table_has_these_rows() -> None:
    page = (ROOT / "docs/howto/endpoint.md").read_text(encoding="utf-8")
    table = page.partition("| server |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in table] == [*CASES]
