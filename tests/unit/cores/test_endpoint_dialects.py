"""Clients find out what a server takes, which model it has and what it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.cores.capabilities import NamesFrameworks
from mpillm.errors import RunError
from tests.helpers.endpoint_cores import FINAL, FIRST, Rows, core_of, failure, refuses, requests, started
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
    plain,
)


def test_a_server_with_detokenize() -> None:
    """TensorRT-LLM's server refuses unknown fields, and gives token ids in place of text."""
    with ScriptedServer(refuses("return_token_ids")) as server, started(server) as core:
        core.enqueue(requests([[4, 5]]))
        assert Rows(core).until(1) == [(10, FIRST | FINAL, answer_of([4, 5], 4))]
        assert server.bodies()[-1]["detokenize"] is False


TEXT = "Hello, world"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer that makes each character of ASCII a token."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    vocab = {chr(i): i for i in range(32, 127)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    return folder


def text_only(request: Request) -> Reply:
    """Answer as `transformers serve`: text in, text out, no unknown fields, and no [DONE]."""
    body = request.json
    if not isinstance(body["prompt"], str):
        return plain({"detail": "prompt must be a string."}, "400 Bad Request")
    if unknown := set(body) - {
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "stream",
        "stop",
        "seed",
        "top_p",
    }:
        return plain({"detail": f"Unexpected fields in the request: {unknown}"}, "422 Unprocessable Entity")
    text = body["prompt"][::-1][: body["max_tokens"]]
    counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(text)}
    if not body.get("stream"):
        return plain({**choice(None, text, "stop"), "usage": counts})
    pieces = [chunk(event(choice(None, text[i : i + 3]))) for i in range(0, len(text), 3)]
    return Reply([STREAM, *pieces, chunk(event({**choice(None, "", "stop"), "usage": counts})) + chunk(b"")])


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_a_server_of_text(tokenizer_folder: Path, scenario: str) -> None:
    prompt = [ord(letter) for letter in TEXT]
    with (
        ScriptedServer(text_only) as server,
        started(
            server,
            f"--scenarios={scenario}",
            f"--model_path={tokenizer_folder}",
            core_options={"model": MODEL},
        ) as core,
    ):
        core.enqueue(requests([prompt], max_output=7))
        (*first, last) = Rows(core).until(1)
        assert last[2] == prompt[::-1][:7]
        assert all(row == (10, FIRST, [ord("d")]) for row in first)
        statistics = core.statistics()
    assert (
        statistics["retokenized"],
        statistics["other_prompt_length"],
        statistics["other_answer_length"],
        statistics["other_text_length"],
    ) == (1, 0, 0, 0)


def test_what_a_server_of_text_lacks(tokenizer_folder: Path) -> None:
    with (
        ScriptedServer(text_only) as server,
        started(server, f"--model_path={tokenizer_folder}", core_options={"model": MODEL}) as core,
    ):
        core.enqueue(requests([[65]], min_output=3))
        assert failure(core).startswith(f"{server.url}/v1/completions: it has no min_tokens")


def test_text_without_a_tokenizer() -> None:
    with ScriptedServer(text_only) as server, pytest.raises(RunError) as caught, started(server):
        pass
    assert re.match(f"{server.url}.* gives no token ids: .*--model_path", str(caught.value))


def test_tokens_made_from_text_in_a_test_of_tokens(tokenizer_folder: Path) -> None:
    """TEST06 compares first tokens and end tokens, which must be the server's, not those made here."""
    options = (f"--model_path={tokenizer_folder}", "--compliance_test=TEST06")
    with (
        ScriptedServer(text_only) as server,
        pytest.raises(RunError) as caught,
        started(server, *options, core_options={"model": MODEL}),
    ):
        pass
    assert re.match(f"{server.url}.* gives no token ids: .*TEST06 checks", str(caught.value))
    with ScriptedServer() as server, started(server, "--compliance_test=TEST06"):
        pass


# --- models ---


def models(*names: str) -> dict[str, Callable[[Request], Reply]]:
    return {"/v1/models": lambda request: plain({"data": [{"id": name} for name in names]})}


@pytest.mark.parametrize(
    ("names", "wanted", "words"),
    [
        (
            ["llama-2-70b", "mixtral"],
            "llama-2-7b",
            r"it has no model llama-2-7b \(did you mean 'llama-2-70b'\?\); it has llama-2-70b",
        ),
        (["a", "b"], None, "lists a, b: name one with --core_options model:NAME"),
        ([], None, "lists no model: name one"),
    ],
)
def test_a_missing_model(names: list[str], wanted: str | None, words: str) -> None:
    options = {} if wanted is None else {"model": wanted}
    with (
        ScriptedServer(others=models(*names)) as server,
        pytest.raises(RunError) as caught,
        started(server, core_options=options),
    ):
        pass
    assert re.match(f"{server.url}/v1/models:? {words}", str(caught.value))


def test_the_model_of_several() -> None:
    with ScriptedServer(others=models("a", "b")) as server, started(server, core_options={"model": "b"}):
        assert server.bodies()[-1]["model"] == "b"


def routes_of(owner: str, version: object = None) -> dict[str, Callable[[Request], Reply]]:
    """Return the replies of a server that identify it, shortened."""
    card = {"id": MODEL, "object": "model", "created": 1795357545, "owned_by": owner, "root": MODEL}
    routes: dict[str, Callable[[Request], Reply]] = {"/v1/models": lambda request: plain({"data": [card]})}
    path = "/server_info" if owner == "sglang" else "/version"
    return routes if version is None else {**routes, path: lambda request: plain(version)}


@pytest.mark.parametrize(
    ("routes", "frameworks"),
    [
        (routes_of("vllm", {"version": "0.32.0"}), ["vLLM 0.32.0"]),
        (routes_of("mpillm", {"version": "0.1.0"}), ["mpillm 0.1.0"]),
        (routes_of("sglang", {"version": "0.5.23", "dtype": "auto"}), ["SGLang 0.5.23"]),
        (routes_of("tensorrt_llm"), ["TensorRT-LLM"]),
        (routes_of("vllm", ["0.32"]), ["vLLM"]),
        (routes_of("HuggingFaceTB", {"version": "1"}), []),  # the model's maker, from transformers serve
        ({}, []),
    ],
)
def test_what_the_server_is(routes: dict[str, Callable[[Request], Reply]], frameworks: list[str]) -> None:
    with ScriptedServer(others=routes) as server, started(server) as core:
        assert isinstance(core, NamesFrameworks) and core.frameworks() == frameworks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"modle": "x"},
            "--core_options modle: this core has no such option .did you mean 'model'..; it has:"
            " model, retry_s",
        ),
        ({"retry_s": "soon"}, "--core_options retry_s:soon: expected a number"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), core_of("localhost:1", core_options=options):
        pass


def test_stop_words_of_several_tokens() -> None:
    with (
        pytest.raises(ConfigError, match=r"--stop_words \[13, 13\]: a server accepts"),
        core_of("localhost:1", "--stop_words=[[13, 13]]"),
    ):
        pass
