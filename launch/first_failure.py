"""Search for the lines of a program's log that describe its failure. They may be far above the log's end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from launch.safe_text import one_line

_MAX_BYTES = 16 << 20  # of a log that are searched
_MAX_SEARCHED = 4096  # characters of a line
_MAX_PRINTED = 400
_MAX_LINES = 3
# Levels of Python's logging and of glog, in which tritonserver logs, and exceptions without a level.
_QUIET = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b|^[IW]\d{4} |^\$ ")
_EXCEPTION = re.compile(r"\b\w{0,60}(?:Error|Exception): ")
_FAILS = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|^[EF]\d{4} |\b(?:error|fatal): ")
_FRAMES = re.compile(r"\] {2,}\S|Traceback \(most recent|\^\^\^")  # lines of a traceback, each with a level


def failing_lines(log: Path, begin: int = 0) -> list[str]:
    """Return the first lines of a log that name failures, up to the first exception; [] if there are none.

    `begin`: bytes at the start of the log that are skipped.
    """
    try:
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return []
    return _failing(text.splitlines())


def _failing(lines: Iterable[str]) -> list[str]:
    failures: dict[str, None] = {}
    for line in lines:
        part = line[:_MAX_SEARCHED].strip()
        if _QUIET.search(part) or _FRAMES.search(part):
            continue
        is_exception = _EXCEPTION.search(part) is not None
        if is_exception or _FAILS.search(part):
            failures[one_line(part, _MAX_PRINTED)] = None
        if is_exception or len(failures) == _MAX_LINES:
            break
    return [*failures]
