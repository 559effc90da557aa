"""Names of files in a rank's log before it reads them: a read may end the process, or never return."""

from __future__ import annotations

import logging
from pathlib import Path

from launch.logs import EVERY

READS = "reads %s"
"""The text of the log's line, with a file that the rank is about to read."""
_log = logging.getLogger(__name__)


class ReadLog:
    """Names in the log each file that this process is about to read, once for several reads in a row.

    A read of a mapped file may end the process (SIGBUS) or never return, and Python can do nothing then.
    """

    def __init__(self) -> None:
        self._last: Path | None = None

    def note(self, file: Path) -> None:
        if file != self._last:
            self._last = file
            _log.info(READS, file, extra={EVERY: True})
