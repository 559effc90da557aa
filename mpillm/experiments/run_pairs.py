"""Pairs of runs with two sets of options, in alternating order, and a test of their differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import ConfigError
from mpillm.experiments import conversation_runs
from mpillm.experiments.intervals import PairedTest, paired_test
from mpillm.experiments.run_series import must_have_verdict
from mpillm.experiments.warm_cache import RepeatedPrompts
from mpillm.loadgen.logs import latencies_ms
from mpillm.options.run_config import RunConfig
from mpillm.runtime.whole_runs import run_in

ALPHA = 0.01
"""Probability of calling a difference real if there is none."""

METRICS = (
    *("samples_per_second", "tokens_per_second", "ttft_mean", "ttft_p99", "tpot_mean", "latency_mean"),
    *conversation_runs.METRICS,
)


class MeasuredPair(NamedTuple):
    """Outcome of a pair of runs."""

    figures: dict[str, dict[str, float]]  # by side and metric
    doubts: list[tuple[str, str]]  # the name of a run, and a doubt about it


def run_pairs(
    folder: Path,
    mpirun: Sequence[str],
    sides: Mapping[str, Sequence[str]],
    configs: Mapping[str, RunConfig],
    pairs: int,
    metric: str,
    repeated: RepeatedPrompts,
    report: Callable[[str], None],
) -> Iterator[MeasuredPair]:
    """Run both sides of each pair, starting with A in odd pairs.

    A run of A before the first pair does not count, because files and caches are cold. `report` gets a line
    after each pair, and the warning of `repeated`.

    Raises ConfigError or StageError if a run fails, ConfigError if it does not have `metric`.
    """

    def run(side: str, name: str, title: str) -> tuple[dict[str, float], list[str]]:
        ended = must_have_verdict(run_in(folder / name, mpirun, sides[side]), title)
        if text := repeated.warning(configs[side], ended.result):
            report(f"warning: {text}")
        figures = _figures(ended.result, ended.folder)
        if metric not in figures:
            has = ", ".join(name for name in METRICS if name in figures)
            raise ConfigError(f"--metric {metric}: {title} does not have it; it has {has}", about=["metric"])
        return figures, ended.result["doubts"]

    run("A", "warm-up", "the first run of A")
    for pair in range(1, pairs + 1):
        order = ("A", "B") if pair % 2 else ("B", "A")
        measured = MeasuredPair({}, [])
        for side in order:
            figures, doubts = run(side, f"{pair:02d}-{side}", f"run {side} of pair {pair}")
            measured.figures[side] = figures
            measured.doubts.extend((f"{side} of pair {pair}", doubt) for doubt in doubts)
        report(f"pair {pair} of {pairs}, {order[0]} first")
        yield measured


def _figures(result: Mapping[str, Any], folder: Path) -> dict[str, float]:
    latency = latencies_ms(folder) or result.get("latency_ms") or {}  # LoadGen's, or those of another load
    of_conversations = conversation_runs.conversation_values(result)
    values = {
        **{name: of_conversations.get(name) for name in conversation_runs.METRICS},
        "samples_per_second": result["samples_per_second"],
        "tokens_per_second": result["tokens_per_second"],
        "latency_mean": latency.get("mean"),
    }
    for name in ("ttft", "tpot"):
        for kind in ("mean", "p99"):
            values[f"{name}_{kind}"] = (result[f"{name}_ms"] or {}).get(kind)
    return {name: float(value) for name, value in values.items() if value is not None}


def judge(pairs: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> PairedTest:
    """Test the pairs' differences in a metric. Raises ConfigError if it is 0 in a run."""
    if not all(pair[side][metric] for pair in pairs for side in "AB"):
        raise ConfigError(f"--metric {metric}: it is 0 in a run, so there is no ratio", about=["metric"])
    return paired_test([p["A"][metric] for p in pairs], [p["B"][metric] for p in pairs], ALPHA)
