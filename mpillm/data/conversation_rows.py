"""The rows of a data set as conversations.

A conversation is read from one of these rows:

- MLCommons' agentic form, one message per row: ``conversation_id``, ``turn``, ``role``, ``content``,
  ``tool_calls``, ``tool_results``, ``tools``, ``system``, ``delay_seconds``;
- ``messages`` that end with the assistant's, as vLLM's multi_turn benchmark has them;
- ``conversations``, ShareGPT's form;
- ``turns``, AIPerf's multi_turn form, with delays and time stamps in milliseconds, or a list of texts;
- ``turns`` with ``messages``, ``forks`` and ``spawns``, AIPerf's `dag_jsonl`: see `branched_rows`;
- ``prompt_0``, ``prompt_1``, …, GuideLLM's form;
- ``requests``, Weka's traces of agents: see `weka_traces`;
- a single request, as `records.sample_of` reads it. ``session_id`` joins such rows to a conversation. Then
  ``text_input`` and ``input_length`` add to it, as in AIPerf's `mooncake_trace`; other prompts are complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from itertools import count
from typing import Any

from disagg.errors import ConfigError
from mpillm.data.branched_rows import BranchedRows, is_branched
from mpillm.data.conversations import Conversation, Message, Turn, append
from mpillm.data.message_rows import MessageRows, output_len_of
from mpillm.data.records import (
    KNOWN,
    MAX_STAMP_S,
    WITHOUT_EFFECT,
    Columns,
    Trace,
    body_of,
    chat_of,
    length_of,
    sample_of,
    seconds_of,
    tools_of,
    unicode_of,
)
from mpillm.data.row_fields import FieldUse, own_fields
from mpillm.data.weka_traces import add_weka, is_weka
from mpillm.files import excerpt

_FLAT = {"conversation_id", "turn", "role"}
_SHARE_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_PREFIXES = ("prefix", "prefix_0", "system_prompt", "system")  # GuideLLM's columns of system prompts
_USED = {"timestamp", "delay", "session_id", "tools"}  # by conversations, not by single prompts


def read_conversations(
    rows: Iterable[tuple[str, Any]],
    vocab_size: int,
    columns: Columns = KNOWN,
    left_out: list[str] | None = None,
    use: FieldUse = FieldUse.UNUSED,
    no_output: list[str] | None = None,
) -> list[Conversation]:
    """Return the conversations of rows, of which one may have others as branches.

    `rows`: each with its place, for messages. `use`: of the rows' own fields. `left_out` gets the places of
    ShareGPT's conversations without a user's message, which its published file has; `no_output`, of requests
    without output tokens. Raises ConfigError with the place of the row and the name of the wrong field.
    """
    reader = _Reader(
        vocab_size, columns, [] if left_out is None else left_out, use, [] if no_output is None else no_output
    )
    for where, row in rows:
        try:
            reader.add(where, row)
        except ConfigError:  # of an earlier row
            raise
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    reader.end()
    reader.branched.link()
    return [one for one in reader.conversations if one.parent is None]


class _Reader:
    def __init__(
        self, vocab_size: int, columns: Columns, left_out: list[str], use: FieldUse, no_output: list[str]
    ) -> None:
        self._left_out, self._use, self._no_output = left_out, use, no_output
        self.conversations: list[Conversation] = []
        self.branched = BranchedRows()
        self._vocab_size, self._columns = vocab_size, columns
        self._by_name: dict[str, Conversation] = {}  # that further rows may continue
        self._open: MessageRows | None = None
        self._last_at_s = -math.inf  # of rows without a session

    def add(self, where: str, row: Any) -> None:
        is_flat = isinstance(row, dict) and set(row) >= _FLAT and not row.keys() & {"messages", "prompt"}
        if is_flat and self._columns.prompt is None:
            self._add_message(where, row)
            return
        self.end()
        if self._columns.prompt is not None:
            self._add_request(where, row)
        elif isinstance(row, dict) and isinstance(row.get("conversations"), list):
            messages = [_share_message(one) for one in row["conversations"]]
            if any(message["role"] == "user" for message in messages):
                self._add_chat(where, row, messages)
            else:
                self._left_out.append(where)
        elif is_weka(row):
            self._add_weka(where, row)
        elif is_branched(row):
            self.branched.add(where, row, self._new(row, ("session_id",)), self._use)
        elif isinstance(row, dict) and isinstance(row.get("turns"), list):
            self._add_turns(where, row)
        elif isinstance(row, dict) and "prompt_0" in row:
            self._add_columns(where, row)
        elif isinstance(row, dict) and _ends_with_response(row.get("messages")):
            self._add_chat(where, row, chat_of(row["messages"], "messages"))
        else:
            self._add_request(where, row)

    def end(self) -> None:
        """Complete the conversation of the rows so far. Raises ConfigError."""
        if self._open is not None:
            self.conversations.append(self._open.complete())
            self._open = None

    # --- a row per message ---

    def _add_message(self, where: str, row: Mapping[str, Any]) -> None:
        row = {key: value for key, value in row.items() if value != ""}  # CSV has all fields in each row
        self._check_columns()
        name = row.get("conversation_id")
        if not isinstance(name, str) or not name.isascii() or not name.isprintable() or not name:
            raise ValueError(f"conversation_id is {excerpt(name)}; must be printable ASCII text")
        if self._open is None or self._open.conversation.name != name:
            self.end()
            if name in self._by_name:
                raise ValueError(
                    f"conversation_id {name} is also an earlier conversation's; its rows must be together"
                )
            self._open = MessageRows(Conversation(name), self._use)
            self._by_name[name] = self._open.conversation
        self._open.add(where, row)

    # --- a row per conversation ---

    def _add_chat(self, where: str, row: Mapping[str, Any], messages: list[Message]) -> None:
        conversation = self._new(row, ("id", "conversation_id", "session_id"))
        conversation.tools = tools_of(row)
        pending: list[Message] = []
        for message in messages:
            if message["role"] == "system" and not conversation.turns and not pending:
                conversation.system.append(message)
            elif message["role"] != "assistant":
                pending.append(message)
            elif pending:
                append(conversation, Turn(where, pending, message))
                pending = []
            elif conversation.turns:
                raise ValueError(f"two assistant messages in a row: {excerpt(message['content'])}")
            else:  # ShareGPT has conversations that begin in their middle
                conversation.system.append(message)
        if pending:
            append(conversation, Turn(where, pending))
        if not conversation.turns:
            raise ValueError("the conversation has no message of a user")
        used = {"session_id"}
        if type(row.get("timestamp")) in (int, float):  # otherwise a date, as a text
            conversation.turns[0].at_s = _time(row)
            used.add("timestamp")
        length = output_len_of(row)
        for turn in conversation.turns:
            turn.output_len = length
            self._set_own(turn, row, used)

    def _add_turns(self, where: str, row: Mapping[str, Any]) -> None:
        conversation = self._new(row, ("session_id",))
        conversation.tools = tools_of(row)
        if not row["turns"]:
            raise ValueError("turns is empty")
        for i, turn in enumerate(row["turns"]):
            if isinstance(turn, str):
                turn = {"text": turn}
            if not isinstance(turn, dict):
                raise ValueError(f"turns has {excerpt(turn)}; must be objects or texts")
            message = {"role": turn.get("role") or "user", "content": _text_of(turn, f"turns[{i}]")}
            if message["role"] == "system" and i == 0 and len(row["turns"]) > 1:
                conversation.system.append(message)
                continue
            one = Turn(
                f"{where}: turns[{i}]",
                [message],
                delay_s=seconds_of(turn, "delay", unit=1e-3),
                at_s=_time(turn),
                output_len=output_len_of(turn),
            )
            self._set_own(one, {**row, **turn})
            append(conversation, one)

    def _add_weka(self, where: str, row: Mapping[str, Any]) -> None:
        add_weka(where, row, self._new(row, ("id",)), self._no_output)

    def _add_columns(self, where: str, row: Mapping[str, Any]) -> None:
        conversation = self._new(row, ())
        for i in count():
            if (text := row.get(f"prompt_{i}")) in (None, ""):
                break
            if not isinstance(text, str):
                raise ValueError(f"prompt_{i} is {excerpt(text)}; must be a string")
            length = row.get(f"output_tokens_count_{i}")
            turn = Turn(where, [{"role": "user", "content": unicode_of(text, f"prompt_{i}")}])
            if length not in (None, ""):
                turn.output_len = length_of(length, f"output_tokens_count_{i}")
            append(conversation, turn)
        if not conversation.turns:
            raise ValueError("prompt_0 is empty")
        for turn in conversation.turns:
            self._set_own(turn, row, set())
        if prefix := next((row[key] for key in _PREFIXES if row.get(key)), None):
            conversation.system = chat_of([{"role": "system", "content": prefix}], "prefix")
        names = sorted(key for key in row if key.startswith("prompt_") and key[7:].isdigit())
        if missing := [key for key in names if int(key[7:]) >= len(conversation.turns) and row[key]]:
            raise ValueError(f"{missing[0]} follows a missing prompt_{len(conversation.turns)}")

    def _set_own(self, turn: Turn, row: Mapping[str, Any], used: Set[str] = _USED) -> None:
        """Set the row's own fields for a request, and the names of others that are not `used`."""
        turn.own = own_fields(row, self._use)
        turn.unused |= turn.own.unused | (row.keys() & {*WITHOUT_EFFECT} - used)

    def _check_columns(self) -> None:
        if self._columns.output_len is not None:
            raise ValueError("a row of a conversation; --output_len_column is for rows of single requests")

    def _new(self, row: Mapping[str, Any], keys: Iterable[str]) -> Conversation:
        self._check_columns()
        named = next(((str(row[key]), key) for key in keys if row.get(key) not in (None, "")), ("", ""))
        name = unicode_of(*named)
        if name in self._by_name:
            raise ValueError(f"{name} is also the name of an earlier conversation")
        conversation = Conversation(name or f"#{len(self.conversations)}")
        self._by_name[conversation.name] = conversation
        self.conversations.append(conversation)
        return conversation

    # --- a row per request ---

    def _add_request(self, where: str, row: Any) -> None:
        if isinstance(row, dict) and self._columns == KNOWN:
            row = _aiperf_request(row)
        sample = sample_of(row, self._vocab_size, self._columns, self._use)
        unused = sample.unused - _USED
        turn = Turn(
            where, [], prompt=sample.prompt, output_len=sample.output_len, unused=unused, own=sample.own
        )
        if isinstance(sample.prompt, Trace):
            turn.trace, turn.prompt = sample.prompt, None
        name: Any = None
        if isinstance(row, dict):
            turn.tools, name = tools_of(body_of(row)), row.get("session_id")
            turn.delay_s, turn.at_s = seconds_of(row, "delay", unit=1e-3), _time(row)
            if row.get("message_mode") == "delta":
                if not isinstance(sample.prompt, list):
                    raise ValueError("message_mode is delta, but the row has no messages")
                turn.added, turn.prompt = sample.prompt, None
            elif isinstance(sample.prompt, str) and "text_input" in row and name not in (None, ""):
                turn.added, turn.prompt = [{"role": "user", "content": sample.prompt}], None
        if name in (None, ""):
            self._check_order(turn)
            self.conversations.append(Conversation(f"#{len(self.conversations)}", [turn], tools=turn.tools))
            return
        name = unicode_of(str(name), "session_id")
        conversation = self._by_name.get(name)
        if conversation is None:
            conversation = self._by_name[name] = Conversation(name, tools=turn.tools)
            self.conversations.append(conversation)
        else:
            _check_continues(conversation, turn)
        append(conversation, turn)

    def _check_order(self, turn: Turn) -> None:
        """Raise ValueError for a time stamp before that of an earlier row without a session."""
        if turn.at_s is None:
            return
        if turn.at_s < self._last_at_s:
            raise ValueError(
                f"timestamp {turn.at_s * 1e3:.12g} is before an earlier row's,"
                f" {self._last_at_s * 1e3:.12g}; sort the rows by time"
            )
        self._last_at_s = turn.at_s


