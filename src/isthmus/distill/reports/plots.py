"""Plots as inline SVG, in the colors of the page they stand on."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TypeGuard

from isthmus.distill.reports.words import measure
from isthmus.features.html import figure

MODELS = ("teacher", "reference", "student", "control")
STYLE = """\
:root { --teacher: #5b6675; --reference: #7a4fb5; --student: #0b62c4; --control: #b8560a; --other: #1d2430 }
@media (prefers-color-scheme: dark) { :root { --teacher: #9aa6b5; --reference: #c3a1f5; --student: #6cb0ff;
  --control: #ffb066; --other: #e6e9ee } }
.teacher { --m: var(--teacher) } .reference { --m: var(--reference) } .student { --m: var(--student) }
.control { --m: var(--control) } .other { --m: var(--other) }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(300px, 100%), 1fr)) }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } svg .grid { stroke: var(--line) }
svg .name { fill: var(--m) } svg polyline { fill: none; stroke: var(--m); stroke-width: 1.5; stroke-linejoin: round }
svg polyline.faint { stroke-opacity: .35 } svg .range { stroke: var(--m); stroke-width: 2 }
svg .limit { stroke: var(--bad); stroke-dasharray: 4 3 }
svg circle { fill: var(--m); fill-opacity: 1 } svg circle.faint { fill-opacity: .35 }
i.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; background: var(--m) }
td:first-child { min-width: 6.5rem } td svg { border: 0; background: none }
.slice { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: center; gap: 0 1rem }
.slice span { min-width: 6rem } .slice svg { width: 120px }
.halves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: .8rem }
.halves .card { margin: 0 } .halves td:first-child { width: 40% }
"""
_WIDTH = 320
_ROW = 22
_FOOT = 20
_MOST = 1e300
_POINTS = 300
"""Of a line, at most: more are not seen."""


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high` along pixels from `start` to `end`; each ten times the last if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a number."""
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers within, or both ends where there are none."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            found = [10.0**power for power in range(first, last + 1, max(last - first, 0) // 4 + 1)]
            if len(found) < 2:
                every = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
                found = [tick for tick in every if self.low <= tick <= self.high]
        else:
            widest = (self.high - self.low) / 2.5
            power = 10.0 ** math.floor(math.log10(widest))
            step = next(factor * power for factor in (5, 2, 1) if factor * power <= widest or factor == 1)
            digits = max(0, 1 - math.floor(math.log10(step)))
            # Products, not sums: 3 * 0.1, and not 0.1 + 0.1 + 0.1.
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            found = [round(n * step, digits) for n in range(first, last + 1)]
        return found if len(found) > 1 else [self.low, self.high]


def axis(values: Iterable[float], start: float, end: float, *, log: bool = False) -> Axis:
    """An axis that holds some numbers, with a margin."""
    found = list(values)
    low, high = min(found), max(found)
    if log:
        return Axis(low / 1.5, high * 1.5, start, end, log=True)
    margin = (high - low) * 0.12
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        margin = abs(high) * 0.05 or 1.0
    return Axis(low - margin, high + margin, start, end)


def known(values: Iterable[float | None]) -> list[float]:
    """Those that can be drawn."""
    return [value for value in values if drawn(value)]


def drawn(value: float | None) -> TypeGuard[float]:
    """Whether a number can be: sums of larger ones leave the range of floats."""
    return value is not None and abs(value) < _MOST


def kind(model: str) -> str:
    """The class that has a model's color."""
    return model if model in MODELS else "other"


@dataclass(frozen=True)
class Strip:
    """A metric of a model: its mean, the interval of that, and what each seed gave."""

    model: str
    mean: float
    bounds: tuple[float, float] | None
    seeds: Sequence[float]


