"""``--json``: a command's figures on stdout as JSON, and all else that it prints on stderr.

A command whose parser has the option tells its figures; `mpillm.cli` writes them when the command has ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


class _Output:
    """What --json has asked for in this process."""

    stdout: TextIO | None = None
    """Where the figures go; None without --json."""
    descriptor: int | None = None
    """A copy of the descriptor 1, which processes that are started meanwhile must not write to."""
    figures: Any = None


_output = _Output()


def begin() -> None:
    """From now on, let stdout be stderr, also of processes that are started."""
    if _output.stdout is not None:
        return
    _output.figures = None  # of a command before this one in the same process
    sys.stdout.flush()
    _output.stdout, sys.stdout = sys.stdout, sys.stderr
    _output.descriptor = os.dup(1)
    os.dup2(2, 1)


def tell(figures: Any) -> None:
    """Say what a command has found; JSON can express it. The last call counts."""
    _output.figures = figures


def end() -> None:
    """Write the figures, if --json asked for them and there are any; stdout is stdout again."""
    stdout, descriptor, figures = _output.stdout, _output.descriptor, _output.figures
    _output.stdout = _output.descriptor = _output.figures = None
    if stdout is None or descriptor is None:
        return
    sys.stdout.flush()
    sys.stdout = stdout
    os.dup2(descriptor, 1)
    os.close(descriptor)
    if figures is not None:
        print(json.dumps(figures, indent=2, ensure_ascii=False), flush=True)
