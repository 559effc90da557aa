"""How much of a run's latencies and throughput is due to the harness."""

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


def certificate(run: RunFiles, harness_run: RunFiles) -> dict[str, Any]:
    """Return the harness's contribution, ready for JSON.

    `harness_run`: the same test with a core that takes no time. Its latencies are due to LoadGen, ranks and
    messages. Shares are fractions of the run's figure. In Offline, the share of the throughput is the
    harness's part of the time for a sample: with 0.01, the harness alone is 100 times as fast as the run. In
    the other scenarios, LoadGen sets the rate, and both tests must keep up with it.
    """
    latencies = {}
    for key in _LATENCIES:
        total, own = _latency(run, key), _latency(harness_run, key)
        if total and own:
            latencies[key] = {
                name: {"run": total[name], "harness": own[name], "share": _share(own[name], total[name])}
                for name in _PERCENTILES
                if name in total and name in own
            }
    rate, harness_rate = (one.result["samples_per_second"] for one in (run, harness_run))
    share = _share(rate, harness_rate) if run.result["scenario"] == "Offline" else None
    return {
        "run": str(run.path),
        "beside": str(harness_run.path),
        "scenario": run.result["scenario"],
        "latencies": latencies,
        "samples_per_second": {"run": rate, "harness": harness_rate, "share": share},
        "cpu_cores": {"run": run.result.get("cpu_cores"), "harness": harness_run.result.get("cpu_cores")},
    }


def _latency(run: RunFiles, key: str) -> dict[str, float] | None:
    return latencies_ms(run.path) if key == "latency_ms" else run.result.get(key)


def _share(part: float, total: float) -> float | None:
    return round(part / total, 6) if total > 0 else None


def format_certificate(figures: dict[str, Any]) -> str:
    """Return the certificate as text."""
    rows = [("", "run", "harness alone", "share")]
    for key, title in _LATENCIES.items():
        for name, figure in figures["latencies"].get(key, {}).items():
            run, harness = (f"{figure[key]:.3f} ms" for key in ("run", "harness"))
            rows.append((f"{title} {name}", run, harness, _percent(figure["share"])))
    rate = figures["samples_per_second"]
    run, harness = (f"{rate[key]:.2f}" for key in ("run", "harness"))
    rows.append(("samples per second", run, harness, _percent(rate["share"])))
    lines = table([(f"  {name}", *cells) for name, *cells in rows]).splitlines()
    if rate["share"] is None:
        lines.append("  LoadGen gives the rate in this scenario: the harness alone got the same rate")
    else:
        lines.append(f"  the harness alone is {rate['harness'] / rate['run']:.1f} times as fast as the run")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
