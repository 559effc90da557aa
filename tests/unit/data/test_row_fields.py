"""Fields of single rows: which of them have an effect, and how they travel."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.data.chat_request import ChatRequests, chat_prompt
from mpillm.data.conversation_dataset import load_conversations
from mpillm.data.dataset import Dataset, PromptLimits, load_dataset
from mpillm.data.generated_history import GeneratedHistory
from mpillm.data.row_fields import FieldUse, own_fields, split_fields, with_fields
from mpillm.data.tokenizer import ByteTokenizer

FORMAT = {"type": "json_object"}
USER = [{"role": "user", "content": "Où"}]
BODY = {"model": "m", "messages": USER, "max_tokens": 7, "temperature": 0.5, "response_format": FORMAT}
BATCH = {"custom_id": "1", "url": "/v1/chat/completions", "body": {**BODY, "guided_x": [1]}}


def load(tmp_path: Path, use: FieldUse, *rows: Any, conversations: bool = False) -> Dataset:
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = ChatRequests() if use is FieldUse.ALL else ByteTokenizer()
    limits = PromptLimits(max_output_len=9, own_fields=use)
    return (load_conversations if conversations else load_dataset)(file, tokenizer, limits)


def sent(dataset: Dataset, sample: int) -> tuple[Any, str]:
    fields, prompt = split_fields(bytes(dataset.sample(sample).tolist()))
    return fields, prompt.decode()


@pytest.mark.parametrize("conversations", [False, True])
def test_a_servers_requests_have_their_rows_fields(tmp_path: Path, conversations: bool) -> None:
    """A batch's body is sent whole; of other rows, the fields with known names, and `extra`."""
    plain = {"prompt": "Où", "stop": ["x"], "ignore_eos": True, "category": "c", "extra": {"a": None, "b": 2}}
    last: dict[str, Any] = {"messages": USER, "seed": 3, "tools": [{"type": "function"}]}
    dataset = load(tmp_path, FieldUse.ALL, BATCH, plain, last, conversations=conversations)
    assert sent(dataset, 0) == ({"response_format": FORMAT, "guided_x": [1]}, chat_prompt(USER))
    assert sent(dataset, 1) == ({"stop": ["x"], "b": 2}, chat_prompt(USER))
    assert sent(dataset, 2) == ({}, chat_prompt(USER, last["tools"]))
    columns = {name: values.tolist() for name, values in dataset.sampling.items()}
    assert (
        columns["temperature"][0] == 0.5 and columns["min_output"][1] == math.inf and columns["seed"][2] == 3
    )
    assert all(math.isnan(columns["temperature"][i]) for i in (1, 2))
    rows = "b, guided_x, ignore_eos, response_format, seed, stop, temperature"
    assert f"its rows set {rows} for their own requests" in dataset.note
    assert "its model has no effect" in dataset.note


def test_other_cores_follow_sampling_options_only(tmp_path: Path) -> None:
    neutral = {
        "n": 1,
        "tool_choice": "auto",
        "stop": [],
        "logprobs": False,
        "response_format": {"type": "text"},
    }
    body = {"messages": USER, "top_p": 0.5, "user": "u", **neutral}
    dataset = load(tmp_path, FieldUse.SAMPLING, {"body": body})
    assert {name: values.tolist() for name, values in dataset.sampling.items()} == {"top_p": [0.5]}
    assert dataset.sample(0).tolist() == ByteTokenizer().encode("Où")
    note = "its logprobs, response_format, stop, tool_choice, user have no effect"
    assert note in dataset.note and "its rows set top_p for" in dataset.note
    wrong = r"f.jsonl:2: response_format is .*; only a server can follow it: remove it, or send"
    for conversations in (False, True):
        with pytest.raises(ConfigError, match=wrong):
            load(tmp_path, FieldUse.SAMPLING, {"prompt": "a"}, BATCH, conversations=conversations)


def test_without_a_use_a_line_names_the_fields(tmp_path: Path) -> None:
    dataset = load(tmp_path, FieldUse.UNUSED, BATCH, {"prompt": "a", "n": 3, "seed": 1})
    assert not dataset.sampling and dataset.sample(0).tolist() == ByteTokenizer().encode("Où")
    assert dataset.note == "its guided_x, model, n, response_format, seed, temperature have no effect"


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"temperature": -1}, "temperature is -1; must be a number from 0 to 100"),
        ({"temperature": True}, "temperature is true; must be a number"),
        ({"top_p": 0}, "top_p is 0; must be a number from 1e-09 to 1"),
        ({"top_k": 1.5}, "top_k is 1.5; must be a whole number from -1 to 2147483647"),
        ({"seed": 1 << 40}, "seed is 1099511627776; must be a whole number from 0 to 4294967295"),
        ({"min_tokens": "many"}, 'min_tokens is "many"; must be a whole number'),
        ({"ignore_eos": 5}, "ignore_eos is 5; must be true or false"),
        ({"n": 2}, "n is 2; must be 1: a request has one answer"),
        ({"extra": [1]}, r"extra is \[1\]; must be an object"),
        ({"extra_body": {"model": "m"}}, "extra_body has model, which mpillm sets"),
        ({"stop": "x" * (1 << 20)}, "stop: 1048587 bytes as JSON; at most 1048576"),
        ({"stop": {1, 2}}, "stop: not JSON"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias: not JSON"),
    ],
)
def test_a_wrong_field_is_an_error(row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        own_fields(row, FieldUse.ALL)


def test_values_of_csv_are_texts() -> None:
    row = {"temperature": "0.5", "top_k": "-1", "ignore_eos": "False", "seed": "", "min_tokens": "4"}
    assert own_fields(row, FieldUse.ALL).sampling == {"temperature": 0.5, "top_k": 0, "min_output": 4}


def test_fields_do_not_change_the_prompt() -> None:
    prompt = array("i", list(chat_prompt(USER).encode()))
    assert with_fields(prompt, {}) == prompt
    fields = {"stop": ["\N{LATIN SMALL LETTER Y WITH DIAERESIS}", '"\n']}
    assert split_fields(bytes(with_fields(prompt, fields).tolist())) == (fields, bytes(prompt.tolist()))
    assert split_fields(b"") == ({}, b"")


def test_each_turn_has_its_own_fields(tmp_path: Path) -> None:
    """In MLCommons' and AIPerf's forms; also where the prompt has responses of the test."""
    flat = [
        {"conversation_id": "x", "turn": 1, "role": "user", "content": "A", "temperature": 0.5},
        {"conversation_id": "x", "turn": 2, "role": "assistant", "content": "B"},
        {"conversation_id": "x", "turn": 3, "role": "user", "content": "C", "tool_choice": "none"},
    ]
    turns = {"temperature": 1, "turns": [{"text": "A"}, {"text": "B", "temperature": 2, "extra": {"c": 1}}]}
    dataset = load(tmp_path, FieldUse.ALL, *flat, turns, conversations=True)
    assert dataset.turns is not None and dataset.turns.are_generated
    np.testing.assert_array_equal(dataset.sampling["temperature"], [0.5, np.nan, 1, 2])
    history = GeneratedHistory(dataset.turns.conversations, ChatRequests(), PromptLimits())
    answer = {"role": "assistant", "content": "yes"}
    for number, fields, text in ((0, {"tool_choice": "none"}, "C"), (1, {"c": 1}, "B")):
        made = split_fields(bytes(history.prompt(number, [answer]).tolist()))
        messages = [{"role": "user", "content": "A"}, answer, {"role": "user", "content": text}]
        assert made == (fields, chat_prompt(messages).encode())
