"""The runs of a submission, and which of them belong together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.world_plan import CONTROL
from mpillm.engine.shape.read_config import PRESETS
from mpillm.files import as_written, is_there, read_json
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
# What the runs of one result must have in common: they are of one system under test.
_SAME = ("harness", "core_type", "mode", "model_path", "model_scale", "dtype", "quantization", "engine_dir")
# Options that a workload sets and the closed division does not allow to change.
_OF_THE_WORKLOAD = (AllFields.max_output_len, AllFields.min_output_len, AllFields.stop_words)
# The entries of `describe_machine` that a submission describes.
_OF_MACHINE = (
    "cpu",
    "memory_bytes",
    "storage",
    "network",
    "gpus",
    "gpu_driver",
    "operating_system",
    "kernel",
    "software",
)


@dataclass(frozen=True)
class Run:
    """One run and its place in the submission."""

    directory: JudgedRun
    kind: str  # of KINDS
    benchmark: str  # the checker's names
    scenario: str

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def workload(self) -> Workload:
        """The full benchmark, whatever its scale was."""
        return WORKLOADS[self.directory.benchmark]

    @cached_property
    def detail(self) -> dict[str, Any]:
        """The values of LoadGen's detailed log."""
        return read_detail(self.path)

    @cached_property
    def report(self) -> ClientReport | None:
        """What MLCommons' client left, if it made the load."""
        return ClientReport.read(self.path) if self.directory.client else None

    @property
    def round(self) -> Round | None:
        return logged_round(self.detail) if self.report is None else self.report.round

    @cached_property
    def machines(self) -> dict[str, Any]:
        """What `describe_machine` said of each node that has workers."""
        file = self.path / "machines.json"
        with as_written(file):
            machines = read_json(file)
            return {
                rank["node"]: {key: machines[rank["node"]][key] for key in _OF_MACHINE}
                for rank in self.workers
            }

    @cached_property
    def workers(self) -> list[dict[str, Any]]:
        """The plan's ranks that compute answers, or start who does."""
        file = self.path / "plan.json"
        with as_written(file):
            workers = [rank for rank in read_json(file)["ranks"] if {*rank["roles"]} - CONTROL]
        if not workers:
            raise ConfigError(f"{file}: damaged, or not written by a run: no rank is a worker")
        return workers

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions that the ranks ran with."""
        file = self.path / "ranks.json"
        with as_written(file):
            return dict(read_json(file)[0]["versions"])

    def problems(self) -> list[str]:
        """Return what the rules forbid in both divisions and the submission checker does not check."""
        found = []
        result, config = self.directory.result, self.directory.config
        if self.report is not None:
            found += against_rules(self.report, self.directory.is_accuracy)
        # A compliance test has too few queries for early stopping, so in scenario Server it is hardly VALID;
        # no rule asks.
        elif result["status"] != "VALID" and not failed_checks(result) and self.kind not in FILES:
            conditions = ", ".join(unsatisfied(self.path))
            why = f"not satisfied: {conditions}" if conditions else "not every sample was answered"
            found.append(f"LoadGen calls it {result['status']} ({why})")
        for lost in result.get("lost", ()):
            found.append(
                f"instance {lost['instance']} ({lost['role']}) was lost, and the run went on without it"
                " (--on_instance_loss continue)"
            )
        found += restarts(result)
        if config.get("enable_kv_cache_reuse"):
            found.append("KV cache reuse was on, which MLPerf forbids")
        if cached := cached_prompts(result):  # allowed by an option of the run, or not
            found.append(cached)
        found += [text for text in failed_checks(result) if not cached or not text.startswith(cached)]
        file = self.path / "user.conf"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        keys = [
            line.partition("=")[0].strip().rpartition(".")[2]
            for line in lines
            if "=" in line and not line.lstrip().startswith("#")
        ]
        fixed = [key for key in dict.fromkeys(keys) if key not in FREE_SETTINGS]
        return found + ([f"{file} sets {', '.join(fixed)}: that is the benchmark's"] if fixed else [])

    def changed(self) -> list[str]:
        """Return changes to the benchmark's task: forbidden in the closed division, unseen by the checker."""
        config, workload = self.directory.config, self.directory.workload
        defaults = defaults_of(workload, self.directory.scenario, str(config.get("test_mode")))
        found = []
        for option in _OF_THE_WORKLOAD:
            if (given := config.get(option.name, defaults[option])) != defaults[option]:
                found.append(f"--{option.name} was {given}, the benchmark's is {defaults[option]}")
        if more := set(config.get("end_ids") or ()).difference(workload.end_ids):
            found.append(f"--end_ids had {sorted(more)}, which end no answer of the benchmark")
        if workload.sampling:
            for name, value in workload.sampling.items():
                if config.get(name, value) != value:
                    found.append(f"--{name} was {config[name]}, the benchmark's is {value:g}")
        elif config.get("temperature") and config.get("top_k") != 1:
            temperature = config["temperature"]
            found.append(f"answers were sampled (--temperature {temperature}), the benchmark's are greedy")
        model = str(config.get("model_path"))
        is_preset = is_there(PRESETS / f"{model}.json") and not is_there(model)
        if not workload.scaled and (is_preset or config.get("load_format") == "dummy"):
            found.append("the weights were random: a preset's, or --load_format dummy")
        if config.get("dataset") == "synthetic":
            found.append("the data set was random tokens (--dataset synthetic)")
        return found


def read_run(path: Path) -> Run:
    """Read the run in `path`.

    Raises ConfigError if it is not a run directory of a workload, the run failed, or a submission has no
    place for it.
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
    run = Run(directory, kind, benchmark, scenario)
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
    runs: dict[str, Run] = field(default_factory=dict)  # by kind
    measurements: dict[str, Any] = field(default_factory=dict)  # measurements.json

    @property
    def workload(self) -> Workload:
        """The full benchmark."""
        return next(iter(self.runs.values())).workload

    @property
    def by_client(self) -> bool:
        """MLCommons' client made the load of its runs."""
        return any(run.report is not None for run in self.runs.values())

    def forbidden(self, division: str) -> list[Problem]:
        """Return what the rules forbid in its runs."""
        closed = division == "closed"
        tiny = closed and any(run.directory.workload.scaled for run in self.runs.values())
        found = ["the model is a tiny one (--model_scale tiny)"] if tiny else []
        for run in self.runs.values():
            found += [f"{run.path}: {text}" for text in run.problems() + (run.changed() if closed else [])]
        return [Problem(f"{self.benchmark} {self.scenario}: {text}") for text in found]


def group(runs: Iterable[Run]) -> list[Result]:
    """Return results by benchmark and scenario.

    Raises ConfigError for two runs for one place, or runs that differ.
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


def _fit(a: Run, b: Run) -> None:
    for name in _SAME:
        first, second = a.directory.config.get(name), b.directory.config.get(name)
        if first != second:
            raise ConfigError(
                f"{a.path} and {b.path} can't be one result of {a.benchmark} {a.scenario}: "
                f"--{name} is {first!r} and {second!r}"
            )
