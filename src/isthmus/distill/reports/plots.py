"""Plots as inline SVG, in the colors of the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TypeGuard

from isthmus.distill.reports.words import measure
from isthmus.features.document.blocks import Figure

MODELS = ("teacher", "reference", "student", "control")
STYLE = """\
:root { --teacher: #5b6675; --reference: #7a4fb5; --student: #0b62c4; --control: #b8560a; --rest: #1d2430 }
@media (prefers-color-scheme: dark) { :root { --teacher: #9aa6b5; --reference: #c3a1f5; --student: #6cb0ff;
  --control: #ffb066; --rest: #e6e9ee } }
.teacher { --m: var(--teacher) } .reference { --m: var(--reference) } .student { --m: var(--student) }
.control { --m: var(--control) } .rest { --m: var(--rest) }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)) }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } svg .grid { stroke: var(--line) }
svg .name { fill: var(--m) } svg polyline { fill: none; stroke: var(--m); stroke-width: 1.5; stroke-linejoin: round }
svg polyline.faint { stroke-opacity: .35 } svg .range { stroke: var(--m); stroke-width: 2 }
svg .limit { stroke: var(--bad); stroke-dasharray: 4 3 }
svg circle { fill: var(--m); fill-opacity: 1 } svg circle.faint { fill-opacity: .35 }
td:first-child { min-width: 6.5rem }
"""
_WIDTH = 320
_ROW = 22
_DIGIT = 6
"""Width of a label's digit in pixels."""
_FOOT, _LABEL = 20, 12
"""Heights in pixels of the numbers below a plot, and of the axis label."""
_LARGEST = 1e300
_POINTS = 300
"""Most points of a line: more would be indistinguishable."""


@dataclass(frozen=True)
class Axis:
    """Map numbers from `low` to `high` to pixels from `start` to `end`, logarithmically with `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round numbers on the axis, or both ends if there are fewer than two."""
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
    """Return True if a number can be drawn; sums of larger numbers would overflow."""
    return value is not None and abs(value) < _LARGEST


def color_class(model: str) -> str:
    return model if model in MODELS else "rest"


@dataclass(frozen=True)
class Strip:
    model: str
    mean: float
    bounds: tuple[float, float] | None
    seeds: Sequence[float]


def strips(metric: str, rows: Sequence[Strip]) -> Figure:
    x = axis([x for row in rows for x in (row.mean, *(row.bounds or ()), *row.seeds)], 72, _WIDTH - 10)
    parts = []
    for n, row in enumerate(rows):
        content = _range(n, *map(x, row.bounds)) if row.bounds else ""
        content += "".join(_dot(x(value), _middle(n), 3, faint=True) for value in row.seeds)
        parts.append(_model_row(n, row.model, content + _dot(x(row.mean), _middle(n))))
    return _rows(x, parts, metric, metric)


def latency_ranges(label: str, rows: Sequence[tuple[str, float, float]], caption: str) -> Figure:
    """Draw the range from p50 to p99 of each model."""
    x = axis([at for _, *ends in rows for at in ends], 72, _WIDTH - 10, log=True)
    parts = []
    for n, (model, *ends) in enumerate(rows):
        low, high = map(x, ends)
        dots = _dot(low, _middle(n)) + _dot(high, _middle(n), faint=True)
        parts.append(_model_row(n, model, _range(n, low, high) + dots))
    return _rows(x, parts, label, caption)


@dataclass(frozen=True)
class Curve:
    model: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


def curves(metric: str, lines: Sequence[Curve], caption: str) -> Figure:
    height, top = 194, 22
    x = axis((at for line in lines for at, _ in line.points), 48, _WIDTH - 10)
    y = axis((value for line in lines for _, value in line.points), height - _FOOT - 4, top)
    parts = [_across(x, height), _along(y), _label("steps", height)]
    for n, name in enumerate(dict.fromkeys(line.model for line in lines)):
        parts.append(_colored(name, _name(name, f'x="{48 + 66 * n}" y="12"')))
    for line in lines:
        points = [(x(at), y(value)) for at, value in _thinned(line.points)]
        if len(points) == 1:
            mark = _dot(*points[0], 3, faint=line.faint)
        else:
            places = " ".join(f"{at:.1f},{up:.1f}" for at, up in points)
            mark = f'<polyline{_faint(line.faint)} points="{places}"/>'
        parts.append(_colored(line.model, mark))
    return Figure("".join(parts), metric, caption, _WIDTH, height + _LABEL)


def tradeoff(points: Sequence[tuple[str, float, float]], label: str, caption: str) -> Figure:
    height = 180
    x = axis((time for _, time, _ in points), 48, _WIDTH - 10, log=True)
    y = axis((value for _, _, value in points), height - _FOOT - 4, 8)
    parts = [_across(x, height), _along(y), _label("p50 of one prediction, µs", height)]
    lowest = math.inf
    for model, time, value in sorted(points, key=lambda point: point[2]):
        at, up = x(time), y(value)
        # Keep names from overlapping.
        lowest = min(up + 4, lowest - 12)
        left = at > _WIDTH * 0.6
        place = f'x="{at + (-8 if left else 8):.1f}" y="{max(lowest, 10):.1f}"' + (' text-anchor="end"' if left else "")
        parts.append(_colored(model, _dot(at, up) + _name(model, place)))
    return Figure("".join(parts), label, caption, _WIDTH, height + _LABEL)


