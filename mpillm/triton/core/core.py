"""Executor ranks as frontends of tritonservers: each has clients (streams), and a channel of its own."""

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

from disagg.errors import ConfigError, about, nearest
from launch.outside import one_line
from mpillm.comms.messages import Batch, Refusal, RequestFlag, ResponseFlag
from mpillm.core_names import TRITON_URL
from mpillm.cores.base import CoreConfig, Credits, LLMCore, Metrics, StatedLimits, short_requests
from mpillm.cores.clients import (
    EARLIER,
    MOST_AT_ONCE,
    Answers,
    hear_owner,
    longest_first_token_s,
    longest_wait_s,
    share_of,
    until_when,
)
from mpillm.cores.openai_client.endpoint import Endpoint
from mpillm.cores.openai_client.server_reader import ServerReader
from mpillm.errors import Failure, RunError
from mpillm.nvidia.configs import TritonHarnessConfig
from mpillm.options.mitten import configured
from mpillm.triton.core.stream import Stream, Streams, open_channel
from mpillm.triton.core.tensors import NO_END, Wanted, is_last, request_of, stop_of, tokens_of
from mpillm.triton.core.triton_counts import metrics_url, read
from mpillm.triton.core.triton_ready import Model, TritonError, find_models, framework_of, until_ready

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms
    from mpillm.options.run_config import RunConfig

_log = logging.getLogger(__name__)
_WATCH_S = 1.0
# Where nobody measures single answers (Offline), they go to rank 0 many in a message, which is work for both
# ranks: those of so long, or sooner, when a part of all requests that may be open waits for its successors.
_GATHER_S = 0.02
_GATHER_PART = 16
_MOST_LISTED = 5  # requests in a message
# Plain numbers: operations on flags take longer than the rest of a row.
_IGNORE_STOP, _IGNORE_END = int(RequestFlag.IGNORE_STOP), int(RequestFlag.IGNORE_END)
_STREAM = int(RequestFlag.STREAM)
_FIRST, _FINAL, _ERROR = int(ResponseFlag.FIRST), int(ResponseFlag.FINAL), int(ResponseFlag.ERROR)
_PARTIAL, _REFUSED = int(ResponseFlag.PARTIAL), int(ResponseFlag.REFUSED)
_MOST_SAID = 300  # characters of an error
# HTTP's, by gRPC's, which errors of single calls begin with.
_STATUSES = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}


class _Call:
    """A request in progress."""

    def __init__(self, id_: int, model: Model, stream: Stream, live: bool, most: int) -> None:
        """`live`: its tokens are wanted as they come; `most`: how many there may be."""
        self.id = id_
        self.model = model
        self.stream = stream
        self.live = live
        self.most = most
        self.asked_at = time.monotonic()
        self.tokens: list[int] = []
        self.n_told = 0  # of the tokens


