"""What comes over a socket: messages of ranks, greetings, KV caches, bodies, states, answers of servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import socket
import struct
import threading
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import strategies as st

from disagg.instances import ServedInstance
from launch.liveness_server import KEY, LivenessServer
from mpillm.comms import messages
from mpillm.comms.messages import REQUEST, RESPONSE, Batch, Refusal
from mpillm.cores.openai_client.answer import AnswerError, CompletionResponse, failure_text, refusal_of
from mpillm.cores.openai_client.client import seconds_of
from mpillm.cores.openai_client.disagg_protocol import CONTEXT_ONLY, GENERATION_ONLY
from mpillm.cores.openai_client.http_connection import HttpConnection, HttpError
from mpillm.cores.openai_client.server_counts import reading_of
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.disagg.kv_socket import CacheLost, KvStore, checksum, fetch
from mpillm.endpoint.disagg.opaque_state import KvState, Seal, request_digest
from mpillm.endpoint.disagg.routes import DisaggRoutes, KvFormat
from mpillm.endpoint.leader.server_request import ServerRequest
from mpillm.endpoint.leader.workers import Pool, Worker
from mpillm.endpoint.protocol import ServedModel, encode, read, read_clock_offset
from mpillm.roles.pool import InstancePool
from mpillm.triton.client.connection import InferError
from mpillm.triton.client.kserve_http import KServeConnection
from mpillm.triton.models.requests import RequestError
from mpillm.triton.models.requests import read as read_tensors
from tests.helpers.fuzzing import ODD_VALUE, changed, damaged, fuzz, json_bytes
from tests.helpers.raw_server import (
    CHUNKED,
    ERROR,
    EVENT,
    GENERATED,
    HEAD,
    HTTP_WORDS,
    JSON_WORDS,
    LAST,
    PLAIN,
    STREAM,
    raw_server,
    whole,
)

HOST = "127.0.0.1"


# --- ranks ---


def batch(dtype: Any) -> bytes:
    rows = np.zeros(2, dtype)
    rows["n_tokens"] = [2, 1]
    return Batch(rows, np.array([5, 6, 7], np.int32)).pack().tobytes()


BATCHES = {"REQUEST": (REQUEST, batch(REQUEST)), "RESPONSE": (RESPONSE, batch(RESPONSE))}
KIND = st.sampled_from(sorted(BATCHES))


@fuzz(
    KIND.flatmap(lambda kind: st.tuples(st.just(kind), damaged([BATCHES[kind][1]]))),
    refused_by=(ValueError, struct.error),
    found=[(("RESPONSE", struct.pack("<qq", -1, 3)),)],
)
def test_batches(_: Path, drawn: tuple[str, bytes]) -> None:
    """What is whole is what was sent. (Ranks are one user's: how many tokens a row has is theirs to say.)"""
    kind, data = drawn
    made = Batch.unpack(np.frombuffer(data, np.uint8), BATCHES[kind][0])
    assert made.pack().tobytes() == data
    assert sum(map(len, made.split())) == len(made)


NUMBERS = [messages.GRANT, messages.WINDOW, messages.CANCEL, messages.SETTLE, messages.ACCEPT, messages.FIRST]


@fuzz(
    st.sampled_from(NUMBERS),
    damaged([struct.pack("<qq", 1, 2)]),
    refused_by=(ValueError, TypeError, IndexError),
)
def test_numbers(_: Path, message: Any, data: bytes) -> None:
    message.read(np.frombuffer(data, np.uint8))


IDS = itertools.count(2)
HELLO = struct.Struct(f"!{KEY}II64s")


@cache
def callers() -> tuple[LivenessServer, list[Any]]:
    rows: list[Any] = []
    return LivenessServer("fuzzed-callers", HELLO, rows.append, lambda fields, _: rows.append(fields)), rows


@cache
def store() -> tuple[KvStore, bytes]:
    made = KvStore(HOST, 60.0)
    made.open(1)
    made.put(1, np.arange(100, dtype=np.uint8))
    return made, made.key(1) or b""


GREETINGS = st.deferred(lambda: damaged([HELLO.pack(callers()[0].key, 3, 9, b"host"), store()[1]], most=3))


@fuzz(st.lists(GREETINGS, min_size=1, max_size=4), st.booleans(), examples=30)
def test_handshake_listeners(_: Path, greetings: list[bytes], pauses: bool) -> None:
    """Handshake listeners: whatever unauthenticated clients send, the next authorized client is admitted."""
    (roll, rows), (kept, _key) = callers(), store()
    for greeting in greetings:
        for port in (roll.port, kept.port):
            with socket.create_connection((HOST, port), 30.0) as stranger, contextlib.suppress(OSError):
                stranger.sendall(greeting)
                if pauses:
                    stranger.shutdown(socket.SHUT_WR)
    with socket.create_connection((HOST, roll.port), 30.0) as caller:
        caller.sendall(HELLO.pack(roll.key, 3, len(rows), b"me"))
        caller.sendall(b".")
        assert caller.recv(1) == b""
    kept.open(id_ := next(IDS))
    kept.put(id_, np.arange(100, dtype=np.uint8))
    assert len(fetch(HOST, kept.port, kept.key(id_) or b"", 100, time.monotonic() + 30.0)) == 100


CACHE = np.arange(64, dtype=np.uint8)
ANSWER = struct.pack("<qI", 64, checksum(CACHE)) + CACHE.tobytes()


@fuzz(
    damaged([ANSWER, struct.pack("<qI", -1, 0), struct.pack("<qI", 1 << 62, 0)]),
    refused_by=CacheLost,
    examples=40,
)
def test_a_server_of_caches(_: Path, data: bytes) -> None:
    with socket.create_server((HOST, 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(16)
                connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            fetch(HOST, listening.getsockname()[1], bytes(16), 64, time.monotonic() + 20.0)
        finally:
            thread.join(30.0)


# --- clients of our endpoint ---

SERVED = ServedModel(
    ("dummy",),
    ByteTokenizer(),
    PromptLimits(vocab_size=256, max_seq_len=200),
    gives_logprobs=True,
    is_disagg=True,
)
DISAGGREGATED = {
    "request_type": GENERATION_ONLY,
    "first_gen_tokens": [3],
    "ctx_request_id": 1,
    "encoded_opaque_state": "a.b",
    "disagg_request_id": 9,
}
BODIES = [
    {
        "model": "dummy",
        "prompt": ["hello", [1, 2, 3]],
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "seed": 7,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        "logprobs": 2,
        "ignore_eos": True,
        "return_token_ids": True,
        "best_of": 1,
        "user": "u",
    },
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
        ],
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "text"},
        "tools": [],
        "disaggregated_params": DISAGGREGATED,
        "prompt_token_ids": [1, 2],
    },
]


