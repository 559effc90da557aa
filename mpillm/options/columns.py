"""Text for terminals of 80 columns: tables, and prose with a hanging indent."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

WIDTH = 80
INDENT = "  "  # of most lines


def indented(head: str, text: str, width: int = WIDTH) -> str:
    """Return `head` and `text`, wrapped with a hanging indent below the beginning of the text.

    Words and paths are never broken.
    """
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) or head.rstrip()


def prose(text: str, head: str = INDENT) -> str:
    """Do as `indented` on a terminal; elsewhere return one line, which can be searched.

    A text of several lines, such as a command line, keeps its lines.
    """
    if "\n" in text:
        return textwrap.indent(text, head)
    return indented(head, text) if sys.stdout.isatty() else f"{head}{text}".rstrip()


def table(rows: Sequence[Sequence[str]], left: int = 1, names: int = 1, width: int = WIDTH) -> str:
    """Return rows as aligned lines: the first `left` columns to the left, the others to the right.

    A table that is wider than `width` continues below itself, with its first `names` columns again.
    """
    # A cell has one line, even if its text has several.
    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    blocks, start = [list(range(names))], sum(widths[:names]) + 2 * (names - 1)
    used = start
    for i in range(names, len(widths)):
        if used + 2 + widths[i] > width and len(blocks[-1]) > names:
            blocks.append(list(range(names)))
            used = start
        blocks[-1].append(i)
        used += 2 + widths[i]

    def line(row: Sequence[str], block: Sequence[int]) -> str:
        cells = (row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i]) for i in block)
        return "  ".join(cells).rstrip()

    return "\n\n".join("\n".join(line(row, block) for row in rows) for block in blocks)
