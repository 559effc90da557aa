"""Results in the form of MLPerf Endpoints, for runs with MLCommons' load client (v6.1 and later).

Sources in mlcommons/inference: submission_structure.md (tools/submission, August 2026) for the files, and the
submission checker for the checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from disagg.text_file import read_text
from disagg.yaml_text import value_of
from mpillm.files import as_written, read_json
from mpillm.programs.load_clients.inference_endpoint import CONFIG_LEFT, SUMMARY_LEFT, named_percentiles
from mpillm.report.run_directory import HARNESS
from mpillm.submission.compliance_tests import TEST09_BOUNDS
from mpillm.submission.rules import MIN_DURATION_MS, Problem
from mpillm.workloads import Workload
from mpillm.workloads.rounds import Round, round_of_client

CLIENT = "inference-endpoint"
CONFIG, SUMMARY, ACCURACY = "config.yaml", "result_summary.json", "accuracy_results.json"
_ROUNDS = ("v6.1",)
_NOT_ACCEPTED = "results of MLCommons' client are not accepted for {}"
NO_ACCURACY = ("accuracy_result_check", "dataset_check")
"""Checks that fail without scores."""
_MS = 1e-6


class ClientReport(NamedTuple):
    """Files that the client wrote in a run."""

    config: Mapping[str, Any]  # with all values
    summary: Mapping[str, Any]  # times in nanoseconds

    @staticmethod
    def read(run: Path) -> ClientReport:
        """Read the files. Raises ConfigError if one is missing or damaged."""
        file = run / HARNESS / CONFIG_LEFT
        with as_written(file):
            config = value_of(read_text(str(file)), str(file))
            runtime, kind = config["settings"]["runtime"], config["settings"]["load_pattern"]["type"]
            report = ClientReport(config, read_json(run / HARNESS / SUMMARY_LEFT))
            for name in ("scheduler_random_seed", "dataloader_random_seed", "min_duration_ms"):
                int(runtime[name])
        with as_written(run / HARNESS / SUMMARY_LEFT):
            summary = report.summary
            _ = str(kind), int(summary["n_samples_failed"]), float(summary["duration_ns"] or 0)
            for name in ("ttft", "tpot", "output_sequence_lengths"):
                _ = summary[name].keys()
        return report

    @property
    def _runtime(self) -> Mapping[str, Any]:
        runtime: Mapping[str, Any] = self.config["settings"]["runtime"]
        return runtime

    @property
    def round(self) -> Round | None:
        """The round with the client's seeds."""
        runtime = self._runtime
        return round_of_client(runtime["dataloader_random_seed"], runtime["scheduler_random_seed"])

    @property
    def load_pattern(self) -> str:
        return str(self.config["settings"]["load_pattern"]["type"])

    @property
    def min_duration_ms(self) -> int:
        return int(self._runtime["min_duration_ms"])

    @property
    def lasted_ms(self) -> float:
        return float(self.summary["duration_ns"] or 0) * _MS

    def p99_ms(self, name: str) -> float | None:
        """Return early stopping's p99 of a latency, in milliseconds; None: too few requests."""
        value = named_percentiles(self.summary[name].get("early_stopping_percentiles") or {}).get("99.0")
        return None if value is None else float(value) * _MS


def performance(report: ClientReport, scenario: str, workload: Workload) -> Iterator[Problem]:
    """Yield the problems that the checker finds in a performance run (PerformanceCheck, ComplianceCheck)."""
    if report.round is None:
        yield Problem("its seeds are of no round with this layout (--round)", ("seeds_check",))
    elif report.round.name not in _ROUNDS:
        text = f"round {report.round.name} accepts no results of MLCommons' client"
        yield Problem(text, ("get_performance_metric_check",))
    if workload.submission.interactive is None:
        yield Problem(_NOT_ACCEPTED.format(workload.name), ("endpoints_model_check",))
    if (duration_ms := report.min_duration_ms) < MIN_DURATION_MS:
        text = f"min_duration_ms was {duration_ms} ms; must be at least {MIN_DURATION_MS}"
        yield Problem(text, ("min_duration_check",))
    if scenario != "Offline":
        yield from _latencies(report, scenario, workload)
    if "TEST09" in workload.compliance:
        min_tokens, max_tokens = TEST09_BOUNDS
        mean = report.summary["output_sequence_lengths"].get("avg")
        if mean is None or not min_tokens <= mean <= max_tokens:
            text = (
                f"the answers' mean length was {mean} tokens; must be {min_tokens} to {max_tokens} (TEST09)"
            )
            yield Problem(text, ("compliance_endpoints_check",))


def _latencies(report: ClientReport, scenario: str, workload: Workload) -> Iterator[Problem]:
    if (limits := workload.submission.limits_of(scenario)) is None:
        return
    for name, title, limit in (("ttft", "TTFT", limits.ttft_ms), ("tpot", "TPOT", limits.tpot_ms)):
        if (value := report.p99_ms(name)) is None:
            yield Problem(f"too few requests for {title} at p99 (early stopping)", ("llm_check",))
        elif value >= limit:
            text = f"{title} at p99 was {value:.1f} ms (early stopping); it must be below {limit:g} ms"
            yield Problem(text, ("llm_check",))


def accuracy(run: Path, workload: Workload, samples: int) -> Iterator[Problem]:
    """Yield the problems that the checker finds in the accuracy run in `run` (AccuracyCheck)."""
    if workload.submission.interactive is None:
        yield Problem(_NOT_ACCEPTED.format(workload.name), ("endpoints_model_check",))
    file = run / ACCURACY
    if not file.exists():
        text = f"no {ACCURACY}: `python -m mpillm accuracy {run}` makes it"
        yield Problem(text, NO_ACCURACY)
        return
    with as_written(file):
        count = sum(int(one["total_samples"]) for one in read_json(file)["accuracy_scores"])
    if count != samples:
        text = f"accuracy_sample_count was {count} samples; the benchmark has {samples}"
        yield Problem(text, ("dataset_check",))


def against_rules(report: ClientReport, is_accuracy: bool) -> list[str]:
    """Return violations of the rules that the checker does not find."""
    violations = []
    if n := int(report.summary["n_samples_failed"]):
        violations.append(f"{n:,} requests failed")
    if not report.summary.get("complete", True):
        violations.append(f"the client's report is not complete: state {report.summary.get('state')}")
    if not is_accuracy and report.lasted_ms < report.min_duration_ms:
        violations.append(
            f"it lasted {report.lasted_ms:,.0f} ms, less than min_duration_ms {report.min_duration_ms}"
        )
    return violations


def accuracy_results(dataset: str, n_samples: int, scores: Mapping[str, float], by: str) -> dict[str, Any]:
    """Return `accuracy_results.json` in the client's form, for one pass over a data set."""
    return {
        "scored_by": by,
        "accuracy_scores": [
            {
                "dataset_name": dataset,
                "score": dict(scores),
                "unit_samples": n_samples,
                "num_repeats": 1,
                "total_samples": n_samples,
                "complete": True,
                "dataset_type": "accuracy",
            }
        ],
    }
