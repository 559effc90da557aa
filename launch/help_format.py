"""Layout of --help: prose is wrapped, and example commands are wrapped in shell syntax."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import textwrap

from launch.command import wrapped

_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|\S)+""")  # of a command line, with its quotes


def terminal_columns() -> int:
    """Return the columns of the user's terminal, even if a pager gets the output; 80 without a terminal."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    for number in (1, 2, 0):
        with contextlib.suppress(OSError):
            return os.get_terminal_size(number).columns or 80
    return 80


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter for argparse. Indented lines of description and epilog are commands."""

    def __init__(self, prog: str) -> None:
        width = min(140, terminal_columns() - 2)
        super().__init__(prog, max_help_position=min(44, width // 3), width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            wrapped(_WORD.findall(line), width, "  ")
            if line.startswith("  ") and len(line) > width
            else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in text.splitlines()
        )
