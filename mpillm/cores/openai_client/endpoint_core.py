"""Cores whose ranks are clients of OpenAI-compatible servers: one client process for each executor rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from disagg.errors import ConfigError, about
from mpillm.comms.messages import WAITING, Batch, Refusal, RequestFlag, ResponseFlag
from mpillm.cores.base import CoreConfig, Metrics, NumericLimits, short_requests
from mpillm.cores.clients import (
    DEADLINE_SHARE,
    allow_files,
    longest_first_token_s,
    longest_wait_s,
    until_when,
    with_owner_failures,
)
from mpillm.cores.openai_client.cache_reset import MAX_RESET_S, reset_prefix_caches
from mpillm.cores.openai_client.call import Call
from mpillm.cores.openai_client.client import Client
from mpillm.cores.openai_client.client_core import ClientCore
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.cores.openai_client.delivered_tokens import AnswerTokens, DeliveredTokens
from mpillm.cores.openai_client.dialect import COMPLETIONS, PATHS, Sampling
from mpillm.cores.openai_client.disagg_protocol import BootstrapProtocol, protocol_of
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer, ServerUnreachable, api_key
from mpillm.cores.openai_client.endpoint_options import EndpointOptions, HarnessValues
from mpillm.cores.openai_client.profiling import ServerProfilers
from mpillm.cores.openai_client.readiness import (
    UNKNOWN_STARTS,
    ServerStarts,
    bootstrap_port_of,
    choose_dialect,
    find_model,
    framework_of,
    until_ready,
)
from mpillm.cores.openai_client.server_reader import ServerReader
from mpillm.cores.openai_client.server_records import counts_of, server_records
from mpillm.cores.openai_client.statistics import Statistics
from mpillm.data.chat_request import REQUESTS
from mpillm.data.row_fields import split_fields
from mpillm.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from mpillm.errors import Failure, RunError

if TYPE_CHECKING:
    from mpillm.comms.communicators import InstanceComms

_log = logging.getLogger(__name__)

# Answers that arrive within this time are sent together. A message for each answer would cost the
# other ranks and the client's thread a quarter more CPU time per request.
_GATHER_S = 1e-3
_Row = tuple[ResponseFlag, Sequence[int]]  # of a request: flags, tokens
_OF_CONTENT = (400, 413, 422)  # statuses that mean the request's content
_MAX_LOGGED = 100  # failed single requests in the log: HTTP clients may send any number
_BROKEN = Refusal(502, "the server behind this one did not answer; its rank's log has the cause")
_LONGER = "--health_deadline"
_PROFILER_START_S = 15.0
_PROFILER_END_S = 2.0  # after a failure: other ranks wait for this one
_AGAIN_S = 0.5  # between attempts to warm up a restarted server


class EndpointCore(ClientCore):
    """A server with `/v1/completions` over HTTP: vLLM, SGLang, `trtllm-serve` or another."""

    takes_text = True

    starts: ServerStarts = UNKNOWN_STARTS  # of servers outside the run

    def __init__(self, config: CoreConfig, comms: InstanceComms | None = None) -> None:
        self._harness: HarnessValues = config.settings
        super().__init__(config, comms, self._harness.endpoint_urls, self._harness.max_concurrency)
        self._options = EndpointOptions.from_options(config.options)
        self._encoder = None if config.serves else REQUESTS.get(self._harness.endpoint_type)
        self._path = COMPLETIONS if self._encoder is None else PATHS[self._harness.endpoint_type]
        self._models = () if config.serves else self._harness.lora_modules or ()
        self._context_urls: list[str] = []
        self.waits_for_server = False
        self._tokenizer: Tokenizer | None = None
        self._tokens = AnswerTokens(None)
        self._thread: ClientThread | None = None
        self._shared: ClientThread | None = None
        self._failed: EndpointError | None = None
        self._frameworks: list[str | None] = []  # of the servers
        self._handed_on = 0.0  # time.perf_counter()
        self._delivered: dict[int, DeliveredTokens] = {}  # by id, of open calls
        self._may_fail_alone = False  # whether a request may; warm-up requests may not
        self._n_failed = 0  # single requests
        self._profilers: ServerProfilers | None = None  # with --profile, of the first client of each server
        self._began(0.0)

    @classmethod
    def check(cls, config: CoreConfig) -> NumericLimits | None:
        options = EndpointOptions.from_options(config.options)
        harness: HarnessValues = config.settings
        if options.model is not None and harness.lora_modules:
            raise ConfigError(
                "--core_options model:NAME and --lora_modules exclude each other: add the name to the latter",
                about=["core_options", "lora_modules"],
            )
        api_key()  # raises ConfigError, also for servers that start later
        for url in harness.endpoint_urls:
            with about("trtllm_server_urls"):
                try:
                    RemoteServer(url)
                except ValueError as error:
                    raise ConfigError(f"--trtllm_server_urls {error}") from None
        with about("stop_words"):
            for word in config.engine.stop_words:
                if not isinstance(word, str) and len(word) != 1:
                    raise ConfigError(
                        f"--stop_words {list(word)}: a server accepts words as text, or single tokens;"
                        " write it as text"
                    )
        return None if _folder(config) else NumericLimits()

    # --- life ---

    def share(self, thread: ClientThread) -> None:
        self._shared = thread

    def load(self) -> None:
        """Wait for the servers, if they are outside the run."""
        if (folder := _folder(self.config)) is not None:
            tokenizer = load_tokenizer(folder, apply_chat_template=False)
            self._tokenizer = tokenizer if isinstance(tokenizer, FileTokenizer) else None
        self._tokens = AnswerTokens(self._tokenizer, self.config.client.sends_text)
        if self.config.client.server is not None:
            return
        self._open()
        deadline = longest_wait_s(self.config, self._harness.load_deadline)
        began = time.monotonic()

        def report_wait(waiting: str) -> None:
            self.awaits = f"{waiting}\n{until_when(self.starts.wait_s(deadline))}"

        for endpoint in self._endpoints:  # one deadline for all servers, because the phase has one
            ready = until_ready(endpoint, deadline, report_wait, began, "--load_deadline", self.starts)
            self._run(ready, self._harness.load_deadline + 60)
        self.awaits = ""

    def find_servers(self, urls: Mapping[int, str]) -> None:
        if self.config.client.server is not None:
            self._urls = [urls[self.config.client.server]]
            self._context_urls = [urls[index] for index in self.config.client.context_servers]
            self._open()

    def _open(self) -> None:
        """Start the client."""
        allow_files(self._at_once * (len(self._urls) + bool(self._context_urls)))
        self._endpoints = [self._endpoint(url) for url in self._urls]
        self._contexts = [self._endpoint(url) for url in self._context_urls]
        if self._reads:  # one client reads the counts of all context servers
            contexts = self._contexts if self.config.instance == 0 else ()
            self._reader = ServerReader(self._endpoints, contexts)
        name = self.config.client.protocol
        self._protocol = protocol_of(name, self.config.instance) if self._contexts else None
        self._thread = self._shared.shared() if self._shared else ClientThread("mpillm-http", self.wake)
        self._warming: set[asyncio.Task[None]] = set()
        self._client = Client(
            self._endpoints,
            self,
            self._text,
            self._harness.streaming,
            DEADLINE_SHARE * self._harness.stall_timeout,
            self._options.retry_s,
            self._contexts,
            self._protocol,
            self._path,
            self._models,
        )

    def _endpoint(self, url: str) -> RemoteServer:
        harness, strict_model = self._harness, self.config.client.names_model
        return RemoteServer(
            url,
            strict_model,
            harness.extra_headers,
            harness.session_header,
            request_path=harness.endpoint_path,
            insecure=harness.insecure,
        )

    def server_lost(self) -> None:
        assert self._thread is not None
        self.waits_for_server = True
        self._thread.post(self._park)

    def _park(self) -> None:
        for task in self._warming:  # the server is lost again
            task.cancel()
        self._client.park()

    def server_back(self, url: str) -> None:
        assert self._thread is not None
        self._urls = [url]
        endpoint = self._endpoint(url)
        endpoint.tally = self._endpoints[0].tally
        self._thread.post(self._go_on, endpoint)

    def _go_on(self, endpoint: RemoteServer) -> None:
        task = asyncio.get_running_loop().create_task(self._warm_up(endpoint))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _warm_up(self, endpoint: RemoteServer) -> None:
        """Probe a restarted server, have it answer a request, and resume the calls there."""
        limit = DEADLINE_SHARE * self._harness.health_deadline
        end = time.monotonic() + limit
        while True:
            try:
                await self._prepare(endpoint, limit)
                break
            except EndpointError as error:  # if the server is lost again, `server_lost` follows
                if time.monotonic() > end:
                    self._failed = error
                    self.wake()
                    return
                await asyncio.sleep(_AGAIN_S)
        if self._reader is not None:
            await self._reader.begin_again(endpoint)
        self._client.go_on([endpoint])
        self._endpoints[:] = [endpoint]
        self.waits_for_server = False

    def run_health_check(self) -> None:
        """Find the model and generate a token on each server."""
        endpoints = [*self._contexts, *self._endpoints]
        checks = 2 * len(endpoints) * max(1, len(self._models))
        limit = DEADLINE_SHARE * self._harness.health_deadline / checks
        limit = longest_first_token_s(self.config, limit)
        for endpoint in endpoints:
            path = endpoint.path_of(self._path)
            self.awaits = f"{WAITING}{endpoint.url}: a first token (POST {path})"
            self._run(self._prepare(endpoint, limit), checks * limit + 60)
            if self._harness.compliance_test and not endpoint.dialect.token_ids:
                raise RunError(
                    Failure(
                        f"{endpoint.url} gives no token ids: {self._harness.compliance_test} checks tokens as"
                        " they were generated, and those made here from text need not be the same",
                        self.config.rank,
                    )
                )
            self._frameworks.append(self._run(framework_of(endpoint, limit), limit + 60))
            framework = self._frameworks[-1] or "an unknown server"
            _log.info("%s serves %s: %s; %s", endpoint.url, endpoint.model, endpoint.dialect.name, framework)
        self.awaits = ""

    async def _prepare(self, endpoint: RemoteServer, limit_s: float) -> None:
        """Find each model, and have it generate a token; `limit_s`: for each of these steps."""
        config = self.config
        for name in self._models or (self._options.model,):
            endpoint.model = await find_model(
                endpoint, name, config.engine.model_path, limit_s, strict=config.client.names_model
            )
            await self._choose_dialect(endpoint, limit_s)
        if isinstance(self._protocol, BootstrapProtocol) and endpoint in self._contexts:
            endpoint.bootstrap_port = await bootstrap_port_of(endpoint, limit_s)

    def _index_of(self, error: EndpointError) -> int | None:
        """Return the index of the run's context server that an error names; None: it names another server."""
        contexts = zip(self._contexts, self.config.client.context_servers, strict=True)
        return next((index for one, index in contexts if str(error).startswith(f"{one.url}/")), None)

    def _cause(self, error: EndpointError) -> str:
        cause = with_owner_failures(self, str(error), self._index_of(error))
        return "\n".join(filter(None, (cause, self.starts.failures())))

    def _choose_dialect(self, endpoint: RemoteServer, limit_s: float) -> Coroutine[Any, Any, None]:
        texts, stream = self.config.client.sends_text, self._harness.streaming
        known = self._tokenizer is not None
        more = self._protocol.alone if self._protocol else {}
        return choose_dialect(
            endpoint, known, limit_s, _LONGER, texts=texts, path=self._path, stream=stream, more=more
        )

    def _run(self, work: Any, limit_s: float) -> Any:
        assert self._thread is not None
        try:
            return self._thread.run(work, limit_s, self.check_run)
        except EndpointError as error:
            raise RunError(Failure(self._cause(error), self.config.rank)) from None
        except TimeoutError as error:  # long after the work's own deadline: the thread hangs
            urls = ", ".join(self._urls)
            raise RunError(Failure(f"the HTTP client of {urls}: {error}", self.config.rank)) from None

    def warm_up_requests(self) -> Batch:
        """Return a request for each server, with an answer that may end immediately."""
        requests = short_requests(n := max(len(self._endpoints), len(self._contexts)))
        if self._encoder is None:
            return requests
        prompt = self._encoder.encode("Hello")
        requests.rows["n_tokens"] = len(prompt)
        return Batch(requests.rows, np.array(prompt * n, np.int32))

    def start_test(self) -> None:
        assert self._thread is not None
        self._client.outlives_server = self.config.client.restarts
        self._may_fail_alone = self.config.serves
        if self.config.resets_prefix_cache and self._reads:
            self.reset_prefix_cache()
        if self._reader is not None:
            self._reader.start(self._run)
        if self.config.client.profiler_stop_s is not None and self._reads:
            self._profilers = ServerProfilers(self._read_servers())
            self._run(self._profilers.start(_PROFILER_START_S), _PROFILER_START_S + 60)
        self._began(self._thread.cpu_s())

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches of this client's servers. Raises RunError if a server cannot."""
        self._run(reset_prefix_caches(self._read_servers()), MAX_RESET_S + 60)

    def _read_servers(self) -> list[RemoteServer]:
        """Return the servers of which this client is the first, if it `_reads`."""
        return [*self._endpoints, *(self._contexts if self.config.instance == 0 else ())]

    def flush(self) -> None:
        super().flush()
        limit_s = self.config.client.profiler_stop_s
        if self._profilers is not None and limit_s is not None:
            self._run(self._profilers.stop(limit_s), limit_s + 60)

    def _began(self, cpu_s: float) -> None:
        self._statistics, self._prompt_tokens = Statistics(), 0
        self._started = time.perf_counter(), cpu_s
        if self._thread is not None:
            for endpoint in (*self._endpoints, *self._contexts):
                endpoint.tally.clear()
            self._client.retries = self._client.generated_tokens = self._client.handed_over = 0

    def statistics(self) -> dict[str, Any]:
        """Return retries, re-tokenized answers, latencies at the socket, and the client's use of a CPU core.

        - `handed_over`: requests whose context a context server has computed.
        - `other_prompt_length`, `other_answer_length`: answers with token ids for which the server counts
          other numbers of tokens than this client; `other_text_length`: re-tokenized answers.
        - `short_answers`: answers with fewer tokens than required.
        - `servers`: see `server_records`.
        - `server_…`, from the first client of each server: the server's counts in the test, for all its
          clients; see `ServerCounts`. `server_context_…`: counts of all context servers, from the run's first
          client. During the test, these are the last readings.
        """
        assert self._thread is not None
        elapsed = time.perf_counter() - self._started[0]
        busy = (self._thread.cpu_s() - self._started[1]) / elapsed if elapsed > 0 else 0.0
        return {
            "client_busy_fraction": round(busy, 4),
            "retries": self._client.retries,
            **({"handed_over": self._client.handed_over} if self._contexts else {}),
            **counts_of([*self._endpoints, *self._contexts]),
            **self._statistics.values(),
            **(self._reader.counted(self._run) if self._reader else {}),
            **(self._profilers.values() if self._profilers else {}),
            "servers": server_records(
                self._endpoints,
                self._contexts,
                self._reader,
                owned=self.config.client.server is not None,
                may_recompute=self._protocol is not None and self._protocol.may_recompute,
            ),
        }

    def frameworks(self) -> list[str]:
        known = [name for name in self._frameworks if name is not None]
        return sorted(set(known)) if len(known) == len(self._frameworks) else []

    def metrics(self) -> Metrics:
        client = self._client
        return self._metrics(Metrics(self._prompt_tokens, client.generated_tokens, len(client.calls), 0))

    def notify_stop(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            if self._profilers is not None and self._profilers.running:  # the run has failed
                with contextlib.suppress(TimeoutError):
                    thread.run(self._profilers.stop(_PROFILER_END_S), 2 * _PROFILER_END_S)
            thread.post(self._close)
            thread.stop()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.stop()
        for task in self._warming:
            task.cancel()
        self._client.close()

    # --- work ---

    def enqueue(self, requests: Batch) -> None:
        assert self._thread is not None
        self._thread.post(self._submit, requests)

    def has_work(self) -> bool:
        return (
            (bool(self._answers) and time.perf_counter() - self._handed_on >= _GATHER_S)
            or self._failed is not None
            or (self._thread is not None and self._thread.error is not None)
        )

    def quiet_s(self) -> float:
        return (self._handed_on + _GATHER_S if self._answers else math.inf) - time.perf_counter()

    def poll_responses(self) -> Batch | None:
        if self._failed is not None:
            raise RunError(Failure(self._cause(self._failed), self.config.rank))
        if self._thread is not None and self._thread.error is not None:
            raise RuntimeError("the HTTP client failed") from self._thread.error
        if self._answers:
            self._handed_on = time.perf_counter()
        return self._answers.take()

    def cancel(self, ids: Iterable[int]) -> None:
        assert self._thread is not None
        self._thread.post(self._client.cancel, list(ids))

    # --- on the client's thread ---

    def _submit(self, requests: Batch) -> None:
        stop_texts = tuple(word for word in self.config.engine.stop_words if isinstance(word, str))
        ids = tuple(word[0] for word in self.config.engine.stop_words if not isinstance(word, str)) + (
            self.config.engine.end_ids or ()
        )
        for request in requests.split():
            (row,) = request.rows
            extra, prompt = self._harness.extra_body, self._prompt(request)
            if isinstance(prompt, bytes):
                own, prompt = split_fields(prompt)
                extra = {**extra, **own}
            ignore = bool(row["flags"] & RequestFlag.IGNORE_STOP)
            sampling = Sampling(
                int(row["max_output"]),
                int(row["min_output"]),
                float(row["temperature"]),
                int(row["top_k"]),
                float(row["top_p"]),
                int(row["seed"]),
                () if ignore else stop_texts,
                self.config.engine.end_ids or () if ignore else ids,
                ignore_eos=bool(row["flags"] & RequestFlag.IGNORE_END),
                cache_salt=f"{row['salt']:016x}" if row["salt"] else "",
                extra=extra,
            )
            on_more = self._report_tokens if row["flags"] & RequestFlag.STREAM else None
            session, flags = int(row["session"]), int(row["flags"])
            self._client.submit(int(row["id"]), prompt, sampling, on_more, session, flags)

    def _prompt(self, request: Batch) -> bytes | list[int]:
        if self.config.client.sends_text:
            # A list of a text's bytes would take milliseconds, and delay all requests after it.
            return request.tokens.astype(np.uint8).tobytes()
        tokens: list[int] = request.tokens.tolist()
        return tokens

    def _text(self, prompt: Sequence[int]) -> str:
        if self.config.client.sends_text:
            return bytes(prompt).decode(errors="replace")
        assert self._tokenizer is not None
        return self._tokenizer.decode(prompt, keep_special=True)

    def on_first(self, call: Call) -> None:
        """Report the first token, unless it is also the last."""
        if not self.config.client.sends_text:
            self._prompt_tokens += len(call.prompt)
        if (delivered := self._delivered.get(call.id)) is not None:  # before the server was lost
            delivered.again = True
        elif call.on_more is not None:
            self._report_tokens(call)
        elif call.streams and call.answer.finish_reason is None and (tokens := self._tokens.of(call)):
            self._add(call.id, (ResponseFlag.FIRST, tokens[:1]))
            self._delivered[call.id] = DeliveredTokens(tokens[:1])

    def _report_tokens(self, call: Call) -> None:
        """Report the new tokens, unless the answer is complete."""
        if call.answer.finish_reason is not None:
            return
        delivered = self._delivered.get(call.id) or DeliveredTokens()
        if delivered.again or not (new := self._tokens.new(call, delivered)):
            return
        rows: list[_Row] = []
        if not delivered.tokens:
            self._delivered[call.id] = delivered
            rows.append((ResponseFlag.FIRST, new[:1]))
        if more := new if delivered.tokens else new[1:]:
            rows.append((ResponseFlag.PARTIAL, more))
        self._add(call.id, *rows)
        delivered.tokens += new

    def on_done(self, call: Call) -> None:
        delivered = self._delivered.get(call.id)
        tokens = self._tokens.final(call, delivered)
        if not tokens:
            raise ValueError("it answered without a token")
        self._delivered.pop(call.id, None)
        if (
            delivered is not None
            and call.on_more is not None
            and tokens[: len(delivered.tokens)] != delivered.tokens
        ):
            _log.error("request %d: the restarted server generates another answer", call.id)
            self._add(call.id, (ResponseFlag.FINAL | ResponseFlag.ERROR, []))
            return
        flags = ResponseFlag.FINAL
        if delivered is None:
            flags |= ResponseFlag.FIRST
        if self.config.client.sends_text:
            self._prompt_tokens += call.answer.prompt_tokens or 0
        elif not call.streams:
            self._prompt_tokens += len(call.prompt)
        assert call.endpoint is not None
        call.endpoint.count(call, len(tokens))
        if call.streams:
            self._statistics.add(call, len(tokens))
        n_prompt, cached = call.answer.prompt_tokens, call.answer.cached_tokens
        rows: list[_Row] = []
        if call.flags & RequestFlag.PROMPT_COUNTS and n_prompt is not None:
            rows.append((ResponseFlag.PROMPT_COUNTS, [n_prompt, -1 if cached is None else cached]))
        if call.flags & RequestFlag.MESSAGE and self._encoder is not None:
            rows.append((ResponseFlag.MESSAGE, list(json.dumps(call.answer.message).encode())))
        self._add(call.id, *rows, (flags, tokens))

    def on_failed(self, call: Call, error: EndpointError) -> None:
        if self._is_refused(call, error) or (
            self._may_fail_alone and not isinstance(error, ServerUnreachable) and self._is_alone(error)
        ):
            self._delivered.pop(call.id, None)
            self._n_failed += 1
            if self._n_failed <= _MAX_LOGGED:
                _log.error("request %d: %s", call.id, error)
            refused = ResponseFlag.REFUSED, (error.refusal or _BROKEN).numbers()
            self._add(call.id, refused, (ResponseFlag.FINAL | ResponseFlag.ERROR, []))
            return
        self._failed = self._failed or error
        self.wake()

    def _is_refused(self, call: Call, error: EndpointError) -> bool:
        """Return whether the server refuses the content of a request, such as a prompt that is too long."""
        may_be = bool(call.flags & RequestFlag.MAY_BE_REFUSED)
        return may_be and error.refusal is not None and error.refusal.status in _OF_CONTENT

    def _is_alone(self, error: EndpointError) -> bool:
        """Return whether the error is about one request only. If an owned server exits, all requests fail."""
        return self.config.client.server is None or error.refusal is not None

    def on_cancelled(self, call: Call) -> None:
        self._delivered.pop(call.id, None)
        self._add(call.id, (ResponseFlag.FINAL | ResponseFlag.CANCELLED, []))

    def _add(self, id_: int, *rows: _Row) -> None:
        """Add rows of one request together: rows that come later would wait for `_GATHER_S`."""
        if self._answers.add_rows(id_, rows) == len(rows):  # rows that come later need no wake-up
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake the rank for the answers. In a run that serves, gather answers first."""
        if not self.config.serves or self.has_work():
            self.wake()
        elif self._answers:
            asyncio.get_running_loop().call_later(_GATHER_S, self._hand_on)


def _folder(config: CoreConfig) -> Path | None:
    path = Path(config.engine.model_path) if config.engine.model_path else None
    return path if path is not None and path.is_dir() else None
