"""Rank 0's session of a run that serves: the endpoint and its statistics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.comms.transport import Transport
from mpillm.cores.base import LLMCore
from mpillm.cores.registry import BackendRegistry
from mpillm.data.tokenizer import NoTokenizer
from mpillm.endpoint.frontend import Frontend, Mailbox
from mpillm.endpoint.open_requests import OpenRequests
from mpillm.endpoint.protocol import ServedModel
from mpillm.errors import ExitCode
from mpillm.options.disagg_yaml import ROLE_SECTIONS
from mpillm.options.options import model_name, plain_name
from mpillm.options.run_config import RunConfig
from mpillm.report.console import Console
from mpillm.report.result import served_rows
from mpillm.report.run_directory import TELEMETRY, TIMELINE, RunRecord, display_path
from mpillm.roles.instance import InstanceRole
from mpillm.roles.role import Role
from mpillm.runtime.choose_samples import limits_of, tokenizer_of
from mpillm.runtime.join import RunPlan
from mpillm.runtime.run_session import RunSession, announced, opened

if TYPE_CHECKING:
    from mpillm.cores.openai_client.client_thread import ClientThread
    from mpillm.endpoint.disagg.server import DisaggServer
    from mpillm.roles.harness import Totals

_log = logging.getLogger(__name__)

_SAVE_S = 10.0  # time between two writes of the statistics
_TIMELINE_S = 0.5


class ServeSession(RunSession):
    """Session of a run that serves."""

    serves = True
    takes_text = True  # its endpoint tokenizes texts

    @classmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[ServeSession, list[str]]:
        session = opened(lambda: ServeSession(planned, record, console, control), planned, record)
        served = session.served
        longest = served.limits.max_prompt_len
        of_prompts = "" if longest is None else f", at most {longest} of the prompt (no chunked context)"
        of_both = f"at most {served.max_model_len} tokens of prompt and answer{of_prompts}"
        return session, announced(planned, record().path, [f"the API will be at {session.url}; {of_both}"])

    @classmethod
    def directory_name(cls, config: RunConfig) -> str:
        own = config.instance_run and config.instance_run.instance
        part = f"{own.kind}-{own.index}" if own else "serve"
        return plain_name(f"{model_name(config)}-{part}")

    @classmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        return {"url": None, "aborted": 0}

    def __init__(
        self, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> None:
        """Open the port.

        Raises ConfigError if the port cannot be opened or an option is wrong, and OSError like `write_plan`.
        """
        try:
            from mpillm.endpoint.admission import guard_of
            from mpillm.endpoint.app import Service
            from mpillm.endpoint.http_thread import HttpThread, bind, url
        except ImportError as error:
            raise ConfigError(f"serve needs the extra http ({error}): pip install 'mpillm[http]'") from error
        config, plan = planned.config, planned.plan
        self._measured_at = self._saved_at = 0.0
        self._saved_samples = 0
        self.served = _served(planned, self.takes_text)
        self._disagg: DisaggServer | None = None
        bound = bind(config.host, config.port)
        self.url = url(bound)
        timeline = None if self.serves else record().path / TIMELINE  # a server's would grow without end
        super().__init__(planned, record(), console, control, timeline)
        self._record.result["url"] = self.url
        mailbox = Mailbox()
        roles = {instance.role for instance in plan.instances}
        requests = self._requests = OpenRequests(
            roles == {"ctx", "gen"}, mailbox.put, 0 if _reuses_nothing(planned) else None
        )
        if config.disagg_role:
            from mpillm.endpoint.disagg.server import DisaggServer

            self._disagg = DisaggServer(config, planned.models[0], self.url)
        service = Service(
            self.served,
            requests,
            guard=guard_of(config, config.host),
            max_queue_size=config.max_queue_size,
            perf_metrics_max_requests=config.in_section(
                ROLE_SECTIONS.get(config.disagg_role, "")
            ).perf_metrics_max_requests,
            kv_cache_usage=self._kv_cache_usage,
            counts_cached=_counts_cached(planned),
            tokens_per_block=planned.cores[0].engine.scheduler.tokens_per_block,
            lost=self._record.result["lost"],
            disagg=self._disagg.routes if self._disagg else None,
            reset_prefix_cache=(
                partial(mailbox.put, None) if self.serves and config.reset_prefix_cache else None
            ),
        )
        self._metrics = service.metrics
        self._metrics.totals.losses = requests.losses
        self._endpoint = HttpThread(service, requests, mailbox, bound)
        self._mailbox = mailbox
        self._frontend: Frontend | None = None

    @property
    def totals(self) -> Totals:
        """Counts of requests and responses since the start of the frontend."""
        self._metrics.totals.started = self._frontend.started if self._frontend else 0.0
        return self._metrics.totals

    @property
    def http(self) -> ClientThread | None:
        return self._endpoint.thread

    def make_harness(self, route: Transport, leader: int, loop: EventLoop) -> list[Role]:
        self._mailbox.wake = loop.run_inline_or_wake
        self._frontend = Frontend(route, leader, self._mailbox, self._endpoint, self._config.drain_deadline)
        return [self._frontend]

    def make_disagg_role(
        self, core: LLMCore, route: Transport, leader: int, instance: int
    ) -> InstanceRole | None:
        return self._disagg.role(core, route, leader, instance) if self._disagg else None

    def poll(self) -> bool:
        """Record the instances' metrics, and save the statistics."""
        now = time.monotonic()
        if now - self._measured_at > _TIMELINE_S:
            self._measured_at = now
            self.note_measured()
            self._telemetry.look(self.totals)
        if now - self._saved_at > _SAVE_S:
            self._saved_at = now
            self._save()
        return False

    def _save(self) -> None:
        """Write the statistics so far, in case rank 0 is killed."""
        totals = self.totals
        if totals.samples == self._saved_samples or self._frontend is None:
            return
        self._saved_samples = totals.samples
        so_far = self.figures({})
        so_far |= {"per_instance": self._timeline.per_instance(), "aborted": self._metrics.aborted}
        so_far["compiled"] = None  # the ranks report it when they end
        try:
            self._telemetry.write(self._record.path / TELEMETRY, totals, ends=False)
        except OSError as error:  # a full disk does not end the server
            _log.warning("the statistics so far are not written: %s", error)
        self._record.keep(so_far)

    def drain(self) -> bool:
        return self._frontend is not None and self._frontend.end_early()

    def _kv_cache_usage(self) -> float | None:
        """Return the KV cache usage of the fullest instance. Called in the HTTP thread."""
        measured = [self._control.ranks[instance.root_rank].measured for instance in self._plan.instances]
        usages = [
            one[1].kv_cache_usage for one in measured if one is not None and one[1].kv_cache_usage is not None
        ]
        return max(usages, default=None)

    # --- after a phase of all ranks ---

    def ready(self) -> str:
        return f"{super().ready()}; serving {', '.join(self.served.names)} at {self.url}"

    def drained(self, reports: dict[int, DrainReport]) -> str:
        totals = self.totals
        aborted = self._metrics.aborted
        self._record.result |= {**self.figures(reports), "status": "SERVED", "aborted": aborted}
        self.keep_reports(reports)
        return (
            f"{totals.samples} requests answered, {aborted} given up by their clients, {totals.errors} errors"
        )

    # --- the end ---

    def finished(self) -> int:
        page = self.leave_result()
        rows = served_rows(self._record.result, display_path(self._record.path))
        self._console.summary([*rows, page])
        return int(ExitCode.DONE)

    def failed(self, reports: dict[int, DrainReport]) -> str:
        if reports and self._record.result["status"] != "SERVED":
            self.drained(reports)
        cut_off = self._requests.running + self._requests.waiting
        self._record.result |= {"aborted": self._metrics.aborted, "cut_off": cut_off}
        return super().failed(reports)


