"""Faults of a server in the test: one message, and nothing is sent twice that may have begun."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from mpillm.cores.openai_client.call import Call, CallListener
from mpillm.cores.openai_client.client import Client, seconds_of
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import (
    CANCELLED,
    FINAL,
    PROMPTS,
    SERVER,
    Rows,
    core_of,
    failure,
    requests,
    started,
)
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
from tests.helpers.support import wait_until


def once(reply: Callable[[Request], Reply], times: int = 1) -> Callable[[Request], Reply]:
    """Give `reply` to the first requests after the probe, and a good answer to the others."""
    left = itertools.count(-times)

    def answer(request: Request) -> Reply:
        return good(request) if request.json["max_tokens"] == 1 or next(left) >= 0 else reply(request)

    return answer


FIRST_TOKEN = chunk(event(choice([5], "t")))
FAULTS: dict[str, tuple[Reply, str]] = {
    "an event that is no JSON": (
        Reply([STREAM, FIRST_TOKEN, chunk(b'data: {"choices": [{"te\n\n')]),
        "it sent something that is not JSON",
    ),
    "a line that is no event": (
        Reply([STREAM, FIRST_TOKEN, chunk(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")]),
        "it sent a line that is not a server-sent event: b'HTTP/1.1 500",
    ),
    "JSON that is no completion": (
        Reply([STREAM, chunk(event([1]))]),
        "it sent JSON that is not a completion",
    ),
    "choices that are none": (
        Reply([STREAM, chunk(event({"choices": [7]}))]),
        "it sent JSON that is not a completion",
    ),
    "token ids that are none": (
        Reply([STREAM, chunk(event(choice("ab")))]),  # type: ignore[arg-type]
        "it sent JSON that is not a completion",
    ),
    "HTTP 500 in the middle of a stream": (
        Reply([STREAM, FIRST_TOKEN, head("500 Internal Server Error", Content_Length=0)]),
        "where the size of a chunk belongs",
    ),
    "an error in the middle of a stream": (
        Reply(
            [STREAM, FIRST_TOKEN, chunk(event({"error": {"message": "out of memory", "code": 500}})) + DONE]
        ),
        "it sent an error: out of memory",
    ),
    "TensorRT-LLM's error": (
        Reply(
            [
                STREAM,
                FIRST_TOKEN,
                chunk(event({"object": "error", "message": "no blocks", "code": 400})) + DONE,
            ]
        ),
        "it sent an error: no blocks",
    ),
    "a stream cut short": (
        Reply([STREAM, FIRST_TOKEN], "close"),
        "it closed the connection in the middle of the answer",
    ),
    "a stream that breaks": (
        Reply([STREAM, FIRST_TOKEN], "reset"),
        "(the connection broke|it closed the connection)",
    ),
    "a stream cut in a chunk": (
        Reply([STREAM, FIRST_TOKEN[:-5]], "close"),
        "it closed the connection in the middle of the answer",
    ),
    "a stream without an end": (
        Reply([STREAM, FIRST_TOKEN + DONE]),
        "it ended its answer in the middle: no finish_reason",
    ),
    "a body cut short": (
        Reply([head(Content_Length=500), b'{"choices"'], "close"),
        "it closed the connection in the middle of the answer",
    ),
    "no tokens": (
        Reply([STREAM + chunk(event(choice([], "", "stop"))) + DONE]),
        "it answered without a token: finish_reason stop",
    ),
    "no events": (Reply([STREAM + DONE]), "it ended its answer in the middle"),
    "an empty body": (Reply([head(Content_Length=0)]), "it ended its answer in the middle"),
    "an answer given up": (
        Reply([STREAM + chunk(event(choice([5], "t", "abort"))) + DONE]),
        "it gave up the answer: finish_reason abort",
    ),
    "HTTP 500": (
        plain({"error": {"message": "it broke"}}, "500 Internal Server Error"),
        "HTTP 500: it broke$",
    ),
    "HTTP 404": (plain({"detail": "no such model"}, "404 Not Found"), "HTTP 404: no such model$"),
    "a page": (
        Reply([head(Content_Type="text/html", Content_Length=21) + b"<!doctype html>\n\nHi.\n"]),
        "it sent a line that is not a server-sent event: b'<!doctype html>'$",
    ),
    "a redirection": (
        Reply([head("307 Temporary Redirect", Location="https://other/v1", Content_Length=0)]),
        "HTTP 307: it redirects to https://other/v1; name the server that answers$",
    ),
    "a compressed body": (
        Reply([head(Content_Encoding="gzip", Content_Length=4) + b"\x1f\x8b\x08\x00"]),
        "it sent a body in Content-Encoding gzip, which was not requested$",
    ),
    "an answer without an end": (
        Reply([STREAM, FIRST_TOKEN * 9], "hang"),
        "it sent more than the 4 requested tokens$",
    ),
    "an error without an end": (
        Reply([head("500 Internal Server Error"), b"x" * (1 << 17)], "hang"),
        "HTTP 500, and its reply is longer than 65536 bytes$",
    ),
    "trailers without an end": (
        Reply([STREAM, FIRST_TOKEN, b"0\r\n" + b"X-More: 1\r\n" * 9000], "hang"),
        "its trailers are longer than 65536 bytes$",
    ),
    "what is no HTTP": (
        Reply([b"220 mail.example.org ESMTP\r\n\r\n"]),
        "it sent something that is not HTTP: '220 mai",
    ),
    "a chunk without a size": (Reply([STREAM, b"hello" * 1000]), "it sent a chunk without a size"),
    "a chunk of a wrong size": (
        Reply([STREAM, b"3\r\nabcdef\r\n"]),
        "it sent a chunk that is longer than its size",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    """One message has the address and the cause; no request is sent twice and no answer comes twice."""
    reply, words = FAULTS[name]
    with ScriptedServer(once(lambda request: reply)) as server, started(server, SERVER) as core:
        probes = len(server.bodies())
        core.enqueue(requests())
        assert re.match(f"{server.url}/v1/completions: .*{words}", failure(core))
        prompts = [tuple(body["prompt"]) for body in server.bodies()[probes:]]
        assert len(prompts) == len(set(prompts)), "what may have begun is not sent again"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_server_that_accepts_and_never_answers(streamed: bool) -> None:
    scenario = SERVER if streamed else "--scenarios=Offline"
    with (
        ScriptedServer(once(lambda request: Reply([], "hang"), 99)) as server,
        started(server, scenario, "--stall_timeout=1") as core,
    ):
        core.enqueue(requests())
        assert failure(core) == f"{server.url}/v1/completions: silent for 0.9 s, with 4 outstanding requests"


def test_a_server_that_stops_in_the_middle_and_stays_connected() -> None:
    half = once(lambda request: Reply([STREAM, FIRST_TOKEN], "hang"), 99)
    with ScriptedServer(half) as server, started(server, SERVER, "--stall_timeout=1") as core:
        core.enqueue(requests([[1]]))
        assert failure(core) == f"{server.url}/v1/completions: silent for 0.9 s, with 1 outstanding requests"


class Comments(list[bytes]):
    """Pieces of a stream that says only, for ever, that it is still there."""

    def __iter__(self) -> Iterator[bytes]:
        yield STREAM
        while True:
            time.sleep(0.05)
            yield chunk(b": wait\n\n")


@pytest.mark.parametrize(
    ("reply", "begun"),
    [
        (Reply([], "hang"), False),
        (Reply([STREAM, FIRST_TOKEN], "hang"), True),
        (Reply(Comments(), "hang"), False),
    ],
    ids=["silent", "begun", "comments"],
)
def test_a_request_that_hangs_while_others_are_answered(reply: Reply, begun: bool) -> None:
    """A request that hangs is noticed, begun or not, although the server answers new requests all the
    time."""

    def completions(request: Request) -> Reply:
        return reply if request.json["prompt"] == [1, 2] else good(request)

    with ScriptedServer(completions) as server, started(server, SERVER, "--stall_timeout=5") as core:
        core.enqueue(requests([[1, 2]]))
        rows, sent = Rows(core), 0

        def ask_on() -> bool:
            nonlocal sent
            if len(rows.poll()) == sent:
                sent += 1
                core.enqueue(requests([[5]], id=100 + sent))
            return False

        with pytest.raises(RunError) as caught:
            wait_until(ask_on, "a failure")
    who, what = (
        f"{server.url}/v1/completions: the request with the prompt [1, 2] (2 tokens)",
        "received nothing",
    )
    came = f"answered before: {int(begun)} of its tokens"
    assert caught.value.failures[0].cause == f"{who} {what} for 4.5 s, while others were answered; {came}"


def test_a_request_that_waits_for_its_turn_does_not_hang() -> None:
    endpoint, listener = RemoteServer("host:1"), cast(CallListener, None)
    client = Client([endpoint], listener, str, stream=True, silence_s=10, retry_s=0)
    call = Call(client, 1, [5], Sampling(max_tokens=4))
    assert not client._hangs(call, 1000.0), "it is not sent yet"
    call.endpoint, call.sent_at, call.last_received = endpoint, 100.0, 100.0
    assert not client._hangs(call, 1000.0), "it is to be sent again"
    endpoint.calls.add(call)
    endpoint.answered = 109.0
    assert not client._hangs(call, 1000.0), "of all that were sent 10 s later none is answered yet"
    endpoint.answered = 111.0
    assert client._hangs(call, 1000.0)
    assert not client._hangs(call, 109.0)
    call.last_received = 995.0
    assert not client._hangs(call, 1000.0)


def test_dead_in_the_test() -> None:
    with (
        ScriptedServer(once(lambda request: Reply([], "stop"))) as server,
        started(server, core_options={"retry_s": 0.5}) as core,
    ):
        core.enqueue(requests())
        assert re.match(
            f"{server.url}/v1/completions: Connection refused; retried [1-9] times, for at most 0.5 s",
            failure(core),
        )


def _unusual(request: Request) -> Reply:
    """Answer right, in the forms that HTTP and server-sent events allow and few servers use."""
    if not request.json.get("stream"):
        return Reply([head("103 Early Hints", Link="</x>"), *good(request).pieces])
    events = b"".join(event(choice([token], "t")) for token in answer_of(request.json["prompt"], 3))
    last = event(choice([sum(request.json["prompt"]) + 3], "t", "length"))
    text = b"\xef\xbb\xbf: hello\r\n\r\nretry: 5\r\nid: 1\r\n" + (events + last).replace(b"\n", b"\r\n")
    chunks = [b'%x ; name="a;b"\r\n%b\r\n' % (len(part), part) for part in (text[:50], text[50:])]
    return Reply([head("100 Continue"), STREAM, *chunks, b"000;last\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n"])


@pytest.mark.parametrize("scenario", [SERVER, "--scenarios=Offline"])
def test_answers_in_unusual_forms(scenario: str) -> None:
    with ScriptedServer(once(_unusual, 99)) as server, started(server, scenario) as core:
        core.enqueue(requests())
        ended = [row for row in Rows(core).until(4) if row[1] & FINAL]
        assert sorted(row[2] for row in ended) == sorted(answer_of(prompt, 4) for prompt in PROMPTS)
        assert core.statistics()["retries"] == 0


# --- what is safe to send again ---


@pytest.mark.parametrize(
    "reply",
    [
        plain({"error": "busy"}, "429 Too Many Requests", Retry_After=0),
        plain({"error": "busy"}, "429 Too Many Requests", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        plain({"error": "busy"}, "503 Service Unavailable", Retry_After="soon"),
        Reply([], "close"),
        Reply([], "reset"),
    ],
    ids=["429", "429 with a date", "503", "closed", "reset"],
)
def test_what_is_sent_again(reply: Reply) -> None:
    """A request is sent again if nothing of its answer had come.

    Each answer comes once, and every attempt is counted.
    """
    with ScriptedServer(once(lambda request: reply, 3)) as server, started(server, SERVER) as core:
        probes = len(server.bodies())
        core.enqueue(requests())
        ended = [row for row in Rows(core).until(4) if row[1] & FINAL]
        assert sorted((row[0], row[2]) for row in ended) == [
            (10 + i, answer_of(prompt, 4)) for i, prompt in enumerate(PROMPTS)
        ]
        assert core.statistics()["retries"] == 3
        assert len(server.bodies()) - probes == 7


def test_a_retry_after_that_is_too_long() -> None:
    busy = plain({"error": "busy"}, "429 Too Many Requests", Retry_After=3600)
    with ScriptedServer(once(lambda request: busy, 99)) as server, started(server) as core:
        core.enqueue(requests([[1]]))
        words = "HTTP 429: busy, it sent Retry-After 3600; retried 0 times, for at most 10 s"
        assert failure(core) == f"{server.url}/v1/completions: {words}"


def test_a_time_that_is_none_is_no_retry_after() -> None:
    assert seconds_of("Mon, 01 Jan 99999999999 00:00:00 GMT") is None


def test_a_request_that_waits_is_cancelled() -> None:
    busy = plain({"error": "busy"}, "429 Too Many Requests", Retry_After=5)
    with ScriptedServer(once(lambda request: busy, 99)) as server, started(server) as core:
        probes = len(server.bodies())
        core.enqueue(requests([[1]]))
        wait_until(lambda: core.statistics()["retries"], "a retry")
        core.cancel([10])
        assert Rows(core).until(1) == [(10, FINAL | CANCELLED, [])]
        assert len(server.bodies()) == probes + 1


def test_another_server_takes_over() -> None:
    """A request that one server did not begin goes to another one."""
    refusing = once(lambda request: plain({}, "503 Service Unavailable", Retry_After=0), 10**6)
    with (
        ScriptedServer(refusing) as one,
        ScriptedServer() as other,
        core_of(f"{one.address},{other.address}") as core,
    ):
        core.load()
        core.run_health_check()
        core.enqueue(requests([[i] for i in range(1, 11)]))
        rows = Rows(core).until(10)
        assert sorted(row[2] for row in rows) == [answer_of([i], 4) for i in range(1, 11)]
        assert core.statistics()["retries"] > 0


@pytest.mark.parametrize("url", ["host:1", "http://host:1/", "http://host:1/v1", "host:1/v1/"])
def test_messages_name_a_server_without_the_end_that_each_path_begins_with(url: str) -> None:
    assert RemoteServer(url).url == "http://host:1"


@pytest.mark.parametrize(
    "url",
    [
        "http://host..domain:8000",
        f"http://{'h' * 64}.domain",
        "http://host/a b",
        "http://ho\0st:1",
        "http://host/\N{HIRAGANA LETTER A}",
    ],
)
def test_addresses_to_which_no_request_can_be_sent(url: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(url)} is not host:port, or a URL"):
        RemoteServer(url)
