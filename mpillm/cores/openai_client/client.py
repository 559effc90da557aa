"""Send many requests to one or several servers: choose a server, retry, and watch for silence.

A request is sent again only while no part of its answer has arrived. This is the case after a connection that
failed or ended without a status line. It is also the case after HTTP 429 or 503, by which the server reports
that it did not begin. Parts of a broken answer are never mixed with another answer.

In disaggregated serving, a request goes first to a context server, and with its response to a generation
server (`SequentialProtocol`). Both steps are one call: they are retried, watched and cancelled in the same
way. With SGLang (`BootstrapProtocol`), it goes to both servers simultaneously: a call then has two parts. If
one of them fails, so does the other. The answer is the generation server's, once both are complete.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpillm.comms.messages import Refusal
from mpillm.cores.openai_client.answer import (
    REQUEST_STATUSES,
    AnswerError,
    failure_text,
    refusal_of,
)
from mpillm.cores.openai_client.call import Call, CallListener, ContextCall
from mpillm.cores.openai_client.dialect import COMPLETIONS, Sampling, body
from mpillm.cores.openai_client.disagg_protocol import BootstrapProtocol, SequentialProtocol
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer, ServerUnreachable
from mpillm.cores.openai_client.http_connection import NothingSentBack

_BUSY = (429, 503)  # the server has not begun the request, but may accept it later
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_N_PROMPT_TOKENS = 12  # of a prompt, in messages
_WATCH_S = 1.0  # between checks for silence
_HOLDER_AHEAD = 64  # requests; as in `mpillm.roles.session_pool`
_MAX_SESSIONS = 1 << 16  # conversations that a client remembers


class Client:
    """Belongs to one event loop; other threads read only `calls`, `retries` and `generated_tokens`."""

    def __init__(
        self,
        endpoints: Sequence[RemoteServer],
        listener: CallListener,
        text_of: Callable[[Sequence[int]], str],
        stream: bool,
        silence_s: float,
        retry_s: float,
        contexts: Sequence[RemoteServer] = (),
        protocol: SequentialProtocol | BootstrapProtocol | None = None,
        path: str = COMPLETIONS,
        models: Sequence[str] = (),
    ) -> None:
        """
        Args:
            text_of: Converts a prompt to text, for servers that need text.
            stream: All answers arrive token by token.
            silence_s: Longest silence of a server with outstanding requests.
            retry_s: Longest time from a request's first failure to its last attempt.
            contexts: Context servers for `endpoints`.
            protocol: Protocol between context and generation servers.
            path: Path of the requests, in OpenAI's API.
            models: Models that requests name in turn, and the requests of a conversation together; empty: the
                only model of the server.
        """
        self.endpoints = endpoints
        self.contexts = deque(contexts)
        self.protocol = protocol
        self.path = path
        self._models = models
        self._turns = itertools.count()
        self.listener = listener
        self.stream = stream
        self.calls: dict[int, Call] = {}  # open, by id
        self.retries = 0
        self.handed_over = 0  # requests that went on from a context server
        # Whether the server may be restarted: failed requests are then sent again, from the beginning.
        self.outlives_server = False
        self._parked = False  # whether calls wait for a restarted server
        self.generated_tokens = 0  # so far; for streamed text, the number of pieces
        self._text_of = text_of
        self._silence_s = silence_s
        self._retry_s = retry_s
        # The server of each conversation's last request, in order of these requests.
        self._holders: OrderedDict[tuple[int, bool], RemoteServer] = OrderedDict()
        self._timers: set[asyncio.TimerHandle] = set()
        self._watching: asyncio.TimerHandle | None = None

    # --- called by the owner ---

    def submit(
        self,
        id_: int,
        prompt: Sequence[int],
        sampling: Sampling,
        on_more: Callable[[Call], None] | None = None,
        session: int = 0,
        flags: int = 0,
    ) -> None:
        """Send a request. No open call may have `id_`.

        `on_more` is called when tokens after the first arrive. `session`: the conversation, or 0. `flags`:
        `RequestFlag`s, for the owner.
        """
        if self._watching is None:
            self._watch()
        model = self._models[(session or next(self._turns)) % len(self._models)] if self._models else ""
        call = self.calls[id_] = Call(self, id_, prompt, sampling, on_more, session, flags, model)
        if not self._parked:
            self._start(call)

    def park(self) -> None:
        """Withdraw all calls, and keep them until `go_on`."""
        self._parked = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for call in self.calls.values():
            if call.endpoint is not None:
                self._withdraw(call)
                call.from_the_beginning()
                self.retries += 1

    def go_on(self, endpoints: Sequence[RemoteServer]) -> None:
        """Send all calls to these servers, which replace the others."""
        for endpoint in self.endpoints:
            endpoint.close()
        self.endpoints, self._parked = endpoints, False
        for call in [*self.calls.values()]:
            self._start(call)

    def cancel(self, ids: Iterable[int]) -> None:
        """Cancel the open calls among `ids`."""
        for id_ in ids:
            if (call := self.calls.pop(id_, None)) is not None:
                self._withdraw(call)
                self.listener.on_cancelled(call)

    def close(self) -> None:
        """Close every connection; nothing more is reported."""
        self.calls.clear()
        for timer in (*self._timers, *filter(None, [self._watching])):
            timer.cancel()
        for endpoint in (*self.contexts, *self.endpoints):
            endpoint.close()

    # --- called by calls ---

    def ended(self, call: Call, reply: bytes) -> None:
        """Handle the end of a complete response; `reply`: its body, if it is not an answer."""
        self._release(call, is_complete=True)
        if call.status != 200:
            wait_s = seconds_of(call.retry_after)
            text = failure_text(call.status, reply, call.location)
            error = AnswerError(text, refusal_of(call.status, reply, wait_s))
            if call.status in _BUSY:
                self._again(call, error, wait_s)
            else:
                self._fail(call, error, is_last=call.status in REQUEST_STATUSES)
        else:
            try:
                call.answer.finish(call.ended_at, may_be_empty=isinstance(call, ContextCall))
                call.is_complete = True
                if isinstance(call, ContextCall):
                    self._count_context(call)
                elif call.at_context and (params := self._handoff_params(call)) is not None:
                    self._count_context(call)
                    call.go_on(params)
                    self._start(call)
                    return
                call = call.main
                if not all(part.is_complete for part in call.parts):
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

    def _handoff_params(self, call: Call) -> dict[str, Any] | None:
        """Return the context server's parameters for the generation server; None: the answer is complete."""
        assert isinstance(self.protocol, SequentialProtocol)
        params = self.protocol.handoff_params(json.loads(call.answer.body))
        if params is None and call.answer.finish_reason == "length" and call.sampling.max_tokens > 1:
            raise AnswerError(f"its answer has no {self.protocol.name}, so there is no KV cache to transfer")
        return params

    def _count_context(self, call: Call) -> None:
        assert call.endpoint is not None
        self._answered(call)
        call.endpoint.count(call, None)
        self.handed_over += 1

    def _answered(self, call: Call) -> None:
        assert call.endpoint is not None
        call.endpoint.answered = max(call.endpoint.answered, call.sent_at)

    def broken(self, call: Call, error: Exception) -> None:
        """Handle the failure of a connection: the response stays incomplete."""
        self._release(call, is_complete=False)
        if isinstance(error, NothingSentBack):
            if call.connection is not None and call.endpoint is not None:  # the request was sent
                call.endpoint.tally.lose(call)
            self._again(call, error, 0.0 if call.stale else None)
        else:
            self._fail(call, error)

    # --- internal ---

    def _release(self, call: Call, is_complete: bool) -> None:
        assert call.endpoint is not None
        call.endpoint.release(call, call.connection, is_complete)

    def _withdraw(self, call: Call) -> None:
        """Close the connections of a call's outstanding requests."""
        for part in call.parts:
            if (server := part.endpoint) is not None and part in server.calls:
                server.release(part, part.connection, is_complete=False)
                if part.connection is not None:  # the request was sent
                    server.tally.lose(part)

    def _start(self, call: Call) -> None:
        """Send `call` to a server, or to one of each role."""
        call.endpoint = self._choose(call)
        if isinstance(self.protocol, BootstrapProtocol):
            context = call.context = ContextCall(call, self)
            context.endpoint = self._choose(context)
            call.handoff_params = self.protocol.params(context.endpoint.host, context.endpoint.bootstrap_port)
            call.sent_at = 0.0
        parts = call.parts
        try:
            requests = [(part.endpoint, self._body(part)) for part in parts if part.endpoint is not None]
        except ValueError as error:
            self._fail(call, AnswerError(str(error), Refusal(400, str(error))), is_last=True)
            return
        for part, (server, request) in zip(parts, requests, strict=True):
            # Otherwise the part before this one has failed.
            if call.parts == parts and self.calls.get(call.id) is call:
                server.start(part, request, call.session)

    def _choose(self, call: Call) -> RemoteServer:
        """Return the server with the fewest outstanding requests, but avoid the server where `call` failed.

        A conversation stays at its server until that has many more outstanding requests than another one.
        """
        failed = call.endpoint
        servers = self.contexts if call.at_context else self.endpoints
        if call.at_context:
            self.contexts.rotate(-1)  # so equally loaded servers take turns
        key = call.session, call.at_context
        holder = self._holders.get(key)
        endpoint = min(
            servers,
            key=lambda one: (one is failed, len(one.calls) - (_HOLDER_AHEAD if one is holder else 0)),
        )
        if call.session and len(servers) > 1:
            self._holders[key] = endpoint
            self._holders.move_to_end(key)
            if len(self._holders) > _MAX_SESSIONS:
                self._holders.popitem(last=False)
        return endpoint

    def _body(self, call: Call) -> bytes:
        assert call.endpoint is not None
        dialect, model = call.endpoint.dialect, call.model or call.endpoint.model
        prompt = call.prompt if dialect.token_prompts else self._text_of(call.prompt)
        request = body(dialect, model, prompt, call.sampling, call.streams and not call.at_context)
        if self.protocol is None:
            return request
        message, params = json.loads(request), call.main.handoff_params
        if params is not None:  # SGLang's context server gets the same as the generation server
            message = self.protocol.for_generation(message, params)
        else:
            assert isinstance(self.protocol, SequentialProtocol)
            message = self.protocol.for_context(message)
        return json.dumps(message, separators=(",", ":")).encode()

    def _again(self, part: Call, error: Exception, wait_s: float | None) -> None:
        """Send a call again after `wait_s` (None: a growing pause), unless `retry_s` is over.

        `part`: its request that has failed.
        """
        now, call = time.perf_counter(), part.main
        call.failing_since = call.failing_since or now
        if wait_s is None:
            wait_s = min(_FIRST_PAUSE_S * 2 ** min(call.retries, 10), _LONGEST_PAUSE_S)
        if now + wait_s - call.failing_since > self._retry_s:
            wait_text = f", it sent Retry-After {part.retry_after}" if part.retry_after else ""
            tried = f"{error}{wait_text}; retried {call.retries} times, for at most {self._retry_s:g} s"
            refusal = error.refusal if isinstance(error, AnswerError) else None
            is_unreachable = isinstance(error, NothingSentBack)
            self._fail(part, AnswerError(tried, refusal), is_last=True, is_unreachable=is_unreachable)
            return
        self._withdraw(call)
        if self.outlives_server:
            call.handoff_params = None
        call.again()
        self.retries += 1

        def start() -> None:
            self._timers.discard(timer)
            if self.calls.get(call.id) is call:
                self._start(call)

        timer = asyncio.get_running_loop().call_later(wait_s, start)
        self._timers.add(timer)

    def _fail(
        self, part: Call, error: Exception, *, is_last: bool = False, is_unreachable: bool = False
    ) -> None:
        """Fail a call, or retry it. `is_unreachable`: its server cannot be reached, or is silent.

        `part`: its request that has failed.
        """
        assert part.endpoint is not None
        if self.outlives_server and not is_last:  # its server may have exited: then `park` follows
            self._again(part, error, None)
            return
        call = part.main
        self._withdraw(call)
        del self.calls[call.id]
        endpoint_error = (ServerUnreachable if is_unreachable else EndpointError)(
            f"{part.endpoint.url}{part.endpoint.path_of(part.endpoint.dialect.path)}: {error}{_other(part)}"
        )
        endpoint_error.refusal = error.refusal if isinstance(error, AnswerError) else None
        self.listener.on_failed(call, endpoint_error)

    def _watch(self) -> None:
        """Fail the calls of a server that is silent, and single calls that hang."""
        now = time.perf_counter()
        for endpoint in (*self.contexts, *self.endpoints):
            if endpoint.calls and now - endpoint.last_received > self._silence_s:
                outstanding = [part for part in self._parts() if part in endpoint.calls]
                for part in outstanding:
                    endpoint.release(part, part.connection, is_complete=False)
                    error = f"silent for {self._silence_s:g} s, with {len(outstanding)} outstanding requests"
                    self._fail(part, AnswerError(error), is_unreachable=True)
        for part in [part for part in self._parts() if self._hangs(part, now)]:
            if part.endpoint is not None and part in part.endpoint.calls:  # its call has not failed meanwhile
                part.endpoint.release(part, part.connection, is_complete=False)
                self._fail(part, AnswerError(self._hang_text(part)))
        pause = min(_WATCH_S, self._silence_s / 4)
        self._watching = asyncio.get_running_loop().call_later(pause, self._watch)

    def _parts(self) -> list[Call]:
        """Return the requests of all calls."""
        return [part for call in self.calls.values() for part in call.parts]

    def _hangs(self, call: Call, now: float) -> bool:
        """Return whether an answer stopped midway, or has not begun although later requests were answered."""
        if call.endpoint is None or call not in call.endpoint.calls or not call.sent_at:
            return False
        if now - call.last_received <= self._silence_s:
            return False
        return bool(call.answer.size) or call.endpoint.answered - call.sent_at > self._silence_s

    def _hang_text(self, call: Call) -> str:
        n, first = len(call.prompt), ", ".join(map(str, call.prompt[:_N_PROMPT_TOKENS]))
        prompt = f"[{first}{', …' if n > _N_PROMPT_TOKENS else ''}] ({n} tokens)"
        return (
            f"the request with the prompt {prompt} received nothing for {self._silence_s:g} s, while others"
            f" were answered; answered before: {call.answer.size} of its tokens"
        )


def _other(part: Call) -> str:
    """Return the server of the simultaneous request, for the end of an error; "" if there is none."""
    others = [one for one in part.main.parts if one is not part and one.endpoint is not None]
    roles = {True: "context", False: "generation"}
    return "".join(f"; {roles[one.at_context]} server: {one.endpoint.url}" for one in others if one.endpoint)


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds in Retry-After (RFC 9110, 10.2.3); None if it has none."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):  # an invalid year
        return None
