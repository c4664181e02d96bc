"""A verdict as one HTML page that needs no network and no script, in light and dark, on a desk and on a phone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from isthmus.features import clock
from isthmus.features.verdict import FeatureVerdict, Verdict

MOST = 40
"""Differing features that are shown in full; of more, the numbers alone."""
_SIDE, _EDGE = 200, 8
_BARS = 25
_STYLE = """\
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #d9dee5; --paper: #fff; --card: #f6f8fa;
  --bad: #b3261e; --good: #1b7f4b; --mark: #b3261e; --base: #8a95a5 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa6b5; --line: #333c48; --paper: #12161c;
  --card: #1a2029; --bad: #ff8a80; --good: #6fd8a4; --mark: #ff8a80; --base: #75818f } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 68rem; padding: 1rem; color: var(--ink);
  background: var(--paper) }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 } p { margin: .3rem 0; color: var(--soft) }
h1, h3, p, code, td:first-child { overflow-wrap: anywhere }
.bad { color: var(--bad); font-weight: 600 } .good { color: var(--good) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; margin: .8rem 0 }
.wide { overflow-x: auto } .plots { display: flex; flex-wrap: wrap; gap: .8rem; margin: .6rem 0 }
figure { margin: 0; flex: 0 1 200px; min-width: 130px } figcaption { font-size: .8rem; color: var(--soft) }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 500 } .n { text-align: right; font-variant-numeric: tabular-nums }
td.v { font-family: ui-monospace, monospace; overflow-wrap: anywhere; min-width: 6rem }
svg { display: block; background: var(--paper); border: 1px solid var(--line); width: 100%; height: auto }
svg .base { stroke: var(--base); stroke-dasharray: 3 3 } svg circle { fill: var(--mark); fill-opacity: .5 }
svg rect { fill: var(--mark) }
.share { background: var(--good); height: .5rem; min-width: 2.5rem; margin-top: .5rem; border-radius: 4px }
.share i { display: block; background: var(--bad); height: 100%; border-radius: 4px }
summary { cursor: pointer; color: var(--soft) } a { color: inherit }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 14px } .card { padding: .6rem }
  .plots { flex-wrap: nowrap } .views td:nth-child(2), .views th:nth-child(2) { display: none }
  .sides th { display: none }
  .sides td { display: grid; grid-template-columns: 7.5rem 1fr; border: 0; text-align: left }
  .sides td::before { content: attr(data-of); color: var(--soft); font-family: system-ui, sans-serif }
  .sides tr + tr td:first-child { border-top: 1px solid var(--line) } }
"""


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
            parts.append(_table(["", *_COLUMNS], rest, numbers=_COLUMNS))
    parts.append(_passed({name: one for name, one in verdict.named().items() if not one.differing}))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Verdict of {escape(project)}</title>\n<style>\n{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


_COLUMNS = ("compared", "equal", "differing", "worst", "tolerance")


def _overview(verdict: Verdict) -> str:
    """A line per view, and for the package: how much of it is equal."""
    rows = []
    groups: dict[str, Mapping[str, FeatureVerdict]] = dict(verdict.views)
    groups |= {"package, inputs": verdict.inputs, "package, outputs": verdict.files}
    for name, features in groups.items():
        compared = sum(one.compared for one in features.values())
        differing = sum(one.differing for one in features.values())
        if not features:
            continue
        share = f'<div class="share"><i style="width:{100 * differing / max(compared, 1):.2f}%"></i></div>'
        mark = f'<span class="bad">{differing:,}</span>' if differing else "0"
        rows.append([escape(name), f"{len(features)}", f"{compared:,}", mark, share])
    numbers = ("features", "compared", "differing")
    return f'<div class="views">{_table(["", *numbers, "share"], rows, numbers=numbers)}</div>'


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
    values = f'<div class="sides">{_table(columns, rows, numbers=columns[4:], code=columns[2:4])}</div>'
    return f'<section class="card"><h3 class="bad">{escape(name)}</h3><p>{sentence}</p>{_plots(one)}{values}</section>'


def _plots(one: FeatureVerdict) -> str:
    """Online over offline with the line on which equal values lie, and how the differences are distributed."""
    if not one.pairs:
        return ""
    # Eighths, because the difference of two floats can be more than a float holds, and that of two differences, too.
    offline, online = np.array(one.pairs).T / 8
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
    scatter = _figure(points + line, "online over offline", f"online (up) over offline (right), {span}: {shown}")
    gaps = online - offline
    least, most = float(gaps.min()), float(gaps.max())
    counts = np.histogram(gaps, _BARS, (least, most))[0].tolist() if least < most else [0, len(gaps), 0]
    step = inner / len(counts)
    bars = "".join(
        f'<rect x="{_EDGE + n * step:.1f}" y="{_SIDE - _EDGE - inner * count / max(counts):.1f}" '
        f'width="{step - 1:.1f}" height="{inner * count / max(counts):.1f}"/>'
        for n, count in enumerate(counts)
    )
    told = f"online - offline, from {8 * least:.6g} to {8 * most:.6g}"
    return f'<div class="plots">{scatter}{_figure(bars, "differences", told)}</div>'


def _figure(content: str, label: str, caption: str) -> str:
    box = f'viewBox="0 0 {_SIDE} {_SIDE}"'
    return (
        f'<figure><svg {box} role="img" aria-label="{label}">{content}</svg><figcaption>{caption}</figcaption></figure>'
    )


def _passed(equal: Mapping[str, FeatureVerdict]) -> str:
    """What is equal, in a compact table."""
    if not equal:
        return ""
    columns = ("compared", "worst", "tolerance")
    rows = [
        [escape(name), f"{one.compared:,}", _number(one.worst), _number(one.tolerance)] for name, one in equal.items()
    ]
    table = _table(["", *columns], rows, numbers=columns)
    return f"<h2>What is equal</h2>\n<details><summary>{len(equal)} comparisons</summary>{table}</details>"


def _figures(one: FeatureVerdict) -> list[str]:
    equal = one.compared - one.differing
    return [f"{one.compared:,}", f"{equal:,}", f"{one.differing:,}", _number(one.worst), _number(one.tolerance)]


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = (), code: Sequence[str] = ()
) -> str:
    kinds = [' class="n"' if c in numbers else ' class="v"' if c in code else "" for c in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        # On a phone a cell stands below the last, and says itself of what it is.
        names = [f' data-of="{column}"' if tag == "td" and column else "" for column in columns]
        return "".join(f"<{tag}{kind}{of}>{cell}</{tag}>" for kind, of, cell in zip(kinds, names, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<tr>{line("th", columns)}</tr>\n{body}\n</table></div>'


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