@fuzz(
    changed(BODIES).map(json_bytes) | damaged([json_bytes(one) for one in BODIES], JSON_WORDS),
    st.booleans(),
    refused_by=ApiError,
    examples=200,
)
def test_bodies(_: Path, data: bytes, chat: bool) -> None:
    request = read(data, chat, SERVED)
    for prompt, wanted in encode(request, SERVED):
        assert 0 < len(prompt) < 200 and wanted > 0
        row = np.zeros(1, REQUEST)
        for name, value in request.row.items():
            row[name] = value


@fuzz(changed([{"offset": 1.5}]).map(json_bytes), refused_by=ApiError)
def test_clock_offsets(_: Path, data: bytes) -> None:
    read_clock_offset(data)


PROMPT = np.array([5, 6, 7], np.int32)
STATE = KvState("context server 0", HOST, 1, "00" * 16, "any", request_digest(PROMPT, 3))


def signed(state: Any) -> str:
    text = base64.b64encode(json_bytes(state)).decode()
    return f"{text}.{Seal('secret')._signature(text)}"


STATES = changed([dataclasses.asdict(STATE)])


@fuzz(
    STATES.map(lambda state: f"{base64.b64encode(json_bytes(state)).decode()}.")
    | STATES.map(signed)
    | damaged([signed(dataclasses.asdict(STATE)).encode()]).map(lambda data: data.decode("latin-1"))
    | ODD_VALUE,
    st.sampled_from([None, "secret", "another"]),
    refused_by=ApiError,
    examples=120,
)
def test_opaque_states(_: Path, state: Any, secret: str | None) -> None:
    """Without a secret they are believed if they name this machine; nothing listens there."""
    found = Seal(secret).read(state)
    assert secret is not None or found.host == "localhost" or found.host.startswith(("127.", "::1"))
    assert len(bytes.fromhex(found.key)) == 16 and 0 < found.port < 1 << 16


@fuzz(
    changed([DISAGGREGATED, {"request_type": CONTEXT_ONLY}]),
    st.booleans(),
    refused_by=ApiError,
    found=[({"request_type": CONTEXT_ONLY}, True), ({"request_type": ["A" * 30_000]}, True)],
)
def test_disaggregated_params(_: Path, params: Any, context: bool) -> None:
    body = json_bytes({"prompt": [5, 6, 7], "disaggregated_params": params})
    kept = store()[0] if context else None
    seal = Seal("ours")  # which has signed none: no connection is made
    routes = DisaggRoutes(
        "context" if context else "generation", "it", KvFormat("any", 1), HOST, kept, {}, 1.0, seal
    )
    try:
        request = routes.check(read(body, False, SERVED), SERVED)
        if not context:
            asyncio.run(routes.fetch(request, PROMPT, SERVED))
    finally:
        if routes._fetchers is not None:
            routes._fetchers.shutdown()


