"""Logs of a process. External text in a record cannot imitate other records or fill the disk."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
from types import TracebackType
from typing import TextIO

from launch.safe_text import printable

_MAX_CHARACTERS = 1 << 14  # of a record
EVERY = "every"
"""Attribute of records that are never omitted, because the code that makes them limits their number."""
_MAX_RECORDS, _PER_S = 50, 10.0  # from one place in the code, within so many seconds


class _RecordFormatter(logging.Formatter):
    """Formatter that indents all lines of a record except the first, so that no line imitates a record."""

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
        if len(text) <= _MAX_CHARACTERS:
            return text
        return f"{text[: _MAX_CHARACTERS // 2]} … ({len(text)} characters) … {text[-_MAX_CHARACTERS // 2 :]}"


class _RateLimit(logging.Filter):
    """Filter that limits the number of records from each place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self._sites: dict[tuple[str, int], _CallSite] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, EVERY, False):
            return True
        site = self._sites.setdefault((record.pathname, record.lineno), _CallSite(record.created))
        if not 0 <= record.created - site.since < _PER_S:
            site.since, site.n = record.created, 0
        site.n += 1
        if site.n > _MAX_RECORDS:
            site.left_out += 1
            return False
        if site.left_out:
            record.left_out = site.left_out
            site.left_out = 0
        return True


class _CallSite:
    def __init__(self, since: float) -> None:
        self.since = since  # time.time()
        self.n = 0  # records since `since`
        self.left_out = 0  # omitted records that are not yet reported


class _LogStream(logging.StreamHandler[TextIO]):
    """Handler that reports a failed write once, in one line. The default prints a stack for each record."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported and self.stream is not sys.stderr:
            self._reported = True
            with contextlib.suppress(OSError):  # stderr may be on the same disk; nothing else can report it
                print(f"{self.stream.name} can't be written: {error.strerror}", file=sys.stderr, flush=True)


def log_to(
    stream: TextIO, form: str, times: str | None = None, level: int = logging.INFO, *, force: bool = False
) -> None:
    """Send all logging of this process to a stream. `force`: replace existing handlers."""
    logging.basicConfig(level=level, handlers=[log_handler(stream, form, times)], force=force)


def log_handler(stream: TextIO, form: str, times: str | None = None) -> logging.Handler:
    """Return a handler that writes records to a stream. `form`, `times`: as for `logging.Formatter`."""
    handler = _LogStream(stream)
    handler.setFormatter(_RecordFormatter(form, times))
    handler.addFilter(_RateLimit())
    return handler
