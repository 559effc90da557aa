"""`result.json`: what a run came to, also when it failed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from mpillm.config import RunConfig
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


def summary_rows(result: Mapping[str, Any], config: RunConfig, directory: str) -> list[tuple[str, Any]]:
    """What the person sees at the end: names and values of `result.json`, which lies in `directory`."""
    rows: list[tuple[str, Any]] = [("LoadGen", f"{result['loadgen_result']} ({config.scenario}, {config.test_mode})")]
    if config.compliance_test:
        rows.append(("", f"which means nothing for a {config.compliance_test} run"))
    else:
        rows += [("", f"{condition}: no") for condition in result["loadgen_unsatisfied"]]
        rows += [("", advice) for advice in result["loadgen_advice"]]
    rows += [
        ("samples", f"{result['samples']} in {result['test_s']:.2f} s, {result['errors']} errors"),
        ("samples per second", f"{result['samples_per_second']:.2f}"),
        ("tokens per second", f"{result['tokens_per_second']:.1f}"),
    ]
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        if (latency := result[key]) is not None:
            rows.append((name, "  ".join(f"{k} {v:.2f}" for k, v in latency.items()) + "  ms"))
    for instance in result["per_instance"]:
        work = f"{instance['samples']} samples, {instance['tokens']} tokens, busy {100 * instance['busy_fraction']:.0f} %"
        rows.append((f"instance {instance['instance']}", work))
    judge = "compliance" if config.compliance_test else "accuracy" if config.workload and config.test_mode == "AccuracyOnly" else None
    if judge:
        rows.append(("judged by", f"python -m mpillm {judge} {shlex.quote(directory)}"))
    return [*rows, ("result", f"{directory}/result.json")]


def failures_json(failures: tuple[Failure, ...]) -> list[dict[str, Any]]:
    """Failures as `result.json` lists them."""
    return [{"rank": f.rank, "cause": f.cause, "traceback": f.traceback} for f in failures]
