"""What of a run is drawn: for its page, and for whoever shows images beside other things."""

from collections.abc import Mapping
from html import escape
from typing import Any

from isthmus.distill.reports.plots import STYLE, Line, Span, Strip, curves, drawn, known, spans, strips, tradeoff
from isthmus.distill.reports.report import Report, read_report
from isthmus.features.html import image


def images(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The plots of a run by subject ("quality", "loss", "latency") and name, each the address of an image.

    Args:
        report: plain data of `report.json`.

    Raises:
        DataError: it is no report.
    """
    read = read_report(report)
    found = {"quality": quality(read), "loss": training(read), "latency": latency(read)}
    return {
        subject: {name: image(shown, STYLE) for name, shown in drawings.items()} for subject, drawings in found.items()
    }


def metrics(report: Report) -> list[str]:
    """All that were measured, that of the report first."""
    found = dict.fromkeys(name for model in report.models.values() for name in model.quality)
    return sorted(found, key=lambda name: name != report.metric)


def quality(report: Report) -> dict[str, str]:
    """A plot of each metric, and one of what speed costs."""
    plots = {}
    for metric in metrics(report):
        rows = [
            Strip(
                name,
                mean,
                bounds if (bounds := model.intervals.get(metric)) and all(map(drawn, bounds)) else None,
                known(run.quality.get(metric) for run in report.runs if run.model == name),
            )
            for name, model in report.models.items()
            if drawn(mean := model.quality.get(metric))
        ]
        if rows:
            plots[metric] = strips(metric, rows, escape(metric))
    points = [
        (name, model.p50_us, value)
        for name, model in report.models.items()
        if drawn(model.p50_us) and model.p50_us > 0 and drawn(value := model.quality.get(report.metric))
    ]
    if len(points) > 1:
        label = f"{report.metric} over p50"
        told = f"{escape(report.metric)} (up) over p50 of one answer in µs (right, logarithmic)"
        plots[label] = tradeoff(points, label, told)
    return plots


def training(report: Report) -> dict[str, str]:
    """A plot of each number that the trainings went through."""
    names = dict.fromkeys(name for run in report.runs for entry in run.history for name in entry if name != "step")
    plots = {}
    for name in names:
        lines = []
        for run in report.runs:
            points = [
                (step, value)
                for entry in run.history
                if drawn(step := entry.get("step")) and drawn(value := entry.get(name))
            ]
            if points:
                lines.append(Line(run.model, points, faint=report.shipped not in (None, run.seed)))
        if lines:
            told = "" if report.shipped is None else f"; seed {report.shipped} strong, the others faint"
            plots[name] = curves(name, lines, f"{escape(name)} (up) over steps (right){told}")
    return plots


def latency(report: Report) -> dict[str, str]:
    """A plot of how long one answer takes, from p50 to p99."""
    rows = [
        Span(name, model.p50_us, model.p99_us)
        for name, model in report.models.items()
        if drawn(model.p50_us) and drawn(model.p99_us) and 0 < model.p50_us <= model.p99_us
    ]
    label = "p50 to p99 of one answer, µs"
    return {label: spans(label, rows, f"{label} (logarithmic)")} if rows else {}
