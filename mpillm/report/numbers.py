"""Numbers as the console writes them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return 42 s, 12 min, 3.4 h."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
