"""The console of rank 0: plan, phases, progress bar, answers, then a summary or one failure message."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import disagg
from launch.environment import TTY, mpirun_ends_ranks
from launch.launcher import find_launcher
from mpillm.errors import Failure
from mpillm.report.timeline import Computed

_WIDTH = 80  # of the progress lines
_MOST_BAR, _LEAST_BAR = 24, 4
_UP = "\x1b[1A\x1b[2K"  # go to the line above, and clear it
_CUT, _WRAP = "\x1b[?7l", "\x1b[?7h"  # cut long lines, or continue them in the next (DEC's auto-wrap mode)
_STEADY_S = 30.0  # window of --show_steady_state_progress: excludes the start and the end of the test
_TRACE_LINES = 9  # of a traceback; the rank's log has all of it


class Console:
    """Prints lines; redraws the progress in place on a terminal, elsewhere prints it every few seconds."""

    def __init__(self, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> None:
        self._out, self._err = out, err
        # Under mpirun a rank's own stdout says nothing about the user's: Open MPI always makes it a terminal,
        # MPICH a pipe.
        self._terminal = os.environ.get(TTY) == "1" if find_launcher() else out.isatty()
        self._interval_s = 0.25 if self._terminal else 5.0
        self._drawn = time.monotonic()
        self._n_bar_lines = 0
        self._drawn_before: deque[tuple[float, int, int]] = deque()  # seconds, samples, tokens

    def line(self, text: str = "") -> None:
        """Print a line in place of the progress bar, if that is shown."""
        self._clear_bar()
        self._print(text)

    def phase(self, name: str, seconds: float, note: str = "") -> None:
        """Print that a phase is done."""
        self.line(f"  {name:<7} {seconds:8.2f} s  {note}".rstrip())

    def progress(
        self,
        done: int,
        total: int,
        tokens: int,
        elapsed_s: float,
        computed: Computed | None = None,
        steady: bool = False,
    ) -> None:
        """Draw the bar, if it is due.

        `done`, `total`: samples answered and issued; `tokens`: in those answers; `elapsed_s`: since the test
        started; `computed`: what the instances report; `steady`: show the throughput of the last seconds,
        too.
        """
        now = time.monotonic()
        if now - self._drawn < self._interval_s or elapsed_s <= 0 or total == 0:
            return
        self._drawn = now
        lines = progress_lines(done, total, elapsed_s, computed)
        if steady and (lately := self._lately(elapsed_s, done, tokens)):
            lines.append(lately)
        text = "\n".join(lines)
        if self._terminal:
            # Print whole lines and go back up to them: Open MPI forwards output line by line. (rich's live
            # display redraws within a line: under Open MPI's mpirun all of it arrives at the end.) Cut them
            # at the terminal's edge, wherever that is now: going up one line does not clear a wrapped one.
            text = f"{_UP * self._n_bar_lines}{_CUT}{text}{_WRAP}"
            self._n_bar_lines = len(lines)
        self._print(text)

    def _lately(self, elapsed_s: float, done: int, tokens: int) -> str:
        """Return the throughput since the last bar that is no older than the window."""
        while self._drawn_before and elapsed_s - self._drawn_before[0][0] > _STEADY_S:
            self._drawn_before.popleft()
        self._drawn_before.append((elapsed_s, done, tokens))
        since_s, done_then, tokens_then = self._drawn_before[0]
        if elapsed_s == since_s:
            return ""
        seconds = elapsed_s - since_s
        samples_s, tokens_s = (done - done_then) / seconds, (tokens - tokens_then) / seconds
        return f"    last {seconds:.0f} s: {samples_s:.1f} samples/s  {tokens_s:.1f} tokens/s"

    def answers(self, answers: Sequence[tuple[int, str, str]]) -> None:
        """Print a few (index, prompt, answer)."""
        width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120)) - 6
        for index, prompt, answer in answers:
            self.line()
            self.line(
                f"  sample {index}: {textwrap.shorten(' '.join(prompt.split()), width, placeholder=' …')}"
            )
            for part in textwrap.wrap(" ".join(answer.split()), width)[:4] or ["(no text)"]:
                self.line(f"    | {part}")

    def summary(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Print names and values, aligned."""
        self.line()
        for name, value in rows:
            self.line(f"  {name:<22} {value}")

    def failure(
        self, when: str, failures: Sequence[Failure], more: Sequence[str], describe: Callable[[int], str]
    ) -> None:
        """Print the one message of a failed run: what failed, which ranks, and `more` lines.

        Ranks with the same cause share a line.
        """
        self._clear_bar()
        if all(failure.interrupted and failure.rank is None for failure in failures):
            self._interrupted("\n  ".join([f"mpillm: {failures[0].cause} {when}", *more]))
            return
        by_cause: dict[tuple[str, str], list[int]] = {}
        for failure in failures:
            key = (failure.cause, failure.traceback)
            by_cause.setdefault(key, []).extend([] if failure.rank is None else [failure.rank])
        message = [f"mpillm: failed {when}"]
        for (cause, trace), ranks in by_cause.items():
            who = "" if not ranks else f"{describe(ranks[0]) if len(ranks) == 1 else rank_list(ranks)}: "
            message.append(textwrap.indent(f"{who}{cause}", "  "))
            if trace:
                message.append(
                    textwrap.indent("\n".join(trace.rstrip().splitlines()[-_TRACE_LINES:]), "    ")
                )
        message += dict.fromkeys(f"  doctor: {failure.doctor}" for failure in failures if failure.doctor)
        message += [f"  {line}" for line in more]
        print("\n".join(message), file=self._err, flush=True)

    def _interrupted(self, message: str) -> None:
        if mpirun_ends_ranks():
            # The terminal where mpirun was started, if there is one.
            with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:  # noqa: PTH123
                print(message, file=terminal)
                return
        print(message, file=self._err, flush=True)

    def _clear_bar(self) -> None:
        if self._n_bar_lines:
            self._print(_UP * self._n_bar_lines, end="")
            self._n_bar_lines = 0

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, file=self._out, flush=True)
        # The reader (head, say) has gone, or its disk is full: the run goes on, and its directory has it all.
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())


def progress_lines(done: int, total: int, elapsed_s: float, computed: Computed | None) -> list[str]:
    """Return what is answered and, if the instances report it, computed: lines of at most 80 columns."""
    text = f"{done}/{total} samples  {done / elapsed_s:.1f} samples/s  {elapsed_s:.0f} s"
    head = "  test    "
    width = min(_MOST_BAR, _WIDTH - len(f"{head}[] {text}"))
    filled = int(width * done / total)
    bar = f"[{'#' * filled}{'.' * (width - filled)}] " if width >= _LEAST_BAR else ""
    lines = [f"{head}{bar}{text}"]
    if computed is not None:
        c = computed
        usage = "" if c.kv_cache_usage is None else f"  kv {c.kv_cache_usage:.0%}"
        lines.append(
            f"    out {_short(c.generated)} tok/s (now {_short(c.generated_now)})"
            f"  in {_short(c.prompt)} ({_short(c.prompt_now)})"
            f"  run {_short(c.running)}  wait {_short(c.waiting)}{usage}"
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


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 1-4, 7``."""
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {disagg.ranges(ranks, ', ')}"
