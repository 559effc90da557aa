"""Log of the files that a rank is about to read."""

from __future__ import annotations

import logging
from pathlib import Path

from launch.logs import EVERY

READS = "reads %s"
"""Text of the log line."""
_log = logging.getLogger(__name__)


class ReadLog:
    """Logs the name of a file before it is read, once for consecutive reads.

    A read of a mapped file may end the process (SIGBUS) or never return, and Python cannot handle either.
    """

    def __init__(self) -> None:
        self._last: Path | None = None

    def note(self, file: Path) -> None:
        if file != self._last:
            self._last = file
            _log.info(READS, file, extra={EVERY: True})
