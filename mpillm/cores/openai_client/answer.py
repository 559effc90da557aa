"""The response to a completion or a chat, streamed or not: tokens or text, their times, and how it ended."""

from __future__ import annotations

import http.client
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.bounded_http import MAX_ANSWER_BYTES, MAX_EVENT_BYTES
from launch.safe_text import one_line
from mpillm.comms.messages import Refusal

_PLAIN, _BETWEEN = b"data: ", b"\n\ndata: "
_FIELDS = (b"event", b"id", b"retry")  # not part of an answer
_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Parser of server-sent events: returns the data of whole events. Lines end with LF, CR LF or CR."""

    def __init__(self) -> None:
        self._line_start: list[bytes] = []  # pieces of an incomplete line
        self._data: list[bytes] = []
        self._begins = True
        self._after_cr = False  # a CR ended the last line: an LF after it is part of that end
        self._waited = 0  # bytes since the last event

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that ends in `data`.

        Raises ValueError for an invalid line, or more than 16 MiB without an event.
        """
        if data.startswith(_PLAIN) and data.endswith(b"\n\n") and not (self._line_start or self._data):
            plain = data[len(_PLAIN) : -2].split(_BETWEEN)
            self._waited = 0
            if data.count(b"\n") == 2 * len(plain) and b"\r" not in data:
                return plain  # usual: complete events of one line each, in a fifth of the time
        if self._after_cr or b"\r" in data:
            ends, data = data.endswith(b"\r"), data[self._after_cr and data.startswith(b"\n") :]
            self._after_cr, data = ends, data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events: list[bytes] = []
        lines: list[bytes] = []
        if b"\n" in data:
            lines = b"".join((*self._line_start, data)).split(b"\n")
            self._line_start = [tail] if (tail := lines.pop()) else []
        elif data:  # a long line is not copied for each of its pieces
            self._line_start.append(data)
        for line in lines:
            self._take(line, events)
        self._waited = 0 if events else self._waited + len(data)
        if self._waited > MAX_EVENT_BYTES:
            raise ValueError(f"it sent {self._waited} bytes without an event's end")
        return events

    def finish(self) -> list[bytes]:
        """Return the data of an event that ends with the stream."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if self._begins:
            self._begins, line = False, line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        elif not line.startswith(b":") and line.partition(b":")[0] not in _FIELDS:
            raise ValueError(f"it sent a line that is not a server-sent event: {line[:80]!r}")


_DONE = b"[DONE]"
_PROMPT = re.compile(rb'"prompt_token_ids": ?\[')  # vLLM sends them with `return_token_ids`
_TOO_LONG_CODE = re.compile(rb'"code":\s*"context_length_exceeded"')  # of OpenAI's API
# The messages of vLLM and SGLang, whose code is the status.
_TOO_LONG = re.compile("model's (?:maximum )?context length|maximum model length")
_LONG_BYTES = 4096  # of JSON
_REASONING = ("reasoning_content", "reasoning")  # vLLM sends both names
_MAX_PIECES = 64  # pieces of text, for each requested token
# Bytes of a stream, for each requested token; besides, the events with the prompt may have MAX_EVENT_BYTES.
_MAX_BYTES = 1 << 15
_MAX_COUNT = (1 << 31) - 1  # tokens of a prompt or an answer
REQUEST_STATUSES = (400, 404, 413, 422, 429)  # caused by one request, unlike 401
_MAX_MODELS, _MAX_NAME = 4, 4096  # names of models that one answer may have, and their characters
_MAX_CHARS = 300  # characters of an error
_MAX_WAIT_S = 86_400
_FAILED = ("abort", "error", "cancelled")  # finish reasons that mean no answer: vLLM's, TensorRT-LLM's


class AnswerError(Exception):
    """The server's response is an error, or not an answer. The message does not name the server's address."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        """`refusal`: the server's error about this request."""
        super().__init__(message)
        self.refusal = refusal


