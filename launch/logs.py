"""Logs of a process. External text in a record cannot imitate other records or fill the disk."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
from types import TracebackType
from typing import TextIO

from launch.outside import printable

_MOST = 1 << 14  # characters of a record
EVERY = "every"
"""An attribute of records that are never left out, because their number is limited where they are made."""
_RECORDS, _PER_S = 50, 10.0  # from one place in the code: so many in so many seconds


class _Form(logging.Formatter):
    """Formatter that indents the further lines of a record, so that none of them looks like a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message).replace("\n", "\n    ")
        if left_out := getattr(record, "left_out", 0):
            record.message += f" (before it {left_out} of these were left out)"
        return super().formatMessage(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return textwrap.indent(super().formatException(ei), "    ")

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        if len(text) <= _MOST:
            return text
        return f"{text[: _MOST // 2]} … ({len(text)} characters) … {text[-_MOST // 2 :]}"


class _Sparing(logging.Filter):
    """Filter that limits the records from each place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, EVERY, False):
            return True
        place = self._places.setdefault((record.pathname, record.lineno), _Place(record.created))
        if not 0 <= record.created - place.since < _PER_S:
            place.since, place.n = record.created, 0
        place.n += 1
        if place.n > _RECORDS:
            place.left_out += 1
            return False
        if place.left_out:
            record.left_out = place.left_out
            place.left_out = 0
        return True


class _Place:
    def __init__(self, since: float) -> None:
        self.since = since  # time.time()
        self.n = 0  # records since then
        self.left_out = 0  # and not told of


class _Stream(logging.StreamHandler[TextIO]):
    """Handler that reports a failed write once, in one line. The default prints a stack for each record."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported and self.stream is not sys.stderr:
            self._reported = True
            with contextlib.suppress(OSError):  # stderr may be on the same disk, and nothing is left to tell
                print(f"{self.stream.name} can't be written: {error.strerror}", file=sys.stderr, flush=True)


def log_to(
    stream: TextIO, form: str, times: str | None = None, level: int = logging.INFO, *, force: bool = False
) -> None:
    """Send all logging of this process to a stream.

    `form`, `times`: as for `logging.Formatter`. `force`: also if it goes somewhere already.
    """
    handler = _Stream(stream)
    handler.setFormatter(_Form(form, times))
    handler.addFilter(_Sparing())
    logging.basicConfig(level=level, handlers=[handler], force=force)
