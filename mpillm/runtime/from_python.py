"""Runs and servers from a Python program or a notebook: `run`, `load`, `serve`.

Each run is a child process, `mpirun … run`, so a program can start any number of them.
"""

from __future__ import annotations

import contextlib
import html
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError, nearest
from launch.signals import StopSignal
from mpillm.errors import ExitCode, needs_extra
from mpillm.options.fields import BY_NAME
from mpillm.report.page.page import write_page
from mpillm.report.request_log import read_requests, tpot_s
from mpillm.report.run_directory import PAGE, series_folder
from mpillm.report.run_files import RunFiles
from mpillm.runtime.whole_runs import CONSOLE, run_in, served_in

if TYPE_CHECKING:
    import pandas

_PAGE_PIXELS = 900
_SIGINT = 128 + 2


class RunFailed(RuntimeError):
    """Error of a run without a verdict of LoadGen. The message has the cause and the end of the output.

    `path`: the run directory; `code`: the exit code (docs/reference/exit_codes.md).
    """

    def __init__(self, message: str, path: Path, code: int) -> None:
        super().__init__(message)
        self.path, self.code = path, code


@dataclass(frozen=True)
class Run:
    """A run, read from its directory: figures, requests and HTML report. A notebook displays the report."""

    path: Path
    files: RunFiles

    @property
    def result(self) -> dict[str, Any]:
        """All of result.json: status, figures, latencies, phases, each instance's share."""
        return self.files.result

    @property
    def status(self) -> str:
        """The status in result.json: VALID, INVALID, MEASURED, SERVED, FAILED; "" after an early kill."""
        return str(self.result.get("status", ""))

    @property
    def valid(self) -> bool:
        return self.status == "VALID"

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the test; NaN if it had none."""
        return float(self.result.get("tokens_per_second", np.nan))

    @property
    def samples_per_second(self) -> float:
        """Answers per second of the test; NaN if it had none."""
        return float(self.result.get("samples_per_second", np.nan))

    @property
    def per_instance(self) -> list[dict[str, Any]]:
        """Each instance's share of the test, and its metrics."""
        return list(self.result.get("per_instance", ()))

    def option(self, name: str) -> Any:
        """Return the value of an option of the run; None if the option had no value."""
        return self.files.value(name)

    @property
    def requests(self) -> NDArray[np.void]:
        """A record for each request, in order of issue: issued, ttft, latency (s), index, tokens, error.

        Raises ConfigError if the run left no records.
        """
        return read_requests(self.path)

    def frame(self) -> pandas.DataFrame:
        """Return `requests` as a data frame, with `tpot`, seconds per token after the first.

        Raises ConfigError if the run left no records, or without the package pandas.
        """
        with needs_extra("Run.frame", "datasets"):
            import pandas
        rows = self.requests
        columns = {name: rows[name] for name in rows.dtype.names or ()}
        return pandas.DataFrame({**columns, "tpot": tpot_s(rows)})

    @property
    def page(self) -> Path:
        """The HTML report; created if it does not exist."""
        page = self.path / PAGE
        return page if page.exists() else write_page(self.path)

    def __repr__(self) -> str:
        figures = f", {self.tokens_per_second:,.1f} tokens/s" if "tokens_per_second" in self.result else ""
        return f"<Run {self.path}: {self.status or 'no result'}{figures}>"

    def _repr_html_(self) -> str:
        text = html.escape(self.page.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{text}" width="100%" height="{_PAGE_PIXELS}" frameborder="0"></iframe>'


@dataclass(frozen=True)
class RunningServer:
    """A running server: its URL, which ends with /v1 for OpenAI's clients, and its run directory."""

    url: str
    path: Path


def load(path: str | Path) -> Run:
    """Return the run in a run directory, which may be damaged. Raises ConfigError for other folders."""
    return Run(Path(path), RunFiles.read(Path(path)))


def run(
    model_path: str | Path | None = None,
    *,
    ranks: int,
    log_dir: str | Path | None = None,
    mpirun_options: str = "",
    echo: bool = True,
    deadline_s: float | None = None,
    **options: Any,
) -> Run:
    """Run a test on `ranks` ranks, as ``mpirun -n ranks python -m mpillm run``, and return it.

    A run with the verdict INVALID is returned. Raises ConfigError for wrong options, RunFailed without a
    verdict, and KeyboardInterrupt after Ctrl-C. In all cases, the run has ended.

    Args:
        model_path: as the option of this name.
        ranks: number of ranks.
        log_dir: the run directory; by default a new one in mpillm-runs.
        mpirun_options: options of mpirun, as one text.
        echo: print the run's output.
        deadline_s: deadline of the whole run, in addition to the deadline of each phase.
        options: options of `run --help` by name (``mode="disaggregated"``): text, numbers, bools, or a dict
            for options of flags.
    """
    folder = series_folder(log_dir, "run")
    with _interruptible():
        ended = run_in(
            folder,
            ("-n", str(ranks), *shlex.split(mpirun_options)),
            _args(model_path, options),
            _echo(folder / CONSOLE) if echo else None,
            deadline_s,
            adopts=False,
        )
    if ended.code == ExitCode.USAGE:
        raise ConfigError(ended.failure)
    if ended.failure:
        raise RunFailed(ended.failure, folder, ended.code)
    return load(folder)


@contextlib.contextmanager
def serve(
    model_path: str | Path | None = None,
    *,
    ranks: int,
    log_dir: str | Path | None = None,
    mpirun_options: str = "",
    echo: bool = True,
    deadline_s: float = 600.0,
    **options: Any,
) -> Iterator[RunningServer]:
    """Serve a model on `ranks` ranks inside a ``with`` block, on a free port unless `port` is set.

    Arguments as for `run`, but `echo` and `deadline_s` apply until the server is ready. Raises ConfigError if
    the server does not become ready.
    """
    folder = series_folder(log_dir, "serve")
    with (
        _interruptible(),
        served_in(
            folder,
            ("-n", str(ranks), *shlex.split(mpirun_options)),
            _args(model_path, options),
            _echo(folder / CONSOLE) if echo else None,
            deadline_s,
            adopts=False,
        ) as url,
    ):
        yield RunningServer(url, folder)


def _args(model_path: str | Path | None, options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments of a command line. Raises ConfigError for an unknown name."""
    model = {} if model_path is None else {"model_path": str(model_path)}
    args = []
    for name, value in {**model, **options}.items():
        if name not in BY_NAME:
            raise ConfigError(f"{name}: no such option of run or serve{nearest(name, BY_NAME)}")
        args += [f"--{name}", value if isinstance(value, str) else BY_NAME[name].text(value)]
    return args


def _echo(log: Path) -> Callable[[], str]:
    """Return a function that prints the new complete lines of a log (`watch` of `run_in`)."""
    printed = 0

    def follow() -> str:
        nonlocal printed
        with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(printed)
            lines, _, _ = file.read().rpartition(b"\n")
            if lines:
                printed += len(lines) + 1
                sys.stdout.write(lines.decode(errors="replace") + "\n")
                sys.stdout.flush()
        return ""

    return follow


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt after Ctrl-C, as Python programs and notebooks expect."""
    try:
        yield
    except StopSignal as stopped:
        if stopped.code == _SIGINT:
            raise KeyboardInterrupt from None
        raise
