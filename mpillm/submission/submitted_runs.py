"""The runs of a submission, grouped into results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.world_plan import CONTROL
from mpillm.engine.shape.find_model import PRESETS
from mpillm.files import as_written, path_exists, read_json
from mpillm.loadgen.logs import read_detail, unsatisfied
from mpillm.options.fields import AllFields
from mpillm.options.workload_options import defaults_of
from mpillm.report.validity_checks import cached_prompts, failed_checks, restarts
from mpillm.submission.client_form import CLIENT, ClientReport, against_rules
from mpillm.submission.compliance_tests import FILES, compliance_of
from mpillm.submission.judged_run import JudgedRun
from mpillm.submission.rules import FREE_SETTINGS, Problem, logged_round, place
from mpillm.workloads import WORKLOADS, Workload
from mpillm.workloads.rounds import Round

KINDS = ("performance", "accuracy", *FILES)
# Options with equal values in all runs of a result.
_SAME = ("harness", "core_type", "mode", "model_path", "model_scale", "dtype", "quantization", "engine_dir")
# Options of the workload that must not change in the closed division.
_OF_THE_WORKLOAD = (AllFields.max_output_len, AllFields.min_output_len, AllFields.stop_words)
# Entries of `describe_machine` that a submission contains.
_OF_MACHINE = (
    *("cpu", "memory_bytes", "storage", "network", "gpus"),
    *("gpu_driver", "operating_system", "kernel", "software"),
)


@dataclass(frozen=True)
class SubmittedRun:
    """A run and its place in the submission."""

    directory: JudgedRun
    kind: str  # of KINDS
    benchmark: str  # the checker's names
    scenario: str

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def workload(self) -> Workload:
        """The full benchmark, for every scale of the run."""
        return WORKLOADS[self.directory.benchmark]

    @cached_property
    def detail(self) -> dict[str, Any]:
        """The values of LoadGen's detailed log."""
        return read_detail(self.path)

    @cached_property
    def report(self) -> ClientReport | None:
        """Files of MLCommons' client; None: LoadGen made the load."""
        return ClientReport.read(self.path) if self.directory.client else None

    @property
    def round(self) -> Round | None:
        return logged_round(self.detail) if self.report is None else self.report.round

    @cached_property
    def machines(self) -> dict[str, Any]:
        """Result of `describe_machine` on each node with workers."""
        file = self.path / "machines.json"
        with as_written(file):
            machines = read_json(file)
            return {
                rank["node"]: {key: machines[rank["node"]][key] for key in _OF_MACHINE}
                for rank in self.workers
            }

    @cached_property
    def workers(self) -> list[dict[str, Any]]:
        """The plan's worker ranks."""
        file = self.path / "plan.json"
        with as_written(file):
            workers = [rank for rank in read_json(file)["ranks"] if {*rank["roles"]} - CONTROL]
        if not workers:
            raise ConfigError(f"{file}: damaged, or not written by a run: no rank is a worker")
        return workers

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the software on the ranks."""
        file = self.path / "ranks.json"
        with as_written(file):
            return dict(read_json(file)[0]["versions"])

    def problems(self) -> list[str]:
        """Return violations of the rules of both divisions that the submission checker does not find."""
        violations = []
        result, config = self.directory.result, self.directory.config
        if self.report is not None:
            violations += against_rules(self.report, self.directory.is_accuracy)
        # A compliance test has too few queries for early stopping, so in scenario Server it is rarely VALID.
        # The rules do not require it.
        elif result["status"] != "VALID" and not failed_checks(result) and self.kind not in FILES:
            conditions = ", ".join(unsatisfied(self.path))
            why = f"not satisfied: {conditions}" if conditions else "not every sample was answered"
            violations.append(f"LoadGen calls it {result['status']} ({why})")
        for lost in result.get("lost", ()):
            violations.append(
                f"instance {lost['instance']} ({lost['role']}) was lost, and the run went on without it"
                " (--on_instance_loss continue)"
            )
        violations += restarts(result)
        if config.get("enable_kv_cache_reuse"):
            violations.append("KV cache reuse was on, which MLPerf forbids")
        if length := config.get("acceptance_length"):
            violations.append(f"--acceptance_length {length:g} replaced the model's choice of tokens")
        if cached := cached_prompts(result):  # also if an option of the run allows it
            violations.append(cached)
        violations += [text for text in failed_checks(result) if not cached or not text.startswith(cached)]
        file = self.path / "user.conf"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        keys = [
            line.partition("=")[0].strip().rpartition(".")[2]
            for line in lines
            if "=" in line and not line.lstrip().startswith("#")
        ]
        fixed = [key for key in dict.fromkeys(keys) if key not in FREE_SETTINGS]
        return violations + ([f"{file} sets {', '.join(fixed)}: that is the benchmark's"] if fixed else [])

    def changed(self) -> list[str]:
        """Return changes to the benchmark that the closed division forbids and the checker does not find."""
        config, workload = self.directory.config, self.directory.workload
        defaults = defaults_of(workload, self.directory.scenario, str(config.get("test_mode")))
        violations = []
        for option in _OF_THE_WORKLOAD:
            if (value := config.get(option.name, defaults[option])) != defaults[option]:
                violations.append(f"--{option.name} was {value}, the benchmark's is {defaults[option]}")
        if more := set(config.get("end_ids") or ()).difference(workload.end_ids):
            violations.append(f"--end_ids had {sorted(more)}, which end no answer of the benchmark")
        if workload.sampling:
            for name, value in workload.sampling.items():
                if config.get(name, value) != value:
                    violations.append(f"--{name} was {config[name]}, the benchmark's is {value:g}")
        elif config.get("temperature") and config.get("top_k") != 1:
            temperature = config["temperature"]
            violations.append(
                f"answers were sampled (--temperature {temperature}), the benchmark's are greedy"
            )
        model = str(config.get("model_path"))
        is_preset = path_exists(PRESETS / f"{model}.json") and not path_exists(model)
        if not workload.scaled and (is_preset or config.get("load_format") == "dummy"):
            violations.append("the weights were random: a preset's, or --load_format dummy")
        if config.get("dataset") == "synthetic":
            violations.append("the data set was random tokens (--dataset synthetic)")
        return violations


def read_run(path: Path) -> SubmittedRun:
    """Read the run in `path`.

    Raises ConfigError if it is not a run directory of a workload, the run failed, or it cannot be part of a
    submission.
    """
    directory = JudgedRun.read(path, [CLIENT])
    benchmark, scenario = place(
        directory.workload, float(directory.config["accuracy_target"]), directory.scenario
    )
    kind = "performance"
    if directory.is_accuracy:
        kind = "accuracy"
    elif (test := compliance_of(read_detail(path))) is not None:
        kind = test
    elif directory.config.get("audit_conf"):
        raise ConfigError(
            f"{path} was run with an audit.config of none of {', '.join(FILES)}: "
            "it is neither a performance run nor a compliance run"
        )
    run = SubmittedRun(directory, kind, benchmark, scenario)
    if run.report is not None and run.report.load_pattern == "concurrency":
        raise ConfigError(
            f"{path} was run with --concurrency, which is neither Offline nor Server: a submission has no"
            " place for it"
        )
    return run


@dataclass
class Result:
    """The submission's result for a benchmark in a scenario."""

    benchmark: str
    scenario: str
    runs: dict[str, SubmittedRun] = field(default_factory=dict)  # by kind
    measurements: dict[str, Any] = field(default_factory=dict)  # measurements.json

    @property
    def workload(self) -> Workload:
        """The full benchmark."""
        return next(iter(self.runs.values())).workload

    @property
    def by_client(self) -> bool:
        """True if MLCommons' client made the load of its runs."""
        return any(run.report is not None for run in self.runs.values())

    def forbidden(self, division: str) -> list[Problem]:
        """Return the violations of the rules in its runs."""
        closed = division == "closed"
        tiny = closed and any(run.directory.workload.scaled for run in self.runs.values())
        violations = ["the model is a tiny one (--model_scale tiny)"] if tiny else []
        for run in self.runs.values():
            violations += [
                f"{run.path}: {text}" for text in run.problems() + (run.changed() if closed else [])
            ]
        return [Problem(f"{self.benchmark} {self.scenario}: {text}") for text in violations]


