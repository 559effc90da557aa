"""The runs of a submission: which there are, and which belong together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.compliance import is_test06
from mpillm.engine.model_config import PRESETS
from mpillm.json_files import as_written, read_json
from mpillm.loadgen.logs import read_detail, unsatisfied
from mpillm.report.run_directory import RunDirectory
from mpillm.submission.rules import FREE_SETTINGS, MIN_DURATION_MS, Round, place, round_of

KINDS = ("performance", "accuracy", "TEST06")
# What the runs of one result must have in common: they are said to be of one system under test.
_SAME = ("core_type", "mode", "model_path", "model_scale", "dtype", "quantization", "engine_dir")
# Options that a workload decides, which the closed division leaves alone.
_OF_THE_WORKLOAD = ("max_output_len", "min_output_len", "stop_words")
# What of a node is described.
_OF_MACHINE = ("cpu", "memory_bytes", "storage", "network", "gpus", "gpu_driver", "operating_system", "kernel", "software")


@dataclass(frozen=True)
class Run:
    """One run and its place in the submission."""

    directory: RunDirectory
    kind: str  # of KINDS
    benchmark: str  # the checker's names
    scenario: str

    @property
    def path(self) -> Path:
        return self.directory.path

    @cached_property
    def detail(self) -> dict[str, Any]:
        """LoadGen's detailed log."""
        return read_detail(self.path)

    @cached_property
    def round(self) -> Round | None:
        return round_of(self.detail)

    @cached_property
    def machines(self) -> dict[str, Any]:
        """`describe_machine` of each node that has workers."""
        file = self.path / "machines.json"
        with as_written(file):
            machines = read_json(file)
            return {rank["node"]: {key: machines[rank["node"]][key] for key in _OF_MACHINE} for rank in self.workers}

    @cached_property
    def workers(self) -> list[dict[str, Any]]:
        """The plan's ranks that have a device."""
        file = self.path / "plan.json"
        with as_written(file):
            workers = [rank for rank in read_json(file)["ranks"] if rank["device"] is not None]
        if not workers:
            raise ConfigError(f"{file} is not what a run writes: no rank has a device")
        return workers

    @cached_property
    def versions(self) -> dict[str, str]:
        """Of what all ranks ran."""
        file = self.path / "ranks.json"
        with as_written(file):
            return dict(read_json(file)[0]["versions"])

    def problems(self) -> list[str]:
        """Why this run, as it is, would not be accepted."""
        found = []
        result, config = self.directory.result, self.directory.config
        # 100 queries are too few for LoadGen's early stopping, so that TEST06 in the Server scenario is never VALID; nobody asks.
        if result["status"] != "VALID" and self.kind != "TEST06":
            conditions = result.get("loadgen_unsatisfied") or unsatisfied(self.path)
            why = ", ".join(f"{condition}: no" for condition in conditions) or "not every sample was answered"
            found.append(f"LoadGen calls it {result['status']} ({why})")
        if config.get("enable_kv_cache_reuse"):
            found.append("KV cache reuse was on, which MLPerf forbids")
        if self.round is None:
            found.append(f"its LoadGen ({self.detail.get('loadgen_version')}) has the seeds of no round that this layout is for")
        elif self.benchmark not in self.round.benchmarks:
            found.append(f"round {self.round.name}, whose seeds its LoadGen has, has no {self.benchmark}")
        return found + ([] if self.directory.workload.scaled else self._reduced())

    def _reduced(self) -> list[str]:
        """What was asked of LoadGen that is less than the benchmark's, or other: it calls such a run VALID, too."""
        found = []
        samples = self.directory.workload.n_samples
        for kind, key, least, unit in (
            ("performance", "effective_min_duration_ms", MIN_DURATION_MS, "ms"),
            ("performance", "effective_performance_sample_count", samples, "samples"),
            ("accuracy", "effective_accuracy_sample_count", samples, "samples"),
        ):
            value = self.detail.get(key, least)
            if self.kind == kind and value < least:
                found.append(f"{key.removeprefix('effective_')} was {value} {unit}, less than the {least} that are asked for")
        file = self.path / "user.conf"
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        keys = [line.partition("=")[0].strip().rpartition(".")[2] for line in lines if "=" in line and not line.lstrip().startswith("#")]
        fixed = [key for key in dict.fromkeys(keys) if key not in FREE_SETTINGS]
        return found + ([f"{file} sets {', '.join(fixed)}: that is the benchmark's"] if fixed else [])

    def changed(self) -> list[str]:
        """Options that make another task of the benchmark than the closed division has."""
        config, workload = self.directory.config, self.directory.workload
        defaults = {field.name: value for field, value in workload.defaults(self.directory.scenario).items()}
        found = []
        for name in _OF_THE_WORKLOAD:
            if (given := config.get(name, defaults[name])) != defaults[name]:
                found.append(f"--{name} was {given}, the benchmark's is {defaults[name]}")
        if more := set(config.get("end_ids") or ()).difference(workload.end_ids):
            found.append(f"--end_ids had {sorted(more)}, which end no answer of the benchmark")
        asked = self.detail.get("effective_samples_per_query", workload.n_samples)
        if self.kind == "performance" and self.directory.scenario == "Offline" and asked < workload.n_samples:
            found.append(f"samples_per_query was {asked}, less than the {workload.n_samples} that are asked for")
        if config.get("temperature") and config.get("top_k") != 1:
            found.append(f"answers were sampled (--temperature {config['temperature']}), the benchmark's are greedy")
        model = Path(str(config.get("model_path")))
        is_preset = (PRESETS / f"{model}.json").is_file() and not model.is_dir()
        if not workload.scaled and (is_preset or config.get("load_format") == "dummy"):
            found.append("the weights were random: a preset's, or --load_format dummy")
        if config.get("dataset") == "synthetic":
            found.append("the data set was random tokens (--dataset synthetic)")
        return found


