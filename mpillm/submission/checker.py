"""What MLCommons' submission checker will reject, without running it.

Each function does one of its classes of checks (mlcommons/inference,
tools/submission/submission_checker/checks, August 2026) and names the checks that fail. What the rules forbid
but the checker accepts is in `mpillm.submission.submitted_runs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpillm.files import read_object
from mpillm.loadgen.logs import advice, logged_errors
from mpillm.submission import client_form
from mpillm.submission.compliance_tests import FILES
from mpillm.submission.rules import (
    MIN_DURATION_MS,
    STOPS,
    SYSTEM_MEANINGFUL,
    Problem,
    has_scenarios,
    missing_scenarios,
)
from mpillm.submission.scores import printed_scores
from mpillm.submission.submitted_runs import Result, Run
from mpillm.submission.system import of_servers
from mpillm.submission.targets import check
from mpillm.workloads import Workload
from mpillm.workloads.workload import LatencyLimits

# How to make a missing piece.
_CURE = {
    "performance": "a run without --test_mode and --compliance_test",
    "accuracy": "a run with --test_mode AccuracyOnly",
    **{test: f"a run with --compliance_test {test}" for test in FILES},
}
_PASSES: dict[str, tuple[tuple[str, ...], ...]] = {  # the lines of its file, one of each
    "TEST06": (
        ("First token check pass: True", "First token check pass: Skipped"),
        ("EOS check pass: True",),
        ("Sample length check pass: True",),
    ),
    "TEST07": (("TEST PASS",),),
    "TEST09": (("TEST PASS",),),
}
_NS_PER_MS = 1e6


def rejected(results: Sequence[Result], system: Mapping[str, Any], division: str) -> list[Problem]:
    """Return what keeps the checker from accepting all of `results`, with the cure if there is one."""
    closed = division == "closed"
    found = [*_system(system)]
    for result in results:
        where = f"{result.benchmark} {result.scenario}"
        for problem in _result(result, closed):
            found.append(Problem(f"{where}: {problem.text}", problem.checks))
    return found + ([*_scenarios(results, system)] if closed else [])


def _result(result: Result, closed: bool) -> Iterator[Problem]:
    # open, and runs of MLCommons' client: no compliance tests
    tests = result.workload.compliance if closed and not result.by_client else ()
    for kind in ("performance", "accuracy", *tests):
        if kind not in result.runs:
            checks = ("dir_exists_check", "accuracy_check") if kind in FILES else (STOPS,)
            if result.by_client and kind == "accuracy":
                checks = client_form.NO_ACCURACY
            yield Problem(f"no {kind} run: {_CURE[kind]}", checks)
    for key, value in result.measurements.items():
        if not value:
            why = " (the servers don't say)" if of_servers(next(iter(result.runs.values()))) else ""
            what = f"{key} of measurements.json is not known{why}: give it with --measurements"
            yield Problem(what, ("required_fields_check",))
    by_kind = {"performance": _performance, "accuracy": _accuracy}
    for kind, run in result.runs.items():
        if kind not in FILES or kind in tests:
            for problem in by_kind.get(kind, _compliance)(run, closed):
                yield Problem(f"{run.path}: {problem.text}", problem.checks)


def _performance(run: Run, closed: bool) -> Iterator[Problem]:
    """Do PerformanceCheck, which reads only this run's logs."""
    if run.report is not None:
        yield from client_form.performance(run.report, run.scenario, run.workload)
        return
    detail, samples, offline = run.detail, run.workload.n_samples, run.directory.scenario == "Offline"
    if run.round is None:
        version = detail.get("loadgen_version")
        yield Problem(f"its LoadGen ({version}) has the seeds of no round with this layout", ("seeds_check",))
    elif run.benchmark not in run.workload.submission.rounds.get(run.round.name, ()):
        # The checker has no sample counts and no accuracy targets for this round and benchmark.
        checks: tuple[str, ...] = ("performance_sample_count_check", "accuracy_result_check", "dataset_check")
        checks = (STOPS,) if closed else (*checks, "min_query_count_check") if offline else checks
        yield Problem(f"round {run.round.name}, whose seeds its LoadGen has, has no {run.benchmark}", checks)
    for key, least, unit, name in (
        ("performance_sample_count", samples, "samples", "performance_sample_count_check"),
        ("min_duration_ms", MIN_DURATION_MS, "ms", "min_duration_check"),
        *([("samples_per_query", samples, "samples", "min_query_count_check")] if closed and offline else []),
    ):
        if (value := detail.get(f"effective_{key}", 0)) < least:
            yield Problem(f"{key} was {value} {unit}; must be at least {least}", (name,))
    if not detail.get("requested_use_token_latencies"):
        what = "use_token_latencies was off, but every LLM needs it"
        yield Problem(what, ("llm_check", "get_performance_metric_check"))
    if not offline:
        yield from _latencies(run, run.workload.submission.limits)


