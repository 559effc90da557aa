"""Figures of an HTML report from the files of a run: shares, the bottleneck, energy, cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch.safe_text import whole_number
from mpillm.files import DATA_ERRORS
from mpillm.report.numbers import milliseconds, rate_text
from mpillm.report.request_log import read_requests, tpot_s
from mpillm.report.run_directory import REQUESTS
from mpillm.report.run_files import RunFiles
from mpillm.report.validity_checks import queue, rates, without_limits

_SHARES = 200  # points of a distribution
_STRIP = 60  # pieces of an instance's strip
_SATURATED = 0.5  # share of the test: an instance with a smaller share was not the bottleneck
_ROLES = {"ctx": "context", "gen": "generation", "executor": "executor"}


@dataclass
class InstanceFacts:
    """An instance: how much of the test it computed, when, and how long requests waited in it."""

    number: int
    role: str  # ctx, gen or executor
    ranks: list[int]
    has_steps: bool = False
    share: float | None = None  # busy share of the test; `share_of` names the activity
    strip: list[float] | None = None  # busy share of each of `_STRIP` pieces of the test
    waited: float | None = None  # share of the test in which requests waited in the instance
    is_never_starved: bool = False  # while the instance has requests, it computes as much as it can
    result: dict[str, Any] | None = None  # its entry in result.json
    lost: bool = False
    failed: bool = False  # one of its ranks caused the failure of the run

    @property
    def name(self) -> str:
        return f"{_ROLES.get(self.role, self.role)} {self.number}"

    @property
    def share_of(self) -> str:
        """The activity that counts in `share`, in words."""
        return busy_with(self.has_steps)

    @property
    def load(self) -> float | None:
        """The degree to which the instance may have limited the test, 0 to 1."""
        if self.has_steps:
            return self.share
        if not self.is_never_starved:
            # A count of waiting requests may come with a request, and misses the time without requests.
            return min((one for one in (self.share, self.waited) if one is not None), default=None)
        return max((one for one in (self.share, self.waited) if one is not None), default=None)


class GpuEnergy(NamedTuple):
    """Joules of the GPUs in the test, by the activity of their ranks."""

    context: float
    decode: float
    handoff: float
    idle: float

    @property
    def total(self) -> float:
        return float(sum(self))


class Facts:
    """Figures of a run that several parts of the HTML report need."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.test_s = _number(run.result.get("test_s")) or _last_seconds(run)
        telemetry = run.telemetry.get("ranks")
        self.noted: dict[int, dict[str, Any]] = {
            number: noted
            for rank, noted in (telemetry.items() if isinstance(telemetry, dict) else ())
            if (number := whole_number(str(rank))) is not None and isinstance(noted, dict)
        }
        self.failed = run.failed_ranks
        self.instances = {number: self._instance(number) for number in run.instances()}

    def _instance(self, number: int) -> InstanceFacts:
        _, role, ranks = self.run.instances()[number]
        facts = InstanceFacts(number, role, ranks)
        per = self.run.result.get("per_instance") or []
        facts.result = next((one for one in per if one.get("instance") == number), None)
        facts.lost = any(one.get("instance") == number for one in self.run.result.get("lost") or [])
        facts.failed = not self.failed.isdisjoint(ranks)
        # A server may not report which of its waiting requests it has started. In a disaggregated run, an
        # instance that is not the bottleneck also has waiting requests.
        result = self.run.result
        never_starved = not self._as_clients_like or bool(result.get("queue_grew"))
        facts.is_never_starved = role == "executor" and never_starved
        if bypasses_ranks(result):
            return facts
        noted = self.noted.get(ranks[0])
        if noted is not None and self.test_s > 0:
            facts.has_steps = bool(noted.get("knows_steps"))
            facts.strip = _strip(noted.get("steps") or {}, self.test_s)
            facts.share = busy_share(noted, self.test_s)
        if facts.result is not None and "busy_fraction" in facts.result:  # missing if the run was stopped
            facts.share = _number(facts.result["busy_fraction"])
        waiting = [row.get("waiting") or 0 for row in self.run.timeline if row["instance"] == number]
        if waiting:
            facts.waited = float(np.mean([w > 0 for w in waiting]))
        return facts

    def bottleneck(self) -> InstanceFacts | None:
        """Return the instance that limited the test, if one did."""
        if self._keeps_up:
            return None
        loaded = [one for one in self.instances.values() if (one.load or 0) >= _SATURATED]
        return max(loaded, key=lambda one: (one.load or 0, one.share or 0), default=None)

    def limit(self) -> str:
        """Return what limited the test, in words; "" if the instances do not report it."""
        if self._keeps_up:
            if missed := self.missed_limits():
                return f"the system kept up with the rate, but missed {' and '.join(missed)}"
            return "no limit reached: the system kept up with the rate"
        worst = self.bottleneck()
        if worst is None:
            result, instances = self.run.result, self.instances.values()
            too_few = self._as_clients_like and result.get("queue_grew") is None
            known = any(one.has_steps or (one.load is not None and not too_few) for one in instances)
            return "no instance was the bottleneck" if known else ""
        roles = {one.role for one in self.instances.values() if (one.load or 0) >= _SATURATED}
        if {"ctx", "gen"} <= roles:
            return f"context and generation are both saturated; most of all {worst.name}"
        return f"bottleneck: {worst.name}"

    def missed_limits(self) -> list[str]:
        """Return LoadGen's latency limits that the test missed, each with the percentile that exceeds it."""
        if "latency limits" not in (self.run.result.get("loadgen_unsatisfied") or []):
            return []
        missed = []
        for name, limit in limits_ms(self.run).items():
            latency = self.run.result.get(f"{name}_ms") or {}
            high = next((key for key in ("p99", "p90", "p50", "mean") if latency.get(key) is not None), "")
            if limit and high and latency[high] > limit:
                missed.append(f"{name.upper()} {high} {milliseconds(latency[high])} of {milliseconds(limit)}")
        return missed or ["a latency limit"]

    @property
    def _as_clients_like(self) -> bool:
        """Whether requests come as clients send them: in all tests but Offline and SingleStream."""
        return self.run.has_conversations or self.run.result.get("scenario") in ("Server", None)

    @property
    def _keeps_up(self) -> bool:
        """Whether the queue of a Server test did not grow: then the test has not reached a limit."""
        return self.run.result.get("queue_grew") is False

    def verdict_notes(self) -> list[str]:
        """Return notes on LoadGen's verdict, a line each."""
        result = self.run.result
        notes = [text] if (text := _of_client(result)) else []
        notes += [f"{text}; {queue(result)}."] if (text := rates(result)) else []
        if without_limits(result):
            notes.append("No latency limit was set: LoadGen accepts every rate.")
        if ended_by := result.get("ended_by"):
            n = int(result.get("cut_off") or 0)
            cut = f": {n:,} open {'request was' if n == 1 else 'requests were'} cut off" if n else ""
            notes.append(f"Ended early, {ended_by}{cut}.")
        return notes

    def cost_per_million_tokens(self, price_per_gpu_hour: float) -> float | None:
        """Return what a million answer tokens cost at this throughput; None without tokens.

        Without GPUs, each worker rank has the price.
        """
        rate = _number(self.run.result.get("tokens_per_second"))
        return price_per_gpu_hour * self.run.computing()[0] / 3600 / rate * 1e6 if rate else None

    def cdf(self) -> dict[str, Any]:
        """Return the distributions of `telemetry.json`, or of `requests.bin`.

        `telemetry.json` counts failed requests, and only those that came through this run's ranks.
        """
        cdf = self.run.telemetry.get("cdf")
        if (cdf and not self.run.leaves_out_failed) or not (self.run.path / REQUESTS).exists():
            return cdf or {}
        rows = read_requests(self.run.path)
        if self.run.leaves_out_failed:
            rows = rows[rows["error"] == 0]
        if not self.run.result.get("streamed", True):  # times of first tokens are unknown
            rows = rows.copy()
            rows["ttft"] = np.nan
        shares = np.linspace(0, 1, _SHARES + 1)[1:]
        return {
            name: {"ms": (1e3 * np.quantile(known, shares)).tolist(), "share": shares.tolist()}
            for name, values in (("ttft", rows["ttft"]), ("tpot", tpot_s(rows)), ("latency", rows["latency"]))
            if len(known := values[np.isfinite(values) & (values > 0)])
        }

    def energy(self) -> GpuEnergy | None:
        """Return the GPUs' energy in the test; None if no driver reported it.

        The energy between two samples is divided by the seconds of each activity of the rank. The handoff
        gets at most the time without computation.
        """
        total, known = np.zeros(4), False
        for noted in self.noted.values():
            samples = noted.get("samples") or {}
            gpu = samples.get("gpu")
            if not gpu or len(samples["seconds"]) != len(gpu["seconds"]):
                continue
            seconds = floats(gpu["seconds"])
            joules = np.diff(floats(gpu["energy_j"]))
            if not np.isfinite(joules).all():
                power = floats(gpu["power_w"])
                joules = (power[1:] + power[:-1]) / 2 * np.diff(seconds)
            context, decode, handoff, busy = (
                np.diff(floats(samples[f"{name}_s"])) for name in ("context", "decode", "handoff", "busy")
            )
            lasted = np.diff(seconds)
            inside = (
                np.isfinite(joules) & (seconds[:-1] >= 0) & (seconds[1:] <= self.test_s + 1) & (lasted > 0)
            )
            parts = np.stack([context, decode + busy, handoff, np.zeros_like(lasted)])
            parts[:2] *= np.minimum(1, lasted / np.maximum(parts[:2].sum(0), 1e-9))
            parts[2] = np.clip(handoff, 0, lasted - parts[:2].sum(0))
            parts[3] = lasted - parts[:3].sum(0)
            total += ((parts / lasted) * joules)[:, inside].sum(1)
            known |= bool(inside.any())
        return GpuEnergy(*total.tolist()) if known else None


