"""The one exception for anything a person wrote wrong: an option, a file, a layout."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """Bad input, found before anything was loaded.

    The message names the field, the value, and what is allowed, and is printed as it is, without a traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
