"""Wait for data on file descriptors of any number."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


_Source = TypeVar("_Source", bound="int | _HasDescriptor")


def readable(sources: Sequence[_Source], seconds: float) -> list[_Source]:
    """Wait up to `seconds`; return the sources that have data or are at their end, in their order.

    `poll` takes any descriptor, but rounds the time up to a millisecond, by which a request would be late.
    """
    seconds = max(0.0, seconds)
    try:
        return select.select(sources, [], [], seconds)[0]
    except ValueError:  # a descriptor above 1,023
        poll, by_fd = select.poll(), dict[int, _Source]()
    for source in sources:
        fd = source if isinstance(source, int) else source.fileno()
        by_fd[fd] = source
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(seconds * 1000)]
