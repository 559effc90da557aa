"""The readers of bytes from outside take CPU time that grows linearly with the bytes.

Each reader gets small inputs of its format in which one piece repeats n, 2n and 4n bytes long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.cores.openai_client.answer import AnswerError, CompletionResponse
from mpillm.cores.openai_client.http_connection import HttpConnection, HttpError
from mpillm.cores.openai_client.server_counts import ServerCounts, of_iterations, reading_of
from mpillm.data.dataset import PromptLimits, load_dataset
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.protocol import ServedModel, encode, read
from mpillm.engine.shape.read_config import load_model_config
from mpillm.loadgen.logs import advice, logged_errors, read_answers, read_detail, unsatisfied
from mpillm.report.run_files import RunFiles
from mpillm.report.run_list import find_runs
from mpillm.telemetry.rank_log import last_read
from tests.helpers.fuzzing import REPEATED
from tests.helpers.growth import grows_faster

LIMITS = PromptLimits(vocab_size=256, max_seq_len=1000, max_output_len=10)
SERVED = ServedModel(("m",), ByteTokenizer(), LIMITS)
REFUSALS = (ApiError, AnswerError, ConfigError, HttpError, ValueError)


def bodies(_: Path, data: bytes) -> None:
    for chat in (False, True):
        with contextlib.suppress(*REFUSALS):
            list(encode(read(data, chat, SERVED), SERVED))


def events(_: Path, data: bytes) -> None:
    for n in (len(data), 4096):
        answer = CompletionResponse(True, 4)
        for at in range(0, len(data), n):
            answer.feed(data[at : at + n], 0.0)
        answer.finish(1.0)


def http(_: Path, data: bytes) -> None:
    connection, nothing = HttpConnection(), lambda *_: None
    transport: Any = SimpleNamespace(write=nothing, abort=nothing)
    receiver: Any = SimpleNamespace(on_head=nothing, on_body=nothing, on_end=nothing, on_broken=nothing)
    connection.connection_made(transport)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", receiver)
    for at in range(0, len(data), 4096):
        if not connection.closed:
            connection.data_received(data[at : at + 4096])


def metrics(_: Path, data: bytes) -> None:
    text = data.decode()
    reading_of(text)
    of_iterations(text, ServerCounts())


def loadgen(folder: Path, data: bytes) -> None:
    for name in ("mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json"):
        (folder / name).write_bytes(data)
    for reader in (read_detail, logged_errors, unsatisfied, advice):
        with contextlib.suppress(*REFUSALS):
            reader(folder)
    read_answers(folder / "mlperf_log_accuracy.json")


def run_directory(folder: Path, data: bytes) -> None:
    for name in ("result.json", "config.json", "plan.json", "ranks.json", "timeline.jsonl", "telemetry.json"):
        (folder / name).write_bytes(data)
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / "rank_0000.log").write_bytes(data)
    RunFiles.read(folder)
    find_runs(folder)
    last_read(folder / "ranks" / "rank_0000.log")


def rows(folder: Path, data: bytes) -> None:
    for suffix in ("jsonl", "csv", "txt"):
        (file := folder / f"prompts.{suffix}").write_bytes(data)
        with contextlib.suppress(*REFUSALS):
            load_dataset(file, ByteTokenizer(), LIMITS)


def yaml(folder: Path, data: bytes) -> None:
    (file := folder / "d.yaml").write_bytes(data)
    config = disagg.load(str(file))
    disagg.parse(disagg.dump(config))


def model(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    load_model_config(str(folder))


class Parser(NamedTuple):
    """A reader, and inputs of its format; `@` is where a piece repeats."""

    read: Callable[[Path, bytes], object]
    inputs: tuple[bytes, ...]
    max_bytes: int = 240_000


_LLAMA = b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, '
_HEAD = b"HTTP/1.1 200 OK\r\n"
PARSERS = [
    Parser(bodies, (b"@", b'{"prompt": "@"}', b'{"prompt": [@]}', b'{"messages": [@]}', b'{"stop": ["@')),
    Parser(events, (b"@", b"data: @", b'data: {"choices": [{"text": "@"}]}\n\n', b'data: {"choices": [@')),
    Parser(http, (b"@", _HEAD + b"@", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n@")),
    Parser(metrics, (b"@", b'vllm:num_requests_running{engine="@"} 1\n', b"vllm:x{@} 1\n", b"[{@")),
    Parser(
        loadgen, (b"@", b':::MLLOG {"key": "a", "value": "@"}\n', b":::MLLOG @", b'[{"data": "@"}]'), 80_000
    ),
    Parser(run_directory, (b"@", b'{"status": "@"}', b'{"failures": [@', b'{"a": {"value": "@"}}\n'), 24_000),
    Parser(rows, (b"@", b'{"prompt": "@"}\n', b'{"input_tokens": [@]}\n', b'prompt,a\n"@'), 40_000),
    Parser(yaml, (b"@", b'a: "@"', b"a: [@", b"executors:\n  urls: @"), 8_000),
    Parser(model, (b"@", _LLAMA + b'"dtype": "@"}', _LLAMA + b'"rope_scaling": {"type": "@"}}', b"[@")),
]


@pytest.mark.long
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.read.__name__)
def test_a_parser_takes_linear_time(parser: Parser, tmp_path: Path) -> None:
    slow = []
    for text in parser.inputs:
        head, _, tail = text.partition(b"@")
        for piece in map(str.encode, REPEATED):

            def call(n: int, piece: bytes = piece, head: bytes = head, tail: bytes = tail) -> None:
                with contextlib.suppress(*REFUSALS):
                    parser.read(tmp_path, head + piece * (n // len(piece)) + tail)

            if growth := grows_faster(call, (parser.max_bytes // 16, parser.max_bytes)):
                slow.append(f"{head!r} + n * {piece!r} + {tail!r}: {growth}")
    assert slow == []