def bypasses_ranks(result: Mapping[str, Any]) -> bool:
    """Return whether a load client sent requests directly to the servers: then the ranks had no requests."""
    return bool((result.get("harness") or {}).get("completed")) and "endpoint" not in result


def _of_client(result: Mapping[str, Any]) -> str:
    """Return the report of a client other than LoadGen, in a sentence; "" without such a client."""
    client = result.get("harness") or {}
    if not client.get("asked"):
        return ""
    figures = [
        f"{client['completed']:,} of {client['asked']:,} requests in {client['duration_s']:,.2f} s",
        f"{client['failed']:,} failed",
        f"{rate_text(client['requests_per_second'])} requests/s",
    ]
    if (rate := client.get("tokens_per_second")) is not None:
        figures.append(f"{rate_text(rate)} tokens/s")
    for name, key in (
        ("first token", "ttft_ms"),
        ("per output token", "tpot_ms"),
        ("whole answer", "latency_ms"),
    ):
        if latency := client.get(key):
            statistics = " ".join(f"{statistic} {value:.4g}" for statistic, value in latency.items())
            figures.append(f"{name} {statistics} ms")
    return f"{client['name']} {client['version']}".strip() + f" reports {', '.join(figures)}."


def limits_ms(run: RunFiles) -> dict[str, float | None]:
    """Return LoadGen's latency limits; None: no limit."""
    settings = run.result.get("loadgen")
    settings = settings if isinstance(settings, dict) else {}
    return {name: _number(settings.get(f"{name}_latency_ms")) or None for name in ("ttft", "tpot")}


