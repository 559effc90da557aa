"""tritonserver: its configuration files, what it says of itself, what it answers to `bench core-model`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

pytest.importorskip("tritonclient.grpc")

from tritonclient.grpc import service_pb2, service_pb2_grpc

from disagg.errors import ConfigError
from mpillm.triton import pbtxt
from mpillm.triton.bench import load
from mpillm.triton.bench.load_request import LoadRequest
from mpillm.triton.bench.report import statistics_of, table
from mpillm.triton.client.client_options import load_array
from mpillm.triton.client.token_client import _tokens_of
from mpillm.triton.commands import fill_template
from mpillm.triton.core import triton_ready
from mpillm.triton.core.triton_counts import reading_of
from mpillm.triton.core.triton_ready import TritonError
from mpillm.triton.tritonserver import assign_ports, read_repository, triton_server
from tests.helpers.fuzzing import (
    NPY_WORDS,
    ODD_NUMBER,
    ODD_TEXT,
    ODD_VALUE,
    changed,
    damaged,
    fuzz,
    json_bytes,
    npy,
)
from tests.helpers.raw_server import GENERATED, HTTP_WORDS, raw_server
from tests.helpers.raw_server import whole as reply
from tests.helpers.triton_requests import responses

MODEL = {
    "name": "tensorrt_llm",
    "backend": "python",
    "max_batch_size": 8,
    "model_transaction_policy": {"decoupled": True},
    "parameters": [
        {"key": "gpu_device_ids", "value": {"string_value": "0,1"}},
        {"key": "gpt_model_path", "value": {"string_value": "/a"}},
    ],
}
TEMPLATE = b'max_batch_size: ${triton_max_batch_size}\nbackend: "$triton_backend" # costs $$5\n'
PBTXT = [pbtxt.dump(MODEL).encode(), TEMPLATE]
WORDS = [b"${", b"}", b"$", b'"gpu_device_ids"', b"value {", b"string_value: ", b"\\", b'"', b"    ", b",,,,"]
FILLED = st.lists(
    st.tuples(
        st.sampled_from(
            ["triton_max_batch_size", "triton_backend", "gpu_device_ids", "engine_dir", "x", "$"]
        ),
        # as a command line has it: half of a character is bytes that are not UTF-8
        ODD_TEXT.map(lambda text: os.fsdecode(text.replace("\0", "").encode(errors="surrogatepass"))),
    ),
    min_size=1,
    max_size=3,
).map(lambda pairs: ",".join(f"{name}:{value}" for name, value in pairs))


@pytest.mark.long
@fuzz(damaged(PBTXT, WORDS), FILLED, refused_by=(ConfigError, OSError), examples=100)
def test_config_pbtxt(folder: Path, text: bytes, filled: str) -> None:
    """As the command of its server and `fill-template` read it."""
    (model := folder / "repo" / "tensorrt_llm").mkdir(parents=True, exist_ok=True)
    (file := model / "config.pbtxt").write_bytes(text)
    repository = read_repository(folder / "repo", "--model_repo")
    triton_server(0, "tritonserver", repository, assign_ports([8001])[0], ["mpirun"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        fill_template.main([str(file), "--", filled])


class Stub(ModuleType):
    """Stands for what Triton's Python backend gives its models."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

    class TritonModelException(Exception):
        """What Triton logs in a line."""


@cache
def embedded() -> Any:
    with mock.patch.dict(sys.modules, {"triton_python_backend_utils": Stub("triton_python_backend_utils")}):
        from mpillm.triton.models import embedded as module

    return module


CORE = {"model_path": "m", "tp_size": 2, "end_ids": [1, 2], "dtype": "float32", "speculative_config": None}
PARAMETERS = {
    "core_config": json.dumps(CORE),
    "max_tokens_in_paged_kv_cache": "64",
    "kv_cache_free_gpu_mem_fraction": "0.9",
    "enable_kv_cache_reuse": "true",
    "batch_scheduler_policy": "max_utilization",
    "gpt_model_type": "V1",
    "max_beam_width": "1",
    "cancellation_check_period_ms": "100",
    "lora_cache_host_memory_bytes": "",
    "exclude_input_in_output": "${exclude}",
    "max_attention_window_size": "",
}


