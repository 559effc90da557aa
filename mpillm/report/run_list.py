"""The runs below a folder, newest first, and `latest`: the newest of them as a path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from launch.default_paths import RUNS
from mpillm.files import check_files, read_json
from mpillm.report.run_files import stopped_by

LATEST = "latest"
SERIES_PAGES = ("compare.html", "sweep.html", "find-max-qps.html", "ab.html", "advise.html", "endpoint.html")
_SERIES = tuple(f"-{page.removesuffix('.html')}" for page in SERIES_PAGES)  # ends of folder names
_SEARCH = "search.json"  # find-max-qps writes it from its first test on
_PLAN = "plan.json"  # every run writes it at its start
_MAX_STATUS = 40  # characters; a file may contain any text
_DEEPEST = 4  # levels of folders: a sweep's runs, for example, lie in the sweep's folder


@dataclass(frozen=True)
class ListedRun:
    """A run and its result.json, which is empty if the run goes on, was killed, or is damaged."""

    path: Path
    started: float  # time.time()
    result: Mapping[str, Any]
    series: str = ""  # the folder of its sweep or other series; "": a single run

    @property
    def status(self) -> str:
        status = str(self.result.get("status") or "no outcome")[:_MAX_STATUS]
        return "STOPPED" if stopped_by(self.result) else status

    @property
    def verdict(self) -> str:
        """The status, marked if there are doubts."""
        return f"{self.status} DOUBTFUL" if self.is_doubtful else self.status

    @property
    def is_doubtful(self) -> bool:
        return bool(self.result.get("doubts"))

    @property
    def title(self) -> str:
        """Workload or model, and scenario or conversations."""
        result = self.result
        model = str(result.get("model") or "").rpartition("/")[2]
        load = "conversations" if "conversations" in result else result.get("scenario")
        parts = (result.get("workload") or model or result.get("core_type"), load)
        return " ".join(str(one) for one in parts if one)

    def figure(self, name: str, part: str = "") -> float | None:
        """Return a figure of result.json; None if result.json does not have it."""
        value = self.result.get(name)
        if part:
            value = value.get(part) if isinstance(value, dict) else None
        try:
            return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        except OverflowError:  # hundreds of digits
            return None


def find_runs(folder: Path) -> list[ListedRun]:
    """Return the runs below a folder, newest first."""
    runs = [
        ListedRun(plan.parent, plan.stat().st_mtime, _result(plan.parent), series_of(plan.parent, folder))
        for plan in _plans(folder)
    ]
    return sorted(runs, key=lambda run: (run.started, str(run.path)), reverse=True)


def series_of(run: Path, folder: Path) -> str:
    """Return the path, below `folder`, of the series that contains a run; "" for a single run."""
    names = run.relative_to(folder).parts[:-1]
    for i in range(1, len(names) + 1):
        parent = folder.joinpath(*names[:i])
        if parent.name.endswith(_SERIES) or any(
            (parent / file).exists() for file in (*SERIES_PAGES, _SEARCH)
        ):
            return "/".join(names[:i])
    return ""


def find_series(folder: Path) -> list[Path]:
    """Return the pages of commands that start several runs, newest first."""
    pages = [page for depth in range(_DEEPEST) for page in folder.glob("*/" * depth + "*.html")]
    pages = [page for page in pages if page.name in SERIES_PAGES]
    return sorted(pages, key=lambda page: page.stat().st_mtime, reverse=True)


def run_path(text: str) -> Path:
    """Return the path of a run that the user typed; `latest` is the newest in mpillm-runs."""
    if text != LATEST or Path(text).exists():
        return Path(text)
    newest = max(_plans(RUNS), key=lambda plan: plan.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(f"{LATEST}: there is no run in {RUNS}")
    return newest.parent


def _plans(folder: Path) -> Iterator[Path]:
    for depth in range(1, _DEEPEST + 1):
        yield from (plan for plan in folder.glob("*/" * depth + _PLAN) if plan.is_file())


def _result(folder: Path) -> dict[str, Any]:
    try:
        check_files(folder)
        value = read_json(folder / "result.json")
    except (ConfigError, OSError):
        return {}
    return value if isinstance(value, dict) else {}