def group(runs: Iterable[SubmittedRun]) -> list[Result]:
    """Group runs by benchmark and scenario.

    Raises ConfigError for two runs of one kind, or runs that differ.
    """
    results: dict[tuple[str, str], Result] = {}
    for run in runs:
        result = results.setdefault((run.benchmark, run.scenario), Result(run.benchmark, run.scenario))
        if (other := result.runs.get(run.kind)) is not None:
            raise ConfigError(
                f"{other.path} and {run.path} are both the {run.kind} run of {run.benchmark} {run.scenario}"
            )
        for other in result.runs.values():
            _fit(other, run)
        result.runs[run.kind] = run
    return [results[key] for key in sorted(results)]


def round_of_results(results: Iterable[Result]) -> Round | None:
    """Return the round with the seeds of the first performance run, or of another run if there is none."""
    runs = [run for result in results for run in result.runs.values()]
    runs.sort(key=lambda run: run.kind != "performance")
    return next((run.round for run in runs if run.round), None)


def _fit(a: SubmittedRun, b: SubmittedRun) -> None:
    for name in _SAME:
        first, second = a.directory.config.get(name), b.directory.config.get(name)
        if first != second:
            raise ConfigError(
                f"{a.path} and {b.path} can't be one result of {a.benchmark} {a.scenario}: "
                f"--{name} is {first!r} and {second!r}"
            )
