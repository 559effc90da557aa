"""Figures of tests of conversations, for commands that start several runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = {
    "first_turns_ttft_p90_ms": "first turns TTFT p90 ms",
    "later_turns_ttft_p90_ms": "later turns TTFT p90 ms",
    "cached_share": "cached share, later turns",
    "e2e_avg_interactivity": "interactivity",
    "e2e_normalized_interactivity_p90": "interactivity p90",
    "good_conversations_share": "good conversations, share",
    "good_conversations_per_second": "good conversations/s",
}
"""Columns of a sweep's tables, by key of a point."""

METRICS = (
    "first_turns_ttft_mean",
    "later_turns_ttft_mean",
    "e2e_avg_interactivity",
    "e2e_normalized_interactivity_p90",
    "good_conversations_per_second",
)
"""Figures that `ab` can compare."""


def conversation_values(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of `result.json` by name; {} for other tests. Unknown figures are None."""
    of = result.get("conversations")
    if of is None:
        return {}
    values = {**of, **(result.get("goodput") or {})}
    values["cached_share"] = (of.get("later_turns") or {}).get("cached_share")
    for turns in ("first_turns", "later_turns"):
        ttft = (of.get(turns) or {}).get("ttft_ms") or {}
        values |= {f"{turns}_ttft_mean": ttft.get("mean"), f"{turns}_ttft_p90_ms": ttft.get("p90")}
    return {name: values.get(name) for name in (*COLUMNS, *METRICS)}
