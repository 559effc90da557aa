"""What a page says of a run, from its files: shares, the bottleneck, energy, cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch.outside import whole_number
from mpillm.report.doubts import queue, rates, without_limits
from mpillm.report.numbers import milliseconds
from mpillm.report.request_log import read_requests, tpot_s
from mpillm.report.run_directory import REQUESTS
from mpillm.report.run_files import RunFiles

_SHARES = 200  # points of a distribution
_STRIP = 60  # pieces of an instance's strip
_SATURATED = 0.5  # share of the test: whoever computed less was not what limited it
_ROLES = {"ctx": "context", "gen": "generation", "executor": "executor"}


@dataclass
class InstanceFacts:
    """An instance: how much of the test it computed, when, and what waited for it."""

    number: int
    role: str  # ctx, gen or executor
    ranks: list[int]
    knows_steps: bool = False
    share: float | None = None  # of the test, in which it did what `share_of` says
    strip: list[float] | None = None  # the same in `_STRIP` pieces of the test
    waited: float | None = None  # share of the test in which requests waited in it
    holding_limits: bool = False  # what holds requests computes as much as it can
    result: dict[str, Any] | None = None  # its entry in result.json
    lost: bool = False
    failed: bool = False  # a rank of it is why the run failed

    @property
    def name(self) -> str:
        return f"{_ROLES.get(self.role, self.role)} {self.number}"

    @property
    def share_of(self) -> str:
        """What `share` counts, for a reader."""
        return busy_with(self.knows_steps)

    @property
    def load(self) -> float | None:
        """By how much it may have limited the test, 0 to 1."""
        if self.knows_steps or not self.holding_limits:
            return self.share if self.knows_steps else self.waited
        return max((one for one in (self.share, self.waited) if one is not None), default=None)


class Energy(NamedTuple):
    """Joules of the GPUs in the test, by what their ranks did; idle: none of it."""

    context: float
    decode: float
    handoff: float
    idle: float

    @property
    def total(self) -> float:
        return float(sum(self))


class Facts:
    """Figures of a run that several parts of the page need."""

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
        # A server in front of which more requests wait than it answers: it may not tell which it has begun.
        # Of halves the one that is not the limit holds some, too.
        result = self.run.result
        asked_all = not self._as_clients_like or bool(result.get("queue_grew"))
        facts.holding_limits = role == "executor" and asked_all
        if passes_by(result):
            return facts
        noted = self.noted.get(ranks[0])
        if noted is not None and self.test_s > 0:
            facts.knows_steps = bool(noted.get("knows_steps"))
            facts.strip = _strip(noted.get("steps") or {}, self.test_s)
            facts.share = busy_share(noted, self.test_s)
        if facts.result is not None and "busy_fraction" in facts.result:  # not of a run that was stopped
            facts.share = _number(facts.result["busy_fraction"])
        waiting = [row.get("waiting") or 0 for row in self.run.timeline if row["instance"] == number]
        if waiting:
            facts.waited = float(np.mean([w > 0 for w in waiting]))
        return facts

    def bottleneck(self) -> InstanceFacts | None:
        """Return the instance that limited the test, if one did."""
        if self._kept_up:
            return None
        loaded = [one for one in self.instances.values() if (one.load or 0) >= _SATURATED]
        return max(loaded, key=lambda one: (one.load or 0, one.share or 0), default=None)

    def limit(self) -> str:
        """Return what limited the test, in words; "" if the instances don't tell."""
        if self._kept_up:
            if missed := self.missed_limits():
                return f"the system kept up with the rate, but missed {' and '.join(missed)}"
            return "no limit reached: the system kept up with the rate"
        worst = self.bottleneck()
        if worst is None:
            result, told = self.run.result, self.instances.values()
            too_few = self._as_clients_like and result.get("queue_grew") is None
            known = any(one.knows_steps or (one.load is not None and not too_few) for one in told)
            return "no instance was the bottleneck" if known else ""
        roles = {one.role for one in self.instances.values() if (one.load or 0) >= _SATURATED}
        if {"ctx", "gen"} <= roles:
            return f"context and generation are both saturated; most of all {worst.name}"
        return f"bottleneck: {worst.name}"

    def missed_limits(self) -> list[str]:
        """Return LoadGen's latency limits that the test missed, each with the percentile that is over it."""
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
        """Whether requests come at times of their own: in a Server test, and to what serves."""
        return self.run.result.get("scenario") in ("Server", None)

    @property
    def _kept_up(self) -> bool:
        """Whether a Server test was answered as fast as it asked: then it says nothing of a limit."""
        return self.run.result.get("queue_grew") is False

    @property
    def doubts(self) -> list[str]:
        """What is doubtful of the test, a line each: a VALID one with any isn't shown as good."""
        return [str(one) for one in self.run.result.get("doubts") or []]

    def verdict_notes(self) -> list[str]:
        """Return what else to know of LoadGen's verdict, a line each."""
        result = self.run.result
        notes = [said] if (said := _of_client(result)) else []
        notes += [f"{said}; {queue(result)}."] if (said := rates(result)) else []
        if without_limits(result):
            notes.append("No latency limit was set: LoadGen accepts every rate.")
        if ended_by := result.get("ended_by"):
            n = int(result.get("cut_off") or 0)
            cut = f": {n:,} open {'request was' if n == 1 else 'requests were'} cut off" if n else ""
            notes.append(f"Ended at once, {ended_by}{cut}.")
        return notes

    @property
    def gpu_ranks(self) -> list[int]:
        return [rank for rank, noted in self.noted.items() if (noted.get("samples") or {}).get("gpu")]

    @property
    def n_paid(self) -> int:
        """What is paid for: GPUs, or, without any, worker ranks."""
        return len(self.gpu_ranks) or sum(len(one.ranks) for one in self.instances.values())

    def cost_per_million_tokens(self, price_per_gpu_hour: float) -> float | None:
        """Return what a million answer tokens cost at this throughput; None without tokens."""
        rate = _number(self.run.result.get("tokens_per_second"))
        return price_per_gpu_hour * self.n_paid / 3600 / rate * 1e6 if rate else None

    def cdf(self) -> dict[str, Any]:
        """Return the distributions of `telemetry.json`; of a run that left none, from its `requests.bin`."""
        told = self.run.telemetry.get("cdf")
        if told or not (self.run.path / REQUESTS).exists():
            return told or {}
        rows = read_requests(self.run.path)
        shares = np.linspace(0, 1, _SHARES + 1)[1:]
        return {
            name: {"ms": (1e3 * np.quantile(known, shares)).tolist(), "share": shares.tolist()}
            for name, values in (("ttft", rows["ttft"]), ("tpot", tpot_s(rows)), ("latency", rows["latency"]))
            if len(known := values[np.isfinite(values) & (values > 0)])
        }

    def energy(self) -> Energy | None:
        """Return the GPUs' energy in the test; None where no driver said what they drew.

        Between two samples it belongs to what the rank did in that time, by seconds; to the handoff as much
        as was not computing.
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
        return Energy(*total.tolist()) if known else None


def passes_by(result: Mapping[str, Any]) -> bool:
    """Return whether a client that was not LoadGen asked the servers itself: the ranks know of no request."""
    return bool((result.get("harness") or {}).get("completed")) and "endpoint" not in result


def _of_client(result: Mapping[str, Any]) -> str:
    """Return what a client that was not LoadGen reports, in a sentence; "" without one."""
    client = result.get("harness") or {}
    if not client.get("asked"):
        return ""
    said = [
        f"{client['completed']:,} of {client['asked']:,} requests in {client['duration_s']:,.2f} s",
        f"{client['failed']:,} failed",
        f"{client['requests_per_second']:,.4g} requests/s",
    ]
    if (rate := client.get("tokens_per_second")) is not None:
        said.append(f"{rate:,.4g} tokens/s")
    for name, key in (
        ("first token", "ttft_ms"),
        ("per output token", "tpot_ms"),
        ("whole answer", "latency_ms"),
    ):
        if told := client.get(key):
            said.append(f"{name} " + " ".join(f"{what} {value:.4g}" for what, value in told.items()) + " ms")
    return f"{client['name']} {client['version']}".strip() + f" reports {', '.join(said)}."


def limits_ms(run: RunFiles) -> dict[str, float | None]:
    """Return LoadGen's latency limits, None where it has none."""
    asked = run.result.get("loadgen")
    asked = asked if isinstance(asked, dict) else {}
    return {name: _number(asked.get(f"{name}_latency_ms")) or None for name in ("ttft", "tpot")}


