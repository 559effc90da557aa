"""Limits of goodput for LoadGen's Server test, in place of the workload's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpillm.experiments.run_series import GROUP
from mpillm.fields import Field
from mpillm.report.goodput import NO_LIMIT_MS

GOODPUT = Field(
    "goodput",
    "limits in place of the workload's, milliseconds at the 99th percentile: ttft:500 tpot:50 e2el:9000,"
    " or AIPerf's names time_to_first_token, inter_token_latency, request_latency; a latency that is not"
    " named has no limit",
    group=GROUP,
    argparse_opts={"nargs": "+"},
)


def user_conf(limits: Mapping[str, float], model: str, own: str | None) -> str:
    """Return a user.conf with these limits for LoadGen's Server test of `model`; none where none is named.

    `own`: the file that the user gave; its other lines stay in force. ``e2el`` is not in it: with token
    latencies LoadGen looks at no other.
    """
    text = Path(own).read_text(encoding="utf-8-sig") if own else ""
    if text and not text.endswith("\n"):
        text += "\n"
    for name in ("ttft", "tpot"):
        text += f"{model}.Server.{name}_latency = {limits.get(name, NO_LIMIT_MS):.0f}\n"
    return text + f"{model}.Server.target_latency = {NO_LIMIT_MS}\n{model}.Server.use_token_latencies = 1\n"
