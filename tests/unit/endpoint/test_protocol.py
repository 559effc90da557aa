"""Any body is understood, or refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.comms.messages import REQUEST, RequestFlag
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.protocol import ServedModel, encode, read, render
from tests.helpers.odd_requests import BODIES, JSON

SERVED = ServedModel(("m",), ByteTokenizer(), PromptLimits(256, 64), max_output_len=9)


@pytest.mark.long
@settings(max_examples=300)
@given(body=BODIES | JSON, chat=st.booleans())
def test_any_body(body: Any, chat: bool) -> None:
    """A body that is understood fits a row of REQUEST; one that is refused gets a reason in JSON."""
    try:
        request = read(json.dumps(body).encode(), chat, SERVED)
        prompts = encode(render(request, SERVED), SERVED)
    except ApiError as error:
        details = json.loads(json.dumps(error.body()).encode())["error"]
        assert error.status in (400, 404) and details["message"] and details["type"]
        return
    rows = np.zeros(1, REQUEST)
    for name, value in request.row.items():
        rows[name] = value
    (row,) = rows
    assert row["temperature"] == 0 or 0.0099 < row["temperature"] <= 100
    assert 0 < row["top_p"] <= 1
    for prompt, wanted in prompts:
        assert len(prompt) > 0 and wanted > 0 and len(prompt) + wanted <= 64
        assert all(0 <= token < 256 for token in prompt)


@given(data=st.binary(max_size=40))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        read(data, False, SERVED)
    assert error.value.status == 400


def test_parameters_reach_the_row() -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "seed": -1,
        "ignore_eos": True,
        "stream": True,
        "max_tokens": 5,
    }
    request = read(json.dumps(body).encode(), False, SERVED)
    flags = RequestFlag(int(request.row["flags"]))
    assert flags == RequestFlag.IGNORE_END | RequestFlag.IGNORE_STOP | RequestFlag.STREAM
    row = request.row
    assert (row["temperature"], row["top_k"], row["top_p"], row["seed"]) == (0.5, 7, 0.25, 0xFFFFFFFF)
    plain = read(b'{"prompt": "x"}', False, SERVED)
    assert (
        plain.row["flags"] == 0
        and plain.row["temperature"] == 1
        and [(prompt.tolist(), wanted) for prompt, wanted in encode(plain, SERVED)] == [([ord("x")], 16)]
    )
    chat = read(b'{"messages": [{"role": "user", "content": "x"}]}', True, SERVED)
    assert encode(render(chat, SERVED), SERVED)[0][1] == 9
    own = ServedModel(
        ("m",), ByteTokenizer(), PromptLimits(256, 64), temperature=0.0, seed=3, top_k=4, top_p=0.5
    )
    row = read(b'{"prompt": "x"}', False, own).row
    assert (row["temperature"], row["top_k"], row["top_p"], row["seed"]) == (0, 4, 0.5, 3)


def test_more_min_tokens_than_a_chat_may_have() -> None:
    """As with vLLM, the default of max_tokens does not rise. The server's own minimum is no error."""
    body = {"messages": [{"role": "user", "content": "x"}]}

    def max_tokens(served: ServedModel, **more: int) -> int:
        return encode(render(read(json.dumps(body | more).encode(), True, served), served), served)[0][1]

    assert max_tokens(SERVED, min_tokens=9) == 9
    assert max_tokens(SERVED, min_tokens=10, max_tokens=10) == 10
    with pytest.raises(ApiError, match="min_tokens 10 is more than max_tokens, by default 9") as error:
        max_tokens(SERVED, min_tokens=10)
    assert (error.value.status, error.value.param) == (400, "min_tokens")
    assert max_tokens(replace(SERVED, min_output_len=20)) == 9


def test_whole_numbers_with_a_point() -> None:
    """JSON does not distinguish 5 from 5.0, and some clients write all numbers with a point."""
    body = {"prompt": [81, 212.0], "max_tokens": 5.0, "seed": 7.0, "n": 2.0, "stop_token_ids": [9.0]}
    request = read(json.dumps(body).encode(), False, SERVED)
    assert (request.prompts, request.max_tokens, request.n) == ([[81, 212]], 5, 2)
    assert request.row["seed"] == 7 and request.stop_token_ids == {9}
    assert read(b'{"prompt": [[3.0], [4]]}', False, SERVED).prompts == [[3], [4]]
    for wrong in ({"prompt": [81.5]}, {"prompt": [1.0], "max_tokens": 5.5}, {"prompt": [1e400]}):
        with pytest.raises(ApiError):
            read(json.dumps(wrong).encode(), False, SERVED)


def test_the_text_of_a_chat_counts_as_one_to_tokenize() -> None:
    """Long texts are not tokenized in the event loop's thread, where others would wait for them."""
    body = {"messages": [{"role": "user", "content": "x" * 100}]}
    chat = read(json.dumps(body).encode(), True, SERVED)
    assert render(chat, SERVED).n_characters == 100
