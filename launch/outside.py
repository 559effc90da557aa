"""Text that comes from outside: servers of others, clients, files, models.

It may hold what a terminal obeys (escape sequences, text that runs backwards), several lines, or no end.
"""

from __future__ import annotations

_MOST = 200  # characters of a line
_KEPT = "\n\t"


def one_line(text: str | bytes, most: int = _MOST) -> str:
    """Return text from outside as a part of a line: what can't be printed escaped, and cut to `most`
    characters."""
    if isinstance(text, bytes):
        text = text[: 4 * most + 4].decode(errors="backslashreplace")
    shown = _escaped(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 2]} …"


def printable(text: str) -> str:
    """Return text with what can't be printed escaped, but for the ends of lines and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _escaped(c) for c in text)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
