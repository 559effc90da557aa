"""A run directory in any state: complete, of a failed or killed run, or incomplete.

A submission reads its runs strictly, with its own reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from disagg.errors import ConfigError
from mpillm.files import check_files, read_json
from mpillm.loadgen.logs import DETAIL, read_detail
from mpillm.report.request_log import damaged_requests
from mpillm.report.run_directory import REQUESTS, TELEMETRY, TIMELINE, failures_in
from mpillm.telemetry.rank_log import log_name

T = TypeVar("T")
SERVERS = ("trtllm_server_urls", "triton_server_urls")
"""Options with the addresses of servers that a run has not started."""
_INTERRUPTED = "interrupted ("
# Tests from this duration on have a timeline: instances report twice a second, and get a line each second.
_MIN_TIMELINE_S = 2.0

# Files that mark a directory as a run directory, with a description of their contents.
_RUN_MARKERS = {
    "result.json": "the outcome and the figures",
    "config.json": "the options",
    "plan.json": "what ran where",
}


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's files; `missing` has a line for each unreadable file, which counts as empty."""

    path: Path
    result: dict[str, Any] = field(default_factory=dict)
    config: dict[str, dict[str, Any]] = field(default_factory=dict)  # {"value", "source"} by option
    plan: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    machines: dict[str, Any] = field(default_factory=dict)  # by node
    timeline: list[dict[str, Any]] = field(default_factory=list)  # rows of `TIMELINE`, in their order
    telemetry: dict[str, Any] = field(default_factory=dict)  # see docs/reference/report.md
    detail: dict[str, Any] = field(default_factory=dict)  # LoadGen's detailed log: the last value of each key
    missing: tuple[str, ...] = ()

    @staticmethod
    def read(path: Path) -> RunFiles:
        """Read the files. Raises ConfigError if `path` is not the directory of a run."""
        check_run_directory(path)
        if not any((path / name).exists() for name in _RUN_MARKERS):
            raise ConfigError(f"{path} has none of {', '.join(_RUN_MARKERS)}: not a run directory")
        reader = _Reader(path)
        result: dict[str, Any] = reader.read("result.json", _RUN_MARKERS["result.json"], dict)
        config: dict[str, Any] = reader.read("config.json", _RUN_MARKERS["config.json"], dict)
        ranks: list[Any] = reader.read("ranks.json", "versions and hosts", list)
        run = RunFiles(
            path,
            result,
            {name: entry for name, entry in config.items() if _entry(entry)},
            reader.read("plan.json", _RUN_MARKERS["plan.json"], dict),
            [rank for rank in ranks if isinstance(rank, dict)],
            # Written when all ranks have reported. Only then does the result have `compiled`.
            reader.read("machines.json", "the machines", dict) if result.get("compiled") is not None else {},
            reader.rows(TIMELINE) if _has_timeline(result) or (path / TIMELINE).exists() else [],
            reader.read(TELEMETRY, "activity of ranks, latencies, CPUs and GPUs", dict),
            read_detail(path),
        )
        if "loadgen_result" in result and not run.detail:
            reader.missing.append(f"{DETAIL} is missing, empty or can't be read: no verdict of LoadGen")
        reader.requests()
        object.__setattr__(run, "missing", tuple(reader.missing))
        return run

    def value(self, option: str) -> Any:
        """Return an option's value; None if the option has none, or is not known."""
        return self.config.get(option, {}).get("value")

    @property
    def doubts(self) -> list[str]:
        """The doubts about the test, a line each. A VALID test with a doubt is not displayed as good."""
        doubts = self.result.get("doubts")
        return [str(doubt) for doubt in doubts] if isinstance(doubts, list) else []

    @property
    def has_conversations(self) -> bool:
        """Whether the load was that of conversations."""
        return "conversations" in self.result

    @property
    def leaves_out_failed(self) -> bool:
        """Whether the figures leave out failed requests: those of LoadGen's tests do not."""
        return "harness" in self.result

    @property
    def all_at_once(self) -> bool:
        """Whether every request existed when the test started: LoadGen's Offline."""
        return self.result.get("scenario") == "Offline" and not self.has_conversations

    @property
    def world_size(self) -> int:
        """The number of ranks. Raises ConfigError if it is not known."""
        ranks = self.result.get("world_size", self.plan.get("world_size"))
        if not isinstance(ranks, int) or ranks < 1:
            raise ConfigError(f"{self.path}: neither result.json nor plan.json has the number of ranks")
        return ranks

    @property
    def stopped_by(self) -> str:
        return stopped_by(self.result)

    @property
    def failed_ranks(self) -> set[int]:
        """The ranks that caused the failure of the run."""
        ranks = (one.get("rank") for one in failures_in(self.result))
        return {rank for rank in ranks if isinstance(rank, int)}

    def log_of(self, rank: int) -> str:
        """Return a rank's log, by its path in the run directory; "" if it has none."""
        name = log_name(rank)
        return name if (self.path / name).is_file() else ""

    @property
    def plan_ranks(self) -> list[dict[str, Any]]:
        """Return the plan's ranks: rank, node, roles, instance, device, tp_rank, pp_rank."""
        ranks = self.plan.get("ranks")
        return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []

    def computing(self) -> tuple[int, str]:
        """Return the number of GPUs of the run and "GPU", or of ranks with an instance and "rank".

        The GPUs of servers that the run has not started are not known.
        """
        gpus = {
            (rank.get("node"), device)
            for rank in self.plan_ranks
            for device in (rank.get("device"), *(rank.get("server_devices") or ()))
            if device is not None
        }
        if gpus:
            return len(gpus), "GPU"
        has_gpus = any(one.get("gpus") for one in self.machines.values() if isinstance(one, dict))
        is_client = any(self.value(name) for name in SERVERS)
        workers = sum(rank.get("instance") is not None for rank in self.plan_ranks)
        return workers, "GPU" if has_gpus and not is_client else "rank"

    def instances(self) -> dict[int, PlannedInstance]:
        """Return the plan's instances, by index."""
        members: dict[int, list[dict[str, Any]]] = {}
        for rank in self.plan_ranks:
            if isinstance(rank.get("instance"), int):
                members.setdefault(rank["instance"], []).append(rank)
        return {
            index: PlannedInstance(index, _worker(ranks[0].get("roles")), [rank["rank"] for rank in ranks])
            for index, ranks in sorted(members.items())
        }


