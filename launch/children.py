"""Child processes that end with this one: a build tool, a server, an `mpirun`. Each may have a log file."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from disagg.errors import ConfigError
from launch.prctl import adopt_orphans, die_with_parent
from launch.signals import Echoes, StopSignal, stop_signals
from launch.supervisor import STOP_GRACE_S, end_processes

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_S = 0.1
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Child:
    """A started process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None  # None: this process's own output

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the child's log, indented, for an error message; "" without a log."""
        return tail(self.log, lines) if self.log else ""

    def lines(self, pattern: str, max_lines: int = 5) -> list[str]:
        """Return the first lines of the child's log that match; none without a pattern or a log."""
        if not pattern or self.log is None or not self.log.is_file():
            return []
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return [
                *itertools.islice((line.rstrip() for line in file if re.search(pattern, line)), max_lines)
            ]


class Children:
    """Context manager that ends its child processes at its exit, whatever the reason.

    If the main thread enters the context, the first of `stop_signals` raises `StopSignal` there. Other
    threads cannot set handlers. When the context exits, running children get SIGTERM or, with `pass_on`, the
    received signal. They have `stop_grace_s` to exit. A second signal ends this wait. Then they are killed,
    with all their descendants and all other processes that have become children of this process. If `adopts`
    is False, only processes of `start` are killed: for a program that also starts other processes.
    """

    def __init__(
        self, stop_grace_s: float = STOP_GRACE_S, pass_on: bool = False, adopts: bool = True
    ) -> None:
        self._adopts = adopts
        self._grace_s = stop_grace_s
        self._pass_on = pass_on
        self._stop_signal: int = signal.SIGTERM
        self._children: list[Child] = []
        self._signals = 0
        self._stopped: StopSignal | None = None
        self._echoes = Echoes()
        self._orphans: dict[psutil.Process, float] = {}  # when each was first noticed
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._adopts:
            adopt_orphans()
        self._before = {child.pid for child in psutil.Process().children()}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._stop) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        self._signals = max(self._signals, 1)  # from here on, a signal only ends the wait early
        try:
            self._end()
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._echoes.has(number):
            return
        self._signals += 1
        if self._signals == 1:
            self._stop_signal = number if self._pass_on else self._stop_signal
            reports_itself = self._pass_on and any(child.log is None for child in self._children)
            self._stopped = StopSignal(number, is_reported=reports_itself)
            raise self._stopped

    def _stop_late(self) -> None:
        """Raise `StopSignal` again: Python drops exceptions in some callbacks, such as those at a fork."""
        if self._stopped is not None:
            raise self._stopped

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None = None,
        cwd: Path | None = None,
    ) -> Child:
        """Start `argv` with the environment `env`, in the folder `cwd` (None: this process's own).

        Append its output to `log`; None: this process's own.
        """
        try:
            with open(log, "ab") if log else contextlib.nullcontext() as output:  # noqa: PTH123 (one expression for both cases)
                process = subprocess.Popen(
                    argv,
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if log else None,
                    pass_fds=[int(env["PMI_FD"])]
                    if "PMI_FD" in env
                    else [],  # a rank's connection to MPICH's mpirun, if `env` is a rank's
                    start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
                    preexec_fn=lambda: die_with_parent(signal.SIGTERM),
                )
        except OSError as error:
            raise ConfigError(f"{name}: can't start {argv[0]}: {error.strerror}") from error
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def ended(self) -> Child | None:
        """Return a child that has ended, if any has."""
        self._stop_late()
        return next((child for child in self._children if child.process.poll() is not None), None)

    def running(self) -> list[Child]:
        """Return the children that have not ended."""
        return [child for child in self._children if child.process.poll() is None]

    def end_orphans(self, grace_s: float) -> None:
        """Kill adopted orphans `grace_s` after they were first noticed. Call it often; it does not wait."""
        now = time.monotonic()
        own = self._before | {child.process.pid for child in self._children}
        orphans = [process for process in psutil.Process().children() if process.pid not in own]
        self._orphans = {process: self._orphans.get(process, now) for process in orphans}
        late = [process for process, since in self._orphans.items() if now - since >= grace_s]
        for process in late:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(late, timeout=0)  # reaps the killed orphans

    def wait(self, child: Child, deadline_s: float | None) -> int | None:
        """Return a child's exit code (negative: a signal); None if it runs longer than `deadline_s`."""
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while child.process.poll() is None:
            self._stop_late()
            if end is not None and time.monotonic() > end:
                return None
            time.sleep(_POLL_S)
        return child.process.returncode

    def _end(self) -> None:
        running = [child.process for child in self.running()]
        for process in running:
            process.send_signal(self._stop_signal)
        stop_at = time.monotonic() + self._grace_s
        signals = self._signals
        while (
            any(process.poll() is None for process in running)
            and time.monotonic() < stop_at
            and self._signals == signals
        ):
            time.sleep(_POLL_S)
        own = {child.process.pid for child in self._children}
        others = {child.pid for child in psutil.Process().children()} - own
        for child in self._children:
            end_processes(child.process, self._before if self._adopts else others)


def end_of(log: Path) -> str:
    """Return the last 64 KiB of a log file; "" without the file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def tail(log: Path, lines: int) -> str:
    """Return the last `lines` lines of a log file, indented."""
    return "\n".join(f"  | {line}" for line in end_of(log).rstrip().splitlines()[-lines:])
