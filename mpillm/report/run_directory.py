"""A run directory: its names, and how a run creates, locks and fills it."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import disagg
from disagg import DisaggConfig, WorldPlan
from disagg.errors import ConfigError, about
from launch.default_paths import RUNS
from launch.ownership import other_owner, trusted_owners
from mpillm.comms.messages import JoinReport
from mpillm.errors import STORAGE_ERRORS, ExitCode, Failure, RunError
from mpillm.files import write_json
from mpillm.loadgen.logs import ACCURACY, DETAIL, SUMMARY
from mpillm.options.run_config import RunConfig
from mpillm.phases import Phase
from mpillm.report.run_environment import ENVIRONMENT

_log = logging.getLogger(__name__)

TIMELINE = "timeline.jsonl"
TELEMETRY = "telemetry.json"
REQUESTS = "requests.bin"
RANKS = "ranks"  # the folder of the ranks' logs
PAGE, TRACE = "report.html", "trace.json"
MEASURED = "MEASURED"
"""The status of a test with a load client (--harness): LoadGen has not judged it."""
HAS_FIGURES = ("VALID", "INVALID", MEASURED)
"""The statuses of a complete test."""
CERTIFICATE = "certificate.json"
HARNESS_LOG = "harness.log"  # the load client's output (--harness)
HARNESS = "harness"  # the folder of the load client's files
UNFINISHED = "this run goes on, or rank 0 was killed before it could report a cause"
"""The cause in the result.json of a run that has not ended."""

POSTMORTEM_CLAIM = "stands_in"
"""A file that claims the postmortem for one rank while this rank writes it."""

# Files of an earlier run, which would seem to be this run's if it failed before it writes its own.
STALE_FILES = (
    *(POSTMORTEM_CLAIM, "outputs.jsonl", "result.json", TIMELINE, REQUESTS, TELEMETRY, PAGE, TRACE),
    *(CERTIFICATE, HARNESS_LOG, DETAIL, SUMMARY, ACCURACY, "mlperf_log_trace.json"),
    *(ENVIRONMENT, "machines.json", "accuracy.txt", "accuracy.json", "accuracy_results.json"),
    *("TEST06/verify_accuracy.txt", "TEST07/verify_accuracy.txt", "TEST09/verify_output_len.txt"),
)


def unused(path: Path) -> Path:
    """Return `path`, or the first of path-2, path-3, … that does not exist: runs may start simultaneously."""
    n, free = 1, path
    while free.exists():
        n += 1
        free = path.with_name(f"{path.name}-{n}")
    return free


def new_folder(name: str) -> Path:
    """Return an unused path in the folder of runs, from the time and `name`."""
    return unused(RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")


def series_folder(log_dir: str | Path | None, command: str) -> Path:
    """Return the folder for a command's files: --log_dir, or a new folder."""
    return Path(log_dir) if log_dir else new_folder(command)


def lock(folder: Path) -> None:
    """Keep other runs out of a run directory until this process ends, if the file system has locks.

    Raises ConfigError if another run is writing to it.
    """
    descriptor = os.open(folder, os.O_RDONLY)  # never closed: that would release the lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"--log_dir {folder}: another run is writing to it; name another folder") from None
    except OSError:
        os.close(descriptor)


def keep_results(folder: Path) -> None:
    """Raise ConfigError if a test has left its results in `folder`."""
    if (folder / DETAIL).exists():
        raise ConfigError(
            f"--log_dir {folder}: it holds the results of a test; name another folder, or replace them"
            " (--force)"
        )


@about("log_dir")
def take_directory(config: RunConfig, name: str) -> Path:
    """Create and lock the directory of a run. Raises ConfigError, RunError if that is impossible.

    `name`: follows the time in the default directory's name.
    """
    path = Path(config.log_dir) if config.log_dir else new_folder(name)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"--log_dir {str(path)!r}: not valid UTF-8, which LoadGen needs; name another folder"
        ) from None
    try:
        if (path / "config.json").exists() and not (path / "plan.json").exists():
            raise ConfigError(
                f"--log_dir {path}: it holds the config.json of a model or an engine; name another folder"
            )
        if path.is_dir() and (owner := _foreign_owner(path)):
            raise ConfigError(f"--log_dir {path}: {owner}; name a folder of your own")
        path.mkdir(parents=True, exist_ok=True)
        lock(path)
        if not config.force:
            keep_results(path)
    except OSError as error:
        raise unwritable(config, path, error) from error
    return path.absolute()


