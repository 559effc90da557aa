"""The exception for wrong input: an option, a file, a layout."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_HEAD, _TAIL = 2000, 1000  # characters of a message that are kept. A path before the reason may have 4,096


class ConfigError(ValueError):
    """Wrong input that is detected before loading.

    The message contains the field, the value and the allowed values. It is printed without a traceback. The
    class is a ValueError, like nv-mitten's errors. So code that catches ValueError must re-raise ConfigError
    first. A message may quote external text of any length, so a long message is shortened in its middle.
    `about`: names of the wrong options; callers add the source of each option's value.
    """

    def __init__(self, message: str = "", about: Iterable[str] = ()) -> None:
        super().__init__(_shortened(message))
        self.about = tuple(about)


def _shortened(message: str) -> str:
    left_out = len(message) - _HEAD - _TAIL
    if left_out <= 0:
        return message
    return f"{message[:_HEAD]} … ({left_out} characters left out) … {message[-_TAIL:]}"


@contextmanager
def about(*options: str) -> Iterator[None]:
    """Add these options to `about` of a ConfigError from the `with` block, or from the decorated function."""
    try:
        yield
    except ConfigError as error:
        error.about = tuple(dict.fromkeys((*error.about, *options)))
        raise


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to `name`.

    The text is empty if no name's similarity reaches `cutoff` (0 to 1).
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
