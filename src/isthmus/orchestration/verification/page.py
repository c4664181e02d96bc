"""A verdict as an HTML page (`page`), as blocks for the terminal (`screen`), and as images."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from isthmus.features import clock
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    absent,
    bad,
    code,
    decimal,
    good,
    plain,
    strong,
)
from isthmus.features.document.charts import Bar, ChartRow, Dot, histogram, plot, rows_chart, share_in_cell
from isthmus.features.document.html import image, to_html
from isthmus.package.verdict import FeatureVerdict, ValueDifference, Verdict, merged

# Differing features with a card; further ones are listed in a table.
MOST = 40
# Differing features that `images` plots.
IMAGES = 3
_BARS = 25
# Characters of a value on the terminal, enough for the error of a server that refused.
_SHOWN = 160
_NUMBERS = ("compared", "equal", "differing", "largest difference", "tolerance")
_READING = """\
A row is a view, a request transform, or a part of the package. `snapshot`: rows on devices. `API`: answers of the
server. `package, inputs`: values fed to the model. `package, outputs`: answers of its files for rows in batches.
`package, one row at a time`: answers for single rows."""


def page(verdict: Verdict, project: str) -> str:
    differing = _differing(verdict)
    equal = {name: feature for name, feature in verdict.named().items() if not feature.differing}
    as_of = f"{clock.moment(verdict.at):%Y-%m-%d %H:%M:%S}Z"
    blocks: list[Block] = [
        Heading((f"{project}: ", _outcome(verdict)), 1),
        Paragraph((f"{verdict.compared:,} values compared, ", strong(f"{verdict.differing:,} differ"))),
        Paragraph((f"as of {as_of}, contract ", code(verdict.contract[:12]))),
    ]
    if verdict.package is not None:
        blocks.append(Paragraph(("package ", code(verdict.package[:12]))))
    if not verdict.compared:
        blocks.append(Paragraph("Nothing was compared, so the verdict fails."))
    blocks += [*_limits(verdict), Paragraph(_READING), _overview(verdict)]
    if verdict.runtimes:
        blocks += [Heading("Runtimes"), runtimes_table(verdict)]
    if differing:
        blocks += [Heading("Differences"), *(_card(name, differing[name]) for name in list(differing)[:MOST])]
        if len(differing) > MOST:
            blocks.append(_table("", {name: differing[name] for name in list(differing)[MOST:]}))
    if equal:
        blocks += [Heading("Equal values"), BlockGroup("details", [_table("", equal)], f"{len(equal)} comparisons")]
    return to_html(f"Verdict of {project}", blocks)


def screen(verdict: Verdict, file: Path) -> Iterator[Block]:
    yield _overview(verdict)
    if verdict.runtimes:
        yield runtimes_table(verdict)
    differing = _differing(verdict)
    if differing:
        yield _table("differs", differing)
    for name, feature in differing.items():
        yield Paragraph(bad(name))
        for example in feature.examples:
            sides = f"offline {_cut(example.offline)}  online {_cut(example.online)}"
            yield Paragraph(f"  {example.event_timestamp or 'no event time':<20}  {example.key}  {sides}")
    yield Paragraph(
        ("Verdict: ", _outcome(verdict), f", {verdict.compared:,} values compared, {verdict.differing:,} differ.")
    )
    yield from _limits(verdict)
    yield Paragraph(f"Page: {file}")


def _outcome(verdict: Verdict) -> Text:
    if verdict.passed and "the package" in verdict.skipped:
        return "passed, except that the package was not compared"
    return good("passed") if verdict.passed else bad("failed")


def _differing(verdict: Verdict) -> dict[str, FeatureVerdict]:
    return {name: feature for name, feature in verdict.named().items() if feature.differing}


def _limits(verdict: Verdict) -> Iterator[Block]:
    for limit in verdict.limits:
        yield Paragraph(f"{limit[0].upper()}{limit[1:]}.")


def _overview(verdict: Verdict) -> TableBlock:
    rows: list[list[Text]] = []
    for name, features in _groups(verdict).items():
        total = merged(list(features.values()))
        share = total.differing / max(total.compared, 1)
        rows.append([name, f"{len(features)}", *_figures(total), share_in_cell(share, f"{100 * share:.2f} % differ")])
    if not verdict.differing:
        # All bars would be full.
        return TableBlock(["", "features", *_NUMBERS], [row[:-1] for row in rows], numbers=("features", *_NUMBERS))
    numbers = ("features", *_NUMBERS)
    return TableBlock(["", *numbers, "share"], rows, numbers=numbers)


def runtimes_table(verdict: Verdict) -> TableBlock:
    rows: list[list[Text]] = []
    for name, runtime in verdict.runtimes.items():
        total = merged([verdict.files[file] for file in runtime.files])
        differing: Text = bad(f"{total.differing:,}") if total.differing else "0"
        rows.append([
            name, f"{len(runtime.files)}", f"{runtime.rows:,}", differing, _number(total.worst),
            f"{runtime.milliseconds:,.0f}",
        ])  # fmt: skip
    numbers = ("files", "rows", "differing", "largest difference", "ms")
    return TableBlock(["runtime", *numbers], rows, numbers=numbers)


def _groups(verdict: Verdict) -> dict[str, Mapping[str, FeatureVerdict]]:
    groups: dict[str, Mapping[str, FeatureVerdict]] = dict(verdict.views)
    groups |= {"package, inputs": verdict.inputs, "package, inputs on a device": verdict.device}
    groups |= {"package, outputs": verdict.files, "package, one row at a time": verdict.singly}
    return {name: features for name, features in groups.items() if features}


def images(verdict: Verdict) -> dict[str, str]:
    rows = []
    for name, features in _groups(verdict).items():
        total = merged(list(features.values()))
        share = total.differing / max(total.compared, 1)
        bars: list[Bar] = [(0.0, 1.0, "green")] if total.compared else []
        bars += [(0.0, share, "red")] if share else []
        rows.append(ChartRow(name, bars=bars, text=f"{total.differing:,} of {total.compared:,}"))
    figures = {"values that differ": rows_chart(rows, "what differs")}
    drawable = {name: feature for name, feature in _differing(verdict).items() if feature.pairs}
    figures |= {f"{name}, online over offline": _scatter(drawable[name]) for name in list(drawable)[:IMAGES]}
    return {name: image(figure) for name, figure in figures.items()}


def _card(name: str, feature: FeatureVerdict) -> BlockGroup:
    compared, equal, differing, worst, tolerance = map(plain, _figures(feature))
    numbers = f"{differing} of {compared} differ, {equal} are equal; largest difference {worst}, tolerance {tolerance}"
    columns = ["key", "event time", "offline", "online", "online - offline"]
    rows = [
        [each.key, each.event_timestamp or "-", _value(each.offline), _value(each.online), _difference(each)]
        for each in feature.examples
    ]
    values = TableBlock(columns, rows, numbers=columns[4:], code=columns[2:4], layout="sides")
    plots = [BlockGroup("plots", [_scatter(feature), _histogram(feature)])] if feature.pairs else []
    return BlockGroup("card", [Paragraph(numbers), *plots, values], bad(name))


def _sides(feature: FeatureVerdict) -> "tuple[np.ndarray, np.ndarray]":
    # Divided by 8 to avoid overflow: differences of floats, and of such differences, can exceed the range of a float.
    offline, online = np.array(feature.pairs).T / 8
    return offline, online


def _histogram(feature: FeatureVerdict) -> Figure:
    offline, online = _sides(feature)
    gaps = online - offline
    least, most = float(gaps.min()), float(gaps.max())
    counts = np.histogram(gaps, _BARS, (least, most))[0].tolist() if least < most else [0, len(gaps), 0]
    caption = f"online - offline, from {8 * least:.6g} to {8 * most:.6g}"
    return histogram(counts, "differences", caption, color="red")


def _scatter(feature: FeatureVerdict) -> Figure:
    offline, online = _sides(feature)
    low, high = (float(bound((offline, online))) for bound in (np.min, np.max))
    span = f"both from {8 * low:.12g} to {8 * high:.12g}"
    caption = f"online (up) over offline (right), {span}: {len(feature.pairs):,} differing numbers"
    dots = [Dot(x, y, "red") for x, y in zip(offline.tolist(), online.tolist(), strict=True)]
    return plot("online over offline", caption, dots=dots, diagonal=True)


def _table(title: str, features: Mapping[str, FeatureVerdict]) -> TableBlock:
    rows: Sequence[Sequence[Text]] = [[name, *_figures(feature)] for name, feature in features.items()]
    return TableBlock([title, *_NUMBERS], rows, numbers=_NUMBERS)


def _figures(feature: FeatureVerdict) -> list[Text]:
    return [
        f"{feature.compared:,}",
        f"{feature.compared - feature.differing:,}",
        bad(f"{feature.differing:,}") if feature.differing else "0",
        _number(feature.worst),
        _number(feature.tolerance),
    ]


def _number(value: float) -> str:
    return "no number" if math.isinf(value) else decimal(value, 6)


def _value(value: object) -> Text:
    return absent("null") if value is None else repr(value) if isinstance(value, str) else str(value)


def _cut(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _difference(example: ValueDifference) -> str:
    sides = (example.online, example.offline)
    if isinstance(example.offline, bool) or not all(isinstance(side, int | float) for side in sides):
        return "-"
    return f"{example.online - example.offline:.6g}"
