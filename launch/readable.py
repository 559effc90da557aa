"""Wait for data on file descriptors of any number: `select` refuses those above 1,023."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


_Source = TypeVar("_Source", bound="int | _HasDescriptor")


def readable(sources: Sequence[_Source], seconds: float) -> list[_Source]:
    """Wait up to `seconds`; return the sources that have data or are at their end, in their order."""
    poll, by_fd = select.poll(), dict[int, _Source]()
    for source in sources:
        fd = source if isinstance(source, int) else source.fileno()
        by_fd[fd] = source
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(0.0, seconds) * 1000)]
