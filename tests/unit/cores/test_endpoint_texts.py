"""Prompts that servers are sent as text, because there is no tokenizer here: they count the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpillm.errors import RunError
from tests.helpers.endpoint_cores import FINAL, SERVER, Rows, failure, requests, started
from tests.helpers.scripted_server import (
    DONE,
    STREAM,
    Reply,
    Request,
    ScriptedServer,
    choice,
    chunk,
    event,
    plain,
)

TEXTS = ["Hello", "Où est-il?"]
PROMPTS = [list(text.encode()) for text in TEXTS]


def server_of(
    *, ids: bool = False, usage: bool = True, unknown: tuple[str, ...] = ()
) -> Callable[[Request], Reply]:
    """Return a server that takes texts only; its answers have `max_tokens` tokens.

    `ids`: it sends token ids on request; `usage`: it counts; `unknown`: fields that it refuses.
    """

    def answer(request: Request) -> Reply:
        body = request.json
        if not isinstance(body["prompt"], str) or any(name in body for name in unknown):
            return plain({"error": {"message": "a text, please"}}, "400 Bad Request")
        n = body["max_tokens"]
        tokens = [*range(7, 7 + n)] if ids and body.get("return_token_ids") else None
        counts = {"prompt_tokens": 3, "completion_tokens": n}
        if not body.get("stream"):
            whole = choice(tokens, "word " * n, "length")
            return plain({**whole, "usage": counts} if usage else whole)
        pieces = [event(choice(tokens, "word " * n)), event(choice(None, "", "length"))]
        if usage and (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(event({"choices": [], "usage": counts}))
        return Reply([STREAM, *map(chunk, pieces), DONE])

    return answer


@pytest.mark.parametrize("options", [(), (SERVER,)], ids=["whole", "streams"])
@pytest.mark.parametrize("ids", [True, False])
def test_the_server_counts(options: tuple[str, ...], ids: bool) -> None:
    with ScriptedServer(server_of(ids=ids)) as server, started(server, *options, sends_text=True) as core:
        core.enqueue(requests(PROMPTS, max_output=9))
        rows = Rows(core).until(2)
        statistics: dict[str, Any] = core.statistics()
        metrics = core.metrics()
    whole = [tokens for _, flags, tokens in rows if flags & FINAL]
    assert whole == [[*range(7, 16)] if ids else [0] * 9] * 2
    assert {body["prompt"] for body in server.bodies()} == {"Hello", *TEXTS}
    assert statistics["other_prompt_length"] == statistics["retokenized"] == 0
    assert metrics is not None and metrics.prompt_tokens == 6  # as the server counts


def test_a_server_with_openais_fields_only() -> None:
    only = server_of(unknown=("return_token_ids", "detokenize"))
    with ScriptedServer(only) as server, started(server, SERVER, sends_text=True) as core:
        core.enqueue(requests(PROMPTS, max_output=5))
        assert [len(tokens) for _, flags, tokens in Rows(core).until(2) if flags & FINAL] == [5, 5]


@pytest.mark.parametrize(
    ("answers", "options"),
    [
        (server_of(usage=False), ()),
        (server_of(usage=False), (SERVER,)),
        (server_of(unknown=("stream_options",)), (SERVER,)),
    ],
)
def test_a_server_that_does_not_count(answers: Callable[[Request], Reply], options: tuple[str, ...]) -> None:
    with (
        ScriptedServer(answers) as server,
        pytest.raises(RunError, match=r"neither token ids nor usage.*with --model_path$"),
        started(server, *options, sends_text=True),
    ):
        pass


def busy_streams(times: int) -> Callable[[Request], Reply]:
    """Return a server of text that refuses its first streams: a rate limit."""
    left, answer = iter(range(times)), server_of()

    def answer_or_refuse(request: Request) -> Reply:
        if request.json.get("stream") and next(left, None) is not None:
            return plain({"error": {"message": "slow down"}}, "429 Too Many Requests")
        return answer(request)

    return answer_or_refuse


def test_a_rate_limit_while_streams_are_checked() -> None:
    """It was reported as missing usage, without a wait."""
    with ScriptedServer(busy_streams(1)) as server, started(server, SERVER, sends_text=True) as core:
        core.enqueue(requests(PROMPTS, max_output=5))
        Rows(core).until(2)
    with (
        ScriptedServer(busy_streams(99)) as server,
        pytest.raises(RunError, match="completions: HTTP 429: slow down; it refuses every request"),
        started(server, SERVER, sends_text=True),
    ):
        pass


def test_a_server_that_stops_counting() -> None:
    """Usage in the probe, and none in the test."""
    counts, forgets = server_of(), server_of(usage=False)

    def answer(request: Request) -> Reply:
        return (counts if request.json["max_tokens"] == 1 else forgets)(request)

    with ScriptedServer(answer) as server, started(server, sends_text=True) as core:
        core.enqueue(requests(PROMPTS, max_output=5))
        assert failure(core).endswith(
            "no usage in its answer: name the folder of the model's tokenizer with --model_path"
        )


def test_a_server_that_counts_more_tokens_than_the_limit() -> None:
    """The client must not make a list of that length."""
    counts = server_of()

    def answer(request: Request) -> Reply:
        if request.json["max_tokens"] == 1:
            return counts(request)
        usage = {"prompt_tokens": 3, "completion_tokens": 50_000_000}
        return plain({**choice(None, "word", "stop"), "usage": usage})

    with ScriptedServer(answer) as server, started(server, sends_text=True) as core:
        core.enqueue(requests(PROMPTS, max_output=5))
        message = failure(core)
        assert message.startswith(server.url)
        assert message.endswith("its usage has 50,000,000 tokens for an answer of at most 5")
