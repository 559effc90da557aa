"""What servers of others say beside their answers: what they are, what they hand over, what they count."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import queue
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from tests.helpers.responses_server import events_of
from tests.helpers.triton_requests import responses

pytest.importorskip("tritonclient.grpc")

from tritonclient.grpc import InferResult, service_pb2

from launch.safe_text import one_line
from mpillm.cores.base import CoreConfig
from mpillm.cores.openai_client.answer import AnswerError, CompletionResponse
from mpillm.cores.openai_client.dialect import DIALECTS, RESPONSES
from mpillm.cores.openai_client.disagg_protocol import SequentialProtocol, protocol_of
from mpillm.cores.openai_client.endpoint import EndpointError
from mpillm.cores.openai_client.http_connection import HttpError
from mpillm.cores.openai_client.readiness import choose_dialect, find_model, framework_of, until_ready
from mpillm.cores.openai_client.responses_answer import answer_at
from mpillm.cores.openai_client.server_counts import ServerCounts, grown, of_iterations, reading_of
from mpillm.errors import ExitCode
from mpillm.nvidia.configs import TritonHarnessConfig
from mpillm.report import tested_servers as report
from mpillm.triton.client import text_client, token_client
from mpillm.triton.client.connection import GrpcConnection
from mpillm.triton.core import core as triton_core
from mpillm.triton.core.triton_ready import Model
from mpillm.triton.tritonserver import model_table
from tests.helpers.fuzzing import ODD_TEXT, changed, damaged, fuzz, json_bytes
from tests.helpers.raw_server import HTTP_WORDS, JSON_WORDS, LAST, raw_server
from tests.helpers.raw_server import whole as reply

MODELS = {"object": "list", "data": [{"id": "org/m", "object": "model", "owned_by": "vllm"}]}
SGLANG = {"object": "list", "data": [{"id": "org/m", "object": "model", "owned_by": "sglang"}]}
VERSION = {"version": "0.33.0"}
ERROR = {"error": {"message": "no", "type": "BadRequest", "code": 400}}
PAGES = [json_bytes(one) for one in (MODELS, SGLANG, VERSION, LAST, ERROR)]
REPLIES = st.tuples(
    st.sampled_from([200, 200, 200, 400, 401, 404, 405, 429, 500, 503, 99]),
    st.dictionaries(st.sampled_from(["location", "retry-after"]), ODD_TEXT, max_size=1),
    changed([MODELS, SGLANG, VERSION, LAST, ERROR]).map(json_bytes) | damaged(PAGES, JSON_WORDS),
) | st.just("broken")


class Answering:
    """Stands for an endpoint that gives these answers, in turn."""

    def __init__(self, replies: list[Any]) -> None:
        self.url, self.model, self.key_source = "http://a:1", "m", ""
        self.dialect = DIALECTS[0]
        self._replies, self._n = replies, 0

    def path_of(self, path: str) -> str:
        return path

    async def fetch(self, *_: object) -> tuple[int, Mapping[str, str], bytes]:
        one = self._replies[self._n % len(self._replies)]
        self._n += 1
        if one == "broken":
            raise HttpError("it has closed the connection")
        return one  # type: ignore[no-any-return]


@fuzz(
    st.lists(REPLIES, min_size=1, max_size=4),
    st.sampled_from([(None, None), ("m", None), (None, "folder/org/m")]),
    st.booleans(),
    examples=120,
    found=[
        ([(200, {}, json_bytes({"data": [{"id": name}] * 2}))], (wanted, None), False)
        for name in (None, 7)
        for wanted in (None, "m")
    ],
)
def test_replies_of_a_server_before_a_test(
    _: Path, replies: list[Any], wanted: tuple[str | None, str | None], has_tokenizer: bool
) -> None:
    """Each request returns a value of its type, or raises EndpointError."""

    async def ask() -> None:
        endpoint: Any = Answering(replies)
        with contextlib.suppress(EndpointError):
            await until_ready(endpoint, 0.005)
        with contextlib.suppress(EndpointError):
            assert isinstance(await find_model(endpoint, *wanted, 1.0), str)
        assert isinstance(await framework_of(endpoint, 1.0), (str, type(None)))
        try:
            await choose_dialect(endpoint, has_tokenizer, 0.5)
        except EndpointError as error:
            assert 0 < len(str(error)) < 5000
        assert endpoint.dialect in DIALECTS

    asyncio.run(ask())


HANDED = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_block_ids": [1],
        "remote_port": 1,
    },
    "choices": [
        {
            "index": 0,
            "text": "t",
            "token_ids": [5],
            "finish_reason": "length",
            "disaggregated_params": {"ctx_request_id": 1, "first_gen_tokens": [5]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


@fuzz(
    changed([HANDED]).map(json_bytes) | damaged([json_bytes(HANDED)], JSON_WORDS),
    st.sampled_from(["kv_transfer_params", "disaggregated_params"]),
    refused_by=(AnswerError, ValueError),
    examples=150,
)
def test_what_a_context_server_hands_over(_: Path, data: bytes, name: str) -> None:
    """As `Client.ended` reads it, and writes it to the other server."""
    (answer := CompletionResponse(False, 4)).feed(data, 0.0)
    answer.finish(0.0)
    protocol = protocol_of(name, 0)
    assert isinstance(protocol, SequentialProtocol)
    handed = protocol.handoff_params(json.loads(answer.body))
    if handed is not None:
        assert protocol.for_generation({}, handed) == {name: handed}


RESPONSE_EVENTS = events_of({"model": "m", "input": [], "tools": [{}], "max_output_tokens": 4})


@fuzz(
    changed([RESPONSE_EVENTS, RESPONSE_EVENTS[-1]["response"]], most=3),
    refused_by=(AnswerError, ValueError),
    examples=200,
)
def test_events_of_a_response(_: Path, value: Any) -> None:
    """A list is a stream."""
    streams = isinstance(value, list)
    data = b"".join(b"data: %b\n\n" % json_bytes(one) for one in value) if streams else json_bytes(value)
    (answer := answer_at(RESPONSES, streams, 4)).feed(data, 0.0)
    answer.finish(0.0)
    assert answer.size and json.dumps(answer.message)


METRICS = (
    b'vllm:num_requests_running{engine="0",model_name="a b}"} 3.0\n'
    b'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 30\n'
    b'vllm:prompt_tokens_by_source_total{source="local_compute"} 4 1395066363000\n'
    b"vllm:nixl_num_kv_expired_reqs_total 34\nvllm:generation_tokens_total 1e3\n"
    b"sglang:num_requests_total{} 2.0\nsglang:spec_verify_calls_total 5\nmpillm:kv_transfers_total 7\n"
)
ITERATIONS = [{"numActiveRequests": 5, "kvCacheStats": {"usedNumBlocks": 6, "maxNumBlocks": 9}}]


@fuzz(
    damaged([METRICS], [b"{", b"}", b'source="', b"NaN", b"1e999", b"-1", b" "])
    | changed([ITERATIONS]).map(json_bytes)
)
def test_pages_of_metrics(_: Path, data: bytes) -> None:
    """Every count is a number or not known."""
    text = data.decode(errors="replace")
    for reading in (reading_of(text), of_iterations(text, ServerCounts())):
        *counts, accepted_at = reading
        assert all(value is None or math.isfinite(value) for value in (*counts, *accepted_at))
        assert all(by == 0 for by in grown([reading], [reading]).values())


SERVER = {
    "url": "http://a:1",
    "role": "generation",
    "model": "m",
    "owned": True,
    "may_recompute": True,
    "answers": 4,
    "prompt_tokens": 50,
    "generated_tokens": 16,
    "lost_tokens": 4,
    "handed_over": 4,
    "other_model": "n",
    "other_models": 1,
    "counted": {"generated_tokens": 40.0, "transfers": 3.0, "expired_leases": 2.0, "cached_tokens": 1.0},
}


@fuzz(changed([[SERVER, {**SERVER, "url": "http://b:1", "role": "context"}]]))
def test_servers_in_a_result_of_any_origin(_: Path, servers: Any) -> None:
    """`submission` reads it again from the file."""
    found = report.tested_servers({"per_instance": [{"samples": 4, "servers": servers}]})
    texts = [
        report.expired_leases(found),
        report.missing_contexts(found)[0],
        report.other_totals(found)[0],
        report.other_models(found),
    ]
    texts += [
        report.counted_at(found, "cached_tokens"),
        report.summed_at(found, "answers"),
        *report.models_in_use(found),
    ]
    assert all(isinstance(text, str) for text in texts)


@fuzz(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(1, 3))
def test_totals_agree_up_to_requests_without_an_answer(
    _: Path, counted: int, arrived: int, lost: int, n_clients: int
) -> None:
    """However the answers are split over clients, one of which reads the server's counts."""
    clients = [{"generated_tokens": 0, "lost_tokens": 0} for _ in range(n_clients)]
    for i in range(arrived):
        clients[i % n_clients]["generated_tokens"] += 1
    for i in range(lost):
        clients[-1 - i % n_clients]["lost_tokens"] += 1
    records: list[dict[str, Any]] = [{"url": "a", "prompt_tokens": 0, **one} for one in clients]
    records[0]["counted"] = {"generated_tokens": float(counted), "prompt_tokens": 0.0}
    text, known = report.other_totals(
        report.tested_servers({"per_instance": [{"servers": [one]} for one in records]})
    )
    assert known and bool(text) == (not arrived <= counted <= arrived + lost)


