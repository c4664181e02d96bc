"""Charts as inline SVG, in the colors of the page: rows of bars and dots, plots of lines and dots, and histograms."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeGuard

from isthmus.features.document.blocks import Figure

Color = Literal["ink", "soft", "gray", "purple", "blue", "orange", "green", "red"]
STYLE = """\
:root { --gray: #8a95a5; --purple: #7a4fb5; --blue: #0b62c4; --orange: #b8560a }
@media (prefers-color-scheme: dark) { :root { --gray: #75818f; --purple: #c3a1f5; --blue: #6cb0ff;
  --orange: #ffb066 } }
.ink { --m: var(--ink) } .soft { --m: var(--soft) } .gray { --m: var(--gray) } .purple { --m: var(--purple) }
.blue { --m: var(--blue) } .orange { --m: var(--orange) } .green { --m: var(--good) } .red { --m: var(--bad) }
svg { display: block; background: var(--paper); border: 1px solid var(--line); width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } svg .name { fill: var(--m) }
svg rect, svg circle { fill: var(--m) } svg .faint { opacity: .35 }
svg line, svg polyline { fill: none; stroke: var(--m); stroke-width: 1.5; stroke-linejoin: round }
svg .grid { stroke: var(--line); stroke-width: 1 } svg .base { stroke: var(--gray); stroke-dasharray: 3 3 }
svg .limit { stroke: var(--bad); stroke-dasharray: 4 3 }
"""
_WIDTH, _HEIGHT, _ROW = 320, 206, 22
"""Width of a chart, height of a plot, and height of a row, in pixels."""
_LEFT, _RIGHT, _FOOT, _LABEL = 48, 10, 20, 12
"""Margins in pixels: left and right of a plot, below it for the numbers, and below these for the axis label."""
_BARS = 130
"""Fewest pixels for the bars and dots of rows."""
_CHARACTER = 6.5
"""Mean width of a character in pixels."""
_NAME, _LINE_NAME = 60, 11
"""Most characters of the name of a row, and of a line."""
_LARGEST = 1e300
_POINTS = 300
"""Most points of a line: more would be indistinguishable."""
_TICKS = 3
"""Most names below a plot."""


@dataclass(frozen=True)
class Axis:
    """A chart scale: maps numbers from `low` to `high` to pixels from `start` to `end`, logarithmically with `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((at - low) / (high - low))

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            ticks = [10.0**power for power in range(first, last + 1, max(last - first, 0) // 4 + 1)]
            if len(ticks) < 2:
                finer = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
                ticks = [tick for tick in finer if self.low <= tick <= self.high]
        else:
            widest = (self.high - self.low) / 2.5
            power = 10.0 ** math.floor(math.log10(widest))
            step = next(factor * power for factor in (5, 2, 1) if factor * power <= widest or factor == 1)
            digits = max(0, 1 - math.floor(math.log10(step)))
            # Multiply instead of adding steps, to avoid accumulating rounding errors.
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            ticks = [round(n * step, digits) for n in range(first, last + 1)]
        return ticks if len(ticks) > 1 else [self.low, self.high]


def axis(numbers: Iterable[float], start: float, end: float, *, log: bool = False) -> Axis:
    values = list(numbers)
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.5, high * 1.5, start, end, log=True)
    margin = (high - low) * 0.12
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        margin = abs(high) * 0.05 or 1.0
    return Axis(low - margin, high + margin, start, end)


def drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) < _LARGEST


Bar = tuple[float | None, float, Color]
"""Begin, end and color; None begins at the left end of the axis."""


@dataclass(frozen=True)
class ChartRow:
    """A row of a chart: bars in order, dots, small faint dots, and a line over `span`, for example an interval."""

    name: str
    color: Color = "soft"
    bars: Sequence[Bar] = ()
    span: tuple[float, float] | None = None
    dots: Sequence[float] = ()
    faint: Sequence[float] = ()
    text: str = ""


def rows_chart(rows: Sequence[ChartRow], label: str, caption: str = "", *, log: bool = False) -> Figure:
    names = [_cut(row.name, _NAME) for row in rows]
    left = max(72, _CHARACTER * max(map(len, names), default=0) + 12)
    right = max(_RIGHT, _CHARACTER * max((len(row.text) for row in rows), default=0) + 12)
    width = max(_WIDTH, math.ceil(left + _BARS + right))
    numbers = [at for row in rows for begin, end, _ in row.bars for at in (begin, end) if at is not None]
    numbers += [at for row in rows for at in (*(row.span or ()), *row.dots, *row.faint)]
    x = axis(numbers or [0.0], left, width - right, log=log)
    height = _ROW * len(rows) + _FOOT
    parts = [_across(x, _numbers(x), height, width)]
    for n, (row, name) in enumerate(zip(rows, names, strict=True)):
        middle = _ROW * (n + 0.5) + 2
        for begin, end, color in row.bars:
            low, high = sorted((x(x.low if begin is None else begin), x(end)))
            size = f'width="{max(high - low, 1):.1f}" height="{_ROW - 10}"'
            parts.append(_colored(color, f'<rect x="{low:.1f}" y="{middle - (_ROW - 10) / 2:.1f}" {size}/>'))
        content = f'<text class="name" x="6" y="{middle + 4:.1f}">{escape(name)}</text>'
        if row.span:
            content += _line("range", x(row.span[0]), x(row.span[1]), middle, middle)
        content += "".join(_dot(x(at), middle, faint=True) for at in row.faint)
        content += "".join(_dot(x(at), middle) for at in row.dots)
        if row.text:
            content += f'<text x="{width - right + 6:.1f}" y="{middle + 4:.1f}">{escape(row.text)}</text>'
        parts.append(_colored(row.color, content))
    return Figure("".join(parts), label, caption, width, height)


@dataclass(frozen=True)
class Dot:
    """A point of a plot. `title` appears under the mouse, and `interval` is a vertical line through the point."""

    x: float
    y: float
    color: Color
    name: str = ""
    title: str = ""
    interval: tuple[float, float] | None = None
    faint: bool = False


@dataclass(frozen=True)
class Line:
    """A line of a plot. Lines with the same name and color share an entry in the legend; nameless lines have none."""

    points: Sequence[tuple[float, float]]
    color: Color
    name: str = ""
    faint: bool = False


def plot(  # noqa: PLR0913 - everything that a plot can show
    label: str,
    caption: str,
    *,
    dots: Sequence[Dot] = (),
    lines: Sequence[Line] = (),
    log: bool = False,
    x_label: str = "",
    x_names: Sequence[str] = (),
    x_limits: Sequence[float] = (),
    y_limits: Sequence[float] = (),
    diagonal: bool = False,
) -> Figure:
    """Draw lines, and dots above them, over two axes. There must be at least one dot or line point.

    `label` describes the chart for screen readers. `log` makes the x axis logarithmic, and all x must then be positive.
    `x_names` are texts below the x axis instead of numbers: the first is at x = 0, the next at x = 1. Vertical dashed
    lines mark `x_limits`, and horizontal ones mark `y_limits`. `diagonal` gives both axes the same range, and draws a
    dashed line of equal x and y instead of numbers.
    """
    legend = dict.fromkeys((line.name, line.color) for line in lines if line.name)
    left, top, bottom = _LEFT, 22 if legend else 8, _HEIGHT - _FOOT - 4 - (_LABEL if x_label else 0)
    xs = [*(dot.x for dot in dots), *(at for line in lines for at, _ in line.points), *x_limits]
    ys = [*(up for dot in dots for up in (dot.y, *(dot.interval or ()))), *y_limits]
    ys += [up for line in lines for _, up in line.points]
    if diagonal:
        left, xs, ys = 8, [*xs, *ys], [*xs, *ys]
    y = axis(ys, bottom, top)
    if not diagonal:
        left = max(_LEFT, math.ceil(_CHARACTER * max(len(name) for _, name in _numbers(y))) + 10)
    x = axis(xs, left, _WIDTH - _RIGHT, log=log)
    if x_names:
        x = Axis(-0.5, len(x_names) - 0.5, left, _WIDTH - _RIGHT)
    parts = []
    if diagonal:
        parts.append(_line("base", x(x.low), x(x.high), y(x.low), y(x.high)))
    else:
        stride = -(-len(x_names) // _TICKS)
        named = [(n, x_names[n]) for n in range(0, len(x_names), stride)] if x_names else _numbers(x)
        parts += [
            _across(x, named, bottom + _FOOT + 4, _WIDTH),
            *(_tick(y(up), name, left) for up, name in _numbers(y)),
        ]
    parts += [_line("limit", x(at), x(at), 4, bottom + 4) for at in x_limits]
    parts += [_line("limit", left - 2, _WIDTH - 8, y(up), y(up)) for up in y_limits]
    if x_label:
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 5}" text-anchor="end">{escape(x_label)}</text>')
    for n, (name, color) in enumerate(legend):
        parts.append(_colored(color, _name(_cut(name, _LINE_NAME), f'x="{left + 66 * n}" y="12"')))
    parts += [
        _colored(line.color, _drawn([(x(at), y(up)) for at, up in _thinned(line.points)], line)) for line in lines
    ]
    lowest = math.inf
    for dot in sorted(dots, key=lambda dot: (not dot.faint, dot.y)):
        at, up = x(dot.x), y(dot.y)
        content = _line("range", at, at, *map(y, dot.interval)) if dot.interval else ""
        content += _dot(at, up, faint=dot.faint, title=dot.title)
        if dot.name:
            # Keep names from overlapping.
            lowest = min(up + 4, lowest - 12)
            place = f'x="{at - 8:.1f}" text-anchor="end"' if at > _WIDTH * 0.6 else f'x="{at + 8:.1f}"'
            content += _name(_cut(dot.name, _LINE_NAME), f'{place} y="{max(lowest, 10):.1f}"')
        parts.append(_colored(dot.color, content))
    return Figure("".join(parts), label, caption, _WIDTH, _HEIGHT)


def histogram(
    counts: Sequence[float], label: str, caption: str = "", *, color: Color, size: tuple[int, int] = (_WIDTH, _HEIGHT)
) -> Figure:
    width, height = size
    margin = height // 25
    step, tallest = (width - 2 * margin) / max(len(counts), 1), max(counts, default=0) or 1
    bars = []
    for n, count in enumerate(counts):
        bar = (height - 2 * margin) * count / tallest
        place = f'x="{margin + n * step:.1f}" y="{height - margin - bar:.1f}"'
        bars.append(f'<rect {place} width="{step - 1:.1f}" height="{bar:.1f}"/>')
    return Figure(_colored(color, "".join(bars)), label, caption, width, height)


def dots_in_cell(dots: Sequence[tuple[Color, float]], x: Axis, label: str) -> Figure:
    ends = [x(value) for _, value in dots]
    drawn = (_colored(color, _dot(x(value), 7)) for color, value in dots)
    return Figure(_line("grid", min(ends), max(ends), 7, 7) + "".join(drawn), label, "", 120, 14)


def share_in_cell(share: float, label: str) -> Figure:
    red = _colored("red", f'<rect width="{100 * share:.2f}" height="8"/>')
    return Figure(_colored("green", '<rect width="100" height="8"/>') + red, label, "", 100, 8)


def _drawn(places: Sequence[tuple[float, float]], line: Line) -> str:
    if len(places) == 1:
        return _dot(*places[0], faint=line.faint)
    joined = " ".join(f"{at:.1f},{up:.1f}" for at, up in places)
    return f'<polyline{_faint(line.faint)} points="{joined}"/>'


def _across(x: Axis, ticks: Iterable[tuple[float, str]], height: float, width: float) -> str:
    parts, free = [], 0.0
    for value, name in ticks:
        at = x(value)
        anchor, share = ("end", 1.0) if at > width - 24 else ("middle", 0.5)
        begin = at - share * _CHARACTER * len(name)
        parts.append(_line("grid", at, at, 4, height - _FOOT))
        if begin >= free:
            parts.append(f'<text x="{at:.1f}" y="{height - 6:.0f}" text-anchor="{anchor}">{escape(name)}</text>')
            free = begin + _CHARACTER * (len(name) + 1)
    return "".join(parts)


def _tick(at: float, name: str, left: int) -> str:
    text = f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{name}</text>'
    return _line("grid", left - 2, _WIDTH - 8, at, at) + text


def _numbers(axis: Axis) -> list[tuple[float, str]]:
    return [(tick, _number(tick)) for tick in axis.ticks()]


def _number(value: float) -> str:
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{prefix}"
    return f"{value:.4g}"


def _line(kind: str, left: float, right: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{left:.1f}" x2="{right:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _dot(x: float, y: float, *, faint: bool = False, title: str = "") -> str:
    circle = f'<circle{_faint(faint)} cx="{x:.1f}" cy="{y:.1f}" r="{3 if faint else 4}"'
    return f"{circle}><title>{escape(title)}</title></circle>" if title else f"{circle}/>"


def _faint(faint: bool) -> str:
    return ' class="faint"' if faint else ""


def _colored(color: Color, content: str) -> str:
    return f'<g class="{color}">{content}</g>'


def _name(name: str, place: str) -> str:
    return f'<text class="name" {place}>{escape(name)}</text>'


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= _POINTS:
        return points
    stride = -(-len(points) // (_POINTS - 1))
    return [*points[:-1:stride], points[-1]]
