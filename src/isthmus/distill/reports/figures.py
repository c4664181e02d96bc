"""The plots of a run, for its page and as images."""

from collections.abc import Mapping
from typing import Any

from isthmus.distill.reports.comparison import metrics
from isthmus.distill.reports.plots import (
    STYLE,
    Curve,
    Strip,
    curves,
    drawable,
    latency_ranges,
    strips,
    tradeoff,
)
from isthmus.distill.reports.report import Report, SeedMean, read_report
from isthmus.distill.reports.words import span
from isthmus.features.document.blocks import Figure
from isthmus.features.document.html import image

AGED = "age"
"""Name of the plot of quality over the age of a device's features."""


def images(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the plots of a `report.json` as image URLs, by subject ("quality", "loss", "latency") and name."""
    read = read_report(report)
    subjects = {"quality": quality(read), "loss": training(read), "latency": latency(read)}
    return {
        subject: {name: image(figure, STYLE) for name, figure in figures.items()}
        for subject, figures in subjects.items()
    }


def quality(report: Report) -> dict[str, Figure]:
    plots = {}
    for metric in metrics(report):
        rows = [
            Strip(
                name,
                mean,
                bounds if (bounds := model.intervals.get(metric)) and all(map(drawable, bounds)) else None,
                [*filter(drawable, (run.quality.get(metric) for run in report.runs if run.model == name))],
            )
            for name, model in report.models.items()
            if drawable(mean := model.quality.get(metric))
        ]
        if rows:
            plots[metric] = strips(metric, rows)
    points = [
        (name, model.p50_us, value)
        for name, model in report.models.items()
        if drawable(model.p50_us) and model.p50_us > 0 and drawable(value := model.quality.get(report.metric))
    ]
    if len(points) > 1:
        label = f"{report.metric} over p50"
        caption = f"{report.metric} by the time of a prediction"
        plots[label] = tradeoff(points, label, caption)
    if aged := [
        Strip(span(point.seconds), value, interval(point.found), ())
        for point in report.ages
        if drawable(value := point.found.value)
    ]:
        plots[AGED] = strips(f"{report.metric} of the student by the age of its features", aged)
    return plots


def interval(mean: SeedMean) -> tuple[float, float] | None:
    return (mean.low, mean.high) if drawable(mean.low) and drawable(mean.high) else None


def training(report: Report) -> dict[str, Figure]:
    names = dict.fromkeys(name for run in report.runs for entry in run.history for name in entry if name != "step")
    plots = {}
    for name in names:
        lines = []
        for run in report.runs:
            points = [
                (step, value)
                for entry in run.history
                if drawable(step := entry.get("step")) and drawable(value := entry.get(name))
            ]
            if points:
                lines.append(Curve(run.model, points, faint=report.shipped not in (None, run.seed)))
        if lines:
            strong = "" if report.shipped is None else f"; seed {report.shipped} in full color, other seeds faint"
            plots[name] = curves(name, lines, f"{name}{strong}")
    return plots


def latency(report: Report) -> dict[str, Figure]:
    rows = [
        (name, model.p50_us, model.p99_us)
        for name, model in report.models.items()
        if drawable(model.p50_us) and drawable(model.p99_us) and 0 < model.p50_us <= model.p99_us
    ]
    label = "p50 to p99 of one answer, µs"
    return {label: latency_ranges(label, rows, label)} if rows else {}