class CompletionResponse:
    """One answer as it arrives. Times are time.perf_counter() at the socket."""

    _end_name = "finish_reason"  # the part with the reason of the end

    def __init__(self, stream: bool, max_tokens: int, is_chat: bool = False) -> None:
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.contents: list[str] = []  # of a chat, without reasoning and tool calls
        self.first_content: float | None = None  # time of a chat's first piece that is not reasoning
        self._calls: list[dict[str, Any]] = []  # of tools
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None  # by the server's count; None: it gives none
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None  # of the prompt, in the server's KV cache
        self.models: set[str] = set()  # named in the response
        self.times: list[float] = []  # of each stream piece with tokens or text
        self._max_tokens = max_tokens
        self._choose = self._choose_message if is_chat else self._choose_text
        self.streams = stream
        self._events = EventStream() if stream else None
        self._body = bytearray()
        self._n_bytes = 0  # of the stream

    @property
    def body(self) -> bytes:
        """The body of an answer that is not streamed, once it has ended."""
        return bytes(self._body)

    @property
    def text(self) -> str:
        """The complete text; see `text_of`."""
        return text_of(self.texts)

    @property
    def size(self) -> int:
        """Tokens so far; pieces if the server sends text."""
        return len(self.tokens) or len(self.times)

    def feed(self, data: bytes, at: float) -> None:
        """Add a piece of the body, read at `at`.

        Raises AnswerError or ValueError if it is not part of an answer.
        """
        if self._events is None:
            self._body += data
            if len(self._body) > MAX_ANSWER_BYTES:
                raise AnswerError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
            return
        self._n_bytes += len(data)
        if self._n_bytes > (most := MAX_EVENT_BYTES + _MAX_BYTES * self._max_tokens):
            raise AnswerError(f"it sent more than {most} bytes for {self._max_tokens} requested tokens")
        events = self._events.feed(data)
        if len(events) > 1 and (messages := _together(events)) is not None:
            for event, message in zip(events, messages, strict=False):
                self._take_message(event, message, at)
        else:
            for event in events:
                self._take(event, at)

    def finish(self, at: float, *, may_be_empty: bool = False) -> None:
        """Handle the end of the body. `may_be_empty`: its only token may be one without a text.

        Raises AnswerError or ValueError if the answer has not ended, or has no token.
        """
        if self._events is None:
            self._take(bytes(self._body), at)
        else:
            for event in self._events.finish():
                self._take(event, at)
        if self.finish_reason is None:
            raise AnswerError(f"it ended its answer in the middle: no {self._end_name}")
        if self.finish_reason in _FAILED:
            raise AnswerError(f"it gave up the answer: finish_reason {self.finish_reason}")
        if not (self.size or may_be_empty):
            raise AnswerError(f"it answered without a token: finish_reason {self.finish_reason}")

    def _take(self, data: bytes, at: float) -> None:
        if data == _DONE:
            return
        try:
            message = json.loads(_without_prompt(data))
        except (ValueError, RecursionError):
            raise AnswerError(f"it sent something that is not JSON: {data[:80]!r}") from None
        self._take_message(data, message, at)

    def _take_message(self, data: bytes, message: Any, at: float) -> None:
        if not isinstance(message, dict):
            raise AnswerError(f"it sent JSON that is not a completion: {data[:80]!r}")
        if message.get("error") is not None or message.get("object") == "error":
            inner = message.get("error")
            status = inner.get("code") if isinstance(inner, dict) else message.get("code")
            refusal = None
            if isinstance(status, int) and 400 <= status < 600:
                refusal = refusal_of(status, data, None)
            raise AnswerError(f"it sent an error: {error_text(message)}", refusal)
        self.add_model(message)
        try:
            self._take_content(message, at)
        except (AttributeError, KeyError, TypeError) as error:
            raise AnswerError(f"it sent JSON that is not a completion: {data[:80]!r} ({error})") from None

    def add_model(self, message: Mapping[str, Any]) -> None:
        """Note the model that a part of the response names."""
        if isinstance(model := message.get("model"), str) and len(self.models) < _MAX_MODELS:
            self.models.add(model[:_MAX_NAME])

    def _take_content(self, message: Mapping[str, Any], at: float) -> None:
        """Take choices and usage. Raises AttributeError, KeyError or TypeError if they have another form."""
        for choice in message.get("choices") or ():
            self._choose(choice, at)
        if (usage := message.get("usage")) is not None:
            self.prompt_tokens = count_of(usage.get("prompt_tokens"))
            self.completion_tokens = count_of(usage.get("completion_tokens"))
            if (details := usage.get("prompt_tokens_details")) is not None:
                self.cached_tokens = count_of(details.get("cached_tokens"))

    def _choose_text(self, choice: Mapping[str, Any], at: float) -> None:
        text = choice.get("text")
        self._add(choice, text, at)
        if not (text or choice.get("token_ids")) and ("delta" in choice or "message" in choice):
            raise TypeError("it answers as a chat")

    def _choose_message(self, choice: Mapping[str, Any], at: float) -> None:
        message = choice.get("message" if self._events is None else "delta") or {}
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        reasoning = next((message[key] for key in _REASONING if message.get(key)), "")
        for call in calls:
            self._add_call(call)
        self.contents.append(content)
        if content or calls:
            self._mark_first_content(at)
        self._add(choice, reasoning + content + (json.dumps(calls) if calls else ""), at)

    def _mark_first_content(self, at: float) -> None:
        if self.first_content is None:
            self.first_content = at

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        """Add a tool call, or a piece of its arguments."""
        index = piece.get("index", len(self._calls))
        if type(index) is not int or not 0 <= index <= len(self._calls):
            raise TypeError("tool calls count from 0")
        if index == len(self._calls):
            self._calls.append({"id": "", "name": "", "arguments": []})
        call, function = self._calls[index], piece.get("function") or {}
        call["id"] = call["id"] or piece.get("id") or ""
        call["name"] = call["name"] or function.get("name") or ""
        call["arguments"].append(function.get("arguments") or "")

    @property
    def message(self) -> dict[str, Any]:
        """The complete message of a chat, without its reasoning, for the requests that follow."""
        message: dict[str, Any] = {"role": "assistant", "content": text_of(self.contents)}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": text_of(call["arguments"])},
                }
                for call in self._calls
            ]
        return message

    def _add(self, choice: Mapping[str, Any], text: Any, at: float) -> None:
        if choice.get("index"):
            raise TypeError("one choice was requested")
        tokens = choice.get("token_ids")
        if tokens:
            for token in tokens:
                if type(token) is not int or not 0 <= token < 1 << 31:
                    raise TypeError("token ids are whole numbers")
            self.tokens += tokens
        self._add_text(text, at, has_tokens=bool(tokens))
        if (reason := choice.get("finish_reason")) is not None:
            if not isinstance(reason, str):
                raise TypeError("finish_reason is a string")
            self.finish_reason = reason

    def _add_text(self, text: Any, at: float, has_tokens: bool = False) -> None:
        """Add a piece of an answer. Raises AnswerError if there are more than requested."""
        if text:
            if not isinstance(text, str):
                raise TypeError("text is a string")
            self.texts.append(text)
        if has_tokens or text:
            self.times.append(at)
        if len(self.tokens) > self._max_tokens or len(self.times) > _MAX_PIECES * self._max_tokens:
            raise AnswerError(f"it sent more than the {self._max_tokens} requested tokens")