def facts_of(run: RunFiles) -> tuple[Facts, list[str]]:
    """Return the facts of a run; where files are damaged, without them, and a line that says so."""
    lacking: dict[str, Any] = {}
    said: list[str] = []
    for name, empty in (("telemetry", {}), ("timeline", []), ("plan", {}), ("result", {})):
        try:
            return Facts(replace(run, **lacking)), said
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            lacking[name] = empty
            said = [f"without {', '.join(lacking)}: damaged ({type(error).__name__}: {error})"]
    return Facts(replace(run, **lacking)), said


def unrecorded(facts: Facts) -> list[str]:
    """Return what nobody recorded of a run that failed, a line for each."""
    if facts.run.result.get("status") != "FAILED" or facts.noted or not facts.run.telemetry:
        return []
    return [
        "what each rank did, its CPU, memory and GPU: ranks tell it when a test is over, and this run failed"
        " before"
    ]


def busy_with(knows_steps: bool) -> str:
    """Return what of an instance counts as busy."""
    return "computing" if knows_steps else "holding requests"


def busy_share(noted: Mapping[str, Any], test_s: float) -> float:
    """Return which share of the test an instance was busy, by what its first rank noted; see `busy_with`."""
    return float(np.mean(_strip(noted.get("steps") or {}, test_s)))


def _strip(steps: dict[str, list[float]], test_s: float) -> list[float]:
    """Return for each of equal pieces of the test which share of it the spans cover."""
    starts, ends, busy = (floats(steps.get(name) or []) for name in ("start", "end", "busy_s"))
    edges = np.linspace(0, test_s, _STRIP + 1)
    if not len(starts):
        return [0.0] * _STRIP
    # Busy seconds until each moment: a span's are spread evenly over it.
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
    """Return how long the test had lasted when the run was killed or failed, as far as anything says."""
    progress = (run.telemetry.get("progress") or {}).get("seconds") or [0.0]
    return max([float(progress[-1]), *(float(row["seconds"]) for row in run.timeline[-64:])])
