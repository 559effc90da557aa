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

from launch.outside import Shown, one_line, printable

_BEGIN, _BETWEEN, _END = "\x1b_mpillm:", "\x1f", "\x1b\\"  # a terminal ignores what is between
_ALARM = "\x1b_mpillm-alarm:"  # begins a line, up to _END, that is red
_RED, _PLAIN = "\x1b[1;31m", "\x1b[0m"
_MOST_DRAWN = 500  # characters of a line
_CUT, _WRAP = "\x1b[?7l", "\x1b[?7h"  # cut long lines, or continue them in the next (DEC's auto-wrap mode)


def frame(lines: Sequence[str]) -> str:
    """Return `lines` as one line for the launcher, which draws them: Open MPI forwards whole lines."""
    lines = [one_line(line, _MOST_DRAWN) for line in lines]
    return f"{_BEGIN}{_BETWEEN.join(lines)}{_END}\n"


class LiveLines:
    """Writer to stdout and stderr, for any thread. New text replaces the drawn lines."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err
        self._lock = threading.Lock()
        self._n_drawn = 0
        self._ends_in_line = False  # what was written: lines drawn behind it would take it along

    def draw(self, lines: Sequence[str]) -> None:
        """Draw `lines` in place of those drawn before; each is cut at the terminal's edge, wherever that is
        now: a terminal that cuts writes all that is left over its last column."""
        with self._lock:
            begin = "\n" if self._ends_in_line else self._clearing()
            self._ends_in_line = False
            columns = self._columns()
            drawn = "\n".join(one_line(line, columns) for line in lines)
            self._put(f"{begin}{_CUT}{drawn}{_WRAP}\n", self.out)
            self._n_drawn = len(lines)

    def write(self, text: str, to: TextIO | None = None) -> None:
        """Write `text`, to stdout unless `to` says otherwise."""
        text = printable(text)
        with self._lock:
            if clearing := self._clearing():
                self._put(clearing, self.out)
            self._put(text, to or self.out, says=True)
            if text:
                self._ends_in_line = not text.endswith("\n")

    def tell(self, lines: Sequence[str]) -> None:
        """Have the launcher draw `lines`."""
        with self._lock:
            self._put(frame(lines), self.out)

    def alarm(self, text: str, tells: bool = False) -> None:
        """Write lines in red on a terminal, elsewhere as they are; `tells`: have the launcher write them."""
        for line in text.split("\n"):
            line = printable(line)
            if tells:
                with self._lock:
                    self._put(f"{_ALARM}{line}{_END}\n", self.out)
            elif self.out.isatty():
                self.write("")
                with self._lock:
                    self._put(f"{_RED}{line}{_PLAIN}\n", self.out)
            else:
                self.write(f"{line}\n")

    def pump(self, source: IO[bytes], to: TextIO, hear: Callable[[str], bool] = lambda line: False) -> None:
        """Write the lines of `source` to `to`, and draw the frames among them, until it ends.

        `hear` gets each line before it is written, and returns whether to leave it out.
        """
        with source:
            for line in io.TextIOWrapper(source, "utf-8", "replace", newline="\n"):
                if line.startswith(_BEGIN):
                    self.draw(line.removeprefix(_BEGIN).partition(_END)[0].split(_BETWEEN))
                elif line.startswith(_ALARM):
                    self.alarm(line.removeprefix(_ALARM).partition(_END)[0])
                elif not hear(line):
                    self.write(line, to)

    def end(self) -> None:
        """Remove the lines drawn, and end the last one written: nothing more will come."""
        self.write("\n" if self._ends_in_line else "", self.err)

    def _clearing(self) -> str:
        n, self._n_drawn = self._n_drawn, 0
        return f"\r\x1b[{n}A\x1b[J" if n else ""

    def _columns(self) -> int:
        """Return how many characters fit; a wide one takes two, and is left to the terminal to cut."""
        try:
            columns = os.get_terminal_size(self.out.fileno()).columns
        except OSError:  # it is no terminal
            columns = 0
        return min(_MOST_DRAWN, columns or _MOST_DRAWN)

    @staticmethod
    def _put(text: str, to: TextIO, says: bool = False) -> None:
        """`says`: it is text, and nothing that the terminal obeys."""
        try:
            if isinstance(to, Shown) and not says:
                to.as_it_is(text)
            else:
                to.write(text)
            to.flush()
        # The reader (head, say) has gone, or its disk is full: the run goes on, and its directory has it all.
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), to.fileno())
