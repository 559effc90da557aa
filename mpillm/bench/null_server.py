"""``python -m mpillm.bench.null_server``: a server with `/v1/completions` whose answers cost nothing.

What is left of a measurement against it is the client. It answers every request at once with `max_tokens`
tokens, streamed or not, one event a token as vLLM streams them. It prints its URL when it listens, and ends
when its standard input does: with its parent.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import cache
from typing import Any, cast

from mpillm.event_loop import new_loop

MODEL = "null"
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": ?([0-9]+)')
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = re.compile(rb'"include_usage": ?true')
_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: %s\r\n"


class NullServer(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n") + 4) >= 4:
            length = _LENGTH.search(self._buffer, 0, end)
            after = end + (int(length[1]) if length else 0)
            if len(self._buffer) < after:
                return
            path, body = self._buffer[: self._buffer.find(b"\r\n")].split(b" ")[1], self._buffer[end:after]
            self._buffer = self._buffer[after:]
            self._transport.write(_reply(path, body))


def _reply(path: bytes, body: bytes) -> bytes:
    if path == b"/v1/completions":
        n = _MAX_TOKENS.search(body)
        return _completion(int(n[1]) if n else 16, bool(_STREAM.search(body)), bool(_USAGE.search(body)))
    if path == b"/v1/models":
        return _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "mpillm"}]}
        )
    return _json({"status": "ok"})


def _json(value: Any) -> bytes:
    body = json.dumps(value)
    return (_HEAD % "application/json" + f"Content-Length: {len(body)}\r\n\r\n{body}").encode()


@cache
def _completion(n: int, stream: bool, usage: bool) -> bytes:
    """Return the whole response, as it goes over the wire."""
    counts = {"prompt_tokens": 1, "completion_tokens": n, "total_tokens": n + 1}
    about = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL}

    def choice(first: int, after: int) -> dict[str, Any]:
        tokens = [100 + i % 1000 for i in range(first, after)]
        reason = "length" if after == n else None
        return {
            "index": 0,
            "text": " a" * len(tokens),
            "logprobs": None,
            "finish_reason": reason,
            "token_ids": tokens,
        }

    if not stream:
        return _json({**about, "choices": [choice(0, n)], "usage": counts})
    events = [json.dumps({**about, "choices": [choice(i, i + 1)], "usage": None}) for i in range(n)]
    if usage:
        events.append(json.dumps({**about, "choices": [], "usage": counts}))
    data = [f"data: {event}\n\n" for event in (*events, "[DONE]")]
    chunks = "".join(f"{len(text):x}\r\n{text}\r\n" for text in data)
    return (_HEAD % "text/event-stream" + f"Transfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n").encode()


async def _serve(host: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullServer, host, 0, backlog=4096)
    print(f"http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    new_loop().run_until_complete(_serve("127.0.0.1"))
