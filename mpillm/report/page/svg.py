"""Pictures that need no JavaScript: lines, and lanes of ranks."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from launch.safe_text import whole_number
from mpillm.report.numbers import milliseconds, short
from mpillm.report.page.charts import Chart

_WIDE, _NARROW = (800, 320), (400, 200)  # for the width of a page; for a third of it, or a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 36
_ROW, _GAP = 22, 6
_POINT = 4  # radius
_LABEL_HEIGHT = 12  # texts that are closer would overlap
_LETTER, _WIDE_LETTER = 7, 11  # widths of letters; those of a wide picture are larger, for a phone
_MAX_TICKS = 6
_MARGIN = 0.05  # at the ends of an axis of latencies, as a share of its values
_FEW = 5  # up to this count, an axis has a tick for each count
_MAX_LIMIT = 1.5  # times the largest value: a limit that lies further away would leave the chart blank
_LOG_FROM = 20  # a y axis is logarithmic if its largest value is so many times the smallest


def lines(chart: Chart, wide: bool = False) -> str:
    """Return a chart as an SVG element."""
    points = [(x, y) for _, ys, _ in chart.lines for x, y in zip(chart.x, ys, strict=True) if y is not None]
    if not points:
        return ""
    width, height = _WIDE if wide else _NARROW
    right, bottom = width - _RIGHT, height - _BOTTOM
    across = _across(chart, [x for x, _ in points])
    up = _up(chart, [y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + across.share(x) * (right - _LEFT), bottom - up.share(y) * (bottom - _TOP)

    parts = []
    for y in up.ticks:
        at = place(across.low, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in across.ticks:
        at = place(x, up.low)[0]
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        text = milliseconds(x) if chart.is_cdf else short(x)
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    name = html.escape(chart.x_axis)
    parts.append(f'<text class="name" x="{middle}" y="{height - 5}" text-anchor="middle">{name}</text>')
    if chart.unit:
        turned = f'transform="rotate(-90 12 {(_TOP + bottom) / 2})"'
        name = html.escape(chart.unit) + (", log scale" if up.log else "")
        parts.append(
            f'<text class="name" x="12" y="{(_TOP + bottom) / 2}" {turned} text-anchor="middle">{name}</text>'
        )
    for i, (label, x) in enumerate(chart.marks):
        at = place(x, up.low)[0]
        end = ' text-anchor="end"' if at > middle else ""
        parts.append(f'<line class="mark" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(
            f'<text class="said" x="{at + (-4 if end else 4):.1f}" y="{bottom - 8 - 15 * i}"{end}>'
            f"{html.escape(label)}</text>"
        )
    if chart.limit:
        at = place(chart.limit[1], up.low)[0]
        parts.append(f'<line class="limit" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>')
    if chart.y_limit and chart.y_limit[1] <= up.high:
        at = place(across.low, chart.y_limit[1])[1]
        parts.append(f'<line class="limit" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
    for i, (_, ys, colour) in enumerate(chart.lines):
        points = [place(x, y) for x, y in zip(chart.x, ys, strict=True) if y is not None]
        if chart.names is None or i < chart.joined:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="c{colour % 8}" points="{joined}"/>')
    if chart.names is not None:
        parts += _points(chart, place, _WIDE_LETTER if wide else _LETTER, width)
    keys = "".join(
        f'<li><i class="c{colour % 8}"></i>{html.escape(label)}</li>' for label, _, colour in chart.lines
    )
    key = f'<ul class="key">{keys}</ul>' if len(chart.lines) > 1 else ""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(chart.title)}">'
        f"{''.join(parts)}</svg>{key}"
    )


class Axis(NamedTuple):
    """The range of an axis, from `low` to `high`."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies, 0 at the low end, 1 at the high one."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / (math.log(self.high / self.low) or 1)
        return (value - self.low) / ((self.high - self.low) or 1)


