"""Send many requests to one or several servers: choose a server, retry, and watch for silence.

A request is sent again only while nothing of its answer has arrived: after a connection that failed or ended
without a status line, and after HTTP 429 or 503, which say that the server did not begin. Parts of a broken
answer are never mixed with another's.

In disaggregated serving a request goes to a context server first, and with what comes back to one that
generates (`DisaggProtocol`). Both steps are one call: it is retried, watched and cancelled in the same way.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mpillm.comms.messages import Refusal
from mpillm.cores.openai_client.answer import OF_REQUESTS, Answer, AnswerError, failure_text, refusal_of
from mpillm.cores.openai_client.dialect import COMPLETIONS, Dialect, Sampling, body
from mpillm.cores.openai_client.disagg_protocol import DisaggProtocol
from mpillm.cores.openai_client.endpoint import Endpoint, EndpointError, ServerGone
from mpillm.cores.openai_client.http_connection import HttpConnection, NothingSentBack

_BUSY = (429, 503)  # the server has not begun, and may later
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_SHOWN_TOKENS = 12  # of a prompt, in messages
_MOST_REPLY = 1 << 16  # bytes that are kept of a reply that is no answer
_WATCH_S = 1.0  # between checks for silence


class Listener(Protocol):
    """Is told about calls on the event loop's thread. Each call ends as done, failed or cancelled."""

    def on_first(self, call: Call) -> None:
        """The first token of a streamed answer has arrived."""

    def on_done(self, call: Call) -> None:
        """The answer is complete. Raises AnswerError if it makes no sense; the call has then failed."""

    def on_failed(self, call: Call, error: EndpointError) -> None:
        """There will be no answer."""

    def on_cancelled(self, call: Call) -> None:
        """The call was cancelled as requested."""


class Call:
    """One request, with all its attempts. Times are time.perf_counter(), 0 before there is one."""

    __slots__ = (
        "_client", "_reply", "_reply_left", "_reused", "answer", "connection", "ended_at", "endpoint",
        "failing_since", "handed", "heard_at", "id", "location", "on_more", "prompt", "retries",
        "retry_after", "sampling", "sent_at", "status", "streams",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        id_: int,
        prompt: Sequence[int],
        sampling: Sampling,
        on_more: Callable[[Call], None] | None = None,
    ) -> None:
        self.id = id_
        self.prompt = prompt
        self.sampling = sampling
        self.on_more = on_more
        self.streams = client.stream or on_more is not None  # its answer comes token by token
        self.sent_at = self.heard_at = self.ended_at = self.failing_since = 0.0
        self.retries = 0
        self.endpoint: Endpoint | None = None
        self.handed: dict[str, Any] | None = None  # what the context server has answered for the other one
        self._client = client
        self._begin()

    @property
    def at_context(self) -> bool:
        """Whether its context is yet to be computed, by a server for that."""
        return self._client.protocol is not None and self.handed is None

    def _begin(self) -> None:
        self.connection: HttpConnection | None = None
        self.status = 0
        self.retry_after: str | None = None
        self.location: str | None = None
        self.answer = Answer(self.streams and not self.at_context, self.sampling.max_tokens)
        self._reply: list[bytes] = []
        self._reply_left = _MOST_REPLY
        self._reused = False

    def again(self) -> None:
        """Forget the failed attempt."""
        self.retries += 1
        self._begin()

    def go_on(self, handed: dict[str, Any]) -> None:
        """Go on at a server that generates."""
        self.handed = handed
        self.endpoint, self.failing_since = None, 0.0
        self._begin()

    def from_the_beginning(self) -> None:
        """Forget all that has happened to it."""
        self.handed, self.endpoint, self.failing_since = None, None, 0.0
        self.again()

    def sent(self, connection: HttpConnection, reused: bool, at: float) -> None:
        """Note that an attempt was sent."""
        self.connection, self._reused, self.heard_at = connection, reused, at
        if self.handed is None:  # what the context takes belongs to the time to the first token
            self.sent_at = at

    @property
    def stale(self) -> bool:
        """Whether the attempt went over a connection that may have ended before it was sent."""
        return self._reused

    # --- Receiver ---

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        assert self.endpoint is not None
        self.endpoint.heard_at = self.heard_at = time.perf_counter()
        self.status, self.retry_after = status, headers.get("retry-after")
        self.location = headers.get("location")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise AnswerError(f"it sent a body in Content-Encoding {coding[:30]}, which was not asked for")

    def on_body(self, data: bytes, at: float) -> None:
        assert self.endpoint is not None
        self.endpoint.heard_at = at
        if self.status != 200:
            self._reply_left -= len(data)
            if self._reply_left < 0:
                raise AnswerError(f"HTTP {self.status}, and its reply is longer than {_MOST_REPLY} bytes")
            self._reply.append(data)
            return
        answer, client = self.answer, self._client
        had = answer.size
        answer.feed(data, at)
        if self.at_context:
            self.heard_at = at
            return
        if answer.size > had or not self.streams:  # comments and empty events are no part of an answer
            self.heard_at = at
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


