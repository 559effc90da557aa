"""Pairs of runs with two sets of options, in alternating order, and a test of their differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.experiments import conversation_runs
from mpillm.experiments.intervals import PairedTest, paired_test
from mpillm.experiments.run_series import must_have_verdict
from mpillm.experiments.warm_cache import RepeatedPrompts
from mpillm.loadgen.logs import latencies_ms
from mpillm.options.run_config import RunConfig
from mpillm.runtime.whole_runs import EndedRun, run_in

ALPHA = 0.01
"""Probability of calling a difference real if there is none."""

METRICS = (
    *("samples_per_second", "tokens_per_second", "ttft_mean", "ttft_p99", "tpot_mean", "latency_mean"),
    *conversation_runs.METRICS,
)


def run_pairs(
    folder: Path,
    mpirun: Sequence[str],
    sides: Mapping[str, Sequence[str]],
    configs: Mapping[str, RunConfig],
    pairs: int,
    repeated: RepeatedPrompts,
    report: Callable[[str], None],
) -> tuple[list[dict[str, dict[str, float]]], list[tuple[str, str]]]:
    """Run both sides of each pair, starting with A in even pairs.

    A run of A before the first pair does not count, because files and caches are cold. `report` gets a line
    after each pair, and the warning of `repeated`.

    Returns their figures by side and metric, and their doubts with the names of their runs. Raises
    ConfigError or StageError if a run fails.
    """
    pairs_figures: list[dict[str, dict[str, float]]] = []
    doubtful: list[tuple[str, str]] = []

    def run(side: str, name: str, title: str) -> EndedRun:
        ended = must_have_verdict(run_in(folder / name, mpirun, sides[side]), title)
        if text := repeated.warning(configs[side], ended.result):
            report(f"warning: {text}")
        return ended

    run("A", "warm-up", "the first run of A")
    for pair in range(pairs):
        order = ("A", "B") if pair % 2 == 0 else ("B", "A")
        figures: dict[str, dict[str, float]] = {}
        for side in order:
            ended = run(side, f"{pair + 1:02d}-{side}", f"run {side} of pair {pair + 1}")
            figures[side] = _figures(ended.result, ended.folder)
            doubtful += [(f"{side} of pair {pair + 1}", doubt) for doubt in ended.result["doubts"]]
        pairs_figures.append(figures)
        report(f"pair {pair + 1} of {pairs}, {order[0]} first")
    return pairs_figures, doubtful


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
    return {name: float(value) for name, value in values.items() if value}


def judge(pairs: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> PairedTest:
    """Test the pairs' differences in a metric. Raises ConfigError if a run does not have it."""
    if any(metric not in pair[side] for pair in pairs for side in ("A", "B")):
        has = [name for name in METRICS if all(name in pair[side] for pair in pairs for side in ("A", "B"))]
        raise ConfigError(f"--metric {metric}: these runs don't have it; they have {', '.join(has)}")
    return paired_test([p["A"][metric] for p in pairs], [p["B"][metric] for p in pairs], ALPHA)
