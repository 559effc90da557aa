"""The console of rank 0: plan, phases, progress bar, answers, then a summary or one failure message."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

import disagg
from launch.environment import TTY, mpirun_ends_ranks
from launch.launcher import find_launcher
from launch.live_lines import LiveLines
from launch.own_messages import FAILED, MESSAGE
from mpillm.errors import Failure
from mpillm.options.columns import WIDTH, indented
from mpillm.report.numbers import duration
from mpillm.report.timeline import TotalMetrics

_MAX_BAR, _MIN_BAR = 24, 4
_STEADY_S = 30.0  # window of --show_steady_state_progress: excludes the start and the end of the test
# Seconds of a phase before the test after which `waiting` reports it: on a terminal, elsewhere.
_DRAW_WAIT_S, _PRINT_WAIT_S = 1.0, 3.0
_MAX_ACTIVITIES = 2  # in a line
_MIN_SHARE = 0.05  # this share of the samples is enough to estimate the end from their rate
NO_PAGE = "NO PAGE"
"""Name of the summary's row for a missing HTML report; the row is red on a terminal."""
_TRACE_LINES = 9  # of a traceback; the rank's log has all of it


class LoadProgress(NamedTuple):
    """Progress of a test."""

    done: int  # samples answered
    issued: int
    tokens: int  # of the answers
    elapsed_s: float
    planned: int | None = None  # samples in all; None: not known
    lasts_s: float | None = None  # time until the last sample is due; None: all are due at the start

    @property
    def total(self) -> int:
        return max(self.issued, self.planned or 0)

    def share(self) -> float:
        """Return how much of the test is done, 0 to 1."""
        if self.planned is None and self.lasts_s:
            return min(1.0, self.elapsed_s / self.lasts_s)
        return self.done / self.total

    def left_s(self) -> float | None:
        """Return the seconds that the test still needs; None if too few samples are answered to estimate."""
        left = [self.lasts_s - self.elapsed_s] if self.lasts_s and self.lasts_s > self.elapsed_s else []
        if self.done >= _MIN_SHARE * self.total and self.done and not (self.planned is None and left):
            left.append((self.total - self.done) * self.elapsed_s / self.done)
        return max(left, default=None)


