"""Figures of speculative decoding in `result.json`, and their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpillm.cores.draft_counts import draft_counts


def speculation_figures(
    instances: Sequence[Mapping[str, Any]], n_requests: int, set_length: float | None
) -> dict[str, Any]:
    """Return the entry `speculation` of `result.json`; {} without draft tokens.

    Args:
        instances: Entries of `per_instance`.
        n_requests: Requests of the test, cancelled ones included.
        set_length: --acceptance_length.
    """
    counts = draft_counts(instances)
    figures: dict[str, Any] = {} if set_length is None else {"set_acceptance_length": set_length}
    if counts.verifications:
        figures |= {"verifications": round(counts.verifications), "accepted_tokens": round(counts.accepted)}
    if counts.verifications and n_requests:
        figures["accepted_tokens_per_request"] = round(counts.accepted / n_requests, 4)
    if counts.verifications and counts.drafted:
        figures["drafted_tokens"] = round(counts.drafted)
    return figures | counts.figures()


def fixed_acceptance(length: float) -> str:
    """Return that the acceptance length was set, in words."""
    return f"the acceptance of draft tokens is set (--acceptance_length {length:g}), not measured"


def acceptance_doubt(result: Mapping[str, Any]) -> str:
    """Return that a test's figures depend on a set acceptance length; "" if they do not."""
    length = _speculation(result).get("set_acceptance_length")
    if length is None:
        return ""
    return f"{fixed_acceptance(length)}: the tokens are not the model's, and MLPerf does not allow it"


def speculation_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the acceptance of a test, as rows for the summary and the HTML report."""
    of = _speculation(result)
    if (mean := of.get("acceptance_length")) is None:
        return []
    length = of.get("set_acceptance_length")
    text = f"{mean:.2f} tokens per verification" + ("" if length is None else f", set to {length:g}")
    rows = [("acceptance length", text)]
    if shares := [f"{100 * share:.0f} %" for share in of.get("acceptance_by_position", ())]:
        rows.append(("  by draft position", "  ".join(shares)))
    if (each := of.get("accepted_tokens_per_request")) is not None:
        rows.append(("  per request", f"{each:,.1f} accepted draft tokens"))
    return rows


def _speculation(result: Mapping[str, Any]) -> Mapping[str, Any]:
    of = result.get("speculation")  # a file from outside may contain anything
    return of if isinstance(of, Mapping) else {}
