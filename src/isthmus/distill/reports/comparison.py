"""Compare the models of a run, and show where the student loses most."""

from collections.abc import Iterable, Mapping, Sequence

from isthmus.distill.reports.report import ModelRecord, Report, WorstSlice
from isthmus.distill.reports.words import between, duration, measure, number, scaled
from isthmus.features.document.blocks import (
    Block,
    Bullets,
    Figure,
    Legend,
    Paragraph,
    TableBlock,
    Text,
    absent,
    aside,
    strong,
)
from isthmus.features.document.charts import Axis, Color, axis, dots_in_cell, drawable

_COLORS: Mapping[str, Color] = {"teacher": "soft", "reference": "purple", "student": "blue", "control": "orange"}
_MEASURES = {
    "auc": "area under the ROC curve: probability that a row of class 1 scores above one of class 0; higher is better",
    "log_loss": "mean negative log-likelihood of the labels, in nats; lower is better",
    "brier": "mean squared error of the probabilities; lower is better",
    "ece": "expected calibration error: mean distance between probabilities and observed frequencies; lower is better",
    "ece_uncalibrated": "expected calibration error before calibrating on the validation part; lower is better",
    "accuracy": "share of rows with the correct class; higher is better",
    "micro_f1": "harmonic mean of precision and recall, over all classes together; higher is better",
    "macro_f1": "harmonic mean of precision and recall, averaged over the classes; higher is better",
    "rmse": "root of the mean squared error, in the label's unit; lower is better",
    "mae": "mean absolute error, in the label's unit; lower is better",
    "r2": "explained share of the label's variance; higher is better",
    "ndcg": "normalized discounted cumulative gain of the top rows of a group, 1 for the best order; higher is better",
    "mrr": "mean reciprocal rank of the first relevant row of a group; higher is better",
    "correlation": "correlation of the student's and the teacher's predictions; higher is better",
    "agreement": "share of rows with the same class as the teacher; higher is better",
    "kl": "Kullback-Leibler divergence from the teacher's probabilities, in nats; lower is better",
    "taught": "improvement of the student over the control, the same student trained without the teacher",
    "gap_closed": "share of the gap between control and teacher that the student closes",
    "lift_kept": "share of the reference's improvement over chance that the student keeps, in the task's metric",
    "age_cost": "loss in the student's metric when its features have the greatest allowed age",
    "p50": "half of the predictions take no longer",
    "p99": "99 of 100 predictions take no longer",
}


def metrics(report: Report) -> list[str]:
    names = dict.fromkeys(name for model in report.models.values() for name in model.quality)
    return sorted(names, key=lambda name: name != report.metric)


def color(model: str) -> Color:
    return _COLORS.get(model, "ink")


def legend(report: Report) -> Legend:
    return Legend([
        (color(name), name, "; ".join(filter(None, (model.about, model.runtime))))
        for name, model in report.models.items()
    ])  # fmt: skip


def explained(names: Iterable[str]) -> list[Block]:
    known = [(strong(name), f": {_MEASURES[name]}") for name in dict.fromkeys(names) if name in _MEASURES]
    return [Bullets(known)] if known else []


def measures(report: Report) -> list[str]:
    return [*metrics(report), *_agreements(report), "p50", "p99"]


def _agreements(report: Report) -> list[str]:
    return list(dict.fromkeys(name for model in report.agreement.values() for name in model))


def comparison(report: Report) -> TableBlock:
    models = report.models
    rows: list[list[Text]] = [
        [metric, *(_quality(model, metric) for model in models.values())] for metric in metrics(report)
    ]
    for name in _agreements(report):
        values = (report.agreement.get(model, {}).get(name) for model in models)
        rows.append([f"{name} with teacher", *map(measure, values)])
    rows += [
        ["parameters", *(number(model.parameters) for model in models.values())],
        ["size", *(scaled(model.bytes, "B") for model in models.values())],
        ["p50", *(duration(model.p50_us) for model in models.values())],
        ["p99", *(duration(model.p99_us) for model in models.values())],
    ]
    return TableBlock(["", *models], rows, numbers=list(models))


def _quality(model: ModelRecord, metric: str) -> Text:
    bounds = between(*(model.intervals.get(metric) or (None, None)))
    mean = measure(model.quality.get(metric))
    return (mean, aside(bounds)) if bounds else mean


def worst_slices(report: Report) -> list[Block]:
    if not report.slices:
        return []
    columns = ["slice", "rows", "teacher", "student", "control"]
    values = [
        [(name, value) for name in ("teacher", "control", "student") if drawable(value := getattr(part, name))]
        for part in report.slices
    ]
    scale = axis([value for row in values for _, value in row] or [0.0], 6, 114)
    rows: list[list[Text]] = [
        [
            (f"{part.column}: ", _value(part), *_dots(drawn, scale)),
            number(part.rows),
            *map(measure, (part.teacher, part.student, part.control)),
        ]
        for part, drawn in zip(report.slices, values, strict=True)
    ]
    metric = Paragraph(f"{report.metric} on test rows that share a feature value.")
    return [metric, TableBlock(columns, rows, numbers=columns[1:])]


def _dots(values: Sequence[tuple[str, float]], scale: Axis) -> list[Figure]:
    label = ", ".join(f"{model} {measure(value)}" for model, value in values)
    return [dots_in_cell([(color(model), value) for model, value in values], scale, label)] if values else []


def _value(part: WorstSlice) -> Text:
    if part.value is None:
        return absent("no value")
    return part.value if part.value.strip() else absent("empty")
