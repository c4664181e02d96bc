"""Render a run as an HTML page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.distill.reports.boundarycard import SCOPE, Prices, age_sentences, halves
from isthmus.distill.reports.comparison import comparison, explained, legend, measures, metrics, worst_slices
from isthmus.distill.reports.figures import quality, training
from isthmus.distill.reports.findings import limits, teacher_gain
from isthmus.distill.reports.plots import STYLE
from isthmus.distill.reports.report import GateRecord, Report, read_report
from isthmus.distill.reports.searchpage import read_search, search_blocks
from isthmus.distill.reports.words import between, measure, number, span
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    bad,
    code,
    good,
    strong,
)
from isthmus.features.document.html import to_html

_SPREAD = "Dots show the mean over the seeds, lines its 95 % interval, faint dots single seeds."


def page(
    report: Mapping[str, Any], prices: Prices | None = None, currency: str = "", search: Mapping[str, Any] | None = None
) -> str:
    """Return the page for the content of `report.json` and, after a search, of `search.json`.

    `prices` has the price of an hour by device.
    """
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
        BlockGroup("plots", list(quality(read).values())),
        comparison(read),
        BlockGroup(
            "details", explained([*(gate.metric for gate in read.gates), *measures(read)]), "What the metrics mean"
        ),
        *_age(read),
        *([Heading("Worst slices against the teacher"), *worst_slices(read)] if read.slices else []),
        *_training(read),
        Heading("The boundary"),
        Paragraph(SCOPE),
        BlockGroup("halves", [BlockGroup("card", [half], title) for title, half in sections.items()]),
        *([Heading("Search"), *search_blocks(read_search(search))] if search is not None else []),
        Heading("Limits"),
        *map(Paragraph, limits(read)),
        Heading("Rows and time"),
        BlockGroup("details", list(_rows_and_time(read)), "parts and stages"),
    ]
    return to_html(f"Distillation of {read.name}", blocks, STYLE)


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


def _conclusion(gates: Sequence[GateRecord]) -> Iterable[Paragraph]:
    broken = [gate.metric for gate in gates if not gate.holds]
    if broken:
        yield Paragraph(
            f"{len(broken)} of {len(gates)} gates failed, so the student cannot be exported: {', '.join(broken)}."
        )
    elif gates:
        yield Paragraph(f"The student passed all {len(gates)} gates, so it can be exported.")


def _gates(gates: Iterable[GateRecord]) -> Block:
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
        BlockGroup("plots", list(training(report).values())),
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
