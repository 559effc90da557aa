"""How much of a run's latencies and throughput is the harness's own."""

from __future__ import annotations

from typing import Any

from mpillm.loadgen.logs import latencies_ms
from mpillm.options.columns import table
from mpillm.report.run_files import RunFiles

_PERCENTILES = ("p50", "p90", "p99")
_LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "latency_ms": "whole answer",
}


def certificate(run: RunFiles, beside: RunFiles) -> dict[str, Any]:
    """Return what is the harness's own, ready for JSON.

    `beside`: the same test with a core that takes no time, so that its latencies are the harness's (LoadGen,
    ranks and messages between them). Shares are fractions of the run's figure. The share of the throughput is
    that of the time for a sample (Offline): 0.01 means that the harness could have carried 100 times as much.
    In the other scenarios LoadGen gives the rate, and what counts is whether both kept up with it.
    """
    latencies = {}
    for key in _LATENCIES:
        whole, own = _latency(run, key), _latency(beside, key)
        if whole and own:
            latencies[key] = {
                name: {"run": whole[name], "harness": own[name], "share": _share(own[name], whole[name])}
                for name in _PERCENTILES
                if name in whole and name in own
            }
    rate, most = (one.result["samples_per_second"] for one in (run, beside))
    offline = run.result["scenario"] == "Offline"
    return {
        "run": str(run.path),
        "beside": str(beside.path),
        "scenario": run.result["scenario"],
        "latencies": latencies,
        "samples_per_second": {
            "run": rate,
            "harness": most,
            "share": _share(rate, most) if offline else None,
        },
        "cpu_cores": {"run": run.result.get("cpu_cores"), "harness": beside.result.get("cpu_cores")},
    }


def _latency(run: RunFiles, key: str) -> dict[str, float] | None:
    return latencies_ms(run.path) if key == "latency_ms" else run.result.get(key)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole > 0 else None


def certificate_table(found: dict[str, Any]) -> str:
    """Return the certificate for a person."""
    rows = [("", "run", "harness alone", "share")]
    for key, title in _LATENCIES.items():
        for name, one in found["latencies"].get(key, {}).items():
            rows.append(
                (
                    f"{title} {name}",
                    f"{one['run']:.3f} ms",
                    f"{one['harness']:.3f} ms",
                    _percent(one["share"]),
                )
            )
    rate = found["samples_per_second"]
    rows.append(
        ("samples per second", f"{rate['run']:.2f}", f"{rate['harness']:.2f}", _percent(rate["share"]))
    )
    lines = table([(f"  {name}", *cells) for name, *cells in rows]).splitlines()
    if rate["share"] is None:
        lines.append(
            "  LoadGen gives the rate in this scenario: the harness alone was asked for the same one"
        )
    else:
        lines.append(f"  the harness alone is {rate['harness'] / rate['run']:.1f} times as fast as the run")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
