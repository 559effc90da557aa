"""Health check of a server."""

from __future__ import annotations

import threading
import time

from launch.bounded_http import ReplyError, page

_ANSWER_S = 5.0


class HealthCheck:
    """A health check in a separate thread, so that a silent server does not block the caller."""

    def __init__(self, url: str, before: HealthCheck | None = None) -> None:
        """`before`: the previous health check of this URL."""
        self.answered: bool | None = None  # None: the check is under way
        self.problem: str = before.problem if before else ""  # of this check; until its end, of `before`
        self.ended = self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()

    def _run(self, url: str) -> None:
        self.problem = _problem(url)
        self.ended, self.answered = time.monotonic(), not self.problem

    def wait(self, until: float) -> None:
        """Wait for the check's end, at most until `until` (time.monotonic())."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def is_old(self, age_s: float) -> bool:
        """Return whether the check began more than `age_s` ago."""
        return time.monotonic() - self._began > age_s

    def is_late(self, now: float) -> bool:
        """Return whether the check has failed, or has no answer after the time that an answer may take."""
        return self.answered is False or (self.answered is None and now - self._began > _ANSWER_S)


def _problem(url: str) -> str:
    """Request a server's health; return the problem, or ""."""
    try:
        status, _ = page(url, _ANSWER_S)
    except ReplyError as error:
        return str(error)
    return "" if status == 200 else f"HTTP {status}"