@fuzz(
    changed([CORE]).map(lambda core: json_bytes(core).decode())
    | damaged([json_bytes(CORE)]).map(lambda data: data.decode(errors="replace")),
    st.dictionaries(st.sampled_from(sorted(PARAMETERS)), ODD_TEXT | ODD_NUMBER.map(str), max_size=3),
    refused_by=Stub.TritonModelException,
    examples=120,
)
def test_parameters_of_a_model(_: Path, core: str, others: dict[str, str]) -> None:
    """Whatever a config.pbtxt has, which people change: the model loads, or Triton logs why in a line."""
    texts = PARAMETERS | {"core_config": core} | others
    config = {"parameters": {name: {"string_value": text} for name, text in texts.items()}}
    args = {"model_name": "m", "model_version": "1", "model_config": json.dumps(config)}

    def join(config: Any, program: str) -> None:
        assert isinstance(program, str) and hash(config.end_ids) is not None
        raise Built

    with (
        mock.patch.object(embedded(), "join", join),
        mock.patch.object(embedded(), "log_to"),
        mock.patch.object(embedded().faulthandler, "enable"),
        contextlib.suppress(Built),
    ):
        embedded().TritonPythonModel().initialize(args)


class Built(Exception):
    """The model would be loaded now."""


METRICS = (
    b'nv_trt_llm_request_metrics{model="m",request_type="active",version="1"} 3\n'
    b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 2\n'
    b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 8\n'
    b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused",model="m",version="1"} 8\n'
    b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64\n'
    b'nv_inference_pending_request_count{model="m"} 1\nnv_llm_input_token_len_sum 7\n'
)


@fuzz(
    damaged(
        [METRICS],
        [b"NaN", b"1e999", b"-Inf", b"1e308", b"{", b"}", b'"', b'\\"', b"nv_llm_input_token_len_sum"],
    )
)
def test_pages_of_tritons_metrics(_: Path, data: bytes) -> None:
    found = reading_of(data.decode("utf-8", "replace"))
    assert all(value is None or np.isfinite(value).all() for value in found)


class FixedReplies:
    """Fake of a server's stub: each call returns these bytes as a message, or fails."""

    def __init__(self, index: bytes, config: bytes, ready: bytes) -> None:
        pb = service_pb2
        self.RepositoryIndex = self._of(pb.RepositoryIndexResponse, index)
        self.ModelConfig = self._of(pb.ModelConfigResponse, config)
        self.ServerReady = self._of(pb.ServerReadyResponse, ready)

    def _of(self, kind: Any, data: bytes) -> Any:
        def future(*_: object, **__: object) -> Any:
            return SimpleNamespace(result=lambda timeout: kind.FromString(data), cancel=lambda: None)

        return SimpleNamespace(future=future)


def _index(names: list[str]) -> bytes:
    made = service_pb2.RepositoryIndexResponse()
    for name in names:
        made.models.add(name=name, version="1", state="READY")
    return bytes(made.SerializeToString())


def _config(inputs: list[str]) -> bytes:
    made = service_pb2.ModelConfigResponse()
    made.config.backend = "python"
    for name in inputs:
        made.config.input.add(name=name)
    return bytes(made.SerializeToString())


NAMES = st.lists(st.sampled_from(["m", "tensorrt_llm", "A" * 5000, "\x1b[2J\n", ""]), max_size=6)
INPUTS = st.sampled_from([["input_ids", "request_output_len"], ["text_input"], []])
READY = bytes(service_pb2.ServerReadyResponse(ready=True).SerializeToString())