class Client:
    """Belongs to one event loop; only `calls`, `retries` and `generated_tokens` are read elsewhere."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        listener: Listener,
        text_of: Callable[[Sequence[int]], str],
        stream: bool,
        silence_s: float,
        retry_s: float,
        contexts: Sequence[Endpoint] = (),
        protocol: DisaggProtocol | None = None,
    ) -> None:
        """`text_of`: of a prompt, for servers that take text; `stream`: all answers come token by token.

        `silence_s`: longest time for which a server that owes answers may say nothing; `retry_s`: longest
        time from a request's first failure to its last attempt.

        `contexts`: servers that compute contexts for `endpoints`; `protocol`: between the two.
        """
        self.endpoints = endpoints
        self.contexts = deque(contexts)
        self.protocol = protocol
        self.listener = listener
        self.stream = stream
        self.calls: dict[int, Call] = {}  # open, by id
        self.retries = 0
        self.handed_over = 0  # contexts
        # Whether the server may be started again: what fails is then asked again, from the beginning.
        self.outlives_server = False
        self._parked = False  # until it is there again
        self.generated_tokens = 0  # so far; where a stream brings text, its pieces
        self._text_of = text_of
        self._silence_s = silence_s
        self._retry_s = retry_s
        self._timers: set[asyncio.TimerHandle] = set()
        self._watching: asyncio.TimerHandle | None = None

    # --- asked by the owner ---

    def submit(
        self,
        id_: int,
        prompt: Sequence[int],
        sampling: Sampling,
        on_more: Callable[[Call], None] | None = None,
    ) -> None:
        """Ask for an answer. No open call may have `id_`.

        `on_more` hears of all tokens behind the first, as they come.
        """
        if self._watching is None:
            self._watch()
        call = self.calls[id_] = Call(self, id_, prompt, sampling, on_more)
        if not self._parked:
            self._start(call)

    def park(self) -> None:
        """Take all calls back, and keep them until `go_on`."""
        self._parked = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for call in self.calls.values():
            if call.endpoint is not None:
                call.endpoint.release(call, call.connection, whole=False)
                call.from_the_beginning()
                self.retries += 1

    def go_on(self, endpoints: Sequence[Endpoint]) -> None:
        """Send all calls to these servers, which take the place of the others."""
        for endpoint in self.endpoints:
            endpoint.close()
        self.endpoints, self._parked = endpoints, False
        for call in [*self.calls.values()]:
            self._start(call)

    def cancel(self, ids: Iterable[int]) -> None:
        """Cancel those of these calls that are open."""
        for id_ in ids:
            if (call := self.calls.pop(id_, None)) is not None:
                if call.endpoint is not None:
                    call.endpoint.release(call, call.connection, whole=False)
                    call.endpoint.tally.lose(call)
                self.listener.on_cancelled(call)

    def close(self) -> None:
        """Close every connection; nothing more is reported."""
        self.calls.clear()
        for timer in (*self._timers, *filter(None, [self._watching])):
            timer.cancel()
        for endpoint in (*self.contexts, *self.endpoints):
            endpoint.close()

    # --- told by calls ---

    def ended(self, call: Call, reply: bytes) -> None:
        """Take the end of a whole response; `reply`: its body, if it is not an answer."""
        self._release(call, whole=True)
        if call.status != 200:
            wait_s = seconds_of(call.retry_after)
            text = failure_text(call.status, reply, call.location)
            error = AnswerError(text, refusal_of(call.status, reply, wait_s))
            if call.status in _BUSY:
                self._again(call, error, wait_s)
            else:
                self._fail(call, error, is_last=call.status in OF_REQUESTS)
        else:
            assert call.endpoint is not None
            try:
                call.answer.finish(call.ended_at)
                if call.at_context and (handed := self._handed(call)) is not None:
                    self._answered(call)
                    call.endpoint.count(call, None)
                    self.handed_over += 1
                    call.go_on(handed)
                    self._start(call)
                    return
                if call.at_context and call.streams:
                    self.listener.on_first(call)
                if not call.streams or call.at_context:
                    self.generated_tokens += len(call.answer.tokens) or call.answer.completion_tokens or 1
                self.listener.on_done(call)
            except (AnswerError, ValueError) as error:
                self._fail(call, error)
            else:
                del self.calls[call.id]
                self._answered(call)

    def _handed(self, call: Call) -> dict[str, Any] | None:
        """Return what the context server has answered for the other one; None: it is the whole answer."""
        assert self.protocol is not None
        handed = self.protocol.handed(json.loads(call.answer.whole))
        if handed is None and call.answer.finish_reason == "length" and call.sampling.max_tokens > 1:
            raise AnswerError(f"it hands no KV cache over: there are no {self.protocol.name} in its answer")
        return handed

    def _answered(self, call: Call) -> None:
        assert call.endpoint is not None
        call.endpoint.answered = max(call.endpoint.answered, call.sent_at)

    def broken(self, call: Call, error: Exception) -> None:
        """Take the failure of a connection: no more of the response will arrive, and it is incomplete."""
        self._release(call, whole=False)
        if isinstance(error, NothingSentBack):
            if call.connection is not None and call.endpoint is not None:  # the request was sent
                call.endpoint.tally.lose(call)
            self._again(call, error, 0.0 if call.stale else None)
        else:
            self._fail(call, error)

    # --- inside ---

    def _release(self, call: Call, whole: bool) -> None:
        assert call.endpoint is not None
        call.endpoint.release(call, call.connection, whole)

    def _start(self, call: Call) -> None:
        """Send `call` to the server that owes the fewest answers, if possible not to one where it failed."""
        failed = call.endpoint
        self.contexts.rotate(-1)  # of those that owe the same, another one each time
        mine = self.contexts if call.at_context else self.endpoints
        endpoint = min(mine, key=lambda one: (one is failed, len(one.calls)))
        call.endpoint = endpoint
        try:
            request = self._body(endpoint.dialect, endpoint.model, call)
        except ValueError as error:
            self._fail(call, AnswerError(str(error), Refusal(400, str(error))), is_last=True)
            return
        endpoint.start(call, request)

    def _body(self, dialect: Dialect, model: str, call: Call) -> bytes:
        prompt = call.prompt if dialect.token_prompts else self._text_of(call.prompt)
        request = body(dialect, model, prompt, call.sampling, call.streams and not call.at_context)
        if self.protocol is None:
            return request
        whole = json.loads(request)
        if call.handed is None:
            whole = self.protocol.for_context(whole)
        else:
            whole = self.protocol.for_generation(whole, call.handed)
        return json.dumps(whole, separators=(",", ":")).encode()

    def _again(self, call: Call, error: Exception, wait_s: float | None) -> None:
        """Send `call` again after `wait_s` (None: a growing pause), if it is not too late."""
        now = time.perf_counter()
        call.failing_since = call.failing_since or now
        if wait_s is None:
            wait_s = min(_FIRST_PAUSE_S * 2 ** min(call.retries, 10), _LONGEST_PAUSE_S)
        if now + wait_s - call.failing_since > self._retry_s:
            asked = f", it asks to wait {call.retry_after} s" if call.retry_after else ""
            tried = f"{error}{asked}; retried {call.retries} times, for at most {self._retry_s:g} s"
            refusal = error.refusal if isinstance(error, AnswerError) else None
            gone = isinstance(error, NothingSentBack)
            self._fail(call, AnswerError(tried, refusal), is_last=True, gone=gone)
            return
        if self.outlives_server:
            call.handed = None
        call.again()
        self.retries += 1

        def start() -> None:
            self._timers.discard(timer)
            if self.calls.get(call.id) is call:
                self._start(call)

        timer = asyncio.get_running_loop().call_later(wait_s, start)
        self._timers.add(timer)

    def _fail(self, call: Call, error: Exception, *, is_last: bool = False, gone: bool = False) -> None:
        """`gone`: its server can't be reached, or is silent."""
        assert call.endpoint is not None
        if self.outlives_server and not is_last:  # its server may have ended: then `park` comes
            self._again(call, error, None)
            return
        del self.calls[call.id]
        told = (ServerGone if gone else EndpointError)(f"{call.endpoint.url}{COMPLETIONS}: {error}")
        told.refusal = error.refusal if isinstance(error, AnswerError) else None
        self.listener.on_failed(call, told)

    def _watch(self) -> None:
        """Fail the calls of a server that owes answers but is silent, and single calls that hang."""
        now = time.perf_counter()
        for endpoint in (*self.contexts, *self.endpoints):
            if endpoint.calls and now - endpoint.heard_at > self._silence_s:
                owed = [call for call in self.calls.values() if call in endpoint.calls]
                for call in owed:
                    endpoint.release(call, call.connection, whole=False)
                    error = f"it has said nothing for {self._silence_s:g} s, and owes {len(owed)} answers"
                    self._fail(call, AnswerError(error), gone=True)
        for call in [call for call in self.calls.values() if self._hangs(call, now)]:
            assert call.endpoint is not None
            call.endpoint.release(call, call.connection, whole=False)
            self._fail(call, AnswerError(self._hang_text(call)))
        pause = min(_WATCH_S, self._silence_s / 4)
        self._watching = asyncio.get_running_loop().call_later(pause, self._watch)

    def _hangs(self, call: Call, now: float) -> bool:
        """Return whether an answer stopped in the middle, or has not begun although later ones have."""
        if call.endpoint is None or call not in call.endpoint.calls or not call.sent_at:
            return False
        if now - call.heard_at <= self._silence_s:
            return False
        return bool(call.answer.size) or call.endpoint.answered - call.sent_at > self._silence_s

    def _hang_text(self, call: Call) -> str:
        n, first = len(call.prompt), ", ".join(map(str, call.prompt[:_SHOWN_TOKENS]))
        prompt = f"[{first}{', …' if n > _SHOWN_TOKENS else ''}] ({n} tokens)"
        return (
            f"the request with the prompt {prompt} has got nothing for {self._silence_s:g} s, while others"
            f" were answered; answered before: {call.answer.size} of its tokens"
        )


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds in Retry-After (RFC 9110, 10.2.3); None without them."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):  # of a year that is none
        return None