def text_of(pieces: Sequence[str]) -> str:
    """Return an encodable text: join surrogate pairs that pieces split; replace others by U+FFFD."""
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def count_of(value: Any) -> int | None:
    """Return a number of tokens from a server's `usage`. Raises TypeError if it is not one."""
    if value is None or (type(value) is int and 0 <= value <= _MAX_COUNT):
        return value
    raise TypeError(f"usage has whole numbers of tokens, at most {_MAX_COUNT}")


def _without_prompt(data: bytes) -> bytes:
    """Return JSON without the prompt's token ids, which are not used. Parsing 25,000 takes 2 ms."""
    if len(data) < _LONG_BYTES or (match := _PROMPT.search(data)) is None:
        return data
    begin, end = match.end(), data.find(b"]", match.end())
    if end < 0 or data[begin:end].translate(None, b"0123456789, "):
        return data
    return data[:begin] + data[end:]


def _together(events: list[bytes]) -> list[Any] | None:
    """Parse several events together, in half the time of single ones; None if one is invalid.

    A DONE at the end is left out.
    """
    n = len(events) - (events[-1] == _DONE)
    try:
        messages: list[Any] = json.loads(_without_prompt(b"[%b]" % b",".join(events[:n])))
    except (ValueError, RecursionError):
        return None
    return messages if len(messages) == n else None


def error_text(message: Mapping[str, Any]) -> str:
    """Return the message in an error's JSON, from any kind of server, in one line."""
    inner = message.get("error", message)
    if isinstance(inner, dict):
        inner = inner.get("message", inner)
    if isinstance(inner, dict) or inner is message:
        inner = message.get("detail", inner)
    return one_line(str(inner)[:_MAX_CHARS], _MAX_CHARS)


def failure_text(status: int, reply: bytes, location: str | None = None) -> str:
    """Return a reply other than 200 OK in a few words; `location`: the header of that name."""
    if location is not None and 300 <= status < 400:
        return f"HTTP {status}: it redirects to {location[:200]}; name the server that answers"
    text = _reply_text(reply)
    return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def refusal_of(status: int, reply: bytes, retry_after_s: float | None) -> Refusal:
    """Return a reply other than 200 OK as a refusal, for the client of the endpoint."""
    text = _reply_text(reply)
    if status in REQUEST_STATUSES or 500 <= status < 600:
        seconds = math.ceil(min(retry_after_s or 0.0, _MAX_WAIT_S))
        is_too_long = bool(_TOO_LONG_CODE.search(reply) or _TOO_LONG.search(text))
        return Refusal(status, text or http.client.responses.get(status, str(status)), seconds, is_too_long)
    return Refusal(502, f"the server behind this one answered HTTP {status}" + (f": {text}" if text else ""))


def is_page(reply: bytes) -> bool:
    """Return whether a reply is HTML."""
    return reply[:1000].lstrip()[:5].lower() in (b"<!doc", b"<html")


def _reply_text(reply: bytes) -> str:
    if is_page(reply):
        return "an HTML page"
    try:
        message = json.loads(reply)
    except (ValueError, RecursionError):
        return one_line(reply.decode(errors="replace").strip()[:200])
    return error_text(message if isinstance(message, dict) else {"error": message})
