"""An answer means the same however the network has cut it: whole events are read together."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm.comms.messages import Refusal
from mpillm.cores.openai_client import answer as answer_module
from mpillm.cores.openai_client.answer import (
    AnswerError,
    CompletionResponse,
    EventStream,
    failure_text,
    refusal_of,
)
from mpillm.cores.openai_client.http_connection import HttpConnection, NothingSentBack
from tests.helpers.scripted_server import choice, event

END = event(b"[DONE]")
EVENTS = [event(choice([i], f"t{i}", "length" if i == 5 else None)) for i in range(6)]
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}})
STREAMS = [
    b"".join([*EVENTS, USAGE, END]),
    b"".join([*EVENTS, USAGE, END]).replace(b"\n", b"\r\n"),
    b"".join([*EVENTS, USAGE, END]).replace(b"\n", b"\r"),
    b"".join(EVENTS) + USAGE.replace(b"\n", b"\r") + END.replace(b"\n", b"\r\n"),
    b": a comment\n\n" + b"".join(EVENTS) + b"event: x\nid: 1\n" + END,
    b"".join(EVENTS).replace(b"data: ", b"data:") + b"data: {}",  # the end of the stream ends it, too
    b"\xef\xbb\xbf" + b"".join(EVENTS),  # with a byte order mark, and without [DONE]
    b'data: {"choices":\ndata: [' + json.dumps(choice([9], "t", "stop")["choices"][0]).encode() + b"]}\n\n",
]
WRONG = [
    EVENTS[0] + b"data: {\n\n" + EVENTS[5],
    EVENTS[0] + b"data: 3\n\n" + EVENTS[5],
    EVENTS[0] + b"data: {}, {}\n\n" + EVENTS[5],
    EVENTS[0] + b'data: [{"a": [1\n\ndata: 2]}\n\n' + EVENTS[5],
    EVENTS[0] + event({"error": {"message": "broken"}}) + EVENTS[5],
    EVENTS[0] + event(choice([-1])) + EVENTS[5],
    EVENTS[0] + event(choice([True])) + EVENTS[5],
    EVENTS[0] + END + b"nonsense\n\n",
    EVENTS[0] + event({"choices": [{"index": 1, "text": "t"}]}) + EVENTS[5],
    EVENTS[0] + event({"choices": [{"text": 5}]}) + EVENTS[5],
    EVENTS[0] + event({"usage": {"completion_tokens": "6"}}) + EVENTS[5],
    b"".join(EVENTS) + EVENTS[0],  # more than was asked for
    EVENTS[0] + END,  # in the middle
]


def read(pieces: Iterable[bytes]) -> CompletionResponse | str:
    """Return the answer or, if it makes no sense, the reason."""
    answer = CompletionResponse(stream=True, max_tokens=6)
    try:
        for i, piece in enumerate(pieces):
            answer.feed(piece, float(i))
        answer.finish(99.0)
    except (AnswerError, ValueError) as error:
        return str(error)
    return answer


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % len(stream) for place in places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(at)]


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 10**6), max_size=6))
def test_an_answer_in_any_pieces(stream: bytes, places: list[int]) -> None:
    one, many = read(bytes([byte]) for byte in stream), read(cut(stream, places))
    assert isinstance(one, CompletionResponse) and isinstance(many, CompletionResponse)
    names = ("tokens", "text", "finish_reason", "prompt_tokens", "completion_tokens", "size")
    assert [getattr(one, name) for name in names] == [getattr(many, name) for name in names]
    assert len(many.times) == len(one.times) and many.times == sorted(many.times)


@pytest.mark.parametrize("stream", [True, False])
def test_the_token_ids_of_a_long_prompt_are_not_parsed(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other answers would wait meanwhile."""
    parsed: list[int] = []

    def loads(data: bytes) -> Any:
        parsed.append(len(data))
        return json.loads(data)

    monkeypatch.setattr(answer_module, "json", SimpleNamespace(loads=loads))
    text = '"prompt_token_ids": [1, "\\'
    for ids, is_parsed in (([*range(9000)], False), ([*range(9000), [1]], True)):
        parsed.clear()
        message = choice([7, 8], text, "length")
        message["choices"][0]["prompt_token_ids"] = ids
        made = CompletionResponse(stream, max_tokens=2)
        made.feed(event(message) if stream else json.dumps(message).encode(), 1.0)
        made.finish(2.0)
        assert (made.tokens, made.text) == ([7, 8], text)
        assert (max(parsed) > 9000) == is_parsed


def test_a_long_line_in_small_pieces_takes_little_time() -> None:
    """Each piece was added to a copy of all before it: minutes, in which the other answers wait."""
    stream, began = EventStream(), time.process_time()
    stream.feed(b"data: ")
    for _ in range(1 << 16):
        assert stream.feed(b"x" * 240) == []
    assert stream.feed(b"\n\n") == [b"x" * (240 << 16)]
    assert time.process_time() - began < 20  # of the CPU; a hundredth of it is enough


