"""Counts of speculative decoding: their names in the statistics of cores and servers, and figures of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

DRAFTED, ACCEPTED, VERIFICATIONS = "drafted_tokens", "accepted_tokens", "verifications"
_OF_SERVERS = {DRAFTED: "server_drafted_tokens", ACCEPTED: "server_accepted_guesses"}
_MAX_POSITIONS = 64  # more than any server drafts


def accepted_at(position: int) -> str:
    """Return the name of the count of accepted draft tokens at a position of the draft, from 0."""
    return f"accepted_at_{position}"


class DraftCounts(NamedTuple):
    """Counts of a test. A verification is a step of one request with draft tokens."""

    drafted: float
    accepted: float
    verifications: float
    accepted_at: tuple[float, ...] = ()  # by position of the draft; () if unknown

    def figures(self) -> dict[str, Any]:
        """Return figures for `result.json`.

        `acceptance_length`: mean tokens of a verification, including the model's own token.
        `acceptance_by_position`: the share of verifications that accepted the draft token there.
        """
        if not self.verifications:
            return {}
        figures: dict[str, Any] = {"acceptance_length": round(1 + self.accepted / self.verifications, 4)}
        if self.accepted_at:
            figures["acceptance_by_position"] = [round(n / self.verifications, 4) for n in self.accepted_at]
        return figures


def draft_counts(instances: Iterable[Mapping[str, Any]]) -> DraftCounts:
    """Return the sums over instances: of embedded engines, and of servers as their clients read them."""
    instances = list(instances)

    def total(name: str) -> float:
        names = name, _OF_SERVERS.get(name, f"server_{name}")
        return float(sum(one.get(name) or 0 for one in instances for name in names))

    names = itertools.takewhile(
        lambda name: any(name in one or f"server_{name}" in one for one in instances),
        map(accepted_at, range(_MAX_POSITIONS)),
    )
    return DraftCounts(total(DRAFTED), total(ACCEPTED), total(VERIFICATIONS), tuple(map(total, names)))