def _foreign_owner(folder: Path) -> str:
    """Return which other user owns the folder or an entry of it; "" if none does, or only root.

    The owner could redirect the run's files by a link, even during the run. Raises OSError if nothing can be
    written in `folder`.
    """
    trusted = trusted_owners(folder)
    if (owner := other_owner(folder, trusted)) is not None:
        return f"user {owner} owns it"
    with os.scandir(folder) as entries:
        for entry in entries:
            if (owner := entry.stat(follow_symlinks=False).st_uid) not in trusted:
                return f"user {owner} owns {entry.name} in it"
    return ""


def unwritable(config: RunConfig, path: Path, error: OSError) -> RunError:
    """Return the error of a run directory that can't be written: a wrong option, unless the disk is full."""
    message = f"the run directory {path} (--log_dir) can't be written: {error.strerror}"
    code = None if error.errno in STORAGE_ERRORS else ExitCode.USAGE
    return RunError(Failure(message + config.set_by("log_dir"), code=code))


def display_path(path: Path) -> str:
    """Return `path` for the console: relative if it lies in the current directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


class RunRecord:
    """The files of a run besides LoadGen's logs. `result` and `phases_s` fill as the run proceeds."""

    def __init__(self, path: Path, config: RunConfig, plan: WorldPlan, about: Mapping[str, Any]) -> None:
        """`path`: from `take_directory`; `about`: further values of `result.json` known at the start."""
        self.path = path
        self._config = config
        self.phases_s: dict[str, float] = {}
        self._unfinished_figures: Mapping[str, Any] = {}  # figures of a test that has not ended
        self.result: dict[str, Any] = {
            "status": "FAILED",
            **about,
            "mode": plan.mode,
            "core_type": config.core_type,
            "model": config.model_path,
            "workload": config.workload.title if config.workload else None,
            "world_size": len(plan.ranks),
            "samples": 0,
            "errors": 0,
            "retried": 0,
            "lost": [],
        }

    def write_plan(self, yaml: DisaggConfig, plan: WorldPlan, reports: dict[int, JoinReport]) -> None:
        """Write what will run, where and from which options; delete an earlier run's results.

        Raises OSError if a file can't be written.
        """
        (self.path / "disagg.yaml").write_text(disagg.dump(yaml), encoding="utf-8")
        write_json(self.path / "plan.json", plan.to_json())
        write_json(self.path / "config.json", self._config.to_json())
        joined = [
            {"rank": rank, "host": r.host, "pid": r.pid, "versions": r.versions}
            for rank, r in sorted(reports.items())
        ]
        write_json(self.path / "ranks.json", joined)
        for name in STALE_FILES:
            (self.path / name).unlink(missing_ok=True)

    def write_unfinished(self, phase: Phase, *, waits: bool = True) -> None:
        """Write result.json with the figures so far, in case rank 0 is killed in `phase`.

        Raises OSError if the disk is full.

        Some launchers kill all ranks when one is lost. Slurm with PMIx kills them within 20 ms.
        """
        failure = Failure(UNFINISHED, 0)
        ended = {"status": "FAILED", "phase": phase, "exit_code": int(ExitCode.INSTANCE_LOST)}
        result = {**self.result, **self._unfinished_figures, **ended, "phases_s": self.phases_s}
        result["failures"] = failures_json((failure,))
        write_json(self.path / "result.json", result, waits=waits)

    def keep(self, so_far: Mapping[str, Any]) -> None:
        """Write the figures measured so far, because a killed rank 0 cannot write them."""
        self._unfinished_figures = so_far
        try:
            self.write_unfinished("test", waits=False)  # waiting for the disk would disturb the test
        except OSError as error:  # a full disk must not end the test
            _log.warning("what was measured so far is not kept: %s", error)

    def write_result(self) -> None:
        """Write result.json. Raises OSError if the disk is full."""
        write_json(self.path / "result.json", self.result | {"phases_s": self.phases_s})


def failures_in(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the failures that a `result.json` lists; damaged entries are left out."""
    failures = result.get("failures")
    return [one for one in failures if isinstance(one, dict)] if isinstance(failures, list) else []


def failures_json(failures: tuple[Failure, ...]) -> list[dict[str, Any]]:
    """Return failures as `result.json` lists them."""
    return [
        {"rank": f.rank, "cause": f.cause, "traceback": f.traceback}
        | ({"doctor": f.doctor} if f.doctor else {})
        for f in failures
    ]
