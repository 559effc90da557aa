"""Group the doubts of several runs: one line for each kind of doubt, with its runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d[\d.,]*")
_MAX_NAMES = 4  # of runs in a line


def kind_of(doubt: str) -> str:
    """Return a doubt without its numbers, which differ from run to run."""
    return _NUMBER.sub("#", doubt)


def grouped_doubts(doubts: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each kind of doubt. `doubts`: pairs of a run's name and a doubt."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, doubt in doubts:
        groups.setdefault(kind_of(doubt), []).append((name, doubt))
    return [_line(group) for group in groups.values()]


def _line(group: list[tuple[str, str]]) -> str:
    names = [*dict.fromkeys(name for name, _ in group)]
    doubt = group[0][1]
    if len(names) == 1:
        return f"{names[0]}: {doubt}"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    example = "" if len({text for _, text in group}) == 1 else "for example, "
    return f"{len(names)} runs ({', '.join(names[:_MAX_NAMES])}{more}): {example}{doubt}"