@pytest.mark.long
@pytest.mark.parametrize("stream", WRONG)
@given(places=st.lists(st.integers(0, 10**6), max_size=6))
def test_nonsense_in_any_pieces(stream: bytes, places: list[int]) -> None:
    one = read(bytes([byte]) for byte in stream)
    assert isinstance(one, str) and read(cut(stream, places)) == one


@pytest.mark.parametrize(
    ("pieces", "text"),
    [(["a\ud83d", "\ude00"], "a\U0001f600"), (["a\ud83d", "b", "\ude00"], "a\ufffdb\ufffd")],
)
def test_halves_of_characters(pieces: list[str], text: str) -> None:
    """Servers whose strings are UTF-16 may cut a character in two; a half alone can't be encoded."""
    *first, last = pieces
    events = [*(event({"choices": [{"text": piece}]}) for piece in first), event(choice([], last, "stop"))]
    answer = read(events)
    assert isinstance(answer, CompletionResponse)
    assert answer.text == text


def test_text_that_never_ends() -> None:
    """A server of text can't be held to a number of tokens, but to some number of pieces."""
    answer = CompletionResponse(stream=True, max_tokens=2)
    with pytest.raises(AnswerError, match=r"^it sent more than the 2 requested tokens$"):
        for _ in range(1000):
            answer.feed(event(choice(text="t")), 0.0)


@pytest.mark.parametrize("is_chat", [False, True])
def test_bytes_for_ever_in_events(is_chat: bool) -> None:
    """Few long pieces of text, and deltas without any, were kept without a bound."""
    answer = CompletionResponse(stream=True, max_tokens=4, is_chat=is_chat)
    piece = {"choices": [{"delta": {}, "pad": "x" * 60_000}]} if is_chat else choice(text="x" * 1_000_000)
    with pytest.raises(AnswerError, match=r"^it sent more than 16908288 bytes for 4 requested tokens$"):
        for _ in range(1000):
            answer.feed(event(piece), 0.0)


@pytest.mark.parametrize("count", [-1, 1 << 31])
def test_counts_that_no_answer_has(count: int) -> None:
    error = read([*EVENTS, event({"choices": [], "usage": {"completion_tokens": count}})])
    assert isinstance(error, str) and "usage has whole numbers of tokens" in error


FOR_EVER = {
    "a line": b"data: " + b"x" * 65_000,
    "comments": b": busy\n" * 9_000,
    "data": b"data: x\n" * 8_000,
}


@pytest.mark.parametrize("piece", FOR_EVER.values(), ids=FOR_EVER)
def test_bytes_for_ever_without_an_event(piece: bytes) -> None:
    error = read(itertools.chain([EVENTS[0]], itertools.repeat(piece, 400)))
    assert isinstance(error, str) and "without an event's end" in error


@pytest.mark.parametrize(
    ("error", "is_too_long"),
    [
        ({"message": "no", "code": "context_length_exceeded"}, True),
        ({"message": "This model's maximum context length is 64 tokens. However, …", "code": 400}, True),
        ({"message": "The decoder prompt is longer than the maximum model length of 64.", "code": 400}, True),
        ({"message": "Requested token count exceeds the model's maximum context length of 64"}, True),
        ({"message": "the temperature is too high", "code": 400}, False),
        ({"message": 'input: {"code": "context_length_exceeded"}', "code": 400}, False),
    ],
)
def test_a_refusal_of_a_prompt_that_exceeds_the_models_context(error: Any, is_too_long: bool) -> None:
    refusal = refusal_of(400, json.dumps({"error": error}).encode(), None)
    assert refusal.is_too_long == Refusal.of(refusal.numbers()).is_too_long == is_too_long


@pytest.mark.parametrize("stream", [True, False])
def test_json_nested_too_deep(stream: bool) -> None:
    answer = CompletionResponse(stream, max_tokens=6)
    nested = b"[" * 200_000
    with pytest.raises(AnswerError, match="it sent something that is not JSON"):
        answer.feed(event(nested) * 2 if stream else nested, 0.0)
        answer.finish(0.0)
    assert failure_text(500, nested).startswith("HTTP 500: [[")


@pytest.mark.parametrize("first", [b"\0\0\6\4\0 what gRPC says", b""])
def test_a_server_that_speaks_first_or_hangs_up(first: bytes) -> None:
    """Before the request is sent: its port may be another protocol's."""
    receiver, connection, transport = Mock(), HttpConnection(), Mock()
    transport.write.side_effect = RuntimeError("the handler is closed")
    connection.connection_made(transport)
    if first:
        connection.data_received(first)
    else:
        connection.connection_lost(None)
    connection.send(b"GET", receiver)
    (error,) = receiver.on_broken.call_args.args
    assert isinstance(error, NothingSentBack)


@pytest.mark.parametrize("status", [100, 103])
def test_informational_responses_for_ever(status: int) -> None:
    receiver, connection = Mock(), HttpConnection()
    connection.connection_made(Mock())
    connection.send(b"", receiver)
    for _ in range(17):
        connection.data_received(b"HTTP/1.1 %d x\r\n\r\n" % status)
    (error,) = receiver.on_broken.call_args.args
    assert f"17 times HTTP {status}" in str(error)
