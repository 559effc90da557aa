"""Options of requests to servers: where they have an effect, and where they are errors."""

from __future__ import annotations

import json

import pytest

from disagg.errors import ConfigError
from mpillm.cores.openai_client.dialect import (
    CHAT_DIALECTS,
    DIALECTS,
    RESPONSES_DIALECTS,
    TEXT_DIALECTS,
    Sampling,
    body,
)
from mpillm.data.chat_request import chat_prompt, responses_prompt
from mpillm.options.options import parse_run, parse_serve

URL = ("--trtllm_server_urls", "a:1", "--core_type", "trtllm_endpoint")


@pytest.mark.parametrize("option", ["reset_prefix_cache", "profile"])
@pytest.mark.parametrize("server", [URL, ("--server", "vllm", "--model_path", "m"), ("--server", "sglang")])
def test_servers(option: str, server: tuple[str, ...]) -> None:
    assert getattr(parse_run([*server, f"--{option}"]), option) is True


def test_the_embedded_engine() -> None:
    assert parse_run(["--reset_prefix_cache"]).reset_prefix_cache
    assert parse_serve(["--reset_prefix_cache"]).reset_prefix_cache


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--core_type", "dummy", "--reset_prefix_cache"), "has no effect on the dummy core"),
        (("--core_type", "trtllm_hlapi", "--reset_prefix_cache"), "has no effect on the trtllm_hlapi core"),
        (("--profile",), "--profile true has no effect on the torch core"),
        (("--server", "tritonserver", "--profile"), "has no effect on the triton_grpc core"),
    ],
    ids=" ".join,
)
def test_cores_without_them(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run(args)


@pytest.mark.parametrize("args", [(*URL, "--reset_prefix_cache"), (*URL, "--profile")], ids=" ".join)
def test_serve_in_front_of_servers(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="serve does not pass it to servers behind it"):
        parse_serve(args)


def set_by_mpillm() -> set[str]:
    """Return the fields that mpillm sets in any of its requests."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    sampling = Sampling(2, 2, 0.5, 3, 0.5, 7, ("s",), (5,), ignore_eos=True, cache_salt="c")
    names = set[str]()
    for dialect in (*DIALECTS, *TEXT_DIALECTS, *CHAT_DIALECTS, *RESPONSES_DIALECTS):
        if dialect.options:
            prompt = responses_prompt(messages) if dialect in RESPONSES_DIALECTS else chat_prompt(messages)
            names |= json.loads(body(dialect, "m", prompt, sampling, stream=True)).keys()
    return names


def test_fields_of_mpillm_are_not_in_extra_body() -> None:
    """Fields of `/v1/responses`, and those that ask for token ids, were replaced without a word."""
    names = set_by_mpillm() - {"store"}  # a user may want the server to keep responses
    assert names > {"input", "instructions", "max_output_tokens", "return_token_ids", "detokenize"}
    for name in names:
        with pytest.raises(ConfigError, match=f"mpillm sets {name} by itself"):
            parse_run([*URL, "--extra_body", json.dumps({name: 1})])