def _latencies(run: Run, limits: LatencyLimits) -> Iterator[Problem]:
    """Check that an Interactive run meets Server's limits, as in the checker; LoadGen has applied its own."""
    detail = run.detail
    if not detail.get("early_stopping_met"):
        why = "; ".join(text for text in advice(run.path) if "unsuccessful" in text)
        yield Problem(f"early stopping was not satisfied{f' ({why})' if why else ''}", ("latency_check",))
    elif (target := detail.get("effective_target_latency_ns", 0) / _NS_PER_MS) > limits.target_ms:
        what = f"target_latency was {target:g} ms; must be at most {limits.target_ms:g} ms"
        yield Problem(what, ("latency_check",))
    if not detail.get("requested_use_token_latencies"):
        return
    for name, key, limit in (
        ("TTFT", "result_first_token_99.00_percentile_latency_ns", limits.ttft_ms),
        ("TPOT", "result_time_per_output_token_99.00_percentile_ns", limits.tpot_ms),
    ):
        value = detail.get(key)
        if value is None or value / _NS_PER_MS >= limit:
            shown = "not in the log" if value is None else f"{value / _NS_PER_MS:.1f} ms"
            yield Problem(f"{name} at p99 was {shown}; it must be below {limit:g} ms", ("llm_check",))


def _accuracy(run: Run, closed: bool) -> Iterator[Problem]:
    """AccuracyCheck: scores count in the closed division only."""
    samples = run.workload.accuracy_samples or run.workload.n_samples
    if run.report is not None:
        yield from client_form.accuracy(run.path, run.workload, samples)
        if closed and (scored := run.path / "accuracy.json").exists():  # the checker reads the score only
            values = read_object(scored)["scores"]
            if missed := _missed(run, values):
                yield Problem(f"the accuracy target is not reached: {', '.join(missed)}")
        return
    count = run.detail.get("effective_accuracy_sample_count", run.detail.get("qsl_reported_total_count"))
    if count != samples:
        what = f"accuracy_sample_count was {count} samples; the benchmark has {samples}"
        yield Problem(what, ("dataset_check",))
    if errors := logged_errors(run.path):
        what = f"LoadGen logged {len(errors)} errors, the first: {errors[0]}"
        yield Problem(what, ("loadgen_errors_check",))
    file = run.path / "accuracy.txt"
    if not file.is_file():
        what = f"no accuracy.txt: `python -m mpillm accuracy {run.path}` makes it"
        yield Problem(what, ("accuracy_result_check",))
    elif closed and (
        missed := _missed(run, printed_scores(file.read_text(encoding="utf-8", errors="replace")))
    ):
        yield Problem(f"the accuracy target is not reached: {', '.join(missed)}", ("accuracy_result_check",))


def _missed(run: Run, scores: dict[str, float]) -> list[str]:
    """Return the scores that miss their target, as "rouge1 20.1 (at least 44.4)"."""
    target = float(run.directory.config["accuracy_target"])
    return [c.text() for c in check(run.workload.accuracy, scores, target) if not c.passed]


def _compliance(run: Run, _closed: bool) -> Iterator[Problem]:
    """Do ComplianceCheck of the file that the test's verification writes."""
    test = run.kind
    file = run.path / test / FILES[test]
    if not file.is_file():
        what = f"{test} is not verified: `python -m mpillm compliance {run.path}` does it"
        yield Problem(what, ("dir_exists_check", "accuracy_check"))
        return
    lines = {line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()}
    if failed := [either[0].partition(":")[0] for either in _PASSES[test] if not lines.intersection(either)]:
        yield Problem(f"{test} failed: no {', no '.join(failed)} ({file})", ("accuracy_check",))


def _system(system: Mapping[str, Any]) -> Iterator[Problem]:
    """Do SystemCheck: find fields that must not be empty and that a run could not find out."""
    for key in SYSTEM_MEANINGFUL:
        if not system[key]:
            what = f"the system description: {key} is empty: give it with --system_description"
            yield Problem(what, ("required_fields_check",))


def _scenarios(results: Sequence[Result], system: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that a closed submission of a benchmark has the scenarios of its kind of system."""
    by_benchmark: dict[str, tuple[Workload, set[str]]] = {}
    for result in results:
        by_benchmark.setdefault(result.benchmark, (result.workload, set()))[1].add(result.scenario)
    for benchmark, (workload, scenarios) in by_benchmark.items():
        if not has_scenarios(system["system_type"]):
            kind = system["system_type"]
            what = f"{benchmark}: the closed division has none of its scenarios for system_type {kind}"
            yield Problem(what, (STOPS,))
            continue
        for scenario in missing_scenarios(workload, scenarios):
            yield Problem(f"{benchmark}: the closed division needs {scenario} too", ("scenarios_check",))
        for scenario in scenarios.difference(*workload.submission.scenarios):
            yield Problem(f"{benchmark}: no round has its {scenario}", ("scenarios_check",))
