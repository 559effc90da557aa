"""Count the bytes of weights that this process has read so far, for progress reports."""

from __future__ import annotations

_n_bytes = 0


def note(n_bytes: int) -> None:
    """Add bytes of weights in the engine's format."""
    global _n_bytes
    _n_bytes += n_bytes


def count() -> int:
    """Return the bytes read so far."""
    return _n_bytes
