"""A verdict as one HTML page."""

import math
from collections.abc import Mapping
from html import escape

import numpy as np

from isthmus.features import clock
from isthmus.features.html import document, figure, image, table
from isthmus.features.verdict import FeatureVerdict, Verdict

MOST = 40
"""Differing features that are shown in full; of more, the numbers alone."""
IMAGES = 3
"""Differing features that are drawn where there is no room for more."""
_DRAWN = "svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } svg .equal { fill: var(--good) }"
_SIDE, _EDGE = 200, 8
_BARS = 25


def page(verdict: Verdict, project: str) -> str:
    """The page."""
    word = '<span class="good">passed</span>' if verdict.passed else '<span class="bad">failed</span>'
    differing = {name: one for name, one in verdict.named().items() if one.differing}
    about = [
        f"{verdict.compared:,} values compared, <b>{verdict.differing:,} differ</b>",
        f"as of {_time(verdict.at)}, contract <code>{escape(verdict.contract[:12])}</code>",
    ]
    if verdict.package is not None:
        about.append(f"package <code>{escape(verdict.package[:12])}</code>")
    parts = [f"<h1>{escape(project)}: {word}</h1>", *(f"<p>{line}</p>" for line in about)]
    if not verdict.compared:
        parts.append("<p>Nothing was compared: that is no verdict that passes.</p>")
    left_out = {view: keys for view, keys in verdict.ahead.items() if keys}
    if left_out:
        named = ", ".join(f"{keys:,} of {escape(view)}" for view, keys in left_out.items())
        parts.append(f"<p>Left out, because they were pushed after everything the tables hold: {named}.</p>")
    parts += [f"<p>Not compared: {escape(name)}, because {escape(why)}.</p>" for name, why in verdict.skipped.items()]
    parts.append(_overview(verdict))
    if differing:
        parts.append("<h2>What differs</h2>")
        parts += [_card(name, one) for name, one in list(differing.items())[:MOST]]
        if len(differing) > MOST:
            rest = [[escape(name), *_figures(one)] for name, one in list(differing.items())[MOST:]]
            parts.append(table(["", *_COLUMNS], rest, numbers=_COLUMNS))
    parts.append(_passed({name: one for name, one in verdict.named().items() if not one.differing}))
    return document(f"Verdict of {project}", parts)


_COLUMNS = ("compared", "equal", "differing", "worst", "tolerance")


def _overview(verdict: Verdict) -> str:
    """A line per view, and for the package: how much of it is equal."""
    rows = []
    for name, (features, compared, differing) in _groups(verdict).items():
        share = f'<div class="share"><i style="width:{100 * differing / max(compared, 1):.2f}%"></i></div>'
        mark = f'<span class="bad">{differing:,}</span>' if differing else "0"
        rows.append([escape(name), f"{features}", f"{compared:,}", mark, share])
    numbers = ("features", "compared", "differing")
    return f'<div class="views">{table(["", *numbers, "share"], rows, numbers=numbers)}</div>'


def _groups(verdict: Verdict) -> dict[str, tuple[int, int, int]]:
    """Of each view, and of the package: features, values compared, values that differ."""
    groups: dict[str, Mapping[str, FeatureVerdict]] = dict(verdict.views)
    groups |= {"package, inputs": verdict.inputs, "package, outputs": verdict.files}
    return {
        name: (len(of), sum(one.compared for one in of.values()), sum(one.differing for one in of.values()))
        for name, of in groups.items()
        if of
    }


def images(verdict: Verdict) -> dict[str, str]:
    """How much is equal, and of the first features that are not their plots, each the address of an image."""
    wide, line = 440, 18
    parts = []
    groups = _groups(verdict)
    for n, (name, (_, compared, differing)) in enumerate(groups.items()):
        top, whole = 6 + n * line, 160
        worse = 0.0 if not differing else max(whole * differing / compared, 1.0)
        parts.append(
            f'<text x="6" y="{top + 10}">{escape(name if len(name) <= 26 else name[:25] + "…")}</text>'
            f'<rect class="equal" x="170" y="{top}" width="{whole if compared else 0}" height="12"/>'
            f'<rect x="170" y="{top}" width="{worse:.1f}" height="12"/>'
            f'<text x="336" y="{top + 10}">{differing:,} of {compared:,}</text>'
        )
    overview = figure("".join(parts), "what differs", "", width=wide, height=len(groups) * line + 8)
    found = {"values that differ": image(overview, _DRAWN)}
    differing_ones = {name: one for name, one in verdict.named().items() if one.differing and one.pairs}
    for name, one in list(differing_ones.items())[:IMAGES]:
        found[f"{name}, online over offline"] = image(_over(one), _DRAWN)
    return found


