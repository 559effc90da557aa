"""Build OpenAI's response objects, with vLLM's additions. Chunks are built as text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mpillm.endpoint.api_error import Json
from mpillm.endpoint.choices import Choice, Piece
from mpillm.endpoint.protocol import CompletionRequest
from mpillm.endpoint.tool_calls import ToolCall

DONE = b"data: [DONE]\n\n"
_string = json.encoder.encode_basestring_ascii  # like json.dumps, in a fifth of the time


def usage(choices: Sequence[Choice], n: int) -> Json:
    """Return `usage`. A prompt counts once for its `n` answers, and an answer counts with its end token."""
    prompt = sum(len(choice.prompt) for choice in choices[::n])
    completion = sum(choice.n_tokens for choice in choices)
    result: Json = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    cached = [choice.answer.cached for choice in choices[::n]]
    known = [tokens for tokens in cached if tokens is not None]
    if len(known) == len(cached):
        result["prompt_tokens_details"] = {"cached_tokens": sum(known)}
    return result


class Shapes:
    """Builds the response objects of one request."""

    def __init__(self, completion: CompletionRequest, request_id: str, model: str) -> None:
        self._completion = completion
        self._head: Json = {
            "id": f"{'chatcmpl' if completion.chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if completion.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @cached_property
    def _chunk_head(self) -> str:
        """The head of each chunk, without the closing brace."""
        chunk = self._head | ({"object": "chat.completion.chunk"} if self._completion.chat else {})
        return json.dumps(chunk)[:-1]

    def choice(self, choice: Choice, parts: Sequence[Piece]) -> str:
        """Return a choice of an answer that does not stream, as JSON, from its pieces."""
        text = _string("".join(part.text for part in parts))
        content = f'"text": {text}'
        if self._completion.chat:
            calls = [_tool_call(call) for part in parts for call in part.calls]
            text = "null" if calls and text == '""' else text
            called = f', "tool_calls": {json.dumps(calls)}' if calls else ""
            content = f'"message": {{"role": "assistant", "content": {text}{called}}}'
        tokens = parts[0].tokens if len(parts) == 1 else [token for part in parts for token in part.tokens]
        return self._choice(choice, content, 0, Piece("", tokens, *parts[-1][2:]))

    def _choice(self, choice: Choice, content: str, place: int, piece: Piece) -> str:
        """Return a choice, as JSON. `content`: JSON of its text; `place`: of the piece in the answer."""
        logprobs = choice.logprobs(place, piece.tokens)
        text = f'{{"index": {choice.index}, {content}, "logprobs": '
        text += f'{"null" if logprobs is None else json.dumps(logprobs)}, "finish_reason": '
        reason = "tool_calls" if choice.n_calls and piece.finish_reason == "stop" else piece.finish_reason
        text += f'"{reason}", "stop_reason": {json.dumps(piece.stop_reason)}' if reason else "null"
        if self._completion.return_token_ids:
            text += f', "token_ids": {piece.tokens}'  # Python writes a list of numbers as JSON does
            if not self._completion.chat and not place:
                text += f', "prompt_token_ids": {choice.prompt.tolist()}'
        return text + "}"

    def around(self, choices: Sequence[Choice]) -> Json:
        """Return an answer that does not stream, without its choices."""
        response = self._head | {"usage": usage(choices, self._completion.n)}
        if self._completion.chat and self._completion.return_token_ids:
            response["prompt_token_ids"] = choices[0].prompt.tolist()
        return response

    def response(self, choices: Sequence[Choice], choice_texts: Sequence[str]) -> str:
        """Return an answer that does not stream, as JSON; `choice_texts`: its choices."""
        return f'{json.dumps(self.around(choices))[:-1]}, "choices": [{", ".join(choice_texts)}]}}'

    def role_chunk(self, choice: Choice) -> bytes:
        """Return the first chunk of a streamed chat."""
        chunk: Json = {
            "choices": [
                {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ]
        }
        if self._completion.return_token_ids:
            chunk["prompt_token_ids"] = choice.prompt.tolist()
        return self._event(self._chunk_head + ", " + json.dumps(chunk | self._usage_so_far(choice))[1:])

    def chunk(self, choice: Choice, piece: Piece) -> bytes:
        """Return the chunk of a piece of a streamed answer."""
        text = _string(piece.text)
        content = f'"text": {text}'
        if self._completion.chat:
            first = choice.n_calls - len(piece.calls)
            calls = [{"index": i} | _tool_call(call) for i, call in enumerate(piece.calls, first)]
            called = f', "tool_calls": {json.dumps(calls)}' if calls else ""
            content = f'"delta": {{"content": {text}{called}}}'
        choice_text = self._choice(choice, content, choice.n_tokens - len(piece.tokens), piece)
        so_far = self._usage_so_far(choice)
        end = f", {json.dumps(so_far)[1:]}" if so_far else "}"
        return self._event(f'{self._chunk_head}, "choices": [{choice_text}]{end}')

    def usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        """Return the last chunk of a stream whose client requested usage."""
        total = json.dumps(usage(choices, self._completion.n))
        return self._event(f'{self._chunk_head}, "choices": [], "usage": {total}}}')

    def _usage_so_far(self, choice: Choice) -> dict[str, Any]:
        return {"usage": usage([choice], 1)} if self._completion.continuous_usage else {}

    @staticmethod
    def _event(text: str) -> bytes:
        return f"data: {text}\n\n".encode()


def _tool_call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def error_event(body: Json) -> bytes:
    """Return the event that ends a stream after an error."""
    return f"data: {json.dumps(body)}\n\n".encode()
