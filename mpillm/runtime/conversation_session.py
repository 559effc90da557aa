"""Rank 0's view of a test of conversations: when they start, and their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.comms.loop import EventLoop
from mpillm.comms.messages import DrainReport
from mpillm.comms.rank0_control import Rank0Control
from mpillm.data.dataset import Turns
from mpillm.options.run_config import RunConfig
from mpillm.programs.load_clients.kinds import CONVERSATIONS
from mpillm.report.console import Console
from mpillm.report.conversation_figures import (
    answered_figures,
    conversation_figures,
    conversation_goodput,
)
from mpillm.report.goodput import goodput
from mpillm.report.page.run_analysis import Facts
from mpillm.report.request_log import read_requests
from mpillm.report.result import conversation_rows
from mpillm.report.run_directory import MEASURED, RunRecord
from mpillm.roles.conversation_load import ConversationLoad, LoadShape
from mpillm.runtime.choose_samples import history_of, load_samples
from mpillm.runtime.join import RunPlan, RunSamples
from mpillm.runtime.load_session import LoadSession
from mpillm.runtime.run_session import announced, opened


class ConversationSession(LoadSession):
    """Session of a test whose load is conversations. LoadGen does not judge it."""

    @classmethod
    def open(
        cls, planned: RunPlan, record: Callable[[], RunRecord], console: Console, control: Rank0Control
    ) -> tuple[ConversationSession, list[str]]:
        samples = RunSamples(planned, *load_samples(planned.config, planned.models, lambda: record().path))
        session = opened(lambda: ConversationSession(samples, record(), console, control), planned, record)
        return session, announced(planned, record().path, [*samples.dataset_lines(), session.how()])

    @classmethod
    def about(cls, config: RunConfig) -> dict[str, object]:
        harness = {"name": CONVERSATIONS, "version": ""}
        return {"harness": harness, "scenario": config.scenario, "test_mode": config.test_mode}

    def __init__(
        self, samples: RunSamples, record: RunRecord, console: Console, control: Rank0Control
    ) -> None:
        """Raises ConfigError if the data set has no time stamps that scenario Server needs."""
        turns, config = samples.dataset.turns, samples.planned.config
        assert turns is not None
        if config.cache_salt == "conversation" and any(one.n_inherited for one in turns.conversations):
            raise ConfigError(
                f"{config.named('cache_salt')}: a forked branch continues the prompt of another conversation;"
                " use test",
                about=["cache_salt"],
            )
        if config.max_delay is not None:
            turns = turns.with_gaps(config.max_delay * config.trace_speed)
        self._turns, self._shape = turns, load_shape(config, turns)
        self._load: ConversationLoad | None = None
        super().__init__(samples, record, console, control)
        record.result["requests_expected"] = self.expected()[0]

    def how(self) -> str:
        """Describe the number of conversations and when they start."""
        shape = self._shape
        n = f"{shape.n_conversations:,} conversation{'s' if shape.n_conversations > 1 else ''}"
        if self._turns.has_branches:
            n += " with all branches"
        if shape.concurrency is not None:
            how = f"{min(shape.concurrency, shape.n_conversations):,} at a time"
        else:
            how = f"{shape.rate:g} per second" if shape.rate else "by their time stamps"
            if shape.rate and shape.burstiness != 1:
                how += f", burstiness {shape.burstiness:g}"
        history = "generated in the test" if self._turns.are_generated else "recorded in the data set"
        cancelled = (
            f"; {100 * shape.cancel_share:g} % of the requests are cancelled {shape.cancel_after_s:g} s after"
            " they are sent"
            if shape.cancel_share
            else ""
        )
        return f"{n}, {how}; responses in later prompts are those {history}{cancelled}"

    def source(self, loop: EventLoop) -> ConversationLoad:
        planned = self._samples.planned
        history = history_of(planned.config, planned.models, self._samples.dataset, self._samples.tokenizer)
        self._load = ConversationLoad(self._turns, self._shape, history, loop.wake)
        return self._load

    def expected(self) -> tuple[int | None, float | None]:
        counts = self._tree_sizes()
        passes, remainder = divmod(self._shape.n_conversations, len(counts))
        return int(passes * counts.sum() + counts[:remainder].sum()), None

    def _tree_sizes(self) -> NDArray[np.int64]:
        """Return the number of requests of each root conversation with its branches."""
        return np.diff(self._turns.first[[*self._turns.roots, -1]])

    def drained(self, reports: dict[int, DrainReport]) -> str:
        self.close_files()
        result, load = self._record.result, self._load
        assert load is not None
        result |= {"status": MEASURED, **self.figures(reports)}
        rows = read_requests(self._record.path) if self._totals.samples else None
        if rows is not None:
            result |= answered_figures(rows, self._totals.lasted_s, result["streamed"])
        result["conversations"] = {
            "started": load.n_started,
            "ended": load.n_ended,
            "failed": load.n_failed,
            "outgrown": load.n_outgrown,
            "outgrown_at": load.outgrown_at,
            "requests_skipped": load.n_skipped,
            "requests_cancelled": self._totals.cancelled,
            "history": "generated" if self._turns.are_generated else "recorded",
        }
        if self._turns.has_branches:
            result["conversations"]["branches"] = load.n_branches
        if (sizes := self._config.synthetic_conversations) is not None:
            parameters = {**sizes, "num_conversations": len(self._turns), "seed": self._config.seed}
            result["conversations"]["synthetic"] = parameters
        if rows is not None:
            result["conversations"] |= conversation_figures(rows, load.window_s, result["streamed"])
        if rows is not None and "prompt_tokens" not in result and (rows["prompt"] >= 0).all():
            lengths = rows["prompt"]
            result["prompt_tokens"] = {"mean": round(float(lengths.mean()), 2), "max": int(lengths.max())}
        if rows is not None and (limits := self._config.goodput):
            lasted_s = self._totals.lasted_s
            result["goodput"] = goodput(rows, limits, lasted_s)
            if load.root_sessions:  # a conversation is good together with its branches
                rows["session"] = [load.root_sessions.get(one, one) for one in rows["session"].tolist()]
            result["goodput"] |= conversation_goodput(rows, load.cut_sessions, limits, lasted_s)
        self.check_test(reports)
        result["doubts"] += _doubts(result, load)
        self.keep_reports(reports)
        return f"{load.n_ended} of {load.n_started} conversations ended"

    def rows(self, directory: str, facts: Facts | None) -> list[tuple[str, Any]]:
        return conversation_rows(self._record.result, directory, facts)


def _doubts(result: Mapping[str, Any], load: ConversationLoad) -> list[str]:
    """Return the doubts about the load. `result`: contents of result.json."""
    doubts = []
    if n := result["errors"] - load.n_too_long:
        doubts.append(f"{n:,} of {result['samples']:,} requests failed; the first: {load.first_failed}")
    if load.n_unmade:
        doubts.append(f"{load.n_unmade:,} prompts could not be made; the first: {load.problem}")
    if result["conversations"].get("requests") == 0:
        doubts.append(
            f"no request was sent after the ramp-up of {load.window_s[0]:g} s (--ramp_up), so the figures of"
            " turns are empty"
        )
    return doubts


def load_shape(config: RunConfig, turns: Turns) -> LoadShape:
    """Return when conversations start. Raises ConfigError if the data set does not have what this needs."""
    n = config.num_conversations or len(turns)
    max_s = math.inf if config.max_duration is None else config.max_duration
    common: dict[str, Any] = {
        "seed": config.seed,
        "speed": config.trace_speed,
        "ramp_up_s": config.ramp_up,
        "max_s": max_s,
        "cancel_share": (config.request_cancellation_rate or 0.0) / 100,
        "cancel_after_s": config.request_cancellation_delay,
    }
    if config.scenario == "Offline":
        return LoadShape(n, concurrency=config.concurrency or n, **common)
    if config.server_target_qps is not None:
        return LoadShape(n, rate=config.server_target_qps, burstiness=config.burstiness, **common)
    without = turns.roots[np.isnan(turns.at_s[turns.first[turns.roots]])]
    if len(without):
        raise ConfigError(
            f"--scenarios Server: conversation {turns.conversations[int(without[0])].name} has no time stamp;"
            " name the number of conversations per second with --server_target_qps",
            about=["scenarios", "server_target_qps"],
        )
    return LoadShape(n, **common)
