"""Failure messages of mpillm's commands: their first words, and the search for them in a program's output."""

from __future__ import annotations

import itertools
import textwrap

MESSAGE = "mpillm: "
"""Beginning of each message."""

FAILED = f"{MESSAGE}failed "
"""Beginning of the message of a failed run. The phase follows, and the cause in indented lines below."""

_NOTE = f"{MESSAGE}note: "


def cause_in(output: str) -> str:
    """Return the cause in mpillm's last message in a program's output; "" without a message.

    MPI libraries print their own banners before and after the message.
    """
    lines = output.splitlines()
    own = [i for i, line in enumerate(lines) if line.startswith(MESSAGE) and not line.startswith(_NOTE)]
    if failed := [i for i in own if lines[i].startswith(FAILED)]:
        indented = itertools.takewhile(lambda line: line.startswith("  "), lines[failed[-1] + 1 :])
        return textwrap.dedent("\n".join(indented))
    return lines[own[-1]].removeprefix(MESSAGE) if own else ""


def why_ended(code: int, output: str) -> str:
    """Return the exit code of a program with the cause that its output names, in one line."""
    cause = cause_in(output)
    return f"exit code {code}: {cause.splitlines()[0]}" if cause else f"exit code {code}"
