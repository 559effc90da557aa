"""From the rows of a data set to samples: prompts as text, tokens or chats, or the lengths of a trace."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from disagg.errors import nearest
from mpillm.data.row_fields import LENGTHS, NO_FIELDS, FieldUse, OwnFields, own_fields
from mpillm.files import excerpt

_KEYS = ("prompt", "input_tokens", "messages", "text")  # of prompts; the first one in a row is used
# Keys of a request or a trace without effect: the run's options, or LoadGen, determine these
WITHOUT_EFFECT = ("timestamp", "delay", "delay_seconds", "session_id", "model", "stream")
_MAX_KEYS_LENGTH = 300  # characters of a row's keys in a message
_MAX_LENGTH = 1 << 40
_MAX_S = 1e6  # of a delay
MAX_STAMP_S = 1e10  # of a time stamp; those of some traces count from 1970


class Columns(NamedTuple):
    """Names from --prompt_column and --output_len_column; None: the known names."""

    prompt: str | None = None
    output_len: str | None = None


KNOWN = Columns()


class Trace(NamedTuple):
    """Length of a prompt, and hashes of its blocks. Blocks with equal hashes are equal."""

    length: int
    hash_ids: tuple[int, ...]
    block: int = 512  # tokens per hash; Mooncake's


Prompt: TypeAlias = "str | array[int] | list[dict[str, Any]] | Trace"
"""Text, checked tokens, a chat, or a trace's entry."""


class Sample(NamedTuple):
    """A row's prompt and output length."""

    prompt: Prompt
    output_len: int | None = None
    unused: frozenset[str] = frozenset()  # the row's keys that have no effect
    own: OwnFields = NO_FIELDS
    tools: list[Any] | None = None  # that the model may call, if the prompt is a chat


def sample_of(row: Any, vocab_size: int, columns: Columns = KNOWN, use: FieldUse = FieldUse.UNUSED) -> Sample:
    """Convert a row to a sample. `use`: of its own fields. Raises ValueError for a wrong row."""
    if isinstance(row, str):
        if columns != KNOWN:
            raise ValueError(
                "a line of text has no columns: --prompt_column and --output_len_column name some"
            )
        return Sample(_text(row, "the line"))
    if not isinstance(row, dict):
        raise ValueError(f'a JSON {_json_type(row)}, not an object with "prompt" or "input_tokens"')
    is_body = False
    if columns.prompt is None:
        row, is_body = (body := body_of(row)), body is not row
    if columns.prompt is not None:
        prompt = _prompt(_named(row, columns.prompt, "prompt_column"), columns.prompt, vocab_size)
    else:
        prompt = _known_prompt(row, vocab_size)
    output_len = _output_len(row, columns.output_len)
    row = {key: value for key, value in row.items() if key not in columns}
    own, tools = own_fields(row, use, is_body), tools_of(row)
    unused = own.unused.union(key for key in WITHOUT_EFFECT if key in row)
    if tools and not isinstance(prompt, list):
        tools, unused = None, unused | {"tools"}
    return Sample(prompt, output_len, unused, own, tools)


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a row's model may call; None: none. Raises ValueError for another type."""
    tools = row.get("tools")
    if tools not in (None, "") and not isinstance(tools, list):
        raise ValueError(f"tools is {excerpt(tools)}; must be an array")
    return tools or None


def body_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request of a row of OpenAI's batch API; any other row unchanged. Raises ValueError."""
    body, url = row.get("body"), row.get("url")
    if not isinstance(body, dict):
        if "custom_id" in row and "url" in row:
            raise ValueError(f"body is {excerpt(body)}; must be an object, the request")
        return row
    if isinstance(url, str) and not url.rstrip("/").endswith("completions"):
        raise ValueError(f"url is {excerpt(url)}; must be that of a chat or a completion")
    return body


def _known_prompt(row: Mapping[str, Any], vocab_size: int) -> Any:
    present = [key for key in _KEYS if key in row]
    if not present and "input_length" in row:
        return _trace(row)
    if not present and "conversations" in row:
        raise ValueError(_SHARE)
    if not present and {"conversation_id", "turn", "role"} <= set(row):
        raise ValueError(_TURNS)
    if not present and any(key in row for key in ("turns", "prompt_0", "requests")):
        raise ValueError(_CONVERSATION)
    if "prompt" in row and "input_tokens" in row:
        raise ValueError('both "prompt" and "input_tokens"')
    if not present:
        names = ", ".join(f"{key}{nearest(key, _KEYS)}" for key in row) or "no key"
        hint = "; name the prompt's by --prompt_column" if row else ""
        raise ValueError(f'neither "prompt" nor "input_tokens", but {names[:_MAX_KEYS_LENGTH]}{hint}')
    return _prompt(row[present[0]], present[0], vocab_size)