class TritonGrpcCore(LLMCore):
    """Engines behind `tritonserver`: TensorRT-LLM's, or the embedded one."""

    is_client = True
    engine_stages = "mpillm.trtllm.engines:engine_stages"
    servers = "mpillm.triton.servers:triton_servers"

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        super().__init__(config, comms)
        self._harness: TritonHarnessConfig = config.settings
        self.streams = self._harness.streaming or config.serves
        at_once = int(self._harness.runtime_flags.get("max_batch_size") or MOST_AT_ONCE)
        self._urls, self._at_once = (
            share_of(self._harness.server_urls or (TRITON_URL,), at_once, config.instance, config.n_instances)
            if config.server is None
            else share_of([""], at_once, config.client, config.n_clients)
        )
        # One client of each asks what it counts.
        self._reads = config.client == 0 and (
            config.server is not None or config.instance < len(self._harness.server_urls or (TRITON_URL,))
        )
        self._reader: ServerReader | None = None
        self._metrics_port = ""  # of an owned server
        self._clients = Streams()
        self._models: dict[str, itertools.cycle[Model]] = {}  # of each server
        self._calls: dict[int, _Call] = {}  # open, by their number on the wire
        self._numbers: dict[int, int] = {}  # the same, by id
        self._number = itertools.count(1)
        self._frameworks: set[str] = set()  # of the servers' models
        self._answers = Answers()
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
    def check(cls, config: CoreConfig) -> StatedLimits:
        with about("core_options"):
            for key in config.options:
                if key != "model":
                    raise ConfigError(
                        f"--core_options {key}: this core has no such option{nearest(key, ['model'])};"
                        " it has: model"
                    )
        with about("stop_words"):
            for word in config.engine.stop_words:
                if isinstance(word, str):
                    raise ConfigError(
                        f"--stop_words {word}: this core sends tokens; write the word's, as in [[12, 13]]"
                    )
        return StatedLimits()

    # --- life ---

    def load(self) -> None:
        """Connect, if the servers are not the run's own."""
        if self.config.server is None:
            self._connect()

    def find_servers(self, urls: Mapping[int, str]) -> None:
        if self.config.server is not None:
            url, _, self._metrics_port = urls[self.config.server].partition("#")
            self._urls = [url]
            self._connect()

    def _connect(self) -> None:
        """Wait for the servers, and open the clients: their streams share as few channels as carry them."""
        deadline = longest_wait_s(self.config, self._harness.load_deadline)
        began = time.monotonic()

        def tell(waiting: str) -> None:
            self.awaits = f"{waiting}\n{until_when(deadline)}"
            self.meanwhile()

        for url in self._urls:
            n = max(self._harness.clients_per_frontend, self._harness.clients_per_server)
            channel = open_channel(url)
            try:
                until_ready(url, channel, deadline, tell, began, self.meanwhile)
                wanted = self.config.options.get("model")
                name = None if wanted is None else str(wanted)
                models = find_models(url, channel, name, deadline, self.meanwhile)
            except TritonError as error:
                raise self._failure(str(error)) from None
            finally:
                channel.close()
            self._models[url] = itertools.cycle(models)
            self._frameworks |= {framework_of(model) for model in models}
            n_calls = 0 if all(model.decoupled for model in models) else self._at_once
            self._clients.connect(url, n, self._heard, n_calls)
            names = ", ".join(model.name for model in models)
            _log.info("%s has %s; %d clients", url, names, n)
        self.awaits = ""
        if self._reads:
            servers = [Endpoint(metrics_url(url, self._metrics_port)) for url in self._urls]
            self._reader = ServerReader(servers, read=read)

    def run_health_check(self) -> None:
        """Generate a token on each server."""
        limit = longest_first_token_s(self.config, EARLIER * self._harness.health_deadline / len(self._urls))
        for url in self._urls:
            stream = next(one for one in self._clients.open if one.url == url)
            self._submit(0, np.full(8, 3, np.int32), Wanted(1, end_id=NO_END, streaming=False), stream)
            end = time.monotonic() + limit
            while not self._answers:
                self._watch()
                self.meanwhile()
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
        """Return a request for each client, with an answer that may end at once."""
        return short_requests(len(self._clients.open))

    def start_test(self) -> None:
        if self._reader is not None:
            self._reader.start(partial(self._clients.thread.run, meanwhile=self.meanwhile))
        self._began()

    def statistics(self) -> dict[str, float]:
        """Return the numbers of clients, of channels under them, and of requests answered with an error.

        `server_…`, from the first client of each server: what that counted in the test; see `Reading`.
        """
        run = partial(self._clients.thread.run, meanwhile=self.meanwhile)
        return {
            "clients": len(self._clients.open),
            "channels": self._clients.n_channels,
            "errors": self._errors,
            **(self._reader.counted(run) if self._reader else {}),
        }

    def flush(self) -> None:
        if self._reader is not None:
            self._reader.is_over = True

    def frameworks(self) -> list[str]:
        return sorted(self._frameworks)

    def metrics(self) -> Metrics:
        mine = Metrics(self._prompt_tokens, self._generated_tokens, len(self._calls), 0)
        if self._reader is None:
            return mine
        asks_alone = self.config.server is not None and self.config.n_clients == 1
        return self._reader.metrics(mine, asks_alone=asks_alone)

    def notify_stop(self) -> None:
        if self._reader is not None:
            self._clients.thread.post(self._reader.stop)
        self._clients.close()

    # --- work ---

    def credits(self) -> Credits:
        return Credits(self._at_once * len(self._urls), 1 << 40)

    def enqueue(self, requests: Batch) -> None:
        offsets = requests.offsets().tolist()
        # Plain values: to read them one by one from NumPy's rows takes as long as the rest of this.
        for row, (begin, end) in zip(requests.rows.tolist(), itertools.pairwise(offsets), strict=True):
            id_, _, max_output, min_output, temperature, top_k, top_p, seed, flags, *_ = row
            ends, words = self._ends_and_words(flags)
            live = bool(flags & _STREAM)
            streaming = self._harness.streaming or live
            wanted = Wanted(max_output, min_output, temperature, top_k, top_p, ends, words, streaming)
            stream = min(self._clients.open, key=lambda one: len(one.open))
            self._submit(id_, requests.tokens[begin:end], wanted, stream, seed, live)

    def _ends_and_words(self, flags: int) -> tuple[int | None, tuple[tuple[int, ...], ...]]:
        """Return the end token and the stop words of a request, other end tokens among them."""
        ends, words = self.config.engine.end_ids or (), self.config.engine.stop_words
        if flags & _IGNORE_STOP:
            words = ()
        if flags & _IGNORE_END:
            ends = (NO_END,)
        listed = (*(word for word in words if not isinstance(word, str)), *((end,) for end in ends[1:]))
        return ends[0] if ends else None, listed

    def _submit(
        self,
        id_: int,
        prompt: NDArray[np.int32],
        wanted: Wanted,
        stream: Stream,
        seed: int = 0,
        live: bool = False,
    ) -> None:
        model, number = next(self._models[stream.url]), next(self._number)
        if not model.decoupled:
            wanted = wanted._replace(streaming=False)
        # Some servers send the prompt, too.
        call = _Call(id_, model, stream, live, len(prompt) + wanted.max_output)
        self._calls[number], self._numbers[id_] = call, number
        self._prompt_tokens += len(prompt)
        stream.ask(number, request_of(model.name, str(number), prompt, wanted, seed), model.decoupled)

    def has_work(self) -> bool:
        return time.monotonic() >= self._due()

    def quiet_s(self) -> float:
        return self._due() - time.monotonic()

    def _due(self) -> float:
        """Return when there is something to do, if nothing comes before."""
        rows, watch = len(self._answers), self._next_watch if self._calls else math.inf
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
            if (call := self._calls.pop(number, None)) is not None:
                call.stream.open.discard(number)
                self._stop(number, call)
                self._add(id_, int(ResponseFlag.FINAL | ResponseFlag.CANCELLED), [])

    def _stop(self, number: int, call: _Call) -> None:
        """Have the server end a request."""
        call.stream.send(number, stop_of(call.model.name, str(number)), call.model.decoupled)

    def _watch(self) -> None:
        """Look for a stream that has ended, or owes answers and is silent."""
        now = time.monotonic()
        if now < self._next_watch:
            return
        self._next_watch = now + _WATCH_S
        self._give_up(now)
        silence_s = EARLIER * self._harness.stall_timeout
        for stream in self._clients.open:
            if stream.ended:
                raise self._failure(f"tritonserver {stream.url} owes {self._owed(stream)}: {stream.ended}")
            if stream.open and now - stream.heard_at > silence_s:
                raise self._failure(
                    f"tritonserver {stream.url} has said nothing for {silence_s:g} s, and owes"
                    f" {self._owed(stream)}"
                )

    def _give_up(self, now: float) -> None:
        """End requests that have waited for their whole answer for too long."""
        limit = self._harness.request_timeout
        if limit is None:
            return
        for number, call in [*self._calls.items()]:
            if now - call.asked_at > limit:
                self._stop(number, call)
                what = f"no whole answer within --triton_request_timeout {limit:g} s"
                self._fail(number, call, what)

    def _owed(self, stream: Stream) -> str:
        ids = sorted(self._calls[number].id for number in [*stream.open] if number in self._calls)
        listed = ", ".join(map(str, ids[:_MOST_LISTED])) + (", …" if len(ids) > _MOST_LISTED else "")
        return f"{len(ids)} answers" + (f" (requests {listed})" if ids else "")

    def _failure(self, message: str) -> RunError:
        """Return why the run ends. Raises what the server's owner says, if that is the cause."""
        return RunError(Failure(hear_owner(self, message), self.config.rank))

    # --- on the streams' thread ---

    _last_error = ""

    def _heard(self, stream: Stream, response: Any, error: str) -> None:
        number = int(response.id or 0)
        call = self._calls.get(number)
        if call is None:
            if error and not number:
                raise ValueError(error)
            return
        if error:
            self._fail(number, call, error)
            return
        tokens = tokens_of(response)
        if len(call.tokens) + len(tokens) > call.most:
            if not is_last(response):
                self._stop(number, call)
            self._fail(number, call, f"more tokens than the prompt and the answer may have: {call.most}")
            return
        call.tokens += tokens
        self._generated_tokens += len(tokens)
        if is_last(response):
            flags = _FINAL if call.n_told else _FIRST | _FINAL
            if not call.tokens:
                self._fail(number, call, "an answer without a token")
                return
            self._done(number, call, flags, call.tokens)
        elif call.tokens and not call.n_told:
            call.n_told = 1
            self._add(call.id, _FIRST, call.tokens[:1])
        elif call.live and len(call.tokens) > call.n_told:
            new, call.n_told = call.tokens[call.n_told :], len(call.tokens)
            self._add(call.id, _PARTIAL, new)

    def _fail(self, number: int, call: _Call, error: str) -> None:
        if self.config.serves and number in self._calls:
            status = _STATUSES.get(error.partition(":")[0], 500)
            numbers = Refusal(status, one_line(error, _MOST_SAID)).numbers()
            self._add(call.id, _REFUSED, numbers)
        if self._done(number, call, _FINAL | _ERROR, []):
            self._last_error = error
            self._errors += 1
            _log.error("request %d: tritonserver %s: %s", call.id, call.stream.url, error)

    def _done(self, number: int, call: _Call, flags: int, tokens: list[int]) -> bool:
        """Return whether it was still open."""
        if self._calls.pop(number, None) is None:
            return False  # cancelled or given up meanwhile
        self._numbers.pop(call.id, None)
        call.stream.open.discard(number)
        self._add(call.id, flags, tokens)
        return True

    def _add(self, id_: int, flags: int, tokens: list[int]) -> None:
        # Those behind the first of a message are known to the main thread, or soon will be.
        if self._answers.add(id_, flags, tokens) in (1, self._gather):
            self.wake()
