"""Prediction of the problems that MLCommons' submission checker finds, without running it.

Each function replaces one of its classes of checks (mlcommons/inference,
tools/submission/submission_checker/checks, August 2026) and names the checks that fail.
`mpillm.submission.submitted_runs` finds violations of the rules that the checker accepts.
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
    missing_scenarios,
)
from mpillm.submission.scores import check, printed_scores
from mpillm.submission.submitted_runs import Result, SubmittedRun, round_of_results
from mpillm.submission.system import of_servers
from mpillm.workloads import Workload
from mpillm.workloads.workload import LatencyLimits

# Remedies for missing runs.
_REMEDY = {
    "performance": "a run without --test_mode and --compliance_test",
    "accuracy": "a run with --test_mode AccuracyOnly",
    **{test: f"a run with --compliance_test {test}" for test in FILES},
}
_PASSES: dict[str, tuple[tuple[str, ...], ...]] = {  # required lines of a test's file, with alternatives
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
    """Return the problems for which the checker rejects `results`, with remedies."""
    closed = division == "closed"
    problems = [*_system(system), *_rounds(results)]
    for result in results:
        where = f"{result.benchmark} {result.scenario}"
        for problem in _result(result, closed):
            problems.append(Problem(f"{where}: {problem.text}", problem.checks))
    return problems + ([*_scenarios(results, system)] if closed else [])


def _result(result: Result, closed: bool) -> Iterator[Problem]:
    # The open division, and runs with MLCommons' client, have no compliance tests.
    tests = result.workload.compliance if closed and not result.by_client else ()
    for kind in ("performance", "accuracy", *tests):
        if kind not in result.runs:
            checks = ("dir_exists_check", "accuracy_check") if kind in FILES else (STOPS,)
            if result.by_client and kind == "accuracy":
                checks = client_form.NO_ACCURACY
            yield Problem(f"no {kind} run: {_REMEDY[kind]}", checks)
    for key, value in result.measurements.items():
        if not value:
            why = " (the servers do not report it)" if of_servers(next(iter(result.runs.values()))) else ""
            text = f"{key} of measurements.json is not known{why}: add it with --measurements"
            yield Problem(text, ("required_fields_check",))
    by_kind = {"performance": _performance, "accuracy": _accuracy}
    for kind, run in result.runs.items():
        if kind not in FILES or kind in tests:
            for problem in by_kind.get(kind, _compliance)(run, closed):
                yield Problem(f"{run.path}: {problem.text}", problem.checks)


def _performance(run: SubmittedRun, closed: bool) -> Iterator[Problem]:
    """Predict PerformanceCheck, which reads only this run's logs."""
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
    for key, minimum, unit, name in (
        ("performance_sample_count", samples, "samples", "performance_sample_count_check"),
        ("min_duration_ms", MIN_DURATION_MS, "ms", "min_duration_check"),
        *([("samples_per_query", samples, "samples", "min_query_count_check")] if closed and offline else []),
    ):
        if (value := detail.get(f"effective_{key}", 0)) < minimum:
            yield Problem(f"{key} was {value} {unit}; must be at least {minimum}", (name,))
    if not detail.get("requested_use_token_latencies"):
        text = "use_token_latencies was off, but every LLM needs it"
        yield Problem(text, ("llm_check", "get_performance_metric_check"))
    if not offline and not detail.get("early_stopping_met"):
        why = "; ".join(text for text in advice(run.path) if "unsuccessful" in text)
        yield Problem(f"early stopping was not satisfied{f' ({why})' if why else ''}", ("latency_check",))
    limits = run.workload.submission.limits
    if run.directory.scenario == "Server" and limits is not None:
        yield from _latencies(run, limits)


def _latencies(run: SubmittedRun, limits: LatencyLimits) -> Iterator[Problem]:
    """Check that a run meets Server's limits. The checker applies them to Interactive as well."""
    detail = run.detail
    target = detail.get("effective_target_latency_ns", 0) / _NS_PER_MS
    if detail.get("early_stopping_met") and target > limits.target_ms:
        text = f"target_latency was {target:g} ms; must be at most {limits.target_ms:g} ms"
        yield Problem(text, ("latency_check",))
    if not detail.get("requested_use_token_latencies"):
        return
    for name, key, limit in (
        ("TTFT", "result_first_token_99.00_percentile_latency_ns", limits.ttft_ms),
        ("TPOT", "result_time_per_output_token_99.00_percentile_ns", limits.tpot_ms),
    ):
        value = detail.get(key)
        if value is None or value / _NS_PER_MS >= limit:
            measured = "not in the log" if value is None else f"{value / _NS_PER_MS:.1f} ms"
            yield Problem(f"{name} at p99 was {measured}; it must be below {limit:g} ms", ("llm_check",))


