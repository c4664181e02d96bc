"""A quality report as an HTML page, and on the terminal."""

from collections.abc import Iterable, Iterator

import numpy as np

from isthmus.features import clock
from isthmus.features.document.blocks import (
    Block,
    Bullets,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    bad,
    cell,
    decimal,
    good,
    strong,
)
from isthmus.features.document.charts import histogram
from isthmus.features.document.html import to_html
from isthmus.features.quality.statistics import FeatureStatistics, ViewStatistics
from isthmus.features.quality.validation import Finding
from isthmus.orchestration.quality.measure import QualityReport, ViewDrift

_COLUMNS = ("feature", "type", "nulls", "distinct", "low", "median", "high", "mean", "distribution")
_MEASURES = {
    "psi": "population stability index, change of the shares of its bins",
    "ks": "Kolmogorov-Smirnov statistic, the largest gap between the two cumulative distributions",
    "wasserstein": "average shift of the values, in standard deviations of the training set",
}
_BARS = 24


def page(report: QualityReport) -> str:
    verdict = good("passed") if report.passed else bad("failed")
    wrong = [bad(str(sentence)) for sentence in (*report.broken(), *report.drifted())]
    blocks = [Heading(("Feature quality: ", verdict), 1), *([Bullets(wrong)] if wrong else []), *quality_blocks(report)]
    return to_html("Feature quality", blocks)


def quality_blocks(report: QualityReport) -> Iterator[Block]:
    for name, view in report.views.items():
        statistics = view.statistics
        hashes = f"contract {statistics.contract[:12]}, fingerprint {statistics.fingerprint[:12]}"
        yield Heading(name)
        yield Paragraph(f"{statistics.rows:,} rows, version {statistics.version}, {hashes}")
        yield features_table(statistics)
        if view.findings:
            yield expectations_table(view.findings)
        for drift in view.drift:
            yield from _drift(drift)
    if any(drift.judged for view in report.views.values() for drift in view.drift):
        limits = {name: getattr(report.thresholds, name) for name in _MEASURES}
        yield Heading("Measures of drift")
        yield Bullets([
            (strong(name), f": {about}; drift above {limits[name]:g}") for name, about in _MEASURES.items()
        ])  # fmt: skip
        yield Paragraph(
            "Higher values are drift only if they also exceed chance and the usual variation in the training set."
        )


def features_table(statistics: ViewStatistics) -> TableBlock:
    rows: list[list[Text]] = []
    for name, feature in statistics.features.items():
        nulls = f"{feature.nulls / feature.rows:.1%}" if feature.rows else "-"
        median = next(iter(feature.top), None) if feature.categorical else feature.quantile(0.5)
        figures = map(cell, (feature.distinct, feature.low, median, feature.high, feature.mean))
        rows.append([name, feature.dtype, nulls, *figures, _plot(feature)])
    return TableBlock(_COLUMNS, rows, numbers=_COLUMNS[2:-1])


def expectations_table(findings: Iterable[Finding]) -> TableBlock:
    rows: list[list[Text]] = [
        [f.feature, f.expectation, f.found, good("holds") if f.passed else bad("broken")] for f in findings
    ]
    return TableBlock(["feature", "expectation", "found", ""], rows)


def _drift(drift: ViewDrift) -> Iterator[Block]:
    until = "" if drift.until is None else f" until {clock.moment(drift.until):%Y-%m-%d %H:%M}Z"
    window = f"after {clock.moment(drift.after):%Y-%m-%d %H:%M}Z{until}"
    against = f"training set {drift.training_set[:12]} of {drift.name}"
    if not drift.rows:
        yield Paragraph(f"No rows {window} to compare with {against}.")
        return
    yield Heading(f"Drift of {drift.rows:,} rows {window}, against {against}", 3)
    if not drift.judged:
        yield Paragraph("Too few rows to judge: differences may be chance.")
        return
    rows: list[list[Text]] = []
    for name, feature in drift.features.items():
        unseen = f" unseen: {', '.join(feature.unseen)}" if feature.unseen else ""
        figures = (
            "-" if value is None else decimal(value, 3) for value in (feature.psi, feature.ks, feature.wasserstein)
        )
        rows.append([name, *figures, (bad(", ".join(feature.exceeded)), unseen)])
    yield TableBlock(["feature", *_MEASURES, "drift"], rows, numbers=_MEASURES)


def _plot(feature: FeatureStatistics) -> Figure:
    if feature.categorical:
        shares = list(feature.top.values())[:_BARS]
    else:
        values = np.array(feature.points)
        # Without the outermost percents.
        low, high = (feature.quantile(share) or 0.0 for share in (0.01, 0.99))
        # Divided by 2 to avoid overflow of the range.
        inside = values[(values >= low) & (values <= high)] / 2
        shares = np.histogram(inside, _BARS, (low / 2, high / 2))[0].tolist() if low < high else [1.0]
    return histogram(shares, "distribution", color="blue", size=(144, 28))