INDEX = [{"name": "m", "version": "1", "state": "READY"}, {"name": "n", "reason": "no file"}]


@fuzz(
    changed([INDEX]).map(lambda index: reply(json_bytes(index)))
    | damaged([reply(json_bytes(INDEX))], HTTP_WORDS),
    found=[(reply(json_bytes([{"name": "\x1b[2J\n"}])),)],
)
def test_tables_of_models(_: Path, data: bytes) -> None:
    """There is always one, of one line each."""
    server = raw_server()
    server.reply = data
    for line in model_table(f"http://{server.address}/v2/repository/index"):
        assert line == one_line(line, 1 << 20)


@cache
def core() -> Any:
    """Return a client of tritonserver that has connected to none."""
    return triton_core.TritonGrpcCore(CoreConfig("triton_grpc", settings=TritonHarnessConfig()))


@fuzz(
    st.lists(responses(), min_size=1, max_size=4),
    st.sampled_from(["", "", "", "INVALID_ARGUMENT: no", "x" * 1000]),
    st.booleans(),
    refused_by=(ValueError, DecodeError),
    examples=120,
)
def test_responses_over_grpc(_: Path, sent: list[bytes], error: str, live: bool) -> None:
    """What a stream can't read ends it, with these words (`Stream._read`)."""
    stream: Any = SimpleNamespace(url="a:1", open={1}, send=lambda *_: None)
    core()._pending = {1: triton_core._PendingRequest(7, Model("m", True), stream, live, 8)}
    for one in sent:
        core()._receive(stream, service_pb2.ModelInferResponse.FromString(one), error)
    while (answer := core()._answers.take()) is not None:
        assert answer.rows["n_tokens"].max() <= 8  # those of an earlier example may be in it, too