def read_run(path: Path) -> Run:
    """ConfigError: `path` is no run directory of a workload, the run failed, or it is none that a submission has a place for."""
    directory = RunDirectory.read(path)
    benchmark, scenario = place(directory.workload.name, float(directory.config["accuracy_target"]), directory.scenario)
    kind = "performance"
    if directory.is_accuracy:
        kind = "accuracy"
    elif is_test06(read_detail(path)):
        kind = "TEST06"
    elif directory.config.get("audit_conf"):
        raise ConfigError(
            f"{path} was run under an audit.config that is not TEST06's: it is neither a performance run nor a compliance run"
        )
    return Run(directory, kind, benchmark, scenario)


@dataclass
class Result:
    """What is submitted for a benchmark in a scenario."""

    benchmark: str
    scenario: str
    runs: dict[str, Run] = field(default_factory=dict)  # by kind
    measurements: dict[str, Any] = field(default_factory=dict)  # measurements.json


def group(runs: Iterable[Run]) -> list[Result]:
    """Results, sorted by benchmark and scenario. ConfigError: two runs for one place, or runs that don't fit together."""
    results: dict[tuple[str, str], Result] = {}
    for run in runs:
        result = results.setdefault((run.benchmark, run.scenario), Result(run.benchmark, run.scenario))
        if (other := result.runs.get(run.kind)) is not None:
            raise ConfigError(f"{other.path} and {run.path} are both the {run.kind} run of {run.benchmark} {run.scenario}")
        for other in result.runs.values():
            _fit(other, run)
        result.runs[run.kind] = run
    return [results[key] for key in sorted(results)]


def _fit(a: Run, b: Run) -> None:
    for name in _SAME:
        first, second = a.directory.config.get(name), b.directory.config.get(name)
        if first != second:
            raise ConfigError(
                f"{a.path} and {b.path} can't be one result of {a.benchmark} {a.scenario}: --{name} is {first!r} and {second!r}"
            )