def _across(chart: Chart, xs: list[float]) -> Axis:
    low, high = min(xs), max(xs)
    known = [at for _, at in [*chart.marks, *filter(None, [chart.limit])]]
    low, high = min([low, *known]), max([high, *known])
    if chart.is_cdf:  # the whole width for what was measured
        low = max(low, 1e-6)  # tokens that come simultaneously have a time of 0
        low, high = low * (1 - _MARGIN), max(low, high) * (1 + _MARGIN)
        return Axis(low, high, log_ticks(low, high), log=True)
    if chart.names is not None:  # space for the points at the ends
        low, high = around(low, high)
    return Axis(low, high, ticks(low, high))


def _up(chart: Chart, ys: list[float]) -> Axis:
    if chart.unit.startswith("%"):
        return Axis(0, 100, [0, 25, 50, 75, 100])
    low, high = min(ys), max(ys)
    if chart.y_limit and chart.y_limit[1] <= _MAX_LIMIT * high:  # the caption has a limit further away
        high = max(high, chart.y_limit[1])
    if chart.names is not None and chart.unit == "ms" and low > 0 and high / low > _LOG_FROM:
        low, high = low / 1.5, high * 1.5
        return Axis(low, high, log_ticks(low, high), log=True)
    if not chart.unit and chart.names is None and high <= _FEW:  # a count
        return Axis(0, math.ceil(high), list(map(float, range(math.ceil(high) + 1))))
    marks = ticks(0, max(high, 1e-9) * (1.1 if chart.names else 1.02))
    if marks[-1] < high:
        marks.append(2 * marks[-1] - marks[-2])
    return Axis(0, marks[-1], marks)


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, about five of them."""
    if low >= high:
        return [low]
    rough = (high - low) / (_MAX_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from `low` to `high`, both positive, for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        marks = [n * 10.0**power for power in powers for n in steps if low <= n * 10.0**power <= high]
        if len(marks) <= _MAX_TICKS:
            break
    else:
        marks = marks[:: -(-len(marks) // _MAX_TICKS)]
    return marks if len(marks) > 2 else ticks(low, high)


def around(low: float, high: float) -> tuple[float, float]:
    """Return a range with a margin at both ends of `low` to `high`, both positive."""
    margin = 0.08 * (high - low) or 0.2 * high
    return max(0.0, low - margin), high + margin


def _points(
    chart: Chart, place: Callable[[float, float], tuple[float, float]], letter: float, right: float
) -> Iterator[str]:
    """Yield the points of a chart, with their numbers. A point's number is the first word of its name.

    `right`: where the picture ends.
    """
    points: list[tuple[float, float, str]] = []
    crossed = {*chart.crossed[1]} if chart.crossed else set()
    for _, ys, colour in chart.lines:
        for i, (x, y, name) in enumerate(zip(chart.x, ys, chart.names or (), strict=True)):
            if y is None:
                continue
            across, down = (round(at, 1) for at in place(x, y))
            yield (
                f'<circle class="c{colour % 8}" cx="{across}" cy="{down}" r="{_POINT}">'
                f"<title>{html.escape(name)}</title></circle>"
            )
            if i in crossed:
                yield f'<path class="cross" d="M{across - 5} {down - 5}l10 10m0 -10l-10 10"/>'
            points.append((across, down, name.partition(" ")[0]))
    for across, down, text in labels(points, letter, right):
        to_left = _to_left(across, text, letter, right)
        side = 'dx="-7" dy="-5" text-anchor="end"' if to_left else 'dx="7" dy="-5"'
        yield f'<text x="{across}" y="{down}" {side}>{html.escape(text)}</text>'


def labels(
    points: Sequence[tuple[float, float, str]], letter: float, right: float
) -> list[tuple[float, float, str]]:
    """Return texts for points: (across, down, text). `points`: (across, down, number).

    If texts would overlap, the rightmost point has one text with all their numbers. `letter`: width of a
    letter; `right`: where the picture ends. page.js places its texts in the same way.
    """
    placed: list[tuple[float, float, list[str]]] = []
    for across, down, number in points:
        new = (across, down, [number])
        while (old := next((one for one in placed if _overlap(one, new, letter, right)), None)) is not None:
            placed.remove(old)
            new = (*max(old[:2], new[:2]), [*old[2], *new[2]])
        placed.append(new)
    return [(across, down, numbers_text(numbers)) for across, down, numbers in placed]


def _to_left(across: float, text: str, letter: float, right: float) -> bool:
    """Return whether a text stands left of its point, since there is no space on the right."""
    return across + letter * (len(text) + 1) > right


def _overlap(
    one: tuple[float, float, list[str]], other: tuple[float, float, list[str]], letter: float, right: float
) -> bool:
    """Return whether the texts of two points, or one and the other's point, would overlap."""
    (begin, end), (other_begin, other_end) = (_span(*each, letter, right) for each in (one, other))
    return begin < other_end and other_begin < end and abs(one[1] - other[1]) < max(_LABEL_HEIGHT, 2 * letter)