class Console:
    """Prints lines; redraws the progress in place on a terminal, elsewhere prints it every few seconds."""

    def __init__(
        self, out: TextIO = sys.stdout, err: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lines = LiveLines(out, err)
        # Under mpirun, a rank's stdout is not the user's: Open MPI always makes it a terminal, MPICH a pipe.
        # If the user's stdout is a terminal, the launcher draws.
        launcher = find_launcher()
        self._frames = launcher is not None and os.environ.get(TTY) == "1"
        self._terminal = launcher is None and out.isatty()
        self._draws = self._frames or self._terminal
        self._interval_s = 0.25 if self._draws else 5.0
        self._waited_s = 0.0  # time into a phase before the test, at the last line of `waiting`
        self._hints: set[str] = set()  # printed already
        self._last_draw = clock()
        self._history: deque[LoadProgress] = deque()

    def line(self, text: str = "") -> None:
        """Print a line in place of the progress bar, if that is shown."""
        self._lines.write(f"{text}\n")

    def note(self, text: str, head: str = "  ") -> None:
        """Print `head` and prose: wrapped on a terminal; elsewhere a line, which can be searched."""
        self.line(indented(head, text) if self._draws else f"{head}{text}".rstrip())

    def phase(self, name: str, seconds: float, note: str = "") -> None:
        """Print that a phase is done."""
        self.note(note, f"  {name:<7} {seconds:8.2f} s  ")

    def waiting(
        self,
        phase: str,
        elapsed_s: float,
        awaited: Mapping[str, Sequence[int]],
        hosts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Show that a phase goes on. `awaited`: ranks that are not done, by activity.

        A terminal shows it soon. Elsewhere, a line is printed after some seconds, then at growing intervals.
        """
        if not awaited or not self._is_due(elapsed_s):
            return
        activities = [
            f"{disagg.rank_list(ranks, hosts)}: {activity.splitlines()[0] if activity else 'not done'}"
            for activity, ranks in awaited.items()
        ]
        more = len(activities) - _MAX_ACTIVITIES
        text = "; ".join(activities[:_MAX_ACTIVITIES]) + (f"; and {more} more" if more > 0 else "")
        self._draw([f"  {phase:<7} after {elapsed_s:.0f} s  {text}"])
        if elapsed_s >= _PRINT_WAIT_S:
            for hint in {activity.partition("\n")[2] for activity in awaited} - {"", *self._hints}:
                self._hints.add(hint)
                self.note(hint, " " * 10)

    def wait(self, phase: str, elapsed_s: float, activity: str) -> None:
        """Do as `waiting`, for this process alone."""
        if self._is_due(elapsed_s):
            self._draw([f"  {phase:<7} after {elapsed_s:.0f} s  {activity}"])

    def _is_due(self, elapsed_s: float) -> bool:
        if elapsed_s < self._waited_s:
            self._waited_s = 0.0  # another phase
        seldom = max(_PRINT_WAIT_S, min(3 * self._waited_s, self._waited_s + 60))
        if elapsed_s < (_DRAW_WAIT_S if self._draws else seldom):
            return False
        self._waited_s = elapsed_s
        return True

    def clear(self) -> None:
        """Remove the progress bar, if it is shown."""
        if self._draws:
            self._lines.write("")

    def progress(self, now: LoadProgress, metrics: TotalMetrics | None = None, steady: bool = False) -> None:
        """Draw the bar, if it is due.

        `metrics`: of the instances; `steady`: also show the throughput of the last seconds.
        """
        at = self._clock()
        if at - self._last_draw < self._interval_s or now.elapsed_s <= 0 or now.issued == 0:
            return
        self._last_draw = at
        lines = progress_lines(now, metrics)
        if steady and (lately := self._lately(now)):
            lines.append(lately)
        self._draw(lines)

    def _draw(self, lines: Sequence[str]) -> None:
        if self._terminal:
            self._lines.draw(lines)
        elif self._frames:
            self._lines.send(lines)
        else:
            self._lines.write("\n".join(lines) + "\n")

    def _lately(self, now: LoadProgress) -> str:
        """Return the throughput since the oldest bar within the window."""
        while self._history and now.elapsed_s - self._history[0].elapsed_s > _STEADY_S:
            self._history.popleft()
        self._history.append(now)
        then = self._history[0]
        if now.elapsed_s == then.elapsed_s:
            return ""
        seconds = now.elapsed_s - then.elapsed_s
        samples_s, tokens_s = (now.done - then.done) / seconds, (now.tokens - then.tokens) / seconds
        return f"    last {seconds:.0f} s: {samples_s:,.1f} samples/s  {tokens_s:,.1f} tokens/s"

    def answers(self, answers: Sequence[tuple[int, str, str]]) -> None:
        """Print a few (index, prompt, answer)."""
        for index, prompt, answer in answers:
            self.line()
            head = f"  sample {index}: "
            self.line(head + textwrap.shorten(" ".join(prompt.split()), WIDTH - len(head), placeholder=" …"))
            mark = "    | "
            parts = textwrap.wrap(" ".join(answer.split()), WIDTH - len(mark), break_on_hyphens=False)
            for part in parts[:4] or ["(no text)"]:
                self.line(mark + part)

    def summary(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Print names and values, aligned."""
        self.line()
        for name, value in rows:
            text = indented(f"  {name:<22} ", str(value))
            if name == NO_PAGE:
                self._lines.alarm(text, self._frames)
            else:
                self.line(text)

    def failure(
        self,
        when: str,
        failures: Sequence[Failure],
        more: Sequence[str],
        describe: Callable[[int], str],
        hosts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Print the one message of a failed run: what failed, which ranks, and `more` lines.

        Ranks with the same cause share a line, with their `hosts` (by rank).
        """
        if all(failure.interrupted and failure.rank is None for failure in failures):
            self._interrupted("\n  ".join([f"{MESSAGE}{failures[0].cause} {when}", *more]))
            return
        by_cause: dict[tuple[str, str], list[int]] = {}
        for failure in failures:
            key = (failure.cause, failure.traceback)
            by_cause.setdefault(key, []).extend([] if failure.rank is None else [failure.rank])
        message = [f"{FAILED}{when}"]
        for (cause, trace), ranks in by_cause.items():
            ranks_text = ""
            if ranks:
                ranks_text = f"{describe(ranks[0]) if len(ranks) == 1 else disagg.rank_list(ranks, hosts)}: "
            message.append(textwrap.indent(f"{ranks_text}{cause}", "  "))
            if trace:
                lines = trace.rstrip().splitlines()[-_TRACE_LINES:]
                message.append(textwrap.indent("\n".join(lines), "    "))
        message += dict.fromkeys(f"  doctor: {failure.doctor}" for failure in failures if failure.doctor)
        message += [f"  {line}" for line in more]
        self._print_error("\n".join(message))

    def _interrupted(self, message: str) -> None:
        if mpirun_ends_ranks():
            # The terminal where mpirun was started, if there is one.
            with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:  # noqa: PTH123
                print(message, file=terminal)
                return
        self._print_error(message)

    def _print_error(self, message: str) -> None:
        self._lines.write(f"{message}\n", self._lines.err)


def progress_lines(now: LoadProgress, metrics: TotalMetrics | None) -> list[str]:
    """Return how much is answered and, if the instances report it, computed: lines of at most 80 columns."""
    left = "" if (left_s := now.left_s()) is None else f", {duration(left_s)} left"
    text = (
        f"{now.done:,}/{now.total:,} samples  {_short(now.done / now.elapsed_s)}/s"
        f"  {duration(now.elapsed_s)}{left}"
    )
    head = "  test    "
    width = min(_MAX_BAR, WIDTH - len(f"{head}[] {text}"))
    filled = int(width * now.share())
    bar = f"[{'#' * filled}{'.' * (width - filled)}] " if width >= _MIN_BAR else ""
    lines = [f"{head}{bar}{text}"]
    if metrics is not None:
        m = metrics
        usage = "" if m.kv_cache_usage is None else f"  kv {m.kv_cache_usage:.0%}"
        # The other requests wait, in an instance or for an instance.
        waiting = max(0, now.issued - now.done - m.running)
        lines.append(
            f"    out {_short(m.generated)} tok/s (now {_short(m.generated_now)})"
            f"  in {_short(m.prompt)} ({_short(m.prompt_now)})"
            f"  run {_short(m.running)}  wait {_short(waiting)}{usage}"
        )
    return lines


def _short(number: float) -> str:
    """Return at most five characters, below a trillion: 0.5, 21.4, 345, 1.23k, 45.6k, 7.89M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            break
        number /= 1000
    if isinstance(number, int):
        return str(number)
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 or not unit else 2
    return f"{number:.{digits}f}{unit}"