@fuzz(
    NAMES.map(_index).flatmap(lambda data: st.just(data) | damaged([data], most=2)),
    INPUTS.map(_config).flatmap(lambda data: st.just(data) | damaged([data], most=2)),
    damaged([READY], most=1),
    st.sampled_from([None, "m"]),
    refused_by=(TritonError, DecodeError),
    found=[(_index(["A" * 5000] * 5), _config([]), READY, wanted) for wanted in (None, "m")],
)
def test_replies_of_a_tritonserver_before_a_test(
    _: Path, index: bytes, config: bytes, ready: bytes, wanted: str | None
) -> None:
    stub = FixedReplies(index, config, ready)
    channel: Any = None
    with (
        mock.patch.object(service_pb2_grpc, "GRPCInferenceServiceStub", lambda _: stub),
        mock.patch.object(triton_ready, "page", side_effect=ValueError),
        mock.patch.object(triton_ready, "_PAUSE_S", 0.001),
    ):
        for model in triton_ready.find_models("a:1", channel, wanted, 1.0):
            assert triton_ready.framework_of(model)
        triton_ready.until_ready("a:1", channel, 0.005)


REQUESTS = [LoadRequest(np.array([5, 6], np.int32), 4) for _ in range(3)]


@fuzz(
    st.lists(responses(), min_size=1, max_size=8),
    st.lists(st.sampled_from(["", "", "", "INVALID_ARGUMENT: no"]), min_size=8, max_size=8),
    refused_by=(ValueError, DecodeError),
    examples=120,
)
def test_answers_to_core_model_over_grpc(_: Path, sent: list[bytes], errors: list[str]) -> None:
    """A response that a stream cannot read ends the stream with its error (`Stream._read`)."""
    target = load.Target("a:1", "m", 1.0, True)
    sender = load._GrpcLoad(target, REQUESTS, 3, True)
    stream: Any = SimpleNamespace(url="a:1", open={1, 2, 3}, ended="")
    for one, error in zip(sent, errors, strict=False):
        sender.receive(stream, service_pb2.ModelInferResponse.FromString(one), error)
    assert sender._ended.is_set() == (not stream.open), "all have ended, or some are owed"
    _check_table(sender.records)


def _check_table(records: list[Any]) -> None:
    if (found := statistics_of(records))["requests"]:
        json.dumps(found, allow_nan=False)
        assert all(len(line) < 200 for line in table(found))


@pytest.mark.long
@fuzz(
    changed([GENERATED]).map(lambda answer: reply(json_bytes(answer)))
    | changed([GENERATED, {"error": "e"}]).map(lambda answer: reply(b"data: %b\n\n" % json_bytes(answer)))
    | damaged([reply(json_bytes(GENERATED)), reply(b"data: %b\n\n" % json_bytes(GENERATED))], HTTP_WORDS)
    | ODD_VALUE.map(lambda value: reply(json_bytes({"sequence_length": value}))),
    st.booleans(),
)
def test_answers_to_core_model_over_http(_: Path, data: bytes, streaming: bool) -> None:
    """Each request has its answer, or its error in a line."""
    server = raw_server()
    server.reply = data
    n = threading.active_count()
    records = load.over_http(load.Target(server.address, "m", 20.0, streaming), REQUESTS[:2], np.zeros(2), 2)
    assert threading.active_count() <= n
    assert all(record.error or record.output_len > 0 for record in records)
    assert all("\n" not in record.error and len(record.error) < 3000 for record in records)
    _check_table(records)


@fuzz(
    damaged([npy([[5, 6, 7]])], NPY_WORDS, most=2),
    damaged([b"5,6,7\n8\n", b'"5",6\n'], [b'"', b",", b"\0", b"\r", b"9" * 5000, b'"' + b"1" * 140_000]),
    st.booleans(),
    refused_by=ConfigError,
)
def test_files_of_triton_client(folder: Path, array: bytes, tokens: bytes, is_array: bool) -> None:
    """An adapter's arrays, and tokens of a prompt."""
    if is_array:
        (file := folder / "model.lora_weights.npy").write_bytes(array)
        assert isinstance(load_array(file), np.ndarray)
    else:
        (file := folder / "tokens.csv").write_bytes(tokens)
        np.array([_tokens_of(file)], np.int32)
