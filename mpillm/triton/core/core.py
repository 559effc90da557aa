"""Executor ranks as clients of tritonservers: each rank has its own gRPC streams and channels."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, about
from launch.safe_text import one_line
from mpillm.comms.messages import Batch, Refusal, RequestFlag, ResponseFlag
from mpillm.core_names import TRITON_URL
from mpillm.cores.base import CoreConfig, Metrics, NumericLimits, check_option_names, short_requests
from mpillm.cores.clients import (
    DEADLINE_SHARE,
    longest_first_token_s,
    longest_wait_s,
    until_when,
    with_owner_failures,
)
from mpillm.cores.openai_client.client_core import ClientCore
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.server_reader import ServerReader
from mpillm.errors import Failure, RunError
from mpillm.nvidia.configs import TritonHarnessConfig
from mpillm.options.mitten import configured
from mpillm.triton.core.stream import InferStream, StreamPool, open_channel
from mpillm.triton.core.tensors import NO_END, InferParams, is_last, request_of, stop_of, tokens_of
from mpillm.triton.core.triton_counts import metrics_url, read
from mpillm.triton.core.triton_ready import Model, TritonError, find_models, framework_of, until_ready

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.options.run_config import RunConfig

_log = logging.getLogger(__name__)
_WATCH_S = 1.0
# Without streaming (Offline), responses go to rank 0 in batches, which saves work on both ranks. A batch is
# sent after this time, or earlier when it has this fraction (1/n) of all requests that may be outstanding.
_GATHER_S = 0.02
_GATHER_PART = 16
_MAX_LISTED = 5  # requests in a message
# Plain numbers: operations on flags take longer than all other work on a row.
_IGNORE_STOP, _IGNORE_END = int(RequestFlag.IGNORE_STOP), int(RequestFlag.IGNORE_END)
_STREAM = int(RequestFlag.STREAM)
_FIRST, _FINAL, _ERROR = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL), int(ResponseFlag.ERROR)
_PARTIAL, _REFUSED = int(ResponseFlag.PARTIAL), int(ResponseFlag.REFUSED)
_MAX_ERROR_CHARS = 300
# HTTP status by gRPC status; errors of ModelInfer calls begin with the latter.
_STATUSES = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}


class _PendingRequest:
    """A request without its final response."""

    def __init__(self, id_: int, model: Model, stream: InferStream, live: bool, max_tokens: int) -> None:
        """`live`: forward tokens as they arrive; `max_tokens`: limit of tokens in all responses."""
        self.id = id_
        self.model = model
        self.stream = stream
        self.live = live
        self.max_tokens = max_tokens
        self.sent_at = time.monotonic()
        self.tokens: list[int] = []
        self.n_forwarded = 0  # tokens sent to rank 0


class TritonGrpcCore(ClientCore):
    """Client of engines behind `tritonserver`: TensorRT-LLM's, or the embedded engine."""

    engine_stages = "mpillm.trtllm.engines:engine_stages"
    servers = "mpillm.triton.servers:triton_servers"

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        self._harness: TritonHarnessConfig = config.settings
        at_once = int(self._harness.runtime_flags.get("max_batch_size") or 0)
        super().__init__(config, comms, self._harness.server_urls or (TRITON_URL,), at_once)
        self._metrics_port = ""  # of an owned server
        self._clients = StreamPool()
        self._models: dict[str, itertools.cycle[Model]] = {}  # of each server
        self._pending: dict[int, _PendingRequest] = {}  # by their number in Triton's protocol
        self._numbers: dict[int, int] = {}  # these numbers by request id
        self._number = itertools.count(1)
        self._frameworks: set[str] = set()
        self._gathers = not self.streams
        at_once = self._at_once * len(self._urls) if self._gathers else 1
        self._gather = max(1, at_once // _GATHER_PART)
        self._next_watch = self._next_rows = 0.0
        self._began()

    def _began(self) -> None:
        self._errors = self._prompt_tokens = self._generated_tokens = 0

    @classmethod
    def settings(cls, config: RunConfig) -> TritonHarnessConfig:
        return configured(TritonHarnessConfig, config)

    @classmethod
    def check(cls, config: CoreConfig) -> NumericLimits:
        with about("core_options"):
            check_option_names(config.options, ["model"])
        with about("stop_words"):
            for word in config.engine.stop_words:
                if isinstance(word, str):
                    raise ConfigError(
                        f"--stop_words {word}: this core sends tokens; write the word's, such as [[12, 13]]"
                    )
        return NumericLimits()

    # --- life ---

    def load(self) -> None:
        """Connect, unless the run starts the servers."""
        if self.config.client.server is None:
            self._connect()

    def find_servers(self, urls: Mapping[int, str]) -> None:
        if self.config.client.server is not None:
            url, _, self._metrics_port = urls[self.config.client.server].partition("#")
            self._urls = [url]
            self._connect()

    def _connect(self) -> None:
        """Wait for the servers, and open streams on as few channels as carry them."""
        deadline = longest_wait_s(self.config, self._harness.load_deadline)
        began = time.monotonic()

        def report_wait(waiting: str) -> None:
            self.awaits = f"{waiting}\n{until_when(deadline)}"
            self.check_run()

        for url in self._urls:
            n = max(self._harness.clients_per_frontend, self._harness.clients_per_server)
            channel = open_channel(url)
            try:
                until_ready(url, channel, deadline, report_wait, began, self.check_run)
                option = self.config.options.get("model")
                name = None if option is None else str(option)
                models = find_models(url, channel, name, deadline, self.check_run)
            except TritonError as error:
                raise self._failure(str(error)) from None
            finally:
                channel.close()
            self._models[url] = itertools.cycle(models)
            self._frameworks |= {framework_of(model) for model in models}
            n_calls = 0 if all(model.decoupled for model in models) else self._at_once
            self._clients.connect(url, n, self._receive, n_calls)
            names = ", ".join(model.name for model in models)
            _log.info("%s has %s; %d clients", url, names, n)
        self.awaits = ""
        if self._reads:
            servers = [RemoteServer(metrics_url(url, self._metrics_port)) for url in self._urls]
            self._reader = ServerReader(servers, read=read)

    def run_health_check(self) -> None:
        """Generate a token on each server."""
        limit = longest_first_token_s(
            self.config, DEADLINE_SHARE * self._harness.health_deadline / len(self._urls)
        )
        for url in self._urls:
            stream = next(one for one in self._clients.open if one.url == url)
            self._submit(0, np.full(8, 3, np.int32), InferParams(1, end_id=NO_END, streaming=False), stream)
            end = time.monotonic() + limit
            while not self._answers:
                self._watch()
                self.check_run()
                if time.monotonic() > end:
                    raise self._failure(
                        f"tritonserver {url} gave no token within {limit:g} s (--health_deadline)"
                    )
                time.sleep(0.001)
            answer = self._answers.take()
            assert answer is not None
            if answer.rows["flags"][0] & ResponseFlag.ERROR or not len(answer.tokens):
                raise self._failure(f"tritonserver {url} gave no token: {self._last_error}")

    def warm_up_requests(self) -> Batch:
        """Return a request for each stream, whose output may end immediately."""
        return short_requests(len(self._clients.open))

    def start_test(self) -> None:
        if self._reader is not None:
            self._reader.start(partial(self._clients.thread.run, poll=self.check_run))
        self._began()

    def statistics(self) -> dict[str, float]:
        """Return the numbers of streams, channels and failed requests.

        The first client of each server adds the server's counts in the test as `server_…`; see
        `ServerCounts`.
        """
        run = partial(self._clients.thread.run, poll=self.check_run)
        return {
            "clients": len(self._clients.open),
            "channels": self._clients.n_channels,
            "errors": self._errors,
            **(self._reader.counted(run) if self._reader else {}),
        }

    def frameworks(self) -> list[str]:
        return sorted(self._frameworks)

    def metrics(self) -> Metrics:
        return self._metrics(Metrics(self._prompt_tokens, self._generated_tokens, len(self._pending), 0))

    def notify_stop(self) -> None:
        if self._reader is not None:
            self._clients.thread.post(self._reader.stop)
        self._clients.close()

    # --- work ---

    def enqueue(self, requests: Batch) -> None:
        offsets = requests.offsets().tolist()
        # Plain values: reading them one by one from NumPy's rows doubles the time of this loop.
        for row, (begin, end) in zip(requests.rows.tolist(), itertools.pairwise(offsets), strict=True):
            id_, _, max_output, min_output, temperature, top_k, top_p, seed, flags, *_ = row
            ends = self._end_id_and_stop_words(flags)
            live = bool(flags & _STREAM)
            streaming = self._harness.streaming or live
            params = InferParams(max_output, min_output, temperature, top_k, top_p, *ends, streaming)
            stream = min(self._clients.open, key=lambda one: len(one.open))
            self._submit(id_, requests.tokens[begin:end], params, stream, seed, live)

    def _end_id_and_stop_words(self, flags: int) -> tuple[int | None, tuple[tuple[int, ...], ...]]:
        """Return the first end token of a request, and its stop words, which include the other end tokens."""
        end_ids, stop_words = self.config.engine.end_ids or (), self.config.engine.stop_words
        if flags & _IGNORE_STOP:
            stop_words = ()
        if flags & _IGNORE_END:
            end_ids = (NO_END,)
        tokens = (word for word in stop_words if not isinstance(word, str))
        return end_ids[0] if end_ids else None, (*tokens, *((end,) for end in end_ids[1:]))

    def _submit(
        self,
        id_: int,
        prompt: NDArray[np.int32],
        params: InferParams,
        stream: InferStream,
        seed: int = 0,
        live: bool = False,
    ) -> None:
        model, number = next(self._models[stream.url]), next(self._number)
        if not model.decoupled:
            params = params._replace(streaming=False)
        # The limit includes the prompt, which some servers return.
        pending = _PendingRequest(id_, model, stream, live, len(prompt) + params.max_output)
        self._pending[number], self._numbers[id_] = pending, number
        self._prompt_tokens += len(prompt)
        stream.submit(number, request_of(model.name, str(number), prompt, params, seed), model.decoupled)

    def has_work(self) -> bool:
        return time.monotonic() >= self._due()

    def quiet_s(self) -> float:
        return self._due() - time.monotonic()

    def _due(self) -> float:
        """Return when there is work even if no response arrives."""
        rows, watch = len(self._answers), self._next_watch if self._pending else math.inf
        if rows >= self._gather:
            return 0.0
        return min(self._next_rows, watch) if rows else watch

    def poll_responses(self) -> Batch | None:
        self._watch()
        if self._answers and self._gathers:
            self._next_rows = time.monotonic() + _GATHER_S
        return self._answers.take()

    def cancel(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if (number := self._numbers.pop(id_, None)) is None:
                continue
            if (pending := self._pending.pop(number, None)) is not None:
                pending.stream.open.discard(number)
                self._stop(number, pending)
                self._add(id_, int(ResponseFlag.FINAL | ResponseFlag.CANCELLED), [])

    def _stop(self, number: int, pending: _PendingRequest) -> None:
        """Request the server to end a request."""
        pending.stream.send(number, stop_of(pending.model.name, str(number)), pending.model.decoupled)

    def _watch(self) -> None:
        """Fail if a stream has ended, or is silent with outstanding requests."""
        now = time.monotonic()
        if now < self._next_watch:
            return
        self._next_watch = now + _WATCH_S
        self._give_up(now)
        silence_s = DEADLINE_SHARE * self._harness.stall_timeout
        for stream in self._clients.open:
            if stream.ended:
                raise self._failure(f"tritonserver {stream.url}: {stream.ended}; {self._outstanding(stream)}")
            if stream.open and now - stream.silent_since > silence_s:
                raise self._failure(
                    f"tritonserver {stream.url}: no response for {silence_s:g} s; {self._outstanding(stream)}"
                )

    def _give_up(self, now: float) -> None:
        """Fail requests that exceed --triton_request_timeout."""
        limit = self._harness.request_timeout
        if limit is None:
            return
        for number, pending in [*self._pending.items()]:
            if now - pending.sent_at > limit:
                self._stop(number, pending)
                error = f"no whole answer within --triton_request_timeout {limit:g} s"
                self._fail(number, pending, error)

    def _outstanding(self, stream: InferStream) -> str:
        ids = sorted(self._pending[number].id for number in [*stream.open] if number in self._pending)
        listed = ", ".join(map(str, ids[:_MAX_LISTED])) + (", …" if len(ids) > _MAX_LISTED else "")
        return f"outstanding requests: {len(ids)}" + (f" (ids {listed})" if ids else "")

    def _failure(self, message: str) -> RunError:
        """Return the error that ends the run. Raises the failure that the server's owner reports, if any."""
        return RunError(Failure(with_owner_failures(self, message), self.config.rank))

    # --- on the streams' thread ---

    _last_error = ""

    def _receive(self, stream: InferStream, response: Any, error: str) -> None:
        number = int(response.id or 0)
        pending = self._pending.get(number)
        if pending is None:
            if error and not number:
                raise ValueError(error)
            return
        if error:
            self._fail(number, pending, error)
            return
        tokens = tokens_of(response)
        if len(pending.tokens) + len(tokens) > pending.max_tokens:
            if not is_last(response):
                self._stop(number, pending)
            limit = pending.max_tokens
            self._fail(number, pending, f"more tokens than the prompt and the answer may have: {limit}")
            return
        pending.tokens += tokens
        self._generated_tokens += len(tokens)
        if is_last(response):
            flags = _FINAL if pending.n_forwarded else _FIRST | _FINAL
            if not pending.tokens:
                self._fail(number, pending, "an answer without a token")
                return
            self._done(number, pending, flags, pending.tokens)
        elif pending.tokens and not pending.n_forwarded:
            pending.n_forwarded = 1
            self._add(pending.id, _FIRST, pending.tokens[:1])
        elif pending.live and len(pending.tokens) > pending.n_forwarded:
            new, pending.n_forwarded = pending.tokens[pending.n_forwarded :], len(pending.tokens)
            self._add(pending.id, _PARTIAL, new)

    def _fail(self, number: int, pending: _PendingRequest, error: str) -> None:
        if self.config.serves and number in self._pending:
            status = _STATUSES.get(error.partition(":")[0], 500)
            numbers = Refusal(status, one_line(error, _MAX_ERROR_CHARS)).numbers()
            self._add(pending.id, _REFUSED, numbers)
        if self._done(number, pending, _FINAL | _ERROR, []):
            self._last_error = error
            self._errors += 1
            _log.error("request %d: tritonserver %s: %s", pending.id, pending.stream.url, error)

    def _done(self, number: int, pending: _PendingRequest, flags: int, tokens: list[int]) -> bool:
        """End a request; return whether it was still pending."""
        if self._pending.pop(number, None) is None:
            return False  # cancelled or timed out
        self._numbers.pop(pending.id, None)
        pending.stream.open.discard(number)
        self._add(pending.id, flags, tokens)
        return True

    def _add(self, id_: int, flags: int, tokens: list[int]) -> None:
        # Only the first response, and a full batch, must wake the main thread.
        if self._answers.add(id_, flags, tokens) in (1, self._gather):
            self.wake()
