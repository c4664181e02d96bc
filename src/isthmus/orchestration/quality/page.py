"""A quality report as one HTML page, and on the terminal."""

from collections.abc import Iterator

import numpy as np

from isthmus.features import clock
from isthmus.features.document.blocks import Block, Figure, Heading, Paragraph, Table, Text, bad, bars, cell, good
from isthmus.features.document.html import to_html
from isthmus.features.quality.statistics import FeatureStatistics, ViewStatistics
from isthmus.orchestration.quality.quality import QualityReport, ViewDrift

FEATURE_COLUMNS = ("feature", "type", "nulls", "distinct", "low", "median", "high", "mean")
_MEASURES = ("psi", "ks", "wasserstein")
_BARS = 24
_WIDTH, _HEIGHT = 144, 28
_STYLE = "svg rect { fill: #4a7ab5 }\n"


def page(report: QualityReport) -> str:
    """A self-contained HTML page."""
    verdict = good("passed") if report.passed else bad("failed")
    blocks = [Heading(("Feature quality: ", verdict), 1), *quality_blocks(report)]
    return to_html("Feature quality", blocks, _STYLE)


def quality_blocks(report: QualityReport) -> Iterator[Block]:
    """Of each view its statistics, expectations and drift."""
    for name, view in report.views.items():
        statistics = view.statistics
        hashes = f"contract {statistics.contract[:12]}, fingerprint {statistics.fingerprint[:12]}"
        yield Heading(name)
        yield Paragraph(f"{statistics.rows:,} rows, version {statistics.version}, {hashes}")
        plots = map(_plot, statistics.features.values())
        rows: list[list[Text]] = [[*row, plot] for row, plot in zip(feature_rows(statistics), plots, strict=True)]
        yield Table([*FEATURE_COLUMNS, "distribution"], rows, numbers=FEATURE_COLUMNS[2:])
        if view.findings:
            rows = [
                [f.feature, f.expectation, f.found, good("holds") if f.passed else bad("broken")] for f in view.findings
            ]
            yield Table(["feature", "expectation", "found", ""], rows)
        for drift in view.drift:
            yield from _drift(drift)


def feature_rows(statistics: ViewStatistics) -> list[list[str]]:
    """The features of a view as rows of FEATURE_COLUMNS; the median of categories is the most frequent."""
    rows = []
    for name, feature in statistics.features.items():
        nulls = f"{feature.nulls / feature.rows:.1%}" if feature.rows else "-"
        median = next(iter(feature.top), None) if feature.categorical else feature.quantile(0.5)
        figures = map(cell, (feature.distinct, feature.low, median, feature.high, feature.mean))
        rows.append([name, feature.dtype, nulls, *figures])
    return rows


def _drift(drift: ViewDrift) -> Iterator[Block]:
    until = "" if drift.until is None else f" until {clock.moment(drift.until):%Y-%m-%d %H:%M}Z"
    window = f"after {clock.moment(drift.after):%Y-%m-%d %H:%M}Z{until}"
    yield Heading(
        f"Drift of {drift.rows:,} rows {window}, against training set {drift.training_set} of {drift.name}", 3
    )
    if not drift.rows:
        return
    if not drift.judged:
        yield Paragraph("These are too few rows to judge: what they differ by may be chance.")
        return
    rows: list[list[Text]] = []
    for name, feature in drift.features.items():
        unseen = f" unseen: {', '.join(feature.unseen)}" if feature.unseen else ""
        figures = ("-" if value is None else f"{value:.3g}" for value in (feature.psi, feature.ks, feature.wasserstein))
        rows.append([name, *figures, (bad(", ".join(feature.exceeded)), unseen)])
    yield Table(["feature", *_MEASURES, ""], rows, numbers=_MEASURES)


def _plot(feature: FeatureStatistics) -> Figure:
    """Bars of the most frequent categories, or of numbers between their 1st and 99th percentile."""
    if feature.categorical:
        shares = list(feature.top.values())[:_BARS]
    else:
        values = np.array(feature.points)
        low, high = (feature.quantile(share) or 0.0 for share in (0.01, 0.99))
        # Halves, because the range of two floats can be more than a float holds.
        inside = values[(values >= low) & (values <= high)] / 2
        shares = np.histogram(inside, _BARS, (low / 2, high / 2))[0].tolist() if low < high else [1.0]
    return Figure(bars(shares, _WIDTH, _HEIGHT), "distribution", width=_WIDTH, height=_HEIGHT)
