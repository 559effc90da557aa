"""The exception for wrong input: an option, a file, a layout."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_HEAD, _TAIL = 2000, 1000  # characters of a message: a path may have 4,096, and the reason stands after it


class ConfigError(ValueError):
    """Bad input, found before anything was loaded.

    The message names the field, the value and what is allowed; it is printed without a traceback. It is a
    ValueError, as nv-mitten's errors are: our code that catches ValueError lets a ConfigError pass first.
    A message may quote text from outside, of any length; a long message is shortened in its middle.
    `about`: the names of the options that are wrong, for whoever knows where each was set.
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
    """A ConfigError in this block, or in the function that this decorates, is about these options, too."""
    try:
        yield
    except ConfigError as error:
        error.about = tuple(dict.fromkeys((*error.about, *options)))
        raise


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to `name`.

    Empty if no name's similarity reaches `cutoff` (0 to 1).
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