TENSORS: dict[str, Any] = {
    "input_ids": np.array([[5, 6, 7]], np.int32),
    "input_lengths": np.array([[3]], np.int32),
    "request_output_len": np.array([[4]], np.int32),
    "end_id": np.array([[2]], np.int32),
    "temperature": np.array([[0.5]], np.float32),
    "runtime_top_k": np.array([[3]], np.int32),
    "runtime_top_p": np.array([[0.5]], np.float32),
    "seed": np.array([[7]], np.uint64),
    "beam_width": np.array([[1]], np.int32),
    "len_penalty": np.array([[1.0]], np.float32),
    "early_stopping": np.array([[True]], np.bool_),
    "streaming": np.array([[False]], np.bool_),
    "stop_words_list": np.array([[7, 8, 9, 0], [1, 3, -1, -1]], np.int32),
    "bad_words_list": np.array([[7], [1]], np.int32),
    "embedding_bias": np.array([[0.0, 1.0]], np.float32),
    "repetition_penalty": np.array([[1.0]], np.float32),
    "presence_penalty": np.array([[0.0]], np.float32),
    "return_log_probs": np.array([[True]], np.bool_),
    "min_tokens": np.array([[1]], np.int32),
    "pad_id": np.array([[0]], np.int32),
    "num_return_sequences": np.array([[1]], np.int32),
    "runtime_top_p_reset_ids": np.array([[0]], np.int32),
}


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the tensors of a request, of their types, with any values and shapes."""
    made = dict(TENSORS)
    for name in draw(st.lists(st.sampled_from(sorted(TENSORS)), max_size=12)):
        if name not in made or draw(st.integers(0, 4)) == 0:
            made.pop(name, None)
            continue
        dtype, shape = (
            made[name].dtype,
            draw(st.sampled_from([(1,), (1, 1), (0,), (1, 0), (2, 3), (3,), (2, 1), ()])),
        )
        raw = draw(
            st.binary(min_size=64, max_size=64) | st.sampled_from([bytes(64), b"\xff" * 64, b"\x7f" * 64])
        )
        n = int(np.prod(shape, dtype=int))
        made[name] = (
            np.frombuffer(raw, np.uint8)[: n * dtype.itemsize]
            .view(dtype if dtype != np.bool_ else np.uint8)
            .astype(dtype)
            .reshape(shape)
        )
    return made


@fuzz(tensors(), st.booleans(), refused_by=RequestError, examples=200)
def test_tensors_of_triton(_: Path, given: dict[str, Any], extras: bool) -> None:
    request = read_tensors(given, False, takes_extras=extras)
    assert request.prompt and request.max_output >= 1


# --- servers of others ---

EVENTS = st.lists(changed([EVENT, LAST, {"error": {"message": "m"}}], most=3), min_size=1, max_size=4)


class Receiver:
    """Reads an answer as a client does."""

    def __init__(self, stream: bool) -> None:
        self.answer = CompletionResponse(stream, 4)
        self.status = 0
        self.wait_s: float | None = None
        self.errors: list[Exception] = []
        self.ended = 0

    def on_head(self, status: int, headers: Any) -> None:
        self.status = status
        self.wait_s = seconds_of(headers.get("retry-after"))

    def on_body(self, data: bytes, at: float) -> None:
        if self.status == 200:
            self.answer.feed(data, at)
        else:
            failure_text(self.status, data)
            refusal = Refusal.of(refusal_of(self.status, data, self.wait_s).numbers())
            assert 400 <= refusal.status < 600 and len(refusal.message) < 600

    def on_end(self, connection: HttpConnection) -> None:
        self.ended += 1
        if self.status == 200:
            self.answer.finish(1.0)

    def on_broken(self, error: Exception) -> None:
        self.errors.append(error)


@fuzz(
    damaged([CHUNKED, PLAIN, ERROR, HEAD + b"\r\n" + STREAM], HTTP_WORDS)
    | EVENTS.map(
        lambda events: HEAD + b"\r\n" + b"".join(b"data: %b\n\n" % json_bytes(one) for one in events)
    ),
    st.booleans(),
    st.lists(st.integers(1, 400), max_size=4),
    examples=200,
)
def test_a_server_of_answers(_: Path, data: bytes, stream: bool, cuts: list[int]) -> None:
    """Its client says once how it ended: with an answer, or with an error of ours."""
    connection, receiver = HttpConnection(), Receiver(stream)
    transport: Any = SimpleNamespace(write=lambda data: None, abort=lambda: None)
    connection.connection_made(transport)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", receiver)
    while data and not connection.closed:
        n = cuts.pop() if cuts else len(data)
        connection.data_received(data[:n])
        data = data[n:]
    if not connection.closed:
        with contextlib.suppress(AnswerError, ValueError):  # the loop logs it, and the client's call fails
            connection.connection_lost(None)
    assert all(isinstance(error, (HttpError, AnswerError, ValueError)) for error in receiver.errors)
    assert len(receiver.errors) + receiver.ended >= 1
    answer = receiver.answer
    assert answer.size <= 64 * 4 and all(type(token) is int for token in answer.tokens)
    answer.text.encode()
    assert answer.finish_reason is None or isinstance(answer.finish_reason, str)


INFERRED = {
    "model_name": "m",
    "outputs": [
        {"name": "output_ids", "datatype": "INT32", "shape": [1, 1, 3], "data": [5, 6, 7]},
        {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["a"]},
    ],
}
KSERVE = [
    whole(json_bytes(INFERRED)),
    whole(json_bytes(GENERATED)),
    whole(b"data: %b\n\n" % json_bytes(GENERATED)),
]


@fuzz(
    changed([INFERRED, GENERATED]).map(lambda answer: whole(json_bytes(answer)))
    | changed([GENERATED, {"error": "e"}]).map(lambda answer: whole(b"data: %b\n\n" % json_bytes(answer)))
    | damaged([*KSERVE, ERROR], HTTP_WORDS),
    st.sampled_from(["infer", "generate", "generate_stream"]),
    refused_by=InferError,
    found=[(whole(b'data: {"error": ""}\n\n'), "generate_stream")],
)
def test_answers_of_triton_over_http(_: Path, data: bytes, route: str) -> None:
    server = raw_server()
    server.reply = data
    with KServeConnection(server.address, 20.0) as connection:
        if route == "infer":
            for response in connection.infer("m", {"input_ids": np.array([[5]], np.int32)}):
                assert all(isinstance(value, np.ndarray) for value in response.values())
        else:
            for part in connection.generate("m", {"text_input": "a"}, route == "generate_stream"):
                assert isinstance(part, dict)


BODY = {
    "prompt": [5, 6, 7],
    "max_tokens": 4,
    "n": 1,
    "stream": True,
    "messages": [{"role": "user", "content": "a"}],
}


@pytest.mark.long
@fuzz(
    changed([BODY]).filter(lambda body: isinstance(body, dict)),
    damaged([CHUNKED, PLAIN, ERROR, HEAD + b"\r\n" + STREAM], HTTP_WORDS)
    | changed([LAST]).map(lambda answer: whole(json_bytes(answer))),
    refused_by=ApiError,
    examples=200,
)
def test_what_a_leaders_servers_answer(_: Path, body: dict[str, Any], data: bytes) -> None:
    server = raw_server()
    server.reply = data
    worker = Worker(ServedInstance(0, "context", "context_servers", server.address, range(1)))
    worker.failure = ""
    pool = Pool("context", [worker], InstancePool([0], "round_robin"))

    async def ask() -> None:
        async with (
            aiohttp.ClientSession() as session,
            ServerRequest(session, pool, 20.0, "/v1/completions", {}, body) as answer,
        ):
            if body.get("stream"):
                async for part in answer.chunks():
                    assert isinstance(part, bytes)
            else:
                assert isinstance(await answer.json(), dict)

    try:
        asyncio.run(ask())
    except ApiError as error:
        assert str(error).isprintable(), "what a server says is one line"
        raise
    finally:
        assert worker.running == 0


METRICS = (
    b'vllm:prefix_cache_hits_total{model="a b}",engine="0"} 12.0 1700000000\n# x\n'
    b"sglang:cached_tokens_total 3\nsglang:generation_tokens_total{} 9\n"
    b"sglang:num_requests_total{} 2\nsglang:spec_verify_calls_total{} 4\n"
)


@fuzz(damaged([METRICS], [b"NaN", b"1e999", b"{", b"}", b'"', b"vllm:prefix_cache_hits_total"]))
def test_pages_of_metrics(_: Path, data: bytes) -> None:
    found = reading_of(data.decode("utf-8", "replace"))
    assert all(value is None or np.isfinite(value).all() for value in found)
