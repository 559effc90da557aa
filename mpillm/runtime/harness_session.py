"""Rank 0's view of a run with a load client instead of LoadGen: endpoint, client, and its report."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Transport
from mpillm.core_names import TRTLLM_ENDPOINT
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.cores.openai_client.endpoint import EndpointError, RemoteServer
from mpillm.cores.openai_client.readiness import find_model, gives_usage
from mpillm.data.dataset import Dataset
from mpillm.data.tokenizer import NoTokenizer, Tokenizer
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.loadgen.issue_order import issue_order
from mpillm.options.options import run_name
from mpillm.options.run_config import RunConfig
from mpillm.programs.load_clients.kind import (
    LATENCIES,
    LoadReport,
    LoadSpec,
    PromptSample,
    RequestRecord,
    Seeds,
)
from mpillm.programs.load_clients.kinds import kind_of
from mpillm.report.arrivals import arrival_figures
from mpillm.report.console import Console
from mpillm.report.goodput import goodput
from mpillm.report.page.run_analysis import facts_of
from mpillm.report.percentiles import enough, percentiles_ms
from mpillm.report.request_log import RequestLog, read_requests
from mpillm.report.result import other_harness_rows, other_loads
from mpillm.report.run_directory import HARNESS, HARNESS_LOG, MEASURED, RunRecord, display_path
from mpillm.report.run_files import RunFiles
from mpillm.report.validity_checks import load_client_doubts
from mpillm.roles.client_program import ClientLimits, ClientProgram, command_of
from mpillm.roles.role import Role
from mpillm.runtime.join import RunPlan, RunSetup, prepare
from mpillm.runtime.run_session import announced, opened
from mpillm.runtime.serve_session import ServeSession

_MODEL_S = 30.0
# Counts of the run's own endpoint, in addition to the client's.
_OF_ENDPOINT = (*("samples", "errors", "tokens", "aborted"), *LATENCIES)


class HarnessSession(ServeSession):
    """Session of a run with a load client: serves until the client has exited."""

    serves = False

    @classmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[HarnessSession, list[str]]:
        prepared = prepare(planned, lambda: record().path)
        session = opened(lambda: HarnessSession(prepared, record, console, control), planned, record)
        lines = [
            *prepared.dataset_lines(),
            f"{session.kind.title}: {session.how()}, {_where(session)}",
            f"its command: {session.command}",
        ]
        return session, announced(planned, record().path, lines)

    @classmethod
    def directory_name(cls, config: RunConfig) -> str:
        return run_name(config)

    @classmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        harness = {"name": config.harness, "asked": None, "version": ""}
        test = {"scenario": config.scenario, "test_mode": config.test_mode}
        return {**super().about(config), "harness": harness, **test}

    def __init__(
        self, prepared: RunSetup, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> None:
        """Raises ConfigError if the load client is not installed, or cannot make this load."""
        planned = prepared.planned
        self._prepared = prepared
        self._client_config = planned.config
        self.kind = kind_of(planned.config.harness or "")
        self._order = _order(prepared)
        self.n_servers = _servers_of(planned)
        self.direct = bool(self.n_servers) and (self.n_servers == 1 or self.kind.many_urls)
        self.takes_text = not self.direct  # a direct client sends its texts to the servers
        self.sends_text = prepared.dataset.sends_text
        for name in ("stop_words", "end_ids"):
            if self.direct and planned.config.is_user_set(name):
                raise ConfigError(
                    f"{planned.config.named(name)}: {self.kind.title} asks its servers itself: say with"
                    " --harness_args what ends an answer",
                    about=[name],
                )
        super().__init__(replace(planned, config=_of_endpoint(planned.config)), record, console, control)
        self._own_url = self.url.removesuffix("/v1")
        urls = ("SERVER",) * self.n_servers if self.direct else (self._own_url,)
        self.command = command_of(self.kind, self._load_of(urls, self.served.names[0]))
        self._client: ClientProgram | None = None

    # --- the load ---

    def how(self) -> str:
        """Describe the number of requests and when the client sends them."""
        n, config = f"{len(self._order):,} requests", self._client_config
        if config.scenario == "Server":
            return f"{n} at {self._prepared.settings.test.server_target_qps:g} per second"
        return f"{n}, {config.concurrency:,} at once" if config.concurrency else f"{n}, all at once"

    def make_harness(self, route: Transport, leader: int, loop: EventLoop) -> list[Role]:
        config = self._client_config
        roles = super().make_harness(route, leader, loop)
        assert self._frontend is not None
        limits = ClientLimits(config.stall_timeout, (config.harness_memory_limit or math.inf) * (1 << 30))
        log = self._record.path / HARNESS_LOG
        end = self._frontend.end_early
        self._client = ClientProgram(self.kind, self._load, end, log, limits, loop.wake)
        return [*roles, self._client]

    def _load(self, urls: Mapping[int, str]) -> LoadSpec:
        config = self._client_config
        if not self.direct:
            return self._load_of((self._own_url,), self.served.names[0])
        addresses = [urls[index] for index in sorted(urls)] or [*(config.trtllm_server_urls or ())]
        servers = [RemoteServer(url, insecure=config.insecure) for url in addresses]
        model, gives_usage = self._model_and_usage(servers[0])
        load = self._load_of([server.url for server in servers], model)
        return replace(load, gives_usage=gives_usage)

    def _model_and_usage(self, server: RemoteServer) -> tuple[str, bool]:
        """Return the name under which a server serves its model, and whether its streams have usage."""
        config = self._client_config
        thread = ClientThread("mpillm-ask")
        try:
            name = config.core_options.get("model")
            server.model = thread.run(find_model(server, name, config.model_path, _MODEL_S), 2 * _MODEL_S)
            if not self.kind.needs_usage:
                return server.model, True
            return server.model, thread.run(gives_usage(server, _MODEL_S), 2 * _MODEL_S)
        except (EndpointError, TimeoutError) as error:
            raise RunError(Failure(str(error), 0, code=ExitCode.NOT_READY)) from error
        finally:
            thread.stop()

    def _load_of(self, urls: Sequence[str], model: str) -> LoadSpec:
        config, test = self._client_config, self._prepared.settings.test
        samples = _PromptSamples(self._prepared.dataset, self._prepared.tokenizer, config.max_output_len)
        folder = Path(config.model_path).absolute() if config.model_path else None
        has_tokenizer = folder is not None and (folder / "tokenizer.json").exists()
        return LoadSpec(
            tuple(urls),
            model,
            str(folder) if has_tokenizer else "",
            self._record.path / HARNESS,
            samples,
            samples.lengths,
            samples.ignoring,
            self._order.tolist(),
            test.server_target_qps if config.scenario == "Server" else None,
            config.concurrency,
            config.temperature,
            config.top_k,
            config.top_p,
            config.min_output_len,
            Seeds(test.sample_index_rng_seed, test.schedule_rng_seed, config.seed),
            lambda text: len(self._prepared.tokenizer.encode_plain(text)) if has_tokenizer else 0,
            config.harness_args,
            self._min_duration_ms,
            sends_text=self.sends_text,
        )

    @property
    def _min_duration_ms(self) -> int:
        """Minimum duration of the test; 0 in an accuracy run."""
        test = self._prepared.settings.test
        return 0 if self._client_config.test_mode == "AccuracyOnly" else int(test.min_duration_ms)

    # --- the test ---

    def poll(self) -> bool:
        super().poll()
        client = self._client
        if client is not None and client.report_of_client is None and (last := client.last_line()):
            elapsed = time.monotonic() - self._control.phase_started
            self._console.waiting("test", elapsed, {f"{self.kind.title}: {last}": [0]})
        return False

    def drain(self) -> bool:
        """Refuse to drain: a signal ends the run immediately."""
        return False

    def drained(self, reports: dict[int, DrainReport]) -> str:
        super().drained(reports)
        result = self._record.result
        report = self._client.report_of_client if self._client else None
        if self._client is None or report is None:  # a signal ends the run
            return ""
        if not self.direct:
            result["endpoint"] = {name: result[name] for name in _OF_ENDPOINT}
        result["harness"] = {"name": self.kind.short_name, "asked": len(self._order), **report.to_json()}
        if self.direct:
            result["harness"]["max_server_tokens"] = self._client.max_server_tokens
        result |= {"status": MEASURED, **self._figures(report)}
        result["other_load"] = other_loads([rank.node for rank in self._plan.ranks], reports)
        result["doubts"] = [
            *load_client_doubts(result["harness"], self._min_duration_ms / 1e3),
            *report.problems,
            *self.check_servers(self._client_config),
        ]
        self.keep_reports(reports)
        return f"{self.kind.title}: {report.completed:,} of {len(self._order):,} requests answered"

    def _figures(self, report: LoadReport) -> dict[str, Any]:
        """Return the figures that LoadGen's tests have in result.json, from the client's records or sums."""
        sums = report.to_json()
        figures: dict[str, Any] = {
            "samples": report.completed + report.failed,
            "errors": report.failed,
            "tokens": round(report.tokens or 0),
            "test_s": sums["duration_s"],
            "samples_per_second": sums["requests_per_second"],
            "tokens_per_second": sums["tokens_per_second"] or 0.0,
            "streamed": "ttft_ms" in report.latencies,
            **dict.fromkeys(LATENCIES),
            **{name: enough(latency, report.completed) for name, latency in report.latencies.items()},
        }
        if not report.requests:
            return figures
        rows = self._in_test(report.requests)
        good = [one for one in rows if not one.error]
        ended = max(one.ended for one in rows)
        lasted, tokens = ended - rows[0].issued, sum(one.tokens for one in good)
        figures |= {
            "samples": len(rows),
            "errors": len(rows) - len(good),
            "tokens": tokens,
            "test_s": round(ended, 4),
            "samples_per_second": round(len(good) / lasted, 4) if lasted > 0 else 0.0,
            "tokens_per_second": round(tokens / lasted, 4) if lasted > 0 else 0.0,
            "ttft_ms": percentiles_ms([one.ttft for one in good]),
            "tpot_ms": percentiles_ms([one.tpot for one in good]),
            "latency_ms": percentiles_ms([one.latency for one in good]),
        }
        figures["streamed"] = figures["ttft_ms"] is not None
        log = RequestLog(self._record.path)
        for one in rows:
            log.add_one(one.issued, one.first, one.ended, one.sample, one.tokens, bool(one.error))
        log.close()
        if self._client_config.scenario == "Server":
            records = read_requests(self._record.path)
            figures |= arrival_figures(records)
            if limits := self._client_config.goodput:
                figures["goodput"] = goodput(records, limits, lasted)
        return figures

    def _in_test(self, requests: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Return the client's records in order of issue, with times in seconds since the test's start.

        Clients read the monotonic or the system clock. With any other clock, the first request is the start.
        """
        assert self._client is not None
        rows = sorted(requests)
        now = (time.monotonic(), time.time())
        clocks = zip(self._client.started, now, strict=True)
        began = next((start for start, end in clocks if start <= rows[0].issued <= end), rows[0].issued)
        return [
            one._replace(issued=one.issued - began, first=one.first - began, ended=one.ended - began)
            for one in rows
        ]

    # --- the end ---

    def finished(self) -> int:
        record = self._record
        page = self.leave_result()
        facts, _ = facts_of(RunFiles.read(record.path))
        rows = other_harness_rows(record.result, display_path(record.path), facts)
        self._console.summary([*rows, *self.table(self._prepared.dataset), page])
        return int(ExitCode.DONE)


