"""A run directory: taken by a run, and read again by the commands that work on what a run left."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm import workloads
from mpillm.json_files import as_written, read_json
from mpillm.loadgen.logs import ACCURACY, DETAIL, SUMMARY, read_detail

# What everything that works on a run reads of these files.
_OF_RESULT = ("test_mode", "scenario", "world_size")
_OF_CONFIG = ("benchmarks", "accuracy_target", "model_scale", "core_type")
# What would be taken for a run's if it ended without making its own.
OF_AN_EARLIER_RUN = ("outputs.jsonl", "result.json", "machines.json", "accuracy.txt", "accuracy.json", "TEST06/verify_accuracy.txt")


def unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … that is not there: several runs may start in one second."""
    n, found = 1, path
    while found.exists():
        n += 1
        found = path.with_name(f"{path.name}-{n}")
    return found


def lock(folder: Path) -> None:
    """Keep other runs out of a run directory until this process ends; ConfigError if one is there. File systems without locks keep none."""
    descriptor = os.open(folder, os.O_RDONLY)  # never closed: that would end the lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"--log_dir {folder}: another run is writing to it; name another folder") from None
    except OSError:
        os.close(descriptor)


@dataclass(frozen=True)
class RunDirectory:
    """A run that LoadGen has judged, VALID or INVALID."""

    path: Path
    config: dict[str, Any]  # by field name
    result: dict[str, Any]

    @staticmethod
    def read(path: Path) -> RunDirectory:
        """ConfigError: `path` is no run directory, a file of it can't be read, or the run failed."""
        if not path.is_dir():
            raise ConfigError(f"{path}: {'no run directory, but a file' if path.exists() else 'no such run directory'}")
        if not (path / "result.json").exists():
            raise ConfigError(f"{path} is no run directory, or its run has not ended: it has no result.json")
        result = read_json(path / "result.json")
        with as_written(path / "result.json"):
            failed = result["status"] == "FAILED"
            for key in () if failed else _OF_RESULT:
                result[key]
            last = "result_validity" if failed or result["test_mode"] == "PerformanceOnly" else "effective_test_mode"
        if failed:
            causes = "; ".join(failure["cause"] for failure in result.get("failures", ()))
            raise ConfigError(f"the run in {path} failed in phase '{result.get('phase')}': {causes}")
        with as_written(path / "config.json"):
            config = {name: entry["value"] for name, entry in read_json(path / "config.json").items()}
            for key in _OF_CONFIG:
                config[key]
        for name in (DETAIL, SUMMARY, ACCURACY):
            if not (path / name).is_file():
                raise ConfigError(f"{path} has no {name}: LoadGen's logs are incomplete")
        if last not in read_detail(path):
            raise ConfigError(f"{path / DETAIL}: LoadGen's log is incomplete: it was cut before {last}")
        return RunDirectory(path, config, result)

    @property
    def benchmark(self) -> str:
        """The workload's name; ConfigError if the run was of none."""
        name = _one(self.config.get("benchmarks"))
        if not name:
            raise ConfigError(f"{self.path} was no run of an MLPerf workload: start one with --benchmarks")
        return name

    @property
    def workload(self) -> workloads.Workload:
        """The workload, scaled as it was run."""
        return workloads.get(self.benchmark, str(self.config["model_scale"]))

    @property
    def scenario(self) -> str:
        """LoadGen's."""
        return _one(self.result["scenario"])

    @property
    def is_accuracy(self) -> bool:
        return bool(self.result["test_mode"] == "AccuracyOnly")


def _one(value: Any) -> str:
    """A field that may hold several names holds one in a run."""
    return str(value[0] if isinstance(value, (list, tuple)) else value or "")