def _accuracy(run: SubmittedRun, closed: bool) -> Iterator[Problem]:
    """Predict AccuracyCheck. Scores count only in the closed division."""
    samples = run.workload.accuracy_samples or run.workload.n_samples
    if run.report is not None:
        yield from client_form.accuracy(run.path, run.workload, samples)
        if closed and (scored := run.path / "accuracy.json").exists():  # the checker does not compare scores
            values = read_object(scored)["scores"]
            if missed := _missed(run, values):
                yield Problem(f"the accuracy target is not reached: {', '.join(missed)}")
        return
    count = run.detail.get("effective_accuracy_sample_count", run.detail.get("qsl_reported_total_count"))
    if count != samples:
        text = f"accuracy_sample_count was {count} samples; the benchmark has {samples}"
        yield Problem(text, ("dataset_check",))
    if errors := logged_errors(run.path):
        text = f"LoadGen logged {len(errors)} errors, the first: {errors[0]}"
        yield Problem(text, ("loadgen_errors_check",))
    file = run.path / "accuracy.txt"
    if not file.is_file():
        text = f"no accuracy.txt: `python -m mpillm accuracy {run.path}` makes it"
        yield Problem(text, ("accuracy_result_check",))
    elif closed and (
        missed := _missed(run, printed_scores(file.read_text(encoding="utf-8", errors="replace")))
    ):
        yield Problem(f"the accuracy target is not reached: {', '.join(missed)}", ("accuracy_result_check",))


def _missed(run: SubmittedRun, scores: dict[str, float]) -> list[str]:
    """Return the scores that miss their target, for example "rouge1 20.1 (at least 44.4)"."""
    target = float(run.directory.config["accuracy_target"])
    return [c.text() for c in check(run.workload.accuracy, scores, target) if not c.passed]


def _compliance(run: SubmittedRun, _closed: bool) -> Iterator[Problem]:
    """Predict ComplianceCheck, which reads the file of the test's verification."""
    test = run.kind
    file = run.path / test / FILES[test]
    if not file.is_file():
        text = f"{test} is not verified: `python -m mpillm compliance {run.path}` does it"
        yield Problem(text, ("dir_exists_check", "accuracy_check"))
        return
    lines = {line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()}
    if failed := [either[0].partition(":")[0] for either in _PASSES[test] if not lines.intersection(either)]:
        yield Problem(f"{test} failed: no {', no '.join(failed)} ({file})", ("accuracy_check",))


def _system(system: Mapping[str, Any]) -> Iterator[Problem]:
    """Predict SystemCheck: yield required fields without a value."""
    for key in SYSTEM_MEANINGFUL:
        if not system[key]:
            text = f"the system description: {key} is empty: add it with --system_description"
            yield Problem(text, ("required_fields_check",))


def _rounds(results: Sequence[Result]) -> Iterator[Problem]:
    """Check that all runs have the seeds of one round. The checker reads those of performance runs."""
    if (expected := round_of_results(results)) is None:
        return
    for run in (run for result in results for run in result.runs.values()):
        if run.round and run.round != expected:
            text = f"{run.path}: has the seeds of round {run.round.name}, other runs have those of"
            checks = ("seeds_check",) if run.kind == "performance" else ()
            yield Problem(f"{text} {expected.name}; a submission has one round", checks)


def _scenarios(results: Sequence[Result], system: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that a closed submission has all scenarios of its benchmarks."""
    by_benchmark: dict[str, tuple[Workload, set[str]]] = {}
    for result in results:
        by_benchmark.setdefault(result.benchmark, (result.workload, set()))[1].add(result.scenario)
    for benchmark, (workload, scenarios) in by_benchmark.items():
        kind = system["system_type"]
        if workload.submission.system_type not in kind:
            text = f"{benchmark}: the closed division has none of its scenarios for system_type {kind}"
            yield Problem(text, (STOPS,))
            continue
        for scenario in missing_scenarios(workload, scenarios):
            yield Problem(f"{benchmark}: the closed division also needs {scenario}", ("scenarios_check",))
        for scenario in scenarios.difference(*workload.submission.scenarios):
            yield Problem(f"{benchmark}: no round has its {scenario}", ("scenarios_check",))