def _served(planned: RunPlan, takes_text: bool) -> ServedModel:
    """Describe the served model, from the options and the cores' models.

    Raises ConfigError if the endpoint `takes_text` without a tokenizer, or the core ignores the lengths of
    requests.
    """
    config, models = planned.config, [model for model in planned.models if model is not None]
    core_class = BackendRegistry.get(config.core_type)
    if not core_class.lengths_each:
        raise ConfigError(
            f"{config.named('core_type')}: serve does not support cores of llmlib, whose"
            " requests have no max_tokens and no sampling parameters; use run",
            about=["core_type"],
        )
    tokenizer = tokenizer_of(config)
    if isinstance(tokenizer, NoTokenizer) and takes_text:
        raise ConfigError(
            f"{tokenizer.why}; the endpoint makes tokens of texts: name the folder of the model's tokenizer"
            " (tokenizer.json) with --model_path",
            about=["model_path"],
        )
    names = tuple(
        name.strip() for name in (config.served_model_name or model_name(config)).split(",") if name.strip()
    )
    if not names:
        raise ConfigError(f"{config.named('served_model_name')}: names no model")
    defaults = {
        name: getattr(config, name) if config.is_user_set(name) else None
        for name in ("temperature", "top_k", "top_p", "seed")
    }
    return ServedModel(
        names=names,
        tokenizer=tokenizer,
        limits=limits_of(config, models),
        end_ids=frozenset(id_ for model in models for id_ in getattr(model, "end_ids", ())),
        max_output_len=config.max_output_len,
        min_output_len=config.min_output_len,
        gives_logprobs=core_class.gives_logprobs,
        is_disagg=bool(config.disagg_role),
        **defaults,
    )


def _counts_cached(planned: RunPlan) -> bool:
    """Return whether the instances report the cached tokens of all prompts. Only some servers do."""
    reports_reuse = BackendRegistry.get(planned.config.core_type).reports_reuse
    return _reuses_nothing(planned) or (reports_reuse and not planned.config.disagg_role)


def _reuses_nothing(planned: RunPlan) -> bool:
    """Return whether no instance keeps prompts in its KV cache. A server does not report it."""
    reuse = any(core.engine.scheduler.enable_kv_cache_reuse for core in planned.cores)
    return not reuse and not BackendRegistry.get(planned.config.core_type).is_client
