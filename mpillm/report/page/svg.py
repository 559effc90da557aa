"""Pictures that need no JavaScript: lines, and lanes of ranks."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpillm.report.page.charts import Chart

_W, _H, _LEFT, _BOTTOM, _TOP = 600, 180, 48, 22, 8
_ROW, _GAP = 22, 6
_NEAR = 12  # points whose numbers would lie over each other


def lines(chart: Chart) -> str:
    """Return a chart as an SVG element."""
    points = [(x, y) for _, ys, _ in chart.lines for x, y in zip(chart.x, ys, strict=True) if y is not None]
    if not points:
        return ""
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    if chart.names is not None:  # room for the points at the ends
        x0, x1 = around(x0, x1)
    if chart.limit:
        x1 = max(x1, chart.limit[1] * 1.02)
    y1 = max(max(y for _, y in points), 1e-9) * (1.1 if chart.names else 1)
    width, height = _W - _LEFT - 8, _H - _BOTTOM - _TOP

    def place(x: float, y: float) -> str:
        return f"{_LEFT + (x - x0) / ((x1 - x0) or 1) * width:.1f},{_TOP + (1 - y / y1) * height:.1f}"

    parts = [
        f'<line class="axis" x1="{_LEFT}" y1="{_H - _BOTTOM}" x2="{_W - 8}" y2="{_H - _BOTTOM}"/>',
        f'<line class="grid" x1="{_LEFT}" y1="{_TOP}" x2="{_W - 8}" y2="{_TOP}"/>',
        f'<text x="{_LEFT - 4}" y="{_TOP + 8}" text-anchor="end">{short(y1)}</text>',
        f'<text x="{_LEFT - 4}" y="{_H - _BOTTOM}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{_H - 6}">{short(x0)}</text>',
        f'<text x="{_W - 8}" y="{_H - 6}" text-anchor="end">{short(x1)} {html.escape(chart.x_label)}</text>',
    ]
    if chart.limit:
        at = place(chart.limit[1], 0).partition(",")[0]
        parts.append(f'<line class="limit" x1="{at}" y1="{_TOP}" x2="{at}" y2="{_H - _BOTTOM}"/>')
    for i, (_, ys, colour) in enumerate(chart.lines):
        told = [(j, place(x, y)) for j, (x, y) in enumerate(zip(chart.x, ys, strict=True)) if y is not None]
        if chart.names is None or i == 0:
            joined = " ".join(at for _, at in told)
            parts.append(f'<polyline class="c{colour % 8}" points="{joined}"/>')
    if chart.names is not None:
        parts += _points(chart, place)
    keys = "".join(
        f'<li><i class="c{colour % 8}"></i>{html.escape(label)}</li>' for label, _, colour in chart.lines
    )
    key = f'<ul class="key">{keys}</ul>' if len(chart.lines) > 1 else ""
    return (
        f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{html.escape(chart.title)}">'
        f"{''.join(parts)}</svg>{key}"
    )


def around(low: float, high: float) -> tuple[float, float]:
    """Return a range with some room at both ends of `low` to `high`, both positive."""
    room = 0.08 * (high - low) or 0.2 * high
    return max(0.0, low - room), high + room


def _points(chart: Chart, place: Callable[[float, float], str]) -> Iterator[str]:
    """Yield the points of a chart, with their numbers, the first words of their names.

    Where points lie over each other, one text has all their numbers.
    """
    texts: list[tuple[float, float, str]] = []
    for _, ys, colour in chart.lines:
        for x, y, name in zip(chart.x, ys, chart.names or (), strict=True):
            if y is None:
                continue
            across, down = map(float, place(x, y).split(","))
            yield (
                f'<circle class="c{colour % 8}" cx="{across}" cy="{down}" r="4">'
                f"<title>{html.escape(name)}</title></circle>"
            )
            number = name.partition(" ")[0]
            for k, (a, d, text) in enumerate(texts):
                if abs(a - across) < _NEAR and abs(d - down) < _NEAR:
                    texts[k] = (a, d, f"{text}, {number}")
                    break
            else:
                texts.append((across, down, number))
    for across, down, text in texts:
        yield f'<text x="{across}" y="{down}" dx="7" dy="-5">{html.escape(text)}</text>'


def lanes(rows: Sequence[dict[str, Any]], start: float, end: float) -> str:
    """Return the lanes of ranks as an SVG element. `rows`: as page.js gets them."""
    width, left = 1000, 130
    scale = (width - left) / ((end - start) or 1)
    parts = []
    for i, row in enumerate(rows):
        y = i * (_ROW + _GAP)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(row["label"])}</text>')
        parts.append(f'<rect class="idle" x="{left}" y="{y}" width="{width - left}" height="{_ROW}"/>')
        for lane, top, height in (("steps", 0, _ROW - 6), ("handoffs", _ROW - 5, 5)):
            spans = row[lane]
            for a, b, kind in zip(spans["start"], spans["end"], spans["kind"], strict=True):
                x = left + (max(a, start) - start) * scale
                w = max(0.6, (min(b, end) - max(a, start)) * scale)
                parts.append(
                    f'<rect class="k{kind}" x="{x:.1f}" y="{y + top}" width="{w:.1f}" height="{height}"/>'
                )
    height = len(rows) * (_ROW + _GAP) + 16
    parts.append(f'<text x="{left}" y="{height - 2}">{start:.1f} s</text>')
    parts.append(f'<text x="{width}" y="{height - 2}" text-anchor="end">{end:.1f} s</text>')
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="What each rank did">'
    return f"{head}{''.join(parts)}</svg>"


def strip(shares: Sequence[float]) -> str:
    """Return how busy an instance was over the test: a bar of pieces, as high as each was busy."""
    bars = "".join(
        f'<rect x="{i}" y="{1 - share:.3f}" width="1.02" height="{share:.3f}"/>'
        for i, share in enumerate(shares)
        if share > 0.004
    )
    box = f'viewBox="0 0 {len(shares)} 1" preserveAspectRatio="none"'
    return f'<svg class="strip" {box} aria-hidden="true">{bars}</svg>'


def short(number: float) -> str:
    """Return a number in few characters: 0.05, 1.2, 345, 12k."""
    if abs(number) >= 10_000:
        return f"{number / 1000:.0f}k"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