def _span(across: float, _: float, numbers: list[str], letter: float, right: float) -> tuple[float, float]:
    """Return the left and the right end of a point with its text."""
    text = numbers_text(numbers)
    width = max(_LABEL_HEIGHT, letter * (len(text) + 1))
    to_left = _to_left(across, text, letter, right)
    return (across - width, across + _POINT) if to_left else (across - _POINT, across + width)


def numbers_text(numbers: Sequence[str]) -> str:
    """Return numbers in a few letters: 1 to 4, 7."""
    integers = {whole_number(number) for number in numbers}
    if None in integers:
        return ", ".join(numbers)
    texts: list[str] = []
    ordered = sorted(number for number in integers if number is not None)
    for i, number in enumerate(ordered):
        if 0 < i < len(ordered) - 1 and ordered[i - 1] + 1 == number == ordered[i + 1] - 1:
            continue  # inside a run of consecutive numbers
        goes_on = i > 1 and ordered[i - 2] + 2 == number
        texts.append(f"{texts.pop()} to {number}" if goes_on else str(number))
    return ", ".join(texts)


def lanes(rows: Sequence[dict[str, Any]], end: float) -> str:
    """Return the lanes of ranks from 0 to `end` seconds as an SVG element. `rows`: as page.js gets them."""
    width, left = 1000, 130
    scale = (width - left) / end
    parts = []
    for i, row in enumerate(rows):
        y = i * (_ROW + _GAP)
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(row["label"])}</text>')
        parts.append(f'<rect class="idle" x="{left}" y="{y}" width="{width - left}" height="{_ROW}"/>')
        for lane, top, height in (("steps", 0, _ROW - 6), ("handoffs", _ROW - 5, 5)):
            spans = row[lane]
            for a, b, kind in zip(spans["start"], spans["end"], spans["kind"], strict=True):
                x = left + max(a, 0) * scale
                w = max(0.6, (min(b, end) - max(a, 0)) * scale)
                parts.append(
                    f'<rect class="k{kind:d}" x="{x:.1f}" y="{y + top}" width="{w:.1f}" height="{height}"/>'
                )
    height = len(rows) * (_ROW + _GAP) + 16
    parts.append(f'<text x="{left}" y="{height - 2}">0.0 s</text>')
    parts.append(f'<text x="{width}" y="{height - 2}" text-anchor="end">{end:.1f} s</text>')
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="What each rank did">'
    return f"{head}{''.join(parts)}</svg>"


def strip(shares: Sequence[float]) -> str:
    """Return a picture of how busy an instance was over the test: a bar for each piece of the test."""
    bars = "".join(
        f'<rect x="{i}" y="{1 - share:.3f}" width="1.02" height="{share:.3f}"/>'
        for i, share in enumerate(shares)
        if share > 0.004
    )
    box = f'viewBox="0 0 {len(shares)} 1" preserveAspectRatio="none"'
    return f'<svg class="strip" {box} aria-hidden="true">{bars}</svg>'
