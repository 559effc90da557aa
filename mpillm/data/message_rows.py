"""The rows of MLCommons' agentic form, one message each, as a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from disagg.errors import ConfigError
from mpillm.data.conversations import Conversation, Message, Turn, append
from mpillm.data.records import chat_of, length_of, seconds_of, tools_of, unicode_of
from mpillm.data.row_fields import LENGTHS, FieldUse, own_fields
from mpillm.files import excerpt

_CLIENT_ROLES = ("user", "tool")


class MessageRows:
    """A conversation of MLCommons' agentic form, while its rows are read."""

    def __init__(self, conversation: Conversation, use: FieldUse) -> None:
        self.conversation, self._use = conversation, use
        self._last_role = ""
        self._n_rows = 0
        self._where = ""
        self._calls: list[Any] = []  # of tools, in the last row

    def add(self, where: str, row: Mapping[str, Any]) -> None:
        """Add a row. Raises ValueError for a wrong one."""
        number, role = row.get("turn"), row.get("role")
        if isinstance(number, str) and number.isdecimal() and len(number) < 20:  # CSV has only text
            number = int(number)
        self._n_rows += 1
        if type(number) is not int or number != self._n_rows:
            raise ValueError(
                f"turn is {excerpt(number)}; expected {self._n_rows}: turns count from 1 without gaps"
            )
        self._check_order(role)
        if (system := row.get("system")) and isinstance(system, str) and not self.conversation.system:
            self.conversation.system = [{"role": "system", "content": unicode_of(system, "system")}]
        if self.conversation.tools is None:
            self.conversation.tools = tools_of(row)
        messages = _messages_of(row)
        turns = self.conversation.turns
        if role == "system":
            self.conversation.system += messages
        elif role == "assistant":
            turns[-1].response = messages[0]
        else:
            turn = Turn(
                where, messages, delay_s=seconds_of(row, "delay_seconds"), output_len=output_len_of(row)
            )
            turn.own = own_fields(row, self._use)
            turn.unused |= turn.own.unused
            append(self.conversation, turn)
        if role == "tool":
            _check_results(messages, self._calls)
        self._calls = _calls(row) if role == "assistant" else []
        self._last_role, self._where = str(role), where

    def _check_order(self, role: object) -> None:
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"role is {excerpt(role)}; must be system, user, assistant or tool")
        last = self._last_role
        if role == "system" and last not in ("", "system"):
            raise ValueError(f"role system follows {last}; it must be the first")
        if role == "assistant" and last not in _CLIENT_ROLES:
            raise ValueError(
                f"role assistant follows {last or 'nothing'}; there is no request that it answers"
            )
        if role == "tool" and not self._calls:
            raise ValueError(f"role tool follows {last or 'nothing'} without tool_calls")
        if role == "user" and (last == "user" or self._calls):
            raise ValueError(
                "role user follows tool_calls without a tool's result"
                if self._calls
                else "role user follows user: the response between them is missing"
            )

    def complete(self) -> Conversation:
        """Return the conversation of all rows. Raises ConfigError if it has no request."""
        if not self.conversation.turns:
            raise ConfigError(f"{self._where}: the conversation has no request of a user")
        return self.conversation


def _messages_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row: one, or one for each result of a tool."""
    role, results = row["role"], row.get("tool_results")
    if role == "tool" and results is not None:
        if not isinstance(results, list) or not results:
            raise ValueError(f"tool_results is {excerpt(results)}; must be an array of results")
        messages = []
        for i, result in enumerate(results):
            if not isinstance(result, dict) or not isinstance(result.get("tool_call_id"), str):
                raise ValueError(f"tool_results[{i}] has no tool_call_id, a string")
            if result.get("content") is None:
                raise ValueError(f"tool_results[{i}] has no content")
            messages.append(
                {"role": "tool", "tool_call_id": result["tool_call_id"], "content": result["content"]}
            )
        return messages
    keys = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    message = {key: row[key] for key in keys if row.get(key) is not None}
    has_calls = role == "assistant" and "tool_calls" in message  # then its text may be missing
    if not has_calls and not message.get("content"):
        raise ValueError(f"content is {excerpt(row.get('content'))}; must be text")
    return chat_of([message], "content")


def _calls(row: Mapping[str, Any]) -> list[Any]:
    calls = row.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ValueError(f"tool_calls is {excerpt(calls)}; must be an array of calls")
    return calls or []


def _check_results(messages: Iterable[Message], calls: Iterable[Any]) -> None:
    """Raise ValueError for the result of a call that the response before does not have."""
    known = [call.get("id") for call in calls if isinstance(call, dict)]
    for message in messages:
        name = message.get("tool_call_id")
        if name is not None and None not in known and name not in known:
            raise ValueError(f"tool_call_id is {excerpt(name)}; the calls before it are {excerpt(known)}")


def output_len_of(row: Mapping[str, Any]) -> int | None:
    """Return the response length that a row or a turn has. Raises ValueError for a wrong one."""
    keys = ("max_new_tokens", *LENGTHS)
    return next((length_of(row[key], key) for key in keys if row.get(key) not in (None, "")), None)
