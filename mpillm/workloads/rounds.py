"""The rounds of MLPerf Inference, and the workloads that count in each.

The seeds come from ``loadgen/mlperf.conf`` in mlcommons/inference. For these workloads, the two rounds differ
only in the seeds there. `Workload` has the rounds of each benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.workloads.workload import Workload


@dataclass(frozen=True)
class Round:
    """A round of MLPerf Inference. A run belongs to the round with its seeds."""

    name: str  # the submission checker's
    seeds: tuple[int, int, int]  # qsl, sample index, schedule


ROUNDS = (  # the newest first
    # mlcommons-loadgen 6.0.16 and later
    Round("v6.1", (2085463073848966840, 2747215439041700203, 16159082839903944936)),
    # mlcommons-loadgen 6.0.9 to 6.0.15
    Round("v6.0", (2465351861681999779, 14276810075590677512, 3936089224930324775)),
)


def round_named(name: str) -> Round:
    """Return a round of `ROUNDS` by name."""
    return next(r for r in ROUNDS if r.name == name)


def round_of(seeds: tuple[object, ...]) -> Round | None:
    """Return the round with these seeds (qsl, sample index, schedule), or None."""
    return next((r for r in ROUNDS if r.seeds == seeds), None)


def round_of_client(sample_index: object, schedule: object) -> Round | None:
    """Return the round of a load client, which uses the whole data set and so has no qsl seed."""
    return next((r for r in ROUNDS if r.seeds[1:] == (sample_index, schedule)), None)


def allows_speculation(workload: Workload) -> bool:
    """Return whether the rules allow speculative decoding for `workload`, with its `draft_head`."""
    return bool(workload.interactive_of and workload.submission.draft_head)


def speculation_rule(workload: Workload) -> str:
    """Return the rule that forbids speculative decoding in mpillm's engine for `workload`."""
    if allows_speculation(workload):
        head = workload.submission.draft_head
        return f"MLPerf's rules allow {workload.name} speculative decoding with {head} only"
    return (
        f"MLPerf's rules forbid speculative decoding for {workload.name}: they allow it for the interactive"
        " forms of deepseek-r1 and gpt-oss-120b only, with a head that they name"
    )


def why_not(workload: Workload, accuracy_target: float, name: str) -> str:
    """Return the reason why a result of `workload` does not count in round `name`; empty if it counts."""
    rounds = workload.submission.rounds
    benchmarks = rounds.get(name, ())
    if workload.benchmark(accuracy_target) in benchmarks:
        return ""
    if benchmarks:
        return f"round {name} has {' and '.join(benchmarks)} only (--accuracy_target)"
    last = next((r.name for r in ROUNDS if r.name in rounds), None)
    plain = workload.interactive_of or workload.name
    return f"{plain} is retired: {last} was its last round" if last else f"{plain} is in no round known here"
