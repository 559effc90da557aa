"""A complete run with LoadGen's verdict, for a submission. `RunFiles` reads any other run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.files import as_written, read_json
from mpillm.loadgen.logs import ACCURACY, DETAIL, SUMMARY, read_detail
from mpillm.report.run_directory import MEASURED, failures_in
from mpillm.report.run_files import check_run_directory

# Required keys in result.json and config.json.
_OF_RESULT = ("test_mode", "scenario", "world_size")
_OF_CONFIG = ("benchmarks", "accuracy_target", "model_scale", "core_type")


@dataclass(frozen=True)
class JudgedRun:
    """A run with LoadGen's verdict, VALID or INVALID, or with the load of a load client."""

    path: Path
    config: dict[str, Any]  # by field name
    result: dict[str, Any]

    @staticmethod
    def read(path: Path, clients: Sequence[str] = ()) -> JudgedRun:
        """Read a run.

        Raises ConfigError if `path` is not a run directory, a file cannot be read, the run failed, or its
        load client is not one of `clients`.
        """
        check_run_directory(path)
        if not (path / "result.json").exists():
            raise ConfigError(f"{path} has no result.json: not a run directory, or the run has not ended")
        result = read_json(path / "result.json")
        with as_written(path / "result.json"):
            failed = result["status"] == "FAILED"
            other = result["harness"]["name"] if result["status"] == MEASURED else ""
            for key in () if failed else _OF_RESULT:
                result[key]
            is_performance = failed or result["test_mode"] == "PerformanceOnly"
            last = "result_validity" if is_performance else "effective_test_mode"
        if other and other not in clients:
            raise ConfigError(f"{path}: {other} made its load (--harness): there is no verdict of LoadGen")
        if failed:
            causes = "; ".join(str(failure.get("cause")) for failure in failures_in(result))
            raise ConfigError(f"the run in {path} failed in phase '{result.get('phase')}': {causes}")
        with as_written(path / "config.json"):
            config = {name: entry["value"] for name, entry in read_json(path / "config.json").items()}
            for key in _OF_CONFIG:
                config[key]
        for name in () if other else (DETAIL, SUMMARY, ACCURACY):
            if not (path / name).is_file():
                raise ConfigError(f"{path} has no {name}: LoadGen's logs are incomplete")
        if not other and last not in read_detail(path):
            raise ConfigError(f"{path / DETAIL}: LoadGen's log is incomplete: it was cut before {last}")
        return JudgedRun(path, config, result)

    @property
    def benchmark(self) -> str:
        """The workload's name. Raises ConfigError if the run has no workload."""
        name = _one(self.config.get("benchmarks"))
        if not name:
            raise ConfigError(f"{self.path} is not a run of an MLPerf workload: start one with --benchmarks")
        return name

    @property
    def workload(self) -> workloads.Workload:
        """The workload, at the scale of the run."""
        return workloads.get(self.benchmark, str(self.config["model_scale"]))

    @property
    def scenario(self) -> str:
        """LoadGen's scenario."""
        return _one(self.result["scenario"])

    @property
    def client(self) -> str:
        """The load client that replaced LoadGen; empty: none."""
        return str(self.result["harness"]["name"]) if self.result["status"] == MEASURED else ""

    @property
    def is_accuracy(self) -> bool:
        return bool(self.result["test_mode"] == "AccuracyOnly")


def _one(value: Any) -> str:
    """Return the name in a field that may be a list; in a run, the list has one name."""
    if isinstance(value, (list, tuple)):
        value = next(iter(value), "")
    return str(value or "")
