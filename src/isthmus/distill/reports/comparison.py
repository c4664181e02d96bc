"""The models of a run side by side, and where the student loses most."""

from collections.abc import Iterable

from isthmus.distill.reports.plots import MODELS, axis, color_class, drawable, marks
from isthmus.distill.reports.report import Model, Report, WorstSlice
from isthmus.distill.reports.words import between, duration, measure, number, scaled
from isthmus.features.document.blocks import Block, Bullets, Legend, Paragraph, TableBlock, Text, absent, aside, strong

_MEASURES = {
    "auc": "area under the ROC curve, the chance that a row of class 1 scores above one of class 0; more is better",
    "log_loss": "mean negative log-likelihood of the labels, in nats; less is better",
    "brier": "mean squared error of the probabilities; less is better",
    "ece": "expected calibration error, from probabilities to the share of rows that turn out so; less is better",
    "ece_uncalibrated": "the same before the calibration that the validation part taught; less is better",
    "accuracy": "share of rows that get their class; more is better",
    "macro_f1": "mean over the classes of the harmonic mean of precision and recall; more is better",
    "rmse": "root of the mean squared error, in the label's unit; less is better",
    "mae": "mean absolute error, in the label's unit; less is better",
    "r2": "share of the label's variance that is explained; more is better",
    "ndcg": "normalized discounted cumulative gain of the first rows of a group, 1 in the best order; more is better",
    "mrr": "mean reciprocal rank, of the first relevant row of a group; more is better",
    "correlation": "of the answers with the teacher's; more is better",
    "agreement": "share of rows that get the class that the teacher gives them; more is better",
    "kl": "Kullback-Leibler divergence of the probabilities from the teacher's, in nats; less is better",
    "taught": "what the student is better by than the control, the same student without the teacher",
    "gap_closed": "share of the way from the control to the teacher",
    "lift_kept": "share of what the reference is better by than chance, in the metric of the task",
    "age_cost": "what the greatest age of its features takes from the student's metric",
    "p50": "half of the answers take no longer",
    "p99": "99 of 100 answers take no longer",
}


def metrics(report: Report) -> list[str]:
    """All metrics of the models, the task's own first."""
    names = dict.fromkeys(name for model in report.models.values() for name in model.quality)
    return sorted(names, key=lambda name: name != report.metric)


def legend(report: Report) -> Legend:
    """What each model is, in its color."""
    return Legend([
        (color_class(name), name, "; ".join(filter(None, (model.about, model.runtime))))
        for name, model in report.models.items()
    ])  # fmt: skip


def explained(names: Iterable[str]) -> list[Block]:
    """What measures mean, as far as they are those of Isthmus: a task may have others."""
    known = [(strong(name), f": {_MEASURES[name]}") for name in dict.fromkeys(names) if name in _MEASURES]
    return [Bullets(known)] if known else []


def measures(report: Report) -> list[str]:
    """The names in the comparison: metrics, likeness to the teacher, latency."""
    return [*metrics(report), *_likeness(report), "p50", "p99"]


def _likeness(report: Report) -> list[str]:
    return list(dict.fromkeys(name for model in report.agreement.values() for name in model))


def comparison(report: Report) -> TableBlock:
    """A column per model: its quality, its likeness to the teacher, and what it costs."""
    models = report.models
    rows: list[list[Text]] = [
        [metric, *(_quality(model, metric) for model in models.values())] for metric in metrics(report)
    ]
    for likeness in _likeness(report):
        values = (report.agreement.get(name, {}).get(likeness) for name in models)
        rows.append([f"{likeness} with teacher", *map(measure, values)])
    rows += [
        ["parameters", *(number(model.parameters) for model in models.values())],
        ["size", *(scaled(model.bytes, "B") for model in models.values())],
        ["p50", *(duration(model.p50_us) for model in models.values())],
        ["p99", *(duration(model.p99_us) for model in models.values())],
    ]
    return TableBlock(["", *models], rows, numbers=list(models))


def _quality(model: Model, metric: str) -> Text:
    bounds = between(*(model.intervals.get(metric) or (None, None)))
    mean = measure(model.quality.get(metric))
    return (mean, aside(bounds)) if bounds else mean


def worst_slices(report: Report) -> list[Block]:
    """A table with a row per slice, if any was measured; where figures are shown, all have one scale."""
    if not report.slices:
        return []
    columns = ["slice", "rows", *(name for name in MODELS if name != "reference")]
    values = [
        [(name, value) for name in ("teacher", "control", "student") if drawable(value := getattr(part, name))]
        for part in report.slices
    ]
    scale = axis([value for row in values for _, value in row] or [0.0], 6, 114)
    rows: list[list[Text]] = [
        [
            (f"{part.column}: ", _value(part), *([marks(drawn, scale)] if drawn else [])),
            number(part.rows),
            *map(measure, (part.teacher, part.student, part.control)),
        ]
        for part, drawn in zip(report.slices, values, strict=True)
    ]
    metric = Paragraph(f"{report.metric} on the test rows with the same value of a feature.")
    return [metric, TableBlock(columns, rows, numbers=columns[1:])]


def _value(part: WorstSlice) -> Text:
    if part.value is None:
        return absent("no value")
    return part.value if part.value.strip() else absent("empty")
