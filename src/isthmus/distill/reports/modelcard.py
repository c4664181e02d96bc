"""The model card (Mitchell et al., 2019) in the format of Hugging Face: YAML for the hub, Markdown for people."""

from collections.abc import Mapping
from typing import Any

from isthmus.distill.reports.comparison import comparison, explained, legend, measures, worst_slices
from isthmus.distill.reports.findings import early_stops, limits, teacher_gain
from isthmus.distill.reports.report import ModelRecord, Quality, Report, read_report
from isthmus.distill.reports.words import UNKNOWN, duration, measure, number
from isthmus.features.document.blocks import Block, Bullets, Heading, Paragraph
from isthmus.features.document.markdown import to_markdown


def model_card(report: Mapping[str, Any]) -> str:
    read = read_report(report)
    blocks: list[Block] = [
        Heading(read.name, 1),
        *_description(read),
        Heading("Intended use"),
        Paragraph(_use(read)),
        Heading("Training data"),
        Paragraph(_data(read)),
        Heading("Evaluation"),
        Paragraph(_setting(read)),
        comparison(read),
        *explained(measures(read)),
        *map(Paragraph, (*teacher_gain(read), *early_stops(read))),
        Heading("Worst slices"),
        *(worst_slices(read) or [Paragraph("Not measured.")]),
        Heading("Limits"),
        Bullets(limits(read)),
    ]
    return f"---\n{_front_matter(read)}---\n\n{to_markdown(blocks)}"


def _front_matter(report: Report) -> str:
    result = {
        "task": {"type": report.pipeline or report.task},
        "dataset": {"name": f"{report.name}, test part", "type": report.name},
        "metrics": [{"type": name, "value": value} for name, value in _shipped(report).items() if value is not None],
    }
    matter: dict[str, Any] = {
        "library_name": "isthmus",
        **({"pipeline_tag": report.pipeline} if report.pipeline else {}),
        "tags": ["knowledge-distillation", "onnx", report.task],
        "model-index": [{"name": report.name, "results": [result] if result["metrics"] else []}],
    }
    import yaml

    return str(yaml.safe_dump(matter, sort_keys=False, allow_unicode=True, width=1 << 30))


def _shipped(report: Report) -> Quality:
    runs = (run.quality for run in report.runs if (run.model, run.seed) == ("student", report.shipped))
    return next(runs, report.models.get("student", ModelRecord()).quality)


def _description(report: Report) -> list[Block]:
    blocks: list[Block] = [Paragraph(report.description)] if report.description else []
    blocks.append(Paragraph(f"A model for the task {report.task}, id {report.id}, distilled from a larger one."))
    blocks.append(legend(report))
    if report.shipped is not None and report.seeds:
        students = f"Of {len(report.seeds)} trained students, the one with seed {report.shipped} is shipped."
        blocks.append(Paragraph(students))
    return blocks


def _use(report: Report) -> str:
    sentences = ["It replaces its teacher for rows like the test rows."]
    student, teacher = (report.models.get(name, ModelRecord()) for name in ("student", "teacher"))
    if student.parameters and teacher.parameters:
        sentences.append(f"It has {number(student.parameters)} parameters, the teacher {number(teacher.parameters)}.")
    if student.p50_us and teacher.p50_us:
        sentences.append(
            f"A prediction takes {duration(student.p50_us)}, the teacher's {duration(teacher.p50_us)} (p50)."
        )
    sentences.append("No other use was tested.")
    return " ".join(sentences)


def _data(report: Report) -> str:
    rows = ", ".join(f"{number(count)} {part}" for part, count in report.rows.items()) or UNKNOWN
    divided = f" The parts are split by time, at {' and '.join(report.boundaries)}." if report.boundaries else ""
    return f"Rows: {rows}.{divided}"


def _setting(report: Report) -> str:
    text = "Measured on the test part."
    if len(report.seeds) > 1:
        text += f" Student and control: mean over {len(report.seeds)} seeds, with its 95 % interval."
        if shipped := _shipped(report):
            figures = ", ".join(f"{name} {measure(value)}" for name, value in shipped.items())
            text += f" The shipped student alone: {figures}. Agreement and slices are also of the shipped student."
    return text
