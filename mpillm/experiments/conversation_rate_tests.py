"""Tests of conversations at a rate for `rate_search`. The limits of --goodput judge them, not LoadGen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.experiments.conversation_runs import COLUMNS, conversation_values
from mpillm.experiments.rate_search import RateTrial
from mpillm.experiments.rate_tests import RateTests, common_figures, too_late
from mpillm.options.options import without
from mpillm.runtime.whole_runs import EndedRun

_MIN_CONVERSATIONS = 16  # of a test; fewer do not show what happens while several are open


@dataclass(frozen=True)
class ConversationRateTests(RateTests):
    """The tests of one search for the rate at which conversations start."""

    unit: ClassVar[str] = "conversations"
    per_second: ClassVar[str] = "conversations per second"
    start: ClassVar[float | None] = 1.0  # the search doubles or halves it: no test at the start measures it
    note: ClassVar[str] = (
        "LoadGen does not judge conversations: here, VALID means that their requests meet --goodput, by"
        " LoadGen's rule for the 99th percentile"
    )

    def prepare(self) -> None:
        """Do as the base class. Raises ConfigError without limits, or with a number of conversations."""
        config = self.config
        if not config.goodput:
            raise ConfigError(
                f"{config.named('harness')}: LoadGen does not judge it; give latency limits in milliseconds:"
                " --goodput ttft:500 tpot:50",
                about=["goodput"],
            )
        if config.num_conversations is not None:
            raise ConfigError(
                f"{config.named('num_conversations')}: find-max-qps sets it, from each rate and from"
                " --min_duration; leave it out",
                about=["num_conversations"],
            )
        super().prepare()

    def _options(self, rate: float, seconds: float, queries: int | None) -> list[str]:
        n = max(_MIN_CONVERSATIONS, round(rate * seconds))
        args = without(self.args, {"min_duration"})  # it set `seconds`
        return [*args, "--server_target_qps", f"{rate:.6g}", "--num_conversations", str(n)]

    def _hopeless(self, rows: NDArray[np.void], result: Mapping[str, Any]) -> str:
        return too_late(rows, self.limits_ms, int(result["requests_expected"]))

    def _completed_per_second(self, rows: NDArray[np.void]) -> float:
        return 0.0  # a test that was stopped has complete conversations by chance only

    def _judged(self, rate: float, full: bool, ended: EndedRun) -> RateTrial:
        result = ended.result
        goodput, of = result["goodput"], result["conversations"]
        why = [
            f"{count:,} requests exceeded {name} {goodput['limits_ms'][name]:g} ms,"
            f" {goodput['late_allowed']:,} are allowed"
            for name, count in goodput["late"].items()
            if count > goodput["late_allowed"]
        ]
        why += [f"{result['errors']:,} answers were errors"] if result["errors"] else []
        values = {name: value for name, value in conversation_values(result).items() if name in COLUMNS}
        known = {name: value for name, value in values.items() if value is not None}
        completed = of["ended"] / result["test_s"] if result["test_s"] else 0.0
        figures = common_figures(result) | known
        text = "; ".join(why)
        return RateTrial(rate, full, not why, text, completed, str(ended.folder), figures, result["doubts"])
