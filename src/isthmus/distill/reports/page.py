"""A run as one HTML page."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from isthmus.distill.reports.boundarycard import TOGETHER, Prices, halves
from isthmus.distill.reports.figures import metrics, quality, training
from isthmus.distill.reports.findings import gained, limits
from isthmus.distill.reports.plots import MODELS, STYLE, axis, dots, drawn, kind
from isthmus.distill.reports.report import Gate, Model, Report, read_report
from isthmus.distill.reports.searchpage import read_search, search_parts
from isthmus.distill.reports.words import between, duration, measure, number, scaled
from isthmus.features.html import document, table

_SPREAD = "A dot is the mean over the seeds, a line its 95 % interval; a faint dot is one seed."


def page(
    report: Mapping[str, Any],
    prices: Prices | None = None,
    currency: str = "",
    search: Mapping[str, Any] | None = None,
) -> str:
    """The page.

    Args:
        report: plain data of `report.json`.
        prices: of an hour of each device.
        currency: of the prices.
        search: plain data of `search.json`, if there was one.

    Raises:
        DataError: it is no report.
    """
    read = read_report(report)
    parts = [
        f"<h1>{escape(read.name)}{_word(read)}</h1>",
        f"<p>{_about(read)}</p>",
        f"<p>{escape(read.description)}</p>" if read.description else "",
        *(f"<p><b>{escape(sentence)}</b></p>" for sentence in gained(read)),
        _gates(read.gates),
        "<h2>Quality</h2>",
        _key(read.models),
        f"<p>{_SPREAD}</p>" if len(read.seeds) > 1 else "",
        _plots(quality(read).values()),
        _comparison(read),
        _slices(read),
        _training(read),
        "<h2>The boundary</h2>",
        f"<p>{TOGETHER}</p>",
        _halves(halves(read, prices or {}, currency)),
        *(["<h2>Search</h2>", *search_parts(read_search(search))] if search is not None else []),
        "<h2>Limits</h2>",
        *(f"<p>{escape(sentence)}</p>" for sentence in limits(read)),
        _rest(read),
    ]
    return document(f"Distillation of {read.name}", parts, STYLE)


def _word(report: Report) -> str:
    if not report.gates:
        return ""
    good = all(gate.holds for gate in report.gates)
    return ': <span class="good">passed</span>' if good else ': <span class="bad">failed</span>'


def _about(report: Report) -> str:
    seeds = f"{len(report.seeds)} seed{'' if len(report.seeds) == 1 else 's'}"
    shipped = "" if report.shipped is None else f", seed {report.shipped} is shipped"
    return f"{escape(report.task)}, student <code>{escape(report.id)}</code>, {seeds}{shipped}"


def _gates(gates: Iterable[Gate]) -> str:
    rows = [
        [
            escape(gate.metric),
            '<span class="good">holds</span>' if gate.holds else '<span class="bad">broken</span>',
            measure(gate.found),
            number(gate.at_least),
            number(gate.at_most),
        ]
        for gate in gates
    ]
    columns = ["gate", "", "found", "at least", "at most"]
    return table(columns, rows, numbers=columns[2:]) if rows else "<p>No gate is declared.</p>"


def _key(models: Mapping[str, Model]) -> str:
    """The color of each model, and what it is."""
    lines = [
        f'<p class="{kind(name)}"><i class="dot"></i> <b>{escape(name)}</b> '
        f"{escape('; '.join(filter(None, (model.about, model.runtime))))}</p>"
        for name, model in models.items()
    ]
    return "\n".join(lines)


def _comparison(report: Report) -> str:
    """A column for each model."""
    models = report.models
    rows = [[escape(metric), *(_measured(model, metric) for model in models.values())] for metric in metrics(report)]
    for likeness in dict.fromkeys(name for found in report.agreement.values() for name in found):
        cells = (measure(report.agreement.get(name, {}).get(likeness)) for name in models)
        rows.append([f"{escape(likeness)}, with the teacher", *cells])
    rows += [
        ["parameters", *(number(model.parameters) for model in models.values())],
        ["size", *(scaled(model.bytes, "B") for model in models.values())],
        ["p50", *(duration(model.p50_us) for model in models.values())],
        ["p99", *(duration(model.p99_us) for model in models.values())],
    ]
    columns = list(map(escape, models))
    return table(["", *columns], rows, numbers=columns)


def _measured(model: Model, metric: str) -> str:
    bounds = between(*(model.intervals.get(metric) or (None, None)))
    return measure(model.quality.get(metric)) + (f"<br><small>{bounds}</small>" if bounds else "")


def _slices(report: Report) -> str:
    """Where the student loses most, with a plot in each row, all on one scale."""
    if not report.slices:
        return ""
    found = [
        [(name, value) for name in ("teacher", "control", "student") if drawn(value := getattr(one, name))]
        for one in report.slices
    ]
    values = [value for row in found for _, value in row]
    x = axis(values or [0.0], 6, 114)
    rows = []
    for one, row in zip(report.slices, found, strict=True):
        value = "<i>no value</i>" if one.value is None else escape(one.value) or "<i>empty</i>"
        figures = map(measure, (one.teacher, one.student, one.control))
        name = f'<div class="slice"><span>{escape(one.column)}: {value}</span>{dots(row, x) if row else ""}</div>'
        rows.append([name, *figures, number(one.rows)])
    columns = [f"{escape(report.metric)} where", *(name for name in MODELS if name != "reference"), "rows"]
    shown = table(columns, rows, numbers=columns[1:])
    return f"<h2>Worst slices against the teacher</h2>\n{shown}"


def _training(report: Report) -> str:
    """What the trainings went through."""
    if not report.runs:
        return ""
    columns = ["model", "seed", "steps", "seconds", *map(escape, metrics(report))]
    rows = [
        [
            escape(run.model),
            f"{run.seed}",
            number(run.steps),
            number(run.seconds),
            *(measure(run.quality.get(name)) for name in metrics(report)),
        ]
        for run in report.runs
    ]
    runs = f"<details><summary>{len(rows)} trainings</summary>{table(columns, rows, numbers=columns[1:])}</details>"
    return f"<h2>Training</h2>\n{_plots(training(report).values())}\n{runs}"


def _halves(found: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    cards = []
    for title, rows in found.items():
        lines = [[escape(name), escape(value)] for name, value in rows]
        shown = table(["", " "], lines) if lines else "<p>Not measured yet.</p>"
        cards.append(f'<section class="card"><h3>{title}</h3>{shown}</section>')
    return f'<div class="halves">{"".join(cards)}</div>'


def _rest(report: Report) -> str:
    """Rows of each part, and where the time went."""
    parts = [[escape(part), number(rows)] for part, rows in report.rows.items()]
    stages = [
        [escape(stage), number(seconds), number(report.paused.get(stage, 0.0))]
        for stage, seconds in report.seconds.items()
    ]
    found = [
        table(["part", "rows"], parts, numbers=["rows"]) if parts else "",
        f"<p>Divided at {escape(' and '.join(report.boundaries))}.</p>" if report.boundaries else "",
        table(["stage", "seconds", "paused"], stages, numbers=["seconds", "paused"]) if stages else "",
    ]
    return f"<h2>Rows and time</h2>\n<details><summary>parts and stages</summary>{''.join(found)}</details>"


def _plots(plots: Iterable[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'