@dataclass(frozen=True)
class Dot:
    """A point of a scatter plot with its color class and name; points off the front are faint."""

    color: str
    x: float
    y: float
    name: str
    faint: bool = False


def scatter(
    points: Sequence[Dot], label: str, caption: str, *, stairs: Sequence[tuple[float, float]] = (),
    limits: tuple[float | None, float | None] = (None, None),
) -> Figure:  # fmt: skip
    """Draw dots over a logarithmic axis, each with its name as a tooltip.

    `stairs` are the points of a Pareto front in order, drawn as a staircase. `limits` are the largest allowed x and y,
    drawn as lines where the dots come near them.
    """
    height = 200
    right, top = (
        most if most is not None and max(values) / 3 <= most <= max(values) * 3 else None
        for most, values in zip(limits, ([dot.x for dot in points], [dot.y for dot in points]), strict=True)
    )
    x = axis([*(dot.x for dot in points), *filter(drawable, [right])], 48, _WIDTH - 10, log=True)
    y = axis([*(dot.y for dot in points), *filter(drawable, [top])], height - _FOOT - 4, 8)
    parts = [_across(x, height), _along(y)]
    if right is not None:
        parts.append(f'<line class="limit" x1="{x(right):.1f}" x2="{x(right):.1f}" y1="4" y2="{height - _FOOT}"/>')
    if top is not None:
        parts.append(f'<line class="limit" x1="46" x2="{_WIDTH - 8}" y1="{y(top):.1f}" y2="{y(top):.1f}"/>')
    if len(stairs) > 1:
        corners = [f"{x(stairs[0][0]):.1f},{y(stairs[0][1]):.1f}"]
        for (_, before), (step, value) in pairwise(stairs):
            corners += [f"{x(step):.1f},{y(before):.1f}", f"{x(step):.1f},{y(value):.1f}"]
        parts.append(_colored("rest", f'<polyline class="faint" points="{" ".join(corners)}"/>'))
    for dot in sorted(points, key=lambda dot: not dot.faint):
        mark = _dot(x(dot.x), y(dot.y), 3 if dot.faint else 4, faint=dot.faint, title=dot.name)
        parts.append(f'<g class="{dot.color}">{mark}</g>')
    return Figure("".join(parts), label, caption, _WIDTH, height)


def marks(values: Sequence[tuple[str, float]], x: Axis) -> Figure:
    middle = 7
    ends = [x(value) for _, value in values]
    line = f'<line class="grid" x1="{min(ends):.1f}" x2="{max(ends):.1f}" y1="{middle}" y2="{middle}"/>'
    dots = "".join(
        f'<circle class="{color_class(model)}" cx="{x(value):.1f}" cy="{middle}" r="4"/>' for model, value in values
    )
    return Figure(line + dots, ", ".join(f"{model} {measure(value)}" for model, value in values), "", 120, 14)


def _rows(x: Axis, rows: Sequence[str], label: str, caption: str) -> Figure:
    height = _ROW * len(rows) + _FOOT
    return Figure(_across(x, height) + "".join(rows), label, caption, _WIDTH, height)


def _middle(row: int) -> float:
    return _ROW * (row + 0.5) + 2


def _model_row(row: int, model: str, content: str) -> str:
    return _colored(model, _name(model, f'x="6" y="{_middle(row) + 4:.1f}"') + content)


def _range(row: int, low: float, high: float) -> str:
    middle = _middle(row)
    return f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'


def _dot(x: float, y: float, radius: int = 4, *, faint: bool = False, title: str = "") -> str:
    circle = f'<circle{_faint(faint)} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f"{circle}><title>{escape(title)}</title></circle>" if title else f"{circle}/>"


def _faint(faint: bool) -> str:
    return ' class="faint"' if faint else ""


def _colored(model: str, content: str) -> str:
    return f'<g class="{color_class(model)}">{content}</g>'


def _name(model: str, place: str) -> str:
    short = model if len(model) <= 11 else f"{model[:10]}…"
    return f'<text class="name" {place}>{escape(short)}</text>'


def _across(x: Axis, height: int) -> str:
    parts, free = [], 0.0
    for tick in x.ticks():
        at, label = x(tick), _tick(tick)
        anchor, share = ("end", 1.0) if at > _WIDTH - 24 else ("middle", 0.5)
        left = at - share * _DIGIT * len(label)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - _FOOT}"/>')
        if left >= free:
            parts.append(f'<text x="{at:.1f}" y="{height - 6}" text-anchor="{anchor}">{label}</text>')
            free = left + _DIGIT * (len(label) + 1)
    return "".join(parts)


def _label(text: str, height: int) -> str:
    return f'<text x="{_WIDTH - 10}" y="{height + 7}" text-anchor="end">{escape(text)}</text>'


def _along(y: Axis) -> str:
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="46" x2="{_WIDTH - 8}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="42" y="{at + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{prefix}"
    return f"{value:.4g}"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= _POINTS:
        return points
    stride = -(-len(points) // (_POINTS - 1))
    return [*points[:-1:stride], points[-1]]
