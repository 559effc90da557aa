"""`result.json`: what a run came to, also when it failed."""

from __future__ import annotations

from typing import Any

from mpillm.errors import Failure
from mpillm.roles.harness import Harness


def test_result(harness: Harness, reports: dict[int, Any]) -> dict[str, Any]:
    """The numbers of the test, from the harness and from what the instances reported (by rank) when they were drained."""
    totals = harness.totals
    elapsed = totals.ended - totals.started
    per_instance = []
    for report in reports.values():
        instance = {key: value for role in report["roles"] for key, value in role.items()}
        if "instance" in instance:
            lasted = instance.pop("test_s")
            instance["busy_fraction"] = round(min(1.0, instance.pop("busy_s") / lasted), 4) if lasted > 0 else 0.0
            per_instance.append(instance)
    return {
        "samples": totals.samples,
        "errors": totals.errors,
        "retried": 0,
        "tokens": totals.tokens,
        "test_s": round(elapsed, 4),
        "samples_per_second": round(totals.samples / elapsed, 4) if elapsed > 0 else 0.0,
        "tokens_per_second": round(totals.tokens / elapsed, 4) if elapsed > 0 else 0.0,
        "ttft_ms": harness.ttft.summary_ms(),
        "tpot_ms": harness.tpot.summary_ms(),
        "per_instance": sorted(per_instance, key=lambda instance: int(instance["instance"])),
        "route": {key: sum(report[key] for report in reports.values()) for key in ("messages", "message_bytes")},
        "cpu_cores": [round(reports[rank]["cpu_cores"], 4) for rank in sorted(reports)],
    }


def failures_json(failures: tuple[Failure, ...]) -> list[dict[str, Any]]:
    """Failures as `result.json` lists them."""
    return [{"rank": f.rank, "cause": f.cause, "traceback": f.traceback} for f in failures]
