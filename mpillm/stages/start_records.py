"""Records of servers of a disaggregation YAML that `run-llm-server` is starting, or failed to start.

In both cases, a client finds a closed port. A record is a file in the folder `YAML.servers`. The command
removes it when its servers are ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from disagg.errors import ConfigError
from launch.environment import launch_type
from launch.launcher import find_launcher
from launch.safe_text import one_line
from mpillm.files import as_written, read_object, write_json
from mpillm.options.run_config import RunConfig

_log = logging.getLogger(__name__)
_BOTH = "servers"  # name of the record if one command starts workers and leader
_STARTING, _FAILED = "starting", "failed"
_MAX_LINES, _MAX_BYTES, _MAX_RECORDS = 12, 1 << 16, 64


class StartRecord:
    """The record of a `run-llm-server` command, or of one of its ranks."""

    def __init__(self, yaml: Path, name: str) -> None:
        """`name`: leader, servers, or worker and its rank."""
        self._folder, self._name = _folder_of(yaml), name
        self._is_starting = False

    def begin(self) -> None:
        """Record that servers are starting, and remove earlier failures."""
        with _noted():
            for file in _files(self._folder):
                if self._name == _BOTH or file.stem in (self._name, _BOTH):
                    file.unlink(missing_ok=True)
            self._write(_STARTING, "")
            self._is_starting = True

    def fail(self, reason: str) -> None:
        """Record the reason why servers failed to start."""
        self._is_starting = False
        with _noted():
            self._write(_FAILED, "\n".join(reason.splitlines()[:_MAX_LINES]))

    def end(self) -> None:
        """Remove the record, unless it is a failure."""
        if self._is_starting:
            self._is_starting = False
            with _noted():
                self._file.unlink(missing_ok=True)
                if not any(self._folder.iterdir()):
                    self._folder.rmdir()

    @property
    def _file(self) -> Path:
        return self._folder / f"{self._name}.json"

    def _write(self, state: str, reason: str) -> None:
        process = {"host": socket.gethostname(), "process": psutil.Process().pid, "time": time.time()}
        self._folder.mkdir(exist_ok=True)
        write_json(self._file, {"state": state, "reason": reason, **process}, waits=False)


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """Print an OSError as a note: servers start even if records cannot be written."""
    try:
        yield
    except OSError as error:
        print(f"mpillm: note: no record of the start for run-harness: {error}", file=sys.stderr)


@contextlib.contextmanager
def recorded(config: RunConfig) -> Iterator[StartRecord | None]:
    """Keep a record while a command starts servers of a YAML; None without a YAML.

    Also records a ConfigError in the block.
    """
    path = Path(config.disagg_config) if config.disagg_config else None
    if path is None or config.dry_run or not path.is_file():
        yield None
        return
    launcher, kind = find_launcher(), launch_type() or _BOTH
    rank = f"-{launcher.rank}" if kind == "worker" and launcher and launcher.rank is not None else ""
    record = StartRecord(path, f"{kind}{rank}")
    record.begin()
    try:
        yield record
    except ConfigError as error:
        record.fail(str(error))
        raise
    finally:
        record.end()


class RecordedStarts:
    """The records beside a YAML, for a client of its leader; implements `ServerStarts`."""

    read_s = 1.0  # between two reads
    replaced_s = 5.0  # within this time, a command that starts with the client replaces earlier records

    def __init__(self, yaml: Path, max_wait_s: float) -> None:
        """`max_wait_s`: maximum wait of the client for starting servers."""
        self._yaml, self._max_wait_s = yaml, max_wait_s
        self._read_at = float("-inf")
        self._failures, self._starting = "", False
        self._created_at = time.monotonic()
        self._old: frozenset[tuple[Path, float]] | None = None  # records from before, with their times

    def failures(self) -> str:
        self._read()
        return self._failures

    def wait_s(self, default_s: float) -> float:
        self._read()
        return max(default_s, self._max_wait_s) if self._starting else default_s

    def _read(self) -> None:
        if time.monotonic() - self._read_at < self.read_s:
            return
        self._read_at = time.monotonic()
        failures: dict[tuple[str, str], list[tuple[str, float]]] = {}  # names and ages by host and reason
        self._starting = False
        seen: set[tuple[Path, float]] = set()
        for file in _files(_folder_of(self._yaml)):
            try:
                written = file.stat()
                seen.add((file, written.st_mtime))
                if self._is_old(file, written):
                    continue
                record = read_object(file)
                with as_written(file, "not a record of run-llm-server"):
                    self._add(file, record, failures)
            except (OSError, ConfigError) as error:  # removed during the read, or not a record
                _log.info("%s: %s", file, error)
        if self._old is None:
            self._old = frozenset(seen)
        self._failures = "\n".join(_failure(*key, commands) for key, commands in failures.items())
        if failures:
            folder = _folder_of(self._yaml)
            self._failures += f"\n  as recorded in {folder}; remove it if the servers are started otherwise"

    def _is_old(self, file: Path, written: os.stat_result) -> bool:
        """Return whether a record belongs to an earlier YAML, or a starting command may still replace it."""
        if written.st_mtime < self._yaml.stat().st_mtime or written.st_size > _MAX_BYTES:
            return True
        is_earlier = self._old is None or (file, written.st_mtime) in self._old
        return is_earlier and time.monotonic() - self._created_at < self.replaced_s

    def _add(
        self, file: Path, record: dict[str, Any], failures: dict[tuple[str, str], list[tuple[str, float]]]
    ) -> None:
        host, reason = str(record["host"]), str(record["reason"])
        if record["state"] == _STARTING:
            has_ended = host == socket.gethostname() and not psutil.pid_exists(int(record["process"]))
            self._starting |= not has_ended
        elif record["state"] == _FAILED:
            age_s = max(0.0, time.time() - float(record["time"]))
            failures.setdefault((host, reason), []).append((file.stem, age_s))


def _failure(host: str, reason: str, commands: list[tuple[str, float]]) -> str:
    names = ", ".join(one_line(name) for name, _ in commands)
    age_s = min(age_s for _, age_s in commands)
    first, *more = reason.splitlines()[:_MAX_LINES] or [""]
    failed = f"run-llm-server ({names}) on {one_line(host)} failed {age_s:,.0f} s ago"
    return "\n".join([f"{failed}: {one_line(first)}", *(f"  {one_line(line)}" for line in more)])


def _folder_of(yaml: Path) -> Path:
    return yaml.with_name(f"{yaml.name}.servers")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))[:_MAX_RECORDS]