def strips(metric: str, rows: Sequence[Strip], caption: str) -> str:
    """A row per model: a dot for the mean, a line for its interval, and a faint dot per seed."""
    height = _ROW * len(rows) + _FOOT
    numbers = [x for row in rows for x in (row.mean, *(row.bounds or ()), *row.seeds)]
    x = axis(numbers, 72, _WIDTH - 10)
    parts = [_across(x, height)]
    for n, row in enumerate(rows):
        middle = _ROW * (n + 0.5) + 2
        parts.append(f'<g class="{kind(row.model)}">')
        parts.append(f'<text class="name" x="6" y="{middle + 4:.1f}">{escape(_short(row.model))}</text>')
        if row.bounds:
            low, high = map(x, row.bounds)
            parts.append(f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
        parts += [f'<circle class="faint" cx="{x(value):.1f}" cy="{middle:.1f}" r="3"/>' for value in row.seeds]
        parts.append(f'<circle cx="{x(row.mean):.1f}" cy="{middle:.1f}" r="4"/></g>')
    return figure("".join(parts), escape(metric), caption, width=_WIDTH, height=height)


@dataclass(frozen=True)
class Span:
    """How long a model takes: mostly, and at worst."""

    model: str
    low: float
    high: float


def spans(label: str, rows: Sequence[Span], caption: str, limit: float | None = None) -> str:
    """A row per model on a logarithmic axis: a dot for the one number, a faint one for the other, a line between.

    Args:
        label: for a screen reader.
        rows: of numbers above zero.
        caption: below.
        limit: what is allowed; a line.
    """
    height = _ROW * len(rows) + _FOOT
    x = axis([at for row in rows for at in (row.low, row.high)] + known([limit]), 72, _WIDTH - 10, log=True)
    parts = [_across(x, height)]
    if limit is not None:
        parts.append(f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="4" y2="{height - _FOOT}"/>')
    for n, row in enumerate(rows):
        middle, low, high = _ROW * (n + 0.5) + 2, x(row.low), x(row.high)
        parts.append(
            f'<g class="{kind(row.model)}">'
            f'<text class="name" x="6" y="{middle + 4:.1f}">{escape(_short(row.model))}</text>'
            f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            f'<circle cx="{low:.1f}" cy="{middle:.1f}" r="4"/>'
            f'<circle class="faint" cx="{high:.1f}" cy="{middle:.1f}" r="4"/></g>'
        )
    return figure("".join(parts), escape(label), caption, width=_WIDTH, height=height)


@dataclass(frozen=True)
class Line:
    """What a training went through: points of step and value."""

    model: str
    points: Sequence[tuple[float, float]]
    faint: bool = False


def curves(metric: str, lines: Sequence[Line], caption: str) -> str:
    """A line per training over its steps."""
    height, top = 194, 22
    x = axis((at for line in lines for at, _ in line.points), 48, _WIDTH - 10)
    y = axis((value for line in lines for _, value in line.points), height - _FOOT - 4, top)
    parts = [_across(x, height), _along(y)]
    names = dict.fromkeys(line.model for line in lines)
    parts += [
        f'<g class="{kind(name)}"><text class="name" x="{48 + 66 * n}" y="12">{escape(_short(name))}</text></g>'
        for n, name in enumerate(names)
    ]
    for line in lines:
        points = _thinned(line.points)
        faint = ' class="faint"' if line.faint else ""
        places = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        mark = f'<polyline{faint} points="{places}"/>'
        if len(points) == 1:
            (at, value), dot = points[0], ' class="faint"' if line.faint else ""
            mark = f'<circle{dot} cx="{x(at):.1f}" cy="{y(value):.1f}" r="3"/>'
        parts.append(f'<g class="{kind(line.model)}">{mark}</g>')
    return figure("".join(parts), escape(metric), caption, width=_WIDTH, height=height)


def tradeoff(points: Sequence[tuple[str, float, float]], label: str, caption: str) -> str:
    """A dot per model: its metric over what an answer takes, in microseconds on a logarithmic axis."""
    height = 180
    x = axis((time for _, time, _ in points), 48, _WIDTH - 10, log=True)
    y = axis((value for _, _, value in points), height - _FOOT - 4, 8)
    parts = [_across(x, height), _along(y)]
    lowest = math.inf
    for model, time, value in sorted(points, key=lambda point: point[2]):
        at, up = x(time), y(value)
        # A name does not cover the one below it.
        lowest = min(up + 4, lowest - 12)
        left = at > _WIDTH * 0.6
        place = f'x="{at + (-8 if left else 8):.1f}" y="{max(lowest, 10):.1f}"' + (' text-anchor="end"' if left else "")
        parts.append(
            f'<g class="{kind(model)}"><circle cx="{at:.1f}" cy="{up:.1f}" r="4"/>'
            f'<text class="name" {place}>{escape(_short(model))}</text></g>'
        )
    return figure("".join(parts), escape(label), caption, width=_WIDTH, height=height)


@dataclass(frozen=True)
class Dot:
    """A point among many: the class that has its color, where it is, its name, and whether it is one of the rest."""

    kind: str
    x: float
    y: float
    name: str
    faint: bool = False


def scatter(
    found: Sequence[Dot], label: str, caption: str, *, stairs: Sequence[tuple[float, float]] = (),
    limits: tuple[float | None, float | None] = (None, None),
) -> str:  # fmt: skip
    """Dots over a logarithmic axis, each with its name where a mouse rests on it.

    Args:
        found: the dots.
        label: for a screen reader.
        caption: below.
        stairs: points of which none is better than another in both, in order: a line goes from one to the next as far
            as nothing better is known.
        limits: the most that is allowed of x and of y; a line where the dots come near it.
    """
    height = 200
    at, highs = [dot.x for dot in found], [dot.y for dot in found]
    right, top = (
        most if most is not None and max(values) / 3 <= most <= max(values) * 3 else None
        for most, values in zip(limits, (at, highs), strict=True)
    )
    x = axis([*at, *known([right])], 48, _WIDTH - 10, log=True)
    y = axis([*highs, *known([top])], height - _FOOT - 4, 8)
    parts = [_across(x, height), _along(y)]
    if right is not None:
        parts.append(f'<line class="limit" x1="{x(right):.1f}" x2="{x(right):.1f}" y1="4" y2="{height - _FOOT}"/>')
    if top is not None:
        parts.append(f'<line class="limit" x1="46" x2="{_WIDTH - 8}" y1="{y(top):.1f}" y2="{y(top):.1f}"/>')
    if len(stairs) > 1:
        corners = [f"{x(stairs[0][0]):.1f},{y(stairs[0][1]):.1f}"]
        for (_, before), (step, value) in pairwise(stairs):
            corners += [f"{x(step):.1f},{y(before):.1f}", f"{x(step):.1f},{y(value):.1f}"]
        parts.append(f'<g class="other"><polyline class="faint" points="{" ".join(corners)}"/></g>')
    for dot in sorted(found, key=lambda dot: not dot.faint):
        faint, size = (' class="faint"', 3) if dot.faint else ("", 4)
        parts.append(
            f'<g class="{dot.kind}"><circle{faint} cx="{x(dot.x):.1f}" cy="{y(dot.y):.1f}" r="{size}">'
            f"<title>{escape(dot.name)}</title></circle></g>"
        )
    return figure("".join(parts), escape(label), caption, width=_WIDTH, height=height)


def dots(found: Sequence[tuple[str, float]], x: Axis) -> str:
    """Models on one line, for a row of a table."""
    middle = 7
    ends = [x(value) for _, value in found]
    line = f'<line class="grid" x1="{min(ends):.1f}" x2="{max(ends):.1f}" y1="{middle}" y2="{middle}"/>'
    marks = "".join(
        f'<circle class="{kind(model)}" cx="{x(value):.1f}" cy="{middle}" r="4"/>' for model, value in found
    )
    told = ", ".join(f"{model} {measure(value)}" for model, value in found)
    return f'<svg viewBox="0 0 120 14" role="img" aria-label="{escape(told)}">{line}{marks}</svg>'


def _across(x: Axis, height: int) -> str:
    """Lines upwards at round numbers, which stand below."""
    parts = []
    for tick in x.ticks():
        at = x(tick)
        anchor = "end" if at > _WIDTH - 24 else "middle"
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - _FOOT}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 6}" text-anchor="{anchor}">{_tick(tick)}</text>')
    return "".join(parts)


def _along(y: Axis) -> str:
    """Lines across at round numbers, which stand on the left."""
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


def _short(name: str) -> str:
    return name if len(name) <= 11 else f"{name[:10]}…"


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Evenly taken, with the last."""
    if len(points) <= _POINTS:
        return points
    stride = -(-len(points) // (_POINTS - 1))
    return [*points[:-1:stride], points[-1]]