def _check_continues(conversation: Conversation, turn: Turn) -> None:
    """Raise ValueError if a row cannot continue its session. A complete prompt has the last row's tools."""
    if (first := _form(conversation.turns[0])) != (form := _form(turn)):
        raise ValueError(
            f"session {conversation.name} has rows with {first} and with {form}; its rows must be of one form"
        )
    if turn.prompt is not None:
        turn.tools = turn.tools or conversation.turns[-1].tools
    elif turn.tools not in (None, conversation.tools):
        raise ValueError(
            f"tools are not those of the first row of session {conversation.name}; must be equal, or missing"
        )


def _form(turn: Turn) -> str:
    """Return what a row of a session gives, in words."""
    if turn.trace is not None:
        return "input_length"
    return "a complete prompt" if turn.prompt is not None else "messages or a text to add"


def _aiperf_request(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of AIPerf's traces, or of its requests with several texts, with these as its prompt."""
    if "prompt" not in row and "text_input" in row:
        return {**row, "prompt": row["text_input"]}
    if "texts" in row and not row.keys() & {"prompt", "text", "messages", "input_tokens"}:
        return {**row, "prompt": _text_of(row, "the row")}
    return row


def _text_of(turn: Mapping[str, Any], where: str) -> str:
    """Return the text of a turn; several texts are its parts. Raises ValueError that begins with `where`."""
    text = next((turn[key] for key in ("text", "texts", "prompt", "content") if key in turn), None)
    texts = list[Any]()
    for part in text if isinstance(text, list) else [text]:
        contents = part.get("contents") if isinstance(part, dict) else part
        texts += contents if isinstance(contents, list) else [contents]
    if not texts or not all(isinstance(part, str) and part for part in texts):
        raise ValueError(f"{where} has text {excerpt(text)}; must be a text, or texts")
    return unicode_of("\n".join(texts), where)  # as parts of a message's content


def _ends_with_response(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _share_message(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("value"), str):
        raise ValueError(f"conversations has {excerpt(message)}; must be objects with from and value")
    role = _SHARE_ROLES.get(str(message.get("from")))
    if role is None:
        raise ValueError(f"from is {excerpt(message.get('from'))}; must be one of {', '.join(_SHARE_ROLES)}")
    return {"role": role, "content": unicode_of(message["value"], "conversations")}


def _time(row: Mapping[str, Any]) -> float | None:
    """Return a row's time stamp, which is in milliseconds, in seconds."""
    if row.get("timestamp") in (None, ""):
        return None
    return seconds_of(row, "timestamp", unit=1e-3, max_s=MAX_STAMP_S)