_USE = "use `run --harness conversations` (for a running server: with --url)"
_CONVERSATION = f"a conversation, not a prompt; {_USE}"
_SHARE = (
    f"a ShareGPT conversation, not a prompt; {_USE}, or write the first turns by\n"
    '  python3 -c \'import json, sys; [print(json.dumps({"prompt": c["conversations"][0]["value"]}))'
    ' for c in map(json.loads, sys.stdin) if c["conversations"]]\' < FILE > prompts.jsonl'
)
_TURNS = (
    f"a turn of a conversation, not a prompt; {_USE}, or write a chat up to each user's turn by\n"
    '  python3 -c \'import json, sys; h = {}; [print(json.dumps({"messages": h[t["conversation_id"]]}))'
    ' for t in map(json.loads, sys.stdin) if t.get("content") and not h.setdefault(t["conversation_id"],'
    ' []).append({"role": t["role"], "content": t["content"]}) and t["role"] == "user"]\''
    " < FILE > prompts.jsonl"
)


def _named(row: Mapping[str, Any], column: str, option: str) -> Any:
    if column not in row:
        names = ", ".join(map(str, row))[:_MAX_KEYS_LENGTH] or "none"
        raise ValueError(f"no column {column} (--{option}){nearest(column, row)}; there are {names}")
    return row[column]


def _prompt(value: Any, key: str, vocab_size: int) -> Any:
    """Return the text, tokens or messages of a prompt, by the type of `value`."""
    is_list = isinstance(value, list)
    if key == "input_tokens" or (is_list and value and type(value[0]) is int and key != "messages"):
        return _tokens(value, key, vocab_size)
    if is_list and len(value) > 1 and all(isinstance(one, (str, list)) for one in value):
        raise ValueError(f"{key} has {len(value)} prompts; must be one, in a row of its own")
    if key == "messages" or (is_list and value and all(isinstance(one, dict) for one in value)):
        return chat_of(value, key)
    return _text(value, key)


def _text(prompt: Any, key: str) -> str:
    if not isinstance(prompt, str):
        raise ValueError(f"{key} is a JSON {_json_type(prompt)}, not a string")
    if not prompt.strip():
        raise ValueError(f"{key} is empty")
    return unicode_of(prompt, key)


def unicode_of(text: str, key: str) -> str:
    """Return a text that can be encoded. Raises ValueError that names `key`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key} has half a surrogate pair at character {error.start + 1}") from error
    return text


def chat_of(messages: Any, key: str) -> list[dict[str, Any]]:
    """Return checked messages, with their content as text. Raises ValueError that names `key`."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key} is {excerpt(messages)}; must be an array of messages")
    chat = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{key} has {excerpt(message)}; must be objects with role and content")
        content = message.get("content")
        if isinstance(content, list):  # parts; a language model reads only text
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"{key} has content {excerpt(content)}; only parts of text can be read")
            content = "\n".join(part for part in parts if isinstance(part, str))
        if content is None and "tool_calls" in message:
            content = ""
        if not isinstance(content, str):
            raise ValueError(f"{key} has content {excerpt(content)}; must be a string")
        chat.append({**message, "content": unicode_of(content, key)})
    return chat


def _tokens(tokens: Any, key: str, vocab_size: int) -> array[int]:
    if not isinstance(tokens, list):
        raise ValueError(f"{key} is a JSON {_json_type(tokens)}, not an array")
    if not tokens:
        raise ValueError(f"{key} is empty")
    if set(map(type, tokens)) != {int}:
        wrong = next(token for token in tokens if type(token) is not int)
        raise ValueError(f"{key} has {excerpt(wrong)}, which is not an integer")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{key} has {token}; token ids are 0 to {vocab_size - 1}")
    return array("i", tokens)


def _trace(row: Mapping[str, Any]) -> Trace:
    return Trace(length_of(row["input_length"], "input_length"), hash_ids_of(row))


def hash_ids_of(row: Mapping[str, Any], name: str = "hash_ids") -> tuple[int, ...]:
    """Return the hashes of a prompt's blocks. Raises ValueError that begins with `name`."""
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 63 for one in ids):
        raise ValueError(f"{name} is {excerpt(ids)}; must be an array of integers")
    return tuple(ids)


def seconds_of(
    row: Mapping[str, Any], key: str, where: str = "", unit: float = 1.0, max_s: float = _MAX_S
) -> float:
    """Return a time of a row in seconds; 0 if it is missing. `unit`: the row's, in seconds.

    Raises ValueError that names `where` and `key`.
    """
    value = row.get(key)
    if value in (None, ""):
        return 0.0
    try:
        seconds = float(value) * unit if type(value) in (int, float, str) else math.nan  # CSV has only text
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= max_s:  # or not a number
        name = f"{where}: {key}" if where else key
        raise ValueError(f"{name} is {excerpt(value)}; must be a number from 0 to {max_s / unit:g}")
    return seconds


def _output_len(row: Mapping[str, Any], column: str | None) -> int | None:
    if column is not None:
        return length_of(_named(row, column, "output_len_column"), column)
    lengths = {key: row[key] for key in LENGTHS if row.get(key) not in (None, "")}
    values = {length_of(value, key) for key, value in lengths.items()}
    if len(values) > 1:
        values_text = " and ".join(f"{key} {value}" for key, value in lengths.items())
        raise ValueError(f"{values_text} differ; name one by --output_len_column")
    return next(iter(values), None)


def length_of(value: Any, key: str) -> int:
    """Return a number of tokens, at least 1. Raises ValueError that names `key`."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)  # CSV has only text
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= _MAX_LENGTH:
        raise ValueError(f"{key} is {excerpt(value)}; must be a number of tokens, at least 1")
    return value


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean"}
    return names.get(type(value), type(value).__name__)
