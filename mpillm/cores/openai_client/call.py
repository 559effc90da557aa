"""One request to servers: its attempts, and its answer as it arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpillm.cores.openai_client.answer import AnswerError
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.disagg_protocol import BootstrapProtocol, SequentialProtocol
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer
from mpillm.cores.openai_client.http_connection import HttpConnection
from mpillm.cores.openai_client.responses_answer import answer_at

_MAX_REPLY = 1 << 16  # bytes of a reply that is not an answer


class CallListener(Protocol):
    """Receives events of calls on the event loop's thread. Each call ends as done, failed or cancelled."""

    def on_first(self, call: Call) -> None:
        """Handle the arrival of the first token of a streamed answer."""

    def on_done(self, call: Call) -> None:
        """Handle a complete answer. If it is invalid, raise AnswerError: the call then fails."""

    def on_failed(self, call: Call, error: EndpointError) -> None:
        """Handle a failure: there will be no answer."""

    def on_cancelled(self, call: Call) -> None:
        """Handle the end of a cancelled call."""


class CallOwner(Protocol):
    """The client of a call."""

    protocol: SequentialProtocol | BootstrapProtocol | None
    path: str  # of the requests, in OpenAI's API
    stream: bool
    listener: CallListener
    generated_tokens: int

    def ended(self, call: Call, reply: bytes) -> None:
        """Handle the end of a complete response; `reply`: its body, if it is not an answer."""

    def broken(self, call: Call, error: Exception) -> None:
        """Handle the failure of a connection: the response stays incomplete."""


class Call:
    """One request, with all its attempts. Times are time.perf_counter(), 0 if not set."""

    __slots__ = (
        "_client", "_reply", "_reply_left", "_reused", "answer", "connection", "context", "ended_at",
        "endpoint", "failing_since", "flags", "handoff_params", "id", "is_complete", "last_received",
        "location", "model", "on_more",
        "prompt", "retries", "retry_after", "sampling", "sent_at", "session", "status", "streams",
    )  # fmt: skip

    def __init__(
        self,
        client: CallOwner,
        id_: int,
        prompt: Sequence[int],
        sampling: Sampling,
        on_more: Callable[[Call], None] | None = None,
        session: int = 0,
        flags: int = 0,
        model: str = "",
    ) -> None:
        self.id = id_
        self.session, self.flags, self.model = session, flags, model
        self.prompt = prompt
        self.sampling = sampling
        self.on_more = on_more
        self.streams = client.stream or on_more is not None  # its answer comes token by token
        self.sent_at = self.last_received = self.ended_at = self.failing_since = 0.0
        self.retries = 0
        self.endpoint: RemoteServer | None = None
        self.handoff_params: dict[str, Any] | None = None  # from the context server for the generation server
        self._client = client
        self._begin()

    @property
    def main(self) -> Call:
        """The call to which this request belongs."""
        return self

    @property
    def parts(self) -> tuple[Call, ...]:
        """This request, and the simultaneous request to a context server if there is one."""
        return (self,) if self.context is None else (self, self.context)

    @property
    def at_context(self) -> bool:
        """Whether a context server must compute its context first."""
        return isinstance(self._client.protocol, SequentialProtocol) and self.handoff_params is None

    def _begin(self) -> None:
        self.connection: HttpConnection | None = None
        self.context: ContextCall | None = None  # in this attempt
        self.is_complete = False  # whether this attempt has a complete answer
        self.status = 0
        self.retry_after: str | None = None
        self.location: str | None = None
        streams = self.streams and not self.at_context
        self.answer = answer_at(self._client.path, streams, self.sampling.max_tokens)
        self._reply: list[bytes] = []
        self._reply_left = _MAX_REPLY
        self._reused = False

    def again(self) -> None:
        """Reset the call after a failed attempt."""
        self.retries += 1
        self._begin()

    def go_on(self, handed: dict[str, Any]) -> None:
        """Continue at a generation server."""
        self.handoff_params = handed
        self.endpoint, self.failing_since = None, 0.0
        self._begin()

    def from_the_beginning(self) -> None:
        """Reset the call to its state before the first attempt."""
        self.handoff_params, self.endpoint, self.failing_since = None, None, 0.0
        self.again()

    def sent(self, connection: HttpConnection, reused: bool, at: float) -> None:
        """Record that an attempt was sent."""
        self.connection, self._reused, self.last_received = connection, reused, at
        if self.handoff_params is None or not self.sent_at:  # the time to first token includes the context
            self.sent_at = at

    @property
    def stale(self) -> bool:
        """Whether the attempt used a connection that the server may have closed before the attempt."""
        return self._reused

    # --- Receiver ---

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        assert self.endpoint is not None
        self.endpoint.last_received = self.last_received = time.perf_counter()
        self.status, self.retry_after = status, headers.get("retry-after")
        self.location = headers.get("location")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise AnswerError(f"it sent a body in Content-Encoding {coding[:30]}, which was not requested")

    def on_body(self, data: bytes, at: float) -> None:
        assert self.endpoint is not None
        self.endpoint.last_received = at
        if self.status != 200:
            self._reply_left -= len(data)
            if self._reply_left < 0:
                raise AnswerError(f"HTTP {self.status}, and its reply is longer than {_MAX_REPLY} bytes")
            self._reply.append(data)
            return
        answer, client = self.answer, self._client
        had = answer.size
        answer.feed(data, at)
        if self.at_context:
            self.last_received = at
            return
        if answer.size > had or not self.streams:  # comments and empty events are not part of an answer
            self.last_received = at
        if answer.size > had:
            client.generated_tokens += answer.size - had
            if not had:
                client.listener.on_first(self)
            elif self.on_more is not None:
                self.on_more(self)

    def on_end(self, connection: HttpConnection) -> None:
        self.ended_at = time.perf_counter()
        self._client.ended(self, b"".join(self._reply))

    def on_broken(self, error: Exception) -> None:
        self._client.broken(self, error)


class ContextCall(Call):
    """The request to a context server, simultaneous with the same request to a generation server."""

    __slots__ = ("_main",)
    at_context = True

    def __init__(self, main: Call, client: CallOwner) -> None:
        self._main = main
        super().__init__(client, main.id, main.prompt, main.sampling, None, main.session, 0, main.model)

    @property
    def main(self) -> Call:
        return self._main

    def sent(self, connection: HttpConnection, reused: bool, at: float) -> None:
        super().sent(connection, reused, at)
        self._main.sent_at = self._main.sent_at or at
