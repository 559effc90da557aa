"""``--json``: a command's figures on stdout as JSON, and all its other output on stderr.

A command whose parser has the option calls `set_figures`; `mpillm.cli` writes them when the command has
ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


class _Output:
    """The state of --json in this process."""

    stdout: TextIO | None = None
    """The stream for the figures; None without --json."""
    descriptor: int | None = None
    """A copy of descriptor 1, which `begin` redirects: child processes must not write to stdout."""
    figures: Any = None


_output = _Output()


def begin() -> None:
    """Redirect stdout to stderr from now on, including that of child processes."""
    if _output.stdout is not None:
        return
    _output.figures = None  # an earlier command in the same process may have set them
    sys.stdout.flush()
    _output.stdout, sys.stdout = sys.stdout, sys.stderr
    _output.descriptor = os.dup(1)
    os.dup2(2, 1)


def set_figures(figures: Any) -> None:
    """Set the figures of the command, JSON values. The last call counts."""
    _output.figures = figures


def end() -> None:
    """Write the figures, if --json and figures are set, and restore stdout."""
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
