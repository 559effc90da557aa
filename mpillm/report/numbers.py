"""Numbers as the console and HTML reports write them."""

from __future__ import annotations


def milliseconds(value: float) -> str:
    """Return a time that fits its size: 850 µs, 12.3 ms, 4.5 s."""
    if value >= 1000:
        return f"{value / 1000:.3g} s" if value < 100_000 else f"{value / 1000:.0f} s"
    return f"{value:.3g} ms" if value >= 1 else f"{1000 * value:.3g} µs"


def rate_text(value: float) -> str:
    """Return a rate in at least four digits, never with an exponent: 0.05, 12.34, 7,131, 19,250."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(number: float) -> str:
    """Return a number in few characters: 0.05, 1.2, 345, 2,802, 12k, 2.941M."""
    if abs(number) >= 999_950:
        return f"{number / 1e6:.4g}M"
    if abs(number) >= 10_000:
        return f"{number / 1000:.4g}k"
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def percent(share: float) -> str:
    """Return a change in percent: +0.05, -12.3, +8,224."""
    value = 100 * share
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.3g}"


def duration(seconds: float) -> str:
    """Return 42 s, 12 min, 3.4 h."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
