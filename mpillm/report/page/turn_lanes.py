"""Section of the HTML report: a row for each conversation, with a bar for each of its requests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mpillm.report.numbers import milliseconds
from mpillm.report.page.document import escape
from mpillm.report.page.run_analysis import Facts
from mpillm.report.request_log import read_requests
from mpillm.report.run_directory import REQUESTS

_MAX_ROWS = 40
_MAX_BARS = 1200  # of all rows together: 300 kB of the HTML report
_WIDTH = 1000  # units of a row
_MIN_WIDTH = 0.8  # of a bar


def turn_lanes(facts: Facts) -> str:
    """Return the section; "" if the test had no conversations, or no answer."""
    if not facts.run.result.get("conversations") or not (facts.run.path / REQUESTS).exists():
        return ""
    rows = read_requests(facts.run.path)
    rows = rows[rows["session"] > 0]
    if not len(rows):
        return ""
    subset, note = _first_conversations(rows)
    start, end = float(subset["issued"].min()), float((subset["issued"] + subset["latency"]).max())
    lanes = "".join(_lanes(subset, int(rows["session"].min()), start, max(end - start, 1e-9)))
    kinds = ["until the first token", "from the first token to the end"]
    key = "".join(f'<li><i class="k{kind}"></i>{text}</li>' for kind, text in enumerate(kinds))
    key += '<li><i class="c5"></i>failed</li>' if subset["error"].any() else ""
    return (
        '<section><h2>Turns of conversations</h2><p class="note">A row is a conversation, a bar is a request.'
        f" Point at a bar to read its figures. {note}</p>"
        f'<ul class="key">{key}</ul>{lanes}'
        f'<p class="turns note"><span></span><span class="ends"><span>{_seconds(start)}</span>'
        f"<span>{_seconds(end)}</span></span></p></section>"
    )


def _first_conversations(rows: NDArray[np.void]) -> tuple[NDArray[np.void], str]:
    """Return the records of the conversations of the page, and a note on the others.

    These are the first ones, because a row of the whole test would show nothing of a short conversation.
    """
    sessions, counts = np.unique(rows["session"], return_counts=True)  # they count in order of start
    n = min(_MAX_ROWS, max(1, int(np.searchsorted(counts.cumsum(), _MAX_BARS, "right"))))
    subset = rows[np.isin(rows["session"], sessions[:n])]
    notes = []
    if n < len(sessions):
        notes.append(f"These are the first {n:,} of {len(sessions):,} conversations.")
    if len(subset) > _MAX_BARS:
        notes.append(f"These are the first {_MAX_BARS:,} of {len(subset):,} requests.")
    if notes:
        notes.append("requests.bin has all requests, and --requests_file writes a table of them.")
    return subset[:_MAX_BARS], " ".join(notes)


def _lanes(rows: NDArray[np.void], first_session: int, start: float, span: float) -> Iterator[str]:
    for session in np.unique(rows["session"]).tolist():
        of = rows["session"] == session
        bars = "".join(bar for row in rows[of] for bar in _bar(row, start, span))
        number, n = session - first_session + 1, int(of.sum())
        box = f'viewBox="0 0 {_WIDTH} 1" preserveAspectRatio="none"'
        yield (
            f'<div class="turns"><small>{number:,}</small>'
            f'<svg {box} role="img" aria-label="Conversation {number:,}, {n:,} requests">'
            f'<rect class="idle" width="{_WIDTH}" height="1"/>{bars}</svg></div>'
        )


def _bar(row: np.void, start: float, span: float) -> Iterator[str]:
    """Yield the bar of a request: a part until its first token, and a part after this."""
    issued, ttft, latency = (float(row[name]) for name in ("issued", "ttft", "latency"))
    scale = _WIDTH / span
    x, width = (issued - start) * scale, max(_MIN_WIDTH, latency * scale)
    title = f"<title>{escape(_words(row, ttft, latency))}</title>"
    if row["error"]:
        yield f'<rect class="c5" x="{x:.1f}" width="{width:.1f}" height="1">{title}</rect>'
        return
    until = width if math.isnan(ttft) else min(width, ttft * scale)
    yield f'<g>{title}<rect class="k0" x="{x:.1f}" width="{until:.1f}" height="1"/>'
    if width > until:
        yield f'<rect class="k1" x="{x + until:.1f}" width="{width - until:.1f}" height="1"/>'
    yield "</g>"


def _words(row: np.void, ttft: float, latency: float) -> str:
    """Return a request's figures in words. Turns count from 0, as in --requests_file."""
    parts = [
        f"turn {row['turn']}",
        f"at {_seconds(float(row['issued']))}",
        f"took {milliseconds(1e3 * latency)}",
    ]
    if not math.isnan(ttft):
        parts.append(f"first token after {milliseconds(1e3 * ttft)}")
    if row["prompt"] >= 0:
        cached = f", {row['cached']:,} of them cached" if row["cached"] >= 0 else ""
        parts.append(f"{row['prompt']:,} prompt tokens{cached}")
    parts.append("failed" if row["error"] else f"{row['tokens']:,} output tokens")
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.1f} s"
