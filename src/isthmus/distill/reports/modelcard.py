"""The model card (Mitchell et al., 2019) in the form of Hugging Face: YAML for the hub, Markdown for people."""

from collections.abc import Mapping
from typing import Any

import yaml

from isthmus.distill.reports.findings import gained, limits
from isthmus.distill.reports.markdown import paragraph, table, text
from isthmus.distill.reports.report import Model, Quality, Report, read_report
from isthmus.distill.reports.words import UNKNOWN, between, duration, measure, number, scaled


def model_card(report: Mapping[str, Any]) -> str:
    """The card, of nothing but what the report says.

    Args:
        report: plain data of `report.json`.

    Raises:
        DataError: it is no report.
    """
    read = read_report(report)
    parts = [
        f"---\n{_front_matter(read)}---",
        f"# {text(read.name)}",
        _paragraphs(*_what(read)),
        "## Intended use",
        _use(read),
        "## Training data",
        _data(read),
        "## Evaluation",
        _evaluation(read),
        _paragraphs(*map(paragraph, gained(read))),
        "## Worst slices",
        _slices(read),
        "## Limits",
        "\n".join(f"* {paragraph(sentence)}" for sentence in limits(read)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(report: Report) -> str:
    quality = shipped(report)
    result = {
        "task": {"type": report.pipeline or report.task},
        "dataset": {"name": f"{report.name}, test part", "type": report.name},
        "metrics": [{"type": name, "value": value} for name, value in quality.items() if value is not None],
    }
    matter: dict[str, Any] = {
        "library_name": "isthmus",
        **({"pipeline_tag": report.pipeline} if report.pipeline else {}),
        "tags": ["knowledge-distillation", "onnx", report.task],
        "model-index": [{"name": report.name, "results": [result] if result["metrics"] else []}],
    }
    return str(yaml.safe_dump(matter, sort_keys=False, allow_unicode=True, width=1 << 30))


def shipped(report: Report) -> Quality:
    """How good the shipped student is: by itself, and not with the students of other seeds."""
    runs = (run.quality for run in report.runs if (run.model, run.seed) == ("student", report.shipped))
    return next(runs, report.models.get("student", Model()).quality)


def _what(report: Report) -> list[str]:
    """What the models are, in their own words."""
    found = [paragraph(report.description)] if report.description else []
    found.append(f"A model for the task {text(report.task)}, id {text(report.id)}, taught by a larger one.")
    found.append(
        "\n".join(f"* {text(name)}: {text(model.about)}" for name, model in report.models.items() if model.about)
    )
    if report.shipped is not None and report.seeds:
        found.append(f"Of {len(report.seeds)} trained students the one with seed {report.shipped} is shipped.")
    return found


def _use(report: Report) -> str:
    """Where the student may stand in for its teacher, as far as was measured."""
    sentences = ["It answers in place of its teacher, for rows like those that it was tested on."]
    student, teacher = (report.models.get(name, Model()) for name in ("student", "teacher"))
    if student.parameters and teacher.parameters:
        sentences.append(f"It has {number(student.parameters)} parameters, the teacher {number(teacher.parameters)}.")
    if student.p50_us and teacher.p50_us:
        sentences.append(
            f"One answer takes it {duration(student.p50_us)}, the teacher {duration(teacher.p50_us)} (p50)."
        )
    sentences.append("No other use was tested.")
    return " ".join(sentences)


def _data(report: Report) -> str:
    found = [f"Rows: {', '.join(f'{number(rows)} {text(part)}' for part, rows in report.rows.items()) or UNKNOWN}."]
    if report.boundaries:
        found.append(f"The parts are divided by time, at {text(' and '.join(report.boundaries))}.")
    return " ".join(found)


def _evaluation(report: Report) -> str:
    """A table with a column for each model."""
    models = report.models
    metrics = dict.fromkeys(name for model in models.values() for name in model.quality)
    rows = [[text(metric), *(_measured(model, metric) for model in models.values())] for metric in metrics]
    for likeness in dict.fromkeys(name for found in report.agreement.values() for name in found):
        title = f"{likeness}, with the teacher"
        rows.append([text(title), *(measure(report.agreement.get(name, {}).get(likeness)) for name in models)])
    rows += [
        ["parameters", *(number(model.parameters) for model in models.values())],
        ["size", *(scaled(model.bytes, "B") for model in models.values())],
        ["p50", *(duration(model.p50_us) for model in models.values())],
        ["p99", *(duration(model.p99_us) for model in models.values())],
        ["runtime", *(text(model.runtime) or UNKNOWN for model in models.values())],
    ]
    told = "On the test part."
    if len(report.seeds) > 1:
        told += f" Of student and control the mean over {len(report.seeds)} seeds, with its 95 % interval."
        if alone := shipped(report):
            figures = ", ".join(f"{text(name)} {measure(value)}" for name, value in alone.items())
            told += f" The shipped student alone: {figures}. Likeness and slices are of it, too."
    return f"{told}\n\n{table(['', *map(text, models)], rows)}"


def _measured(model: Model, metric: str) -> str:
    bounds = between(*(model.intervals.get(metric) or (None, None)))
    return measure(model.quality.get(metric)) + (f" ({bounds})" if bounds else "")


def _slices(report: Report) -> str:
    if not report.slices:
        return "Not measured."
    columns = ["slice", "rows", "teacher", "student", "control"]
    rows = [
        [
            f"{text(one.column)}: {'*no value*' if one.value is None else text(one.value) or '*empty*'}",
            number(one.rows),
            *map(measure, (one.teacher, one.student, one.control)),
        ]
        for one in report.slices
    ]
    return f"{paragraph(report.metric)} on the test rows with one value of a feature.\n\n{table(columns, rows)}"


def _paragraphs(*sentences: str) -> str:
    return "\n\n".join(filter(None, sentences))