def facts_of(run: RunFiles) -> tuple[Facts, list[str]]:
    """Return the facts of a run, without its damaged files, and a line about the damaged files."""
    replaced: dict[str, Any] = {}
    notes: list[str] = []
    for name, empty in (("telemetry", {}), ("timeline", []), ("plan", {}), ("result", {})):
        try:
            return Facts(replace(run, **replaced)), notes
        except DATA_ERRORS as error:
            replaced[name] = empty
            notes = [f"without {', '.join(replaced)}: damaged ({type(error).__name__}: {error})"]
    return Facts(replace(run, **replaced)), notes


def unrecorded(facts: Facts) -> list[str]:
    """Return the data that a failed run lacks, a line for each kind."""
    if facts.run.result.get("status") != "FAILED" or facts.noted or not facts.run.telemetry:
        return []
    return [
        "what each rank did, its CPU, memory and GPU: ranks report it when a test is over, and this run"
        " failed before"
    ]


def busy_with(has_steps: bool) -> str:
    """Return the activity of an instance that counts as busy."""
    return "computing" if has_steps else "holding requests"


def busy_share(noted: Mapping[str, Any], test_s: float) -> float:
    """Return the share of the test in which an instance was busy. `noted`: its root rank's telemetry."""
    return float(np.mean(_strip(noted.get("steps") or {}, test_s)))


def _strip(steps: dict[str, list[float]], test_s: float) -> list[float]:
    """Return the busy share of each of `_STRIP` equal pieces of the test. `steps`: spans of work."""
    starts, ends, busy = (floats(steps.get(name) or []) for name in ("start", "end", "busy_s"))
    edges = np.linspace(0, test_s, _STRIP + 1)
    if not len(starts):
        return [0.0] * _STRIP
    # Busy seconds until each moment. A span's busy seconds are spread evenly over the span.
    moments = np.column_stack([starts, np.maximum(ends, starts + 1e-9)]).ravel()
    done = np.repeat(np.cumsum(busy), 2)
    done[0::2] -= busy
    until = np.interp(edges, np.maximum.accumulate(moments), done)
    shares: list[float] = np.clip(np.diff(until) / (test_s / _STRIP), 0, 1).tolist()
    return shares


def floats(values: Any) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _last_seconds(run: RunFiles) -> float:
    """Return how long the test had lasted when the run was killed or failed, as far as recorded."""
    progress = (run.telemetry.get("progress") or {}).get("seconds") or [0.0]
    return max([float(progress[-1]), *(float(row["seconds"]) for row in run.timeline[-64:])])
