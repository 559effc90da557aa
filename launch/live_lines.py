"""Lines at the end of a terminal's text that are redrawn, such as a progress bar.

Under `mpillm mpirun`, rank 0 only sends the bar's text, and the launcher draws it. All output of the ranks,
mpirun and the launcher passes through the launcher, so the bar never overwrites a message.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from typing import IO, TextIO

from launch.safe_text import SafeStream, one_line, printable

_BEGIN, _BETWEEN, _END = "\x1b_mpillm:", "\x1f", "\x1b\\"  # a terminal ignores text between _BEGIN and _END
_ALARM = "\x1b_mpillm-alarm:"  # text between _ALARM and _END becomes a red line
_RED, _PLAIN = "\x1b[1;31m", "\x1b[0m"
_MAX_COLUMNS = 500  # characters of a line
_CUT, _WRAP = "\x1b[?7l", "\x1b[?7h"  # the terminal cuts long lines, or wraps them (DEC's auto-wrap mode)


def frame(lines: Sequence[str]) -> str:
    """Return `lines` as one line, which the launcher draws, because Open MPI forwards whole lines."""
    lines = [one_line(line, _MAX_COLUMNS) for line in lines]
    return f"{_BEGIN}{_BETWEEN.join(lines)}{_END}\n"


class LiveLines:
    """Writer to stdout and stderr, for any thread. New text replaces the drawn lines."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err
        self._lock = threading.Lock()
        self._n_live = 0
        self._in_line = False  # the last written line is incomplete

    def draw(self, lines: Sequence[str]) -> None:
        """Draw `lines` in place of the lines drawn before. Each line is cut at the terminal's current edge.

        Without this cut, a terminal in mode `_CUT` writes all further characters over its last column.
        """
        with self._lock:
            begin = "\n" if self._in_line else self._clearing()
            self._in_line = False
            columns = self._columns()
            text = "\n".join(one_line(line, columns) for line in lines)
            self._put(f"{begin}{_CUT}{text}{_WRAP}\n", self.out)
            self._n_live = len(lines)

    def write(self, text: str, to: TextIO | None = None) -> None:
        """Write `text` to `to` (None: stdout)."""
        text = printable(text)
        with self._lock:
            if clearing := self._clearing():
                self._put(clearing, self.out)
            self._put(text, to or self.out, is_text=True)
            if text:
                self._in_line = not text.endswith("\n")

    def send(self, lines: Sequence[str]) -> None:
        """Send `lines` to the launcher, which draws them."""
        with self._lock:
            self._put(frame(lines), self.out)

    def alarm(self, text: str, sends: bool = False) -> None:
        """Write the lines of `text`, in red on a terminal. `sends`: the launcher writes them instead."""
        for line in text.split("\n"):
            line = printable(line)
            if sends:
                with self._lock:
                    self._put(f"{_ALARM}{line}{_END}\n", self.out)
            elif self.out.isatty():
                self.write("")
                with self._lock:
                    self._put(f"{_RED}{line}{_PLAIN}\n", self.out)
            else:
                self.write(f"{line}\n")

    def pump(self, source: IO[bytes], to: TextIO, omit: Callable[[str], bool] = lambda line: False) -> None:
        """Write the lines of `source` to `to`, and draw the frames among them, until `source` ends.

        `omit` receives each line before it is written, and returns whether to omit the line.
        """
        with source:
            for line in io.TextIOWrapper(source, "utf-8", "replace", newline="\n"):
                if line.startswith(_BEGIN):
                    self.draw(line.removeprefix(_BEGIN).partition(_END)[0].split(_BETWEEN))
                elif line.startswith(_ALARM):
                    self.alarm(line.removeprefix(_ALARM).partition(_END)[0])
                elif not omit(line):
                    self.write(line, to)

    def end(self) -> None:
        """Remove the drawn lines, and complete the last written line."""
        self.write("\n" if self._in_line else "", self.err)

    def _clearing(self) -> str:
        n, self._n_live = self._n_live, 0
        return f"\r\x1b[{n}A\x1b[J" if n else ""

    def _columns(self) -> int:
        """Return the columns of the terminal. If wide characters need more, the terminal cuts the line."""
        try:
            columns = os.get_terminal_size(self.out.fileno()).columns
        except OSError:  # not a terminal
            columns = 0
        return min(_MAX_COLUMNS, columns or _MAX_COLUMNS)

    @staticmethod
    def _put(text: str, to: TextIO, is_text: bool = False) -> None:
        """Write to a stream. `is_text`: the text contains no control characters for the terminal."""
        try:
            if isinstance(to, SafeStream) and not is_text:
                to.write_raw(text)
            else:
                to.write(text)
            to.flush()
        # The reader, such as head, has exited, or the disk is full. The run continues: its directory has all.
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), to.fileno())
