"""A quality report as one HTML page that needs no network and no script."""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from isthmus.features.quality.statistics import FeatureStatistics
from isthmus.orchestration.cells import FEATURE_COLUMNS, feature_rows
from isthmus.orchestration.quality.quality import QualityReport, ViewQuality

_MEASURES = ("psi", "ks", "wasserstein")
_BARS = 24
_WIDTH, _HEIGHT = 144, 28
_STYLE = """\
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd }
th { text-align: left } .n { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #b00020; font-weight: 600 } svg rect { fill: #4a7ab5 }
"""


def page(report: QualityReport) -> str:
    """The page."""
    verdict = "passed" if report.passed else '<span class="bad">failed</span>'
    views = "\n".join(_view(name, view) for name, view in report.views.items())
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Feature quality</title>\n'
        f"<style>\n{_STYLE}</style>\n<h1>Feature quality: {verdict}</h1>\n{views}\n</html>\n"
    )


def _view(name: str, view: ViewQuality) -> str:
    statistics = view.statistics
    plots = map(_plot, statistics.features.values())
    rows = [[*map(escape, row), plot] for row, plot in zip(feature_rows(statistics), plots, strict=True)]
    made = f"contract {statistics.contract[:12]}, fingerprint {statistics.fingerprint[:12]}"
    parts = [
        f"<h2>{escape(name)}</h2>\n<p>{statistics.rows:,} rows, version {statistics.version}, {made}</p>",
        _table([*FEATURE_COLUMNS, "distribution"], rows, numbers=FEATURE_COLUMNS[2:]),
    ]
    if view.findings:
        findings = [
            [escape(f.feature), escape(f.expectation), escape(f.found), _mark("" if f.passed else "broken")]
            for f in view.findings
        ]
        parts.append(_table(["feature", "expectation", "found", ""], findings))
    for drifts in view.drift:
        parts.append(f"<h3>Drift of {drifts.rows:,} rows after training set {drifts.training_set}</h3>")
        if not drifts.judged:
            parts.append("<p>These are too few rows to judge.</p>")
        compared = [
            [escape(feature), *map(_figure, (one.psi, one.ks, one.wasserstein)), _mark(", ".join(one.exceeded))]
            for feature, one in drifts.features.items()
        ]
        parts.append(_table(["feature", *_MEASURES, ""], compared, numbers=_MEASURES))
    return "\n".join(parts)


def _plot(one: FeatureStatistics) -> str:
    """Bars as inline SVG: of numbers between their 1st and 99th percentile, of categories the most frequent."""
    if one.categorical:
        shares = list(one.top.values())[:_BARS]
    else:
        values = np.array(one.points)
        low, high = (one.quantile(share) or 0.0 for share in (0.01, 0.99))
        # Halves, because the range of two floats can be more than a float holds.
        inside = values[(values >= low) & (values <= high)] / 2
        shares = np.histogram(inside, _BARS, (low / 2, high / 2))[0].tolist() if low < high else [1.0]
    tallest = max(shares, default=0) or 1
    step = _WIDTH / _BARS
    bars = "".join(
        f'<rect x="{n * step:.1f}" y="{_HEIGHT * (1 - share / tallest):.1f}" width="{step - 1:.1f}" '
        f'height="{_HEIGHT * share / tallest:.1f}"/>'
        for n, share in enumerate(shares)
    )
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="distribution">{bars}</svg>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    kinds = [' class="n"' if column in numbers else "" for column in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table>\n<tr>{line('th', columns)}</tr>\n{body}\n</table>"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _mark(word: str) -> str:
    return f'<span class="bad">{word}</span>' if word else ""
