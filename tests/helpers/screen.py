"""What a terminal shows of a text: a small one of its own, with the sequences that our bars use."""

from __future__ import annotations

import re

_PIECES = re.compile(r"\x1b\[(\??\d*)([A-Za-z])|\x1b[_\]].*?(?:\x1b\\|\x07)|[^\x1b]", re.DOTALL)


def screen(text: str, width: int = 80) -> list[str]:
    """Return the lines that a terminal of any height shows after `text`, without empty ones.

    Fails on a sequence that it doesn't know.
    """
    rows: list[list[str]] = [[]]
    row = column = 0
    wraps = True
    at = 0
    while at < len(text):
        piece = _PIECES.match(text, at)
        assert piece is not None, f"not understood: {text[at : at + 20]!r}"
        at = piece.end()
        number, letter = piece[1], piece[2]
        if letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            assert number == "2"
            rows[row] = []
        elif letter == "J":
            assert not number
            rows[row] = rows[row][:column]
            del rows[row + 1 :]
        elif letter in ("h", "l"):
            assert number == "?7"
            wraps = letter == "h"
        elif letter is not None:
            raise AssertionError(f"not understood: {piece[0]!r}")
        elif piece[0] == "\r":
            column = 0
        elif piece[0] == "\n":
            row, column = row + 1, 0
        elif len(piece[0]) == 1:
            if column == width:
                row, column = (row + 1, 0) if wraps else (row, width - 1)
            rows += [[] for _ in range(row + 1 - len(rows))]
            cells = rows[row]
            cells += " " * (column + 1 - len(cells))
            cells[column] = piece[0]
            column += 1
        rows += [[] for _ in range(row + 1 - len(rows))]
    return [line for cells in rows if (line := "".join(cells).rstrip())]