def _order(prepared: RunSetup) -> NDArray[np.int64]:
    """Return the sample indices in LoadGen's order of issue; in an accuracy run, each index once."""
    n = len(prepared.dataset)
    if prepared.planned.config.test_mode == "AccuracyOnly":
        return np.arange(n)
    return issue_order(prepared.settings, n).indices


class _PromptSamples(Sequence[PromptSample]):
    """Samples of a data set, each created on access: thousands of texts would take seconds."""

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, max_output_len: int) -> None:
        self._dataset, self._tokenizer = dataset, tokenizer
        lengths = np.full(len(dataset), max_output_len)
        if dataset.output_lengths is not None:
            lengths = np.minimum(dataset.output_lengths, max_output_len)
        self.lengths: list[int] = lengths.tolist()
        ignoring = dataset.ignores_stop
        self.ignoring: list[bool] = [False] * len(dataset) if ignoring is None else ignoring.tolist()

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> PromptSample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptSample]: ...
    def __getitem__(self, index: int | slice) -> PromptSample | Sequence[PromptSample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids, length, ignores = self._dataset.sample(index), self.lengths[index], self.ignoring[index]
        if self._dataset.sends_text:
            return PromptSample([], self._dataset.texts[index], length, ignores)
        known = not isinstance(self._tokenizer, NoTokenizer)
        text = self._tokenizer.decode(ids, keep_special=True) if known else ""
        return PromptSample(ids.tolist(), text, length, ignores)


def _servers_of(planned: RunPlan) -> int:
    """Return the number of servers that the client can use directly; 0 if it must use the run's endpoint."""
    config = planned.config
    # A request of a disaggregated run goes to two servers, which only the run's own clients support.
    if config.core_type not in TRTLLM_ENDPOINT or planned.plan.n_context_servers:
        return 0
    return len(planned.plan.servers) or len(config.trtllm_server_urls or ())


def _of_endpoint(config: RunConfig) -> RunConfig:
    """Return the configuration of an endpoint for the client only: on this host, on any free port."""
    endpoint = copy.copy(config)
    values = {"host": "127.0.0.1", "port": 0, "api_key": None, "max_queue_size": 1 << 30}
    endpoint.option_values = config.option_values | {
        name: config.option_value(name)._replace(value=value) for name, value in values.items()
    }
    return endpoint


def _where(session: HarnessSession) -> str:
    if not session.direct:
        reason = f", because it supports one server, not {session.n_servers}" if session.n_servers else ""
        return f"through the run's own endpoint{reason}"
    return "straight to the server" if session.n_servers == 1 else f"straight to {session.n_servers} servers"
