"""Render a run as an HTML page, and its plots as images."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.distill.gates import GateResult
from isthmus.distill.reports.boundarycard import SCOPE, Prices, age_sentences, halves
from isthmus.distill.reports.comparison import color, comparison, explained, legend, measures, metrics, worst_slices
from isthmus.distill.reports.findings import early_stops, limits, teacher_gain
from isthmus.distill.reports.report import Report, read_report
from isthmus.distill.reports.searchpage import read_search, search_blocks
from isthmus.distill.reports.words import between, measure, number, span
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    bad,
    code,
    good,
    strong,
)
from isthmus.features.document.charts import ChartRow, Dot, Line, drawable, plot, rows_chart
from isthmus.features.document.html import image, to_html

_SPREAD = "Dots show the mean over the seeds, lines its 95 % interval, faint dots single seeds."


def page(
    report: Mapping[str, Any], prices: Prices | None = None, currency: str = "", search: Mapping[str, Any] | None = None
) -> str:
    read = read_report(report)
    sections = halves(read, prices or {}, currency)
    blocks: list[Block] = [
        Heading(_title(read), 1),
        *_summary(read),
        *_conclusion(read.gates),
        _gates(read.gates),
        Heading("Quality"),
        legend(read),
        *([Paragraph(_SPREAD)] if len(read.seeds) > 1 else []),
        BlockGroup("plots", list(_quality_plots(read).values())),
        comparison(read),
        BlockGroup(
            "details", explained([*(gate.metric for gate in read.gates), *measures(read)]), "What the metrics mean"
        ),
        *_age(read),
        *([Heading("Worst slices against the teacher"), *worst_slices(read)] if read.slices else []),
        *_training(read),
        Heading("Cost of training and serving"),
        Paragraph(SCOPE),
        BlockGroup("halves", [BlockGroup("card", [half], title) for title, half in sections.items()]),
        *([Heading("Search"), *search_blocks(read_search(search))] if search is not None else []),
        Heading("Limits"),
        *map(Paragraph, limits(read)),
        Heading("Rows and time"),
        BlockGroup("details", list(_rows_and_time(read)), "parts and stages"),
    ]
    return to_html(f"Distillation of {read.name}", blocks)


def _title(report: Report) -> Text:
    if not report.gates:
        return report.name
    passed = all(gate.holds for gate in report.gates)
    return (f"{report.name}: ", good("passed") if passed else bad("failed"))


def _summary(report: Report) -> Iterable[Paragraph]:
    seeds = f"{len(report.seeds)} seed{'' if len(report.seeds) == 1 else 's'}"
    shipped = "" if report.shipped is None else f", seed {report.shipped} is shipped"
    yield Paragraph((f"{report.task}, student ", code(report.id), f", {seeds}{shipped}"))
    if report.description:
        yield Paragraph(report.description)
    yield from (Paragraph(strong(sentence)) for sentence in teacher_gain(report))


def _conclusion(gates: Sequence[GateResult]) -> Iterable[Paragraph]:
    broken = [gate.metric for gate in gates if not gate.holds]
    if broken:
        yield Paragraph(
            f"{len(broken)} of {len(gates)} gates failed, so the student cannot be exported: {', '.join(broken)}."
        )
    elif gates:
        yield Paragraph(f"The student passed all {len(gates)} gates, so it can be exported.")


def _gates(gates: Iterable[GateResult]) -> Block:
    rows: list[list[Text]] = [
        [
            gate.metric,
            good("passed") if gate.holds else bad("failed"),
            measure(gate.found),
            number(gate.at_least),
            number(gate.at_most),
        ]
        for gate in gates
    ]
    columns = ["gate", "", "value", "at least", "at most"]
    return TableBlock(columns, rows, numbers=columns[2:]) if rows else Paragraph("No gates are declared.")


def _training(report: Report) -> list[Block]:
    if not report.runs:
        return []
    names = metrics(report)
    columns = ["model", "seed", "steps", "seconds", *names]
    rows = [
        [run.model, f"{run.seed}", number(run.steps), number(run.seconds), *map(measure, map(run.quality.get, names))]
        for run in report.runs
    ]
    return [
        Heading("Training"),
        *map(Paragraph, early_stops(report)),
        BlockGroup("plots", list(_training_plots(report).values())),
        BlockGroup("details", [TableBlock(columns, rows, numbers=columns[1:])], f"{len(rows)} trainings"),
    ]


def _age(report: Report) -> list[Block]:
    if not report.ages:
        return []
    rows: list[list[Text]] = [
        [span(point.seconds), measure(point.found.value), between(point.found.low, point.found.high)]
        for point in report.ages
    ]
    columns = ["features", report.metric, "95 %"]
    sentences = map(Paragraph, age_sentences(report))
    return [Heading("Age on a device"), *sentences, TableBlock(columns, rows, numbers=columns[1:])]


def _rows_and_time(report: Report) -> Iterable[Block]:
    if report.rows:
        yield TableBlock(
            ["part", "rows"], [[part, number(rows)] for part, rows in report.rows.items()], numbers=["rows"]
        )
    if report.boundaries:
        yield Paragraph(f"Split at {' and '.join(report.boundaries)}.")
    stages = [
        [stage, number(seconds), number(report.paused.get(stage, 0.0))] for stage, seconds in report.seconds.items()
    ]
    if stages:
        yield TableBlock(["stage", "seconds", "paused"], stages, numbers=["seconds", "paused"])


def images(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    read = read_report(report)
    subjects = {"quality": _quality_plots(read), "loss": _training_plots(read), "latency": _latency_plots(read)}
    return {subject: {name: image(figure) for name, figure in figures.items()} for subject, figures in subjects.items()}


def _quality_plots(report: Report) -> dict[str, Figure]:
    plots = {}
    for metric in metrics(report):
        rows = [
            ChartRow(
                name,
                color(name),
                span=_interval(*(model.intervals.get(metric) or (None, None))),
                dots=[mean],
                faint=[*filter(drawable, (run.quality.get(metric) for run in report.runs if run.model == name))],
            )
            for name, model in report.models.items()
            if drawable(mean := model.quality.get(metric))
        ]
        if rows:
            plots[metric] = rows_chart(rows, metric, metric)
    dots = [
        Dot(model.p50_us, value, color(name), name)
        for name, model in report.models.items()
        if drawable(model.p50_us) and model.p50_us > 0 and drawable(value := model.quality.get(report.metric))
    ]
    if len(dots) > 1:
        label, caption = f"{report.metric} over p50", f"{report.metric} by the time of a prediction"
        plots[label] = plot(label, caption, dots=dots, log=True, x_label="p50 of one prediction, µs")
    if aged := [
        ChartRow(span(point.seconds), "ink", span=_interval(point.found.low, point.found.high), dots=[value])
        for point in report.ages
        if drawable(value := point.found.value)
    ]:
        caption = f"{report.metric} of the student by the age of its features"
        plots["age"] = rows_chart(aged, caption, caption)
    return plots


def _interval(low: float | None, high: float | None) -> tuple[float, float] | None:
    return (low, high) if drawable(low) and drawable(high) else None


def _training_plots(report: Report) -> dict[str, Figure]:
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
                faint = report.shipped not in (None, run.seed)
                lines.append(Line(points, color(run.model), run.model, faint))
        if lines:
            strong = "" if report.shipped is None else f"; seed {report.shipped} in full color, other seeds faint"
            plots[name] = plot(name, f"{name}{strong}", lines=lines, x_label="steps")
    return plots


def _latency_plots(report: Report) -> dict[str, Figure]:
    rows = [
        ChartRow(name, color(name), span=(model.p50_us, model.p99_us), dots=[model.p50_us], faint=[model.p99_us])
        for name, model in report.models.items()
        if drawable(model.p50_us) and drawable(model.p99_us) and 0 < model.p50_us <= model.p99_us
    ]
    label = "p50 to p99 of one answer, µs"
    return {label: rows_chart(rows, label, label, log=True)} if rows else {}
