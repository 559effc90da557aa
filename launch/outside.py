"""Text from external sources: servers, clients, files, models.

It may contain escape sequences, right-to-left text, several lines, or unlimited data. `Shown` filters it for
terminals, `launch.logs` for logs, and `one_line` for messages.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from typing import TextIO

from launch.masking import without_known

_MOST = 200  # characters of a line
_MAX_DIGITS = 18  # int() refuses thousands of digits

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_LINE_ENDS = re.compile(r"\r\n?|[\x0b\x0c\x85\u2028\u2029]")
# Control characters, those that change the direction of what is beside them, and halves of characters, which
# no file takes.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINE_CONTROLS = re.compile(rf"{_CONTROLS.pattern}|[\n\t]")


def one_line(text: str | bytes, most: int = _MOST) -> str:
    """Return text from outside as a part of a line: control characters escaped, at most `most` characters."""
    if isinstance(text, bytes):
        text = text[: 4 * most + 4].decode(errors="backslashreplace")
    shown = _LINE_CONTROLS.sub(_escape, text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 2]} …"


def whole_number(text: str) -> int | None:
    """Return the number that `text` writes in decimal digits; None for other text, or over 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def printable(text: str) -> str:
    """Return lines of text without colours, with secrets masked and control characters escaped."""
    text = without_known(text)
    if _CONTROLS.search(text) is None:
        return text
    return _CONTROLS.sub(_escape, _LINE_ENDS.sub("\n", _COLOURS.sub("", text)))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def fitted(text: str, columns: int) -> str:
    """Return lines of text, of which those longer than `columns` go on in the next, a step further in.

    Words, paths among them, are never broken, nor the lines of a command that goes on behind a backslash.
    """
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if len(line) > columns and not line.endswith("\\"):
            words = line.lstrip()
            indent = line[: len(line) - len(words)]
            lines[i] = textwrap.fill(
                words,
                columns,
                initial_indent=indent,
                subsequent_indent=f"{indent}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


class Shown(io.TextIOWrapper):
    """Standard output or error of a process that writes only `printable` text."""

    python_s: TextIO
    """Python's own, whose end would close what both write to."""
    fits = False  # a terminal for messages, which are `fitted` to it
    _in_line = False  # what was written last has no end yet

    def write(self, text: str) -> int:
        text = printable(text)
        if self.fits:
            # A terminal whose size nobody has said has 0 columns.
            if not self._in_line and (columns := os.get_terminal_size(self.fileno()).columns):
                text = fitted(text, columns)
            self._in_line = not text.endswith("\n") if text else self._in_line
        return super().write(text)

    def as_it_is(self, text: str) -> None:
        """Write text of our own, with control characters."""
        super().write(text)


def safe_stream(stream: TextIO, messages: bool = False) -> TextIO:
    """Return what takes the place of Python's own standard output or error; another stream is given back.

    `messages`: nothing else goes there, which would be laid out already.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    made = Shown(
        stream.buffer,
        stream.encoding,
        # For terminals that lack a character.
        errors="backslashreplace" if stream.errors == "backslashreplace" else "replace",
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    made.python_s = stream
    made.fits = messages and stream.isatty()
    return made