def _card(name: str, one: FeatureVerdict) -> str:
    """A differing feature: numbers, plots, and the first values side by side."""
    compared, equal, differing, worst, tolerance = _figures(one)
    sentence = f"{differing} of {compared} differ, {equal} are equal; worst {worst}, tolerance {tolerance}"
    rows = [
        [
            escape(e.key),
            escape(e.event_timestamp or "-"),
            _value(e.offline),
            _value(e.online),
            _gap(e.offline, e.online),
        ]
        for e in one.examples
    ]
    columns = ["key", "event time", "offline", "online", "online - offline"]
    values = f'<div class="sides">{table(columns, rows, numbers=columns[4:], code=columns[2:4])}</div>'
    return f'<section class="card"><h3 class="bad">{escape(name)}</h3><p>{sentence}</p>{_plots(one)}{values}</section>'


def _plots(one: FeatureVerdict) -> str:
    """Online over offline with the line on which equal values lie, and how the differences are distributed."""
    if not one.pairs:
        return ""
    offline, online = _pairs(one)
    gaps = online - offline
    least, most = float(gaps.min()), float(gaps.max())
    inner = _SIDE - 2 * _EDGE
    counts = np.histogram(gaps, _BARS, (least, most))[0].tolist() if least < most else [0, len(gaps), 0]
    step = inner / len(counts)
    bars = "".join(
        f'<rect x="{_EDGE + n * step:.1f}" y="{_SIDE - _EDGE - inner * count / max(counts):.1f}" '
        f'width="{step - 1:.1f}" height="{inner * count / max(counts):.1f}"/>'
        for n, count in enumerate(counts)
    )
    told = f"online - offline, from {8 * least:.6g} to {8 * most:.6g}"
    return f'<div class="plots">{_over(one)}{figure(bars, "differences", told)}</div>'


def _pairs(one: FeatureVerdict) -> "tuple[np.ndarray, np.ndarray]":
    # Eighths, because the difference of two floats can be more than a float holds, and that of two differences, too.
    offline, online = np.array(one.pairs).T / 8
    return offline, online


def _over(one: FeatureVerdict) -> str:
    """Online over offline."""
    offline, online = _pairs(one)
    low, high = (float(bound((offline, online))) for bound in (np.min, np.max))
    width = (high - low) or 1.0
    inner = _SIDE - 2 * _EDGE

    def place(value: float) -> float:
        return _EDGE + inner * ((value - low) / width)

    points = "".join(
        f'<circle cx="{place(x):.1f}" cy="{_SIDE - place(y):.1f}" r="3"/>'
        for x, y in zip(offline.tolist(), online.tolist(), strict=True)
    )
    line = f'<line class="base" x1="{_EDGE}" y1="{_SIDE - _EDGE}" x2="{_SIDE - _EDGE}" y2="{_EDGE}"/>'
    shown = f"{len(one.pairs):,} differing numbers"
    span = f"both from {8 * low:.12g} to {8 * high:.12g}"
    return figure(points + line, "online over offline", f"online (up) over offline (right), {span}: {shown}")


def _passed(equal: Mapping[str, FeatureVerdict]) -> str:
    """What is equal, in a compact table."""
    if not equal:
        return ""
    columns = ("compared", "worst", "tolerance")
    rows = [
        [escape(name), f"{one.compared:,}", _number(one.worst), _number(one.tolerance)] for name, one in equal.items()
    ]
    shown = table(["", *columns], rows, numbers=columns)
    return f"<h2>What is equal</h2>\n<details><summary>{len(equal)} comparisons</summary>{shown}</details>"


def _figures(one: FeatureVerdict) -> list[str]:
    equal = one.compared - one.differing
    return [f"{one.compared:,}", f"{equal:,}", f"{one.differing:,}", _number(one.worst), _number(one.tolerance)]


def _time(at: int) -> str:
    return f"{clock.moment(at):%Y-%m-%d %H:%M:%S}Z"


def _number(value: float) -> str:
    return "no number" if math.isinf(value) else f"{value:.6g}"


def _value(value: object) -> str:
    return "<i>null</i>" if value is None else escape(repr(value) if isinstance(value, str) else str(value))


def _gap(offline: object, online: object) -> str:
    """The difference of two numbers."""
    kinds = (int, float)
    if isinstance(offline, bool) or not (isinstance(offline, kinds) and isinstance(online, kinds)):
        return "-"
    return f"{online - offline:.6g}"
