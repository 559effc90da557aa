"""The answer to a request for a response (`/v1/responses`), streamed or not.

Source: OpenAI's reference of the Responses API (the response object, and its streaming events). vLLM 0.33 and
SGLang 0.5.23 send these events. A stream has no DONE: `response.completed`, `response.incomplete` or
`response.failed` ends it, with the complete response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpillm.cores.openai_client.answer import AnswerError, CompletionResponse, count_of, error_text
from mpillm.cores.openai_client.dialect import CHAT, RESPONSES

_TEXTS = ("response.output_text.delta", "response.refusal.delta")
_REASONING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")
_ARGUMENTS = "response.function_call_arguments.delta"
_ITEM = "response.output_item.done"
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_REASONS = {"max_output_tokens": "length"}  # finish_reason, by that of an incomplete response
_MAX_CALLS = 1024  # of tools, in one answer


class ResponsesAnswer(CompletionResponse):
    """One answer of `/v1/responses` as it arrives."""

    _end_name = "response.completed"

    def _take_content(self, message: Mapping[str, Any], at: float) -> None:
        """Take an event of a stream, or the complete response."""
        if self.streams:
            self._take_event(message, at)
        else:
            self._end(message, at)

    def _take_event(self, event: Mapping[str, Any], at: float) -> None:
        kind = event.get("type")
        if kind == "error":  # OpenAI's own form; others have `error`
            raise AnswerError(f"it sent an error: {error_text(event)}")
        if kind in _TEXTS:
            self._add_content(event.get("delta"), at)
        elif kind in _REASONING:
            self._add_text(event.get("delta"), at)
        elif kind == _ARGUMENTS:
            self._add_text(event.get("delta"), at)
            self._mark_first_content(at)
        elif kind == _ITEM:
            self._take_call(event["item"])
        elif kind in _ENDS:
            self._end(event["response"], at)

    def _end(self, response: Mapping[str, Any], at: float) -> None:
        """Take the complete response. Its output is used if it has not come in events."""
        self.add_model(response)
        if (error := response.get("error")) is not None:
            raise AnswerError(f"it sent an error: {error_text({'error': error})}")
        output = response.get("output") or []
        if not self.times:
            for item in output:
                self._take_item(item, at)
        if not self._calls:
            for item in output:
                self._take_call(item)
        if (usage := response.get("usage")) is not None:
            self.prompt_tokens = count_of(usage.get("input_tokens"))
            self.completion_tokens = count_of(usage.get("output_tokens"))
            if (details := usage.get("input_tokens_details")) is not None:
                self.cached_tokens = count_of(details.get("cached_tokens"))
        self.finish_reason = _finish_reason(response)

    def _take_item(self, item: Mapping[str, Any], at: float) -> None:
        """Take the text of an output item: an answer, reasoning, or a tool call."""
        if item.get("type") == "reasoning":
            for part in item.get("content") or item.get("summary") or ():
                self._add_text(part.get("text"), at)
        elif item.get("type") == "message":
            for part in item.get("content") or ():
                self._add_content(part.get("text") or part.get("refusal"), at)
        elif item.get("type") == "function_call":
            self._add_text(f"{item.get('name') or ''}{item.get('arguments') or ''}", at)
            self._mark_first_content(at)

    def _take_call(self, item: Mapping[str, Any]) -> None:
        if item.get("type") != "function_call":
            return
        call = {"id": item.get("call_id") or "", "name": item.get("name") or ""}
        arguments = item.get("arguments") or ""
        if not all(isinstance(text, str) for text in (*call.values(), arguments)):
            raise TypeError("a tool call has texts")
        if len(self._calls) == _MAX_CALLS:
            raise AnswerError(f"it sent more than {_MAX_CALLS} tool calls")
        self._calls.append({**call, "arguments": [arguments]})

    def _add_content(self, text: Any, at: float) -> None:
        self._add_text(text, at)
        if text:
            self.contents.append(text)
            self._mark_first_content(at)


def _finish_reason(response: Mapping[str, Any]) -> str | None:
    """Return the reason by a response's status; None: it has not ended."""
    status = response.get("status")
    if status == "completed":
        return "stop"
    if status == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason") or "incomplete"
        return _REASONS.get(reason, str(reason))
    if status in ("failed", "cancelled"):
        raise AnswerError(f"it gave up the answer: status {status}")
    return None


def answer_at(path: str, stream: bool, max_tokens: int) -> CompletionResponse:
    """Return an empty answer to a request at this path of OpenAI's API."""
    if path == RESPONSES:
        return ResponsesAnswer(stream, max_tokens)
    return CompletionResponse(stream, max_tokens, path == CHAT)