class Answered(GrpcConnection):
    """A connection to a server that sends these responses to each request."""

    sent: ClassVar[list[bytes]] = []

    def __init__(self, url: str, *_: object) -> None:
        """There is no channel: thousands, one after another, would leave too little room for threads."""
        self.url, self._timeout_s = url, 0.001
        self._responses, self._n_outstanding = queue.SimpleQueue(), 0

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def _end_stream(self, by_cancel: bool) -> None:
        """There is no stream."""

    def _decoupled(self, model: str) -> bool:
        return True

    def _send(self, *_: object) -> None:
        for one in self.sent:
            self._responses.put((InferResult(service_pb2.ModelInferResponse.FromString(one)), None))


MORE = ["--return_log_probs", "--return_context_logits", "--streaming"]
TEXT = ["-o", "4", "-p", "a", *MORE]
TOKENS = ["--request_output_len", "4", *MORE, "--input_tokens_csv"]


@fuzz(st.lists(responses(), min_size=1, max_size=3), st.sampled_from(["text", "tokens"]), examples=120)
def test_responses_to_triton_client(folder: Path, sent: list[bytes], which: str) -> None:
    """It ends with a code, whatever the server has sent."""
    with contextlib.suppress(DecodeError):  # gRPC's own error
        for one in sent:
            service_pb2.ModelInferResponse.FromString(one)
        (file := folder / "tokens.csv").write_text("5,6,7\n")
        Answered.sent = sent
        words = TEXT if which == "text" else [*TOKENS, str(file)]
        client = text_client if which == "text" else token_client
        args = ["--stream_timeout", "0.001", *words]
        with (
            mock.patch.object(client, "GrpcConnection", Answered),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            assert client.run(args) in (ExitCode.DONE, ExitCode.TEST_FAILED)