def check_run_directory(path: Path) -> None:
    """Raise ConfigError if a folder does not exist, or has other files than plain ones."""
    if not path.is_dir():
        wrong = "a file, not a run directory" if path.exists() else "no such run directory"
        raise ConfigError(f"{path}: {wrong}")
    check_files(path)


def _has_timeline(result: Mapping[str, Any]) -> bool:
    """Return whether the run should have a timeline.

    A server (its result has a URL), a run that was killed early and a very short test have none.
    """
    test_s = result.get("test_s")
    has_lines = not isinstance(test_s, (int, float)) or test_s >= _MIN_TIMELINE_S
    return has_lines and result.get("status") not in (None, "SERVED") and "url" not in result


def stopped_by(result: Mapping[str, Any]) -> str:
    """Return how a user or a batch system stopped the run, such as "Ctrl-C in phase test"; otherwise ""."""
    causes = [str(one.get("cause")) for one in failures_in(result)]
    if not causes or not all(cause.startswith(_INTERRUPTED) for cause in causes):
        return ""
    cause, phase = causes[0].removeprefix(_INTERRUPTED).removesuffix(")"), result.get("phase")
    return f"{cause} in phase {phase}" if phase else cause


class PlannedInstance(NamedTuple):
    """An instance of the plan; its first rank is its root rank."""

    number: int
    role: str  # ctx, gen or executor
    ranks: list[int]


def _worker(roles: Any) -> str:
    return next((role for role in roles or () if role in ("ctx", "gen", "executor")), "?")


def _entry(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value


class _Reader:
    """Reads files of one folder; collects the unreadable files in `missing`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.missing: list[str] = []

    def read(self, name: str, purpose: str, kind: Callable[[], T]) -> T:
        """Return the contents of a JSON file, or `kind()`. `purpose`: the file's, for `missing`."""
        path = self._folder / name
        if not path.exists():
            self.missing.append(f"{name} is missing: {purpose}")
            return kind()
        try:
            value = read_json(path)
        except ConfigError as error:
            self.missing.append(f"{str(error).removeprefix(f'{self._folder}/')}: {purpose}")
            return kind()
        if not isinstance(value, type(kind())):
            self.missing.append(f"{name} is damaged, or not written by a run: {purpose}")
            return kind()
        return value

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a file with one object on each line. Other lines are noted in `missing`."""
        path = self._folder / name
        if not path.exists():
            self.missing.append(f"{name} is missing: what instances computed over time")
            return []
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.missing.append(f"{name}: {error.strerror}: what instances computed over time")
            return []
        rows, bad = [], 0
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and "seconds" in row and "instance" in row:
                rows.append(row)
            else:
                bad += 1
        if bad:
            self.missing.append(f"{name}: {bad} of {bad + len(rows)} lines can't be read")
        return rows

    def requests(self) -> None:
        """Note damaged records of requests in `missing`. A test without answers has no such file."""
        try:
            bad, n = damaged_requests(self._folder)
        except ConfigError as error:
            self.missing.append(str(error).removeprefix(f"{self._folder}/"))
            return
        if bad:
            self.missing.append(f"{REQUESTS}: {bad:,} of {n:,} records are damaged")
