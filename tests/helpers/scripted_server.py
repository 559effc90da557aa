"""A small OpenAI-compatible server that does what a test says, right or wrong, byte by byte."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests.helpers.ports import free_port

MODEL = "scripted"


@dataclass
class Request:
    """Holds what came in."""

    path: str
    headers: dict[str, str]
    body: bytes
    connection: int  # which one, from 0

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


@dataclass
class Reply:
    """Holds pieces of bytes that are sent one after another, and what then becomes of the connection. keep:
    it waits for another request; close: it ends; reset: it breaks; hang: nothing more comes until the server
    is stopped; stop: the whole server ends, as if it had been killed."""

    pieces: Iterable[bytes]
    then: str = "keep"


def head(status: str = "200 OK", **headers: object) -> bytes:
    """Return a status line and headers."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def plain(value: Any, status: str = "200 OK", **headers: object) -> Reply:
    """Reply with JSON in one piece."""
    body = json.dumps(value).encode()
    return Reply([head(status, Content_Length=len(body), **headers) + body])


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body; an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def choice(tokens: Sequence[int] | None = None, text: str = "", reason: str | None = None) -> dict[str, Any]:
    """Return the JSON of one piece of an answer."""
    made: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
    return {"choices": [made if tokens is None else {**made, "token_ids": list(tokens)}]}


STREAM = head(Content_Type="text/event-stream", Transfer_Encoding="chunked")
DONE = chunk(event(b"[DONE]")) + chunk(b"")


def answer_of(prompt: Sequence[int], n: int) -> list[int]:
    """Return what a good server answers. No two prompts' answers begin alike."""
    return [sum(prompt) + i for i in range(n)]


def good(request: Request) -> Reply:
    """Reply as a good server: as vLLM, with token ids."""
    body = request.json
    tokens = answer_of(body["prompt"], body["max_tokens"])
    counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
    if not body.get("stream"):
        return plain({**choice(tokens, "t" * len(tokens), "length"), "usage": counts})
    pieces = [chunk(event(choice([token], "t"))) for token in tokens[:-1]]
    last = chunk(event(choice(tokens[-1:], "t", "length"))) + chunk(event({"choices": [], "usage": counts}))
    return Reply([STREAM, *pieces, last + DONE])


@dataclass
class ScriptedServer:
    """Listens on `port`.

    `completions` answers requests for completions, `others` every other path that it names.
    """

    completions: Callable[[Request], Reply] = good
    others: dict[str, Callable[[Request], Reply]] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._socket = socket.create_server((self.host, self.port), family=family, backlog=512)
        url_host = f"[{self.host}]" if ":" in self.host else self.host
        self.address = f"{url_host}:{self._socket.getsockname()[1]}"
        self.url = f"{'https' if self.tls else 'http'}://{self.address}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for thread in (self._thread, *self._threads):
            if thread is not threading.current_thread():
                thread.join(60)
                assert not thread.is_alive()

    def stop(self) -> None:
        """Close every connection, and refuse new ones."""
        self._stopped.set()
        with self._lock:
            for connection in (self._socket, *self._connections):
                _shut(connection)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def has_clients(self) -> bool:
        """Return whether a connection is open."""
        return any(thread.is_alive() for thread in self._threads)

    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests for completions."""
        with self._lock:
            return [
                request.json
                for request in self.requests
                if request.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
            ]

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if self.tls is not None:  # hands are shaken at the first read
                connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                if self._stopped.is_set():
                    _shut(connection)
                    return
                self._connections.append(connection)
                thread = threading.Thread(
                    target=self._talk, args=(connection, len(self._threads)), daemon=True
                )
                self._threads.append(thread)
            thread.start()

    def _talk(self, connection: socket.socket, number: int) -> None:
        try:
            with connection.makefile("rb") as file:
                while (request := _read(file, number)) is not None:
                    with self._lock:
                        self.requests.append(request)
                    reply = self._reply(request)
                    for piece in reply.pieces:
                        connection.sendall(piece)
                    if reply.then == "hang":
                        self._stopped.wait(60)
                    if reply.then == "stop":
                        self.stop()
                    if reply.then == "reset":  # with what it has not read, the kernel sends RST
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                        break
                    if reply.then != "keep":
                        break
        except OSError:
            return  # the other side has gone
        finally:
            if not self._stopped.is_set():
                connection.close()

    def _reply(self, request: Request) -> Reply:
        if request.path in self.others:
            return self.others[request.path](request)
        if request.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            return self.completions(request)
        if request.path == "/v1/models":
            return plain({"object": "list", "data": [{"id": MODEL}]})
        return plain({}, "200 OK" if request.path == "/health" else "404 Not Found")


def _read(file: Any, number: int) -> Request | None:
    words = file.readline().split()
    if len(words) < 2:  # the end, or no HTTP
        return None
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    body = file.read(int(headers.get("content-length", 0)))
    return Request(words[1].decode("latin-1"), headers, body, number)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
