"""Find the tool calls in a chat's answer: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

The format is that of Hermes 2 Pro (https://github.com/NousResearch/Hermes-Function-Calling). The chat
templates of Qwen, SmolLM3 and others ask the model for it. An array of calls may also be between the tags.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: str  # JSON of an object


class ToolCallReader:
    """Separates the calls from the other text of an answer while it grows."""

    def __init__(self) -> None:
        self._pending = ""  # text that is, or may become, a call
        self._searched = len(OPEN)  # characters of it without the end of a call
        self._after_call = False  # nothing but white space since the last call

    def add(self, piece: str, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Return the text outside of calls, and the calls, that are complete with this piece of the answer.

        White space after a call is dropped. What has not this format stays text, with its tags.
        """
        self._pending += piece
        text, calls = "", list[ToolCall]()
        while self._pending:
            if not self._pending.startswith(OPEN):
                start = self._start(is_last)
                text += self._outside(self._pending[:start])
                self._pending = self._pending[start:]
                if not self._pending.startswith(OPEN):
                    break
            end = self._pending.find(CLOSE, self._searched)
            if end < 0 and not is_last:
                self._searched = max(len(OPEN), len(self._pending) - len(CLOSE) + 1)
                break
            stop = len(self._pending) if end < 0 else end + len(CLOSE)
            new = () if end < 0 else _calls(self._pending[len(OPEN) : end])
            calls += new
            if not new:
                text += self._outside(self._pending[:stop])
            self._after_call = bool(new)
            self._pending, self._searched = self._pending[stop:], len(OPEN)
        return text, calls

    def _start(self, is_last: bool) -> int:
        """Return where the pending text has the first tag, or may have its beginning."""
        if (start := self._pending.find(OPEN)) >= 0:
            return start
        lengths = () if is_last else range(min(len(OPEN) - 1, len(self._pending)), 0, -1)
        return len(self._pending) - next((n for n in lengths if self._pending.endswith(OPEN[:n])), 0)

    def _outside(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


def _calls(text: str) -> Sequence[ToolCall]:
    """Return the calls between two tags; none if one of them is not in the format."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    values = value if isinstance(value, list) else [value]
    return [_call(one) for one in values] if all(map(_is_call, values)) else ()


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments", {}), dict)
    )


def _call(value: dict[str, Any]) -> ToolCall:
    arguments = json.dumps(value.get("arguments", {}), ensure_ascii=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], arguments)
