"""Format figures in tables of several runs, for the terminal and for HTML reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run_names(count: int) -> list[str]:
    """Return names for compared runs: A, B, …"""
    return [chr(ord("A") + i) if i < 26 else f"run {i + 1}" for i in range(count)]


def cell(value: Any) -> str:
    """Return a figure of a point as text; "-" if it is unknown."""
    return "-" if value is None else figure(value, 4) if isinstance(value, float) else str(value)


def figure(value: float, digits: int) -> str:
    """Return a number rounded to `digits`, without an exponent for large numbers: 0.0072, 11,770."""
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def values_text(one: Mapping[str, Any]) -> str:
    """Return the option values of a point: ``max_batch_size=8 …``"""
    return " ".join(f"{name}={value}" for name, value in one["options"].items())


def value_text(cell: Mapping[str, Any] | None) -> str:
    """Return a figure of a run with its interval."""
    if cell is None:
        return "-"
    width = cell["half_width"]
    return figure(cell["value"], 4) + (f" ± {figure(width, 2)}" if width is not None else "")


def change_text(cell: Mapping[str, Any] | None) -> str:
    """Return the change of a figure against the first run, with its interval."""
    if cell is None or "change" not in cell:
        return "-"
    change, width = 100 * cell["change"], cell["change_half_width"]
    decimals = 1 if abs(change) < 100 else 0
    if width is None:
        return f"{change:+,.{decimals}f} %"
    return f"{change:+,.{decimals}f} ± {100 * width:,.{decimals}f} %{' *' if cell['differs'] else '  '}"
