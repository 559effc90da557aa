"""Text from external sources: servers, clients, files, models.

Such text may contain escape sequences, right-to-left text, several lines, or unlimited data. `SafeStream`
filters it for terminals, `launch.logs` for logs, and `one_line` for messages.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
from typing import TextIO

from launch.masking import without_known

_MAX_CHARACTERS = 200  # of a line
_MAX_DIGITS = 18  # int() rejects thousands of digits

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_LINE_ENDS = re.compile(r"\r\n?|[\x0b\x0c\x85\u2028\u2029]")
# Control characters, characters that change the direction of text, and surrogates, which no file can contain.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LINE_CONTROLS = re.compile(rf"{_CONTROLS.pattern}|[\n\t]")


def one_line(text: str | bytes, max_characters: int = _MAX_CHARACTERS) -> str:
    """Return external text for use within a line: shortened, with control characters escaped."""
    if isinstance(text, bytes):
        text = text[: 4 * max_characters + 4].decode(errors="backslashreplace")
    safe = _LINE_CONTROLS.sub(_escape, text[: max_characters + 1])
    return safe if len(safe) <= max_characters else f"{safe[: max_characters - 2]} …"


def whole_number(text: str) -> int | None:
    """Return the number in `text`: at most 18 decimal digits. None for other text."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def printable(text: str) -> str:
    """Return lines of text without colours, with secrets masked and control characters escaped."""
    text = without_known(text)
    if _CONTROLS.search(text) is None:
        return text
    return _CONTROLS.sub(_escape, _LINE_ENDS.sub("\n", _COLOURS.sub("", text)))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def fitted(text: str, columns: int) -> str:
    """Wrap the lines of a text that are longer than `columns`; indent continuation lines further.

    Words, including paths, are never broken. Lines of a command that end with a backslash are not wrapped.
    """
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if len(line) > columns and not line.endswith("\\"):
            text = line.lstrip()
            indent = line[: len(line) - len(text)]
            lines[i] = textwrap.fill(
                text,
                columns,
                initial_indent=indent,
                subsequent_indent=f"{indent}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


class SafeStream(io.TextIOWrapper):
    """Standard output or error of a process that writes only `printable` text."""

    python_s: TextIO
    """Python's original stream. It is kept because its deletion would close the file of both streams."""
    fits = False  # whether text is wrapped by `fitted`
    _in_line = False  # the last line is incomplete

    def write(self, text: str) -> int:
        text = printable(text)
        if self.fits:
            # A terminal of unknown size has 0 columns.
            if not self._in_line and (columns := os.get_terminal_size(self.fileno()).columns):
                text = fitted(text, columns)
            self._in_line = not text.endswith("\n") if text else self._in_line
        return super().write(text)

    def write_raw(self, text: str) -> None:
        """Write trusted text, which may contain control characters."""
        super().write(text)


def safe_stream(stream: TextIO, messages: bool = False) -> TextIO:
    """Return a replacement for Python's standard output or error; return any other stream unchanged.

    `messages`: the stream contains only messages, so their lines may be wrapped.
    """
    if type(stream) is not io.TextIOWrapper:
        return stream
    safe = SafeStream(
        stream.buffer,
        stream.encoding,
        # Used if the terminal's encoding lacks a character.
        errors="backslashreplace" if stream.errors == "backslashreplace" else "replace",
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    safe.python_s = stream
    safe.fits = messages and stream.isatty()
    return safe
