"""Classes that `autoconfigure` decorated, as a type checker sees them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def from_fields(cls: type[T], /, *args: Any, **kwargs: Any) -> T:
    """``cls.from_fields(…)``: the decorator adds it, which types can't express."""
    made: T = attrgetter("from_fields")(cls)(*args, **kwargs)
    return made
