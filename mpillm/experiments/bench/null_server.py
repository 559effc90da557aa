"""``python -m mpillm.experiments.bench.null_server [MS]``: a server that computes nothing.

A measurement against it shows the cost of the client. It answers every request immediately with `max_tokens`
tokens. Streams have one event per token, like vLLM's. With MS, a stream sends one token every MS
milliseconds. It prints its URL when it listens, and ends when its standard input ends, so it ends with its
parent.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, cast

from launch.event_loop import run_alone

MODEL = "null"
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": ?([0-9]+)')
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = re.compile(rb'"include_usage": ?true')
_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: %s\r\n"


class Pace:
    """Sends the next token of all open streams together, so that only the writes cost time."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._open: dict[asyncio.Transport, Iterator[bytes]] = {}

    def begin(self, transport: asyncio.Transport, pieces: Iterator[bytes]) -> None:
        """Send the first piece now, and the others one by one."""
        if not self._open:
            asyncio.get_running_loop().call_later(self._gap_s, self._step)
        self._open[transport] = pieces
        transport.write(next(pieces))

    def _step(self) -> None:
        for transport, pieces in [*self._open.items()]:
            piece = None if transport.is_closing() else next(pieces, None)
            if piece is None:
                del self._open[transport]
            else:
                transport.write(piece)
        if self._open:
            asyncio.get_running_loop().call_later(self._gap_s, self._step)


class NullServer(asyncio.Protocol):
    """One connection."""

    def __init__(self, pace: Pace | None) -> None:
        """`pace`: of streams; None: send all tokens immediately."""
        self._pace = pace
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
            pieces = _reply(path, body)
            if self._pace is None or len(pieces) == 1:
                self._transport.write(b"".join(pieces))
            else:
                self._pace.begin(self._transport, iter(pieces))


def _reply(path: bytes, body: bytes) -> tuple[bytes, ...]:
    """Return the bytes of the response, in the pieces of a stream."""
    if path == b"/v1/completions":
        n = _MAX_TOKENS.search(body)
        return _completion(int(n[1]) if n else 16, bool(_STREAM.search(body)), bool(_USAGE.search(body)))
    if path == b"/v1/models":
        return _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "mpillm"}]}
        )
    return _json({"status": "ok"})


def _json(value: Any) -> tuple[bytes, ...]:
    body = json.dumps(value)
    return ((_HEAD % "application/json" + f"Content-Length: {len(body)}\r\n\r\n{body}").encode(),)


@cache
def _completion(n: int, stream: bool, usage: bool) -> tuple[bytes, ...]:
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
    chunks = [f"{len(text):x}\r\n{text}\r\n" for text in data]
    head = _HEAD % "text/event-stream" + "Transfer-Encoding: chunked\r\n\r\n"
    # The last piece contains the last token and the end of the stream.
    pieces = [head + chunks[0], *chunks[1 : n - 1], "".join(chunks[max(1, n - 1) :]) + "0\r\n\r\n"]
    return tuple(piece.encode() for piece in pieces)


async def _serve(host: str, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(gap_s) if gap_s else None
    server = await loop.create_server(partial(NullServer, pace), host, 0, backlog=4096)
    print(f"http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    run_alone(_serve("127.0.0.1", float(sys.argv[1]) / 1e3 if sys.argv[1:] else 0.0))
