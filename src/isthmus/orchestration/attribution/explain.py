"""Explain row by row why a recorded prediction differs from the ideal one (`isthmus answers explain`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.distill.gates import STAGES
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Heading,
    Paragraph,
    TableBlock,
    cell,
    code,
    decimal,
    strong,
)
from isthmus.features.document.html import to_html
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.attribution.page import parts_table, waterfall
from isthmus.orchestration.attribution.recorded import load_recorded, prediction
from isthmus.orchestration.attribution.report import Measure, parts_of
from isthmus.orchestration.attribution.scores import ScoredRows, open_models
from isthmus.orchestration.attribution.shapley import Shares, shapley
from isthmus.orchestration.attribution.stages import CELLS, NEEDS, coalitions
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.served import ServedAnswers
from isthmus.orchestration.runtimes.products import RUNTIMES
from isthmus.package.inputs import ModelInput

# Rows of an answer on the terminal, and on the page.
SHOWN, ON_PAGE = 10, 100
_FORMS = ("ideal", "served", "fed")


class ExplainedRow(msgspec.Struct, frozen=True):
    """A row of an explained prediction. `features` has the ideal, served and fed value of each model input."""

    keys: dict[str, Any]
    score: Measure
    features: dict[str, dict[str, Any]]
    label: float | None

    @property
    def differing(self) -> list[str]:
        return [name for name, values in self.features.items() if len({repr(values[form]) for form in _FORMS}) > 1]


@dataclass(frozen=True)
class Explanation:
    """Explanation of a recorded prediction that was given at the ISO 8601 time `at`.

    `left_out` counts skipped rows by reason. `unknown` has the stages whose effect is not known, with the reason.
    """

    id: str
    at: str
    name: str
    package: str
    precision: str
    rows: Sequence[ExplainedRow]
    left_out: Mapping[str, int]
    unknown: Mapping[str, str]
    folder: Path = field(default=Path())

    def as_dict(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name != "folder"]
        plain: dict[str, Any] = msgspec.to_builtins({name: getattr(self, name) for name in names}, enc_hook=str)
        for built, row in zip(plain["rows"], self.rows, strict=True):
            built["score"]["difference"] = row.score.difference
        return {**plain, "page": str(page_file(self))}


def explain(project: Project, identity: str, *, progress: Progress = silent) -> Explanation:
    """Explain why a recorded prediction differs from the ideal one, by stage and by feature, and write an HTML page.

    `identity` is the id of the answer, from its `isthmus-answer` header. The ideal prediction is the teacher's, from
    the features that the history now has for the time of the answer. The page is in `attribution/<name>/answers` in the
    state folder, readable by its owner only. Raise RequestError if no prediction with a numeric score has this id.
    Raise DataError if the prediction cannot be recomputed, and ContractMismatch if its package cannot run under the
    current contract.
    """
    progress("reading the recorded answer", 0.0)
    answers = prediction(ServedAnswers(project), identity)
    package = answers.package
    artifacts = Artifacts.of(project, package.manifest.name)
    name = artifacts.declared.name
    with open_models(artifacts, package, answers.precision, RUNTIMES["ONNX Runtime"], progress) as models:
        progress("joining what was served", 0.2)
        scored = models.score(load_recorded(artifacts, answers, models), progress)
        rows = _rows(scored, models.scores.student_inputs)
    at = answers.part["at"][0].as_py().isoformat().replace("+00:00", "Z")
    result = Explanation(
        identity, at, name, package.files.digest, answers.precision, rows, scored.chosen.left_out,
        scored.chosen.unknown, project.state / "attribution" / name / "answers",
    )  # fmt: skip
    write_atomically(page_file(result), page(result).encode(), mode=0o600)
    progress("the answer is explained", 1.0)
    return result


def _rows(scored: ScoredRows, inputs: Sequence[ModelInput]) -> list[ExplainedRow]:
    chosen, shares = scored.chosen, shapley(coalitions(scored.cells), NEEDS)
    known = [stage for stage in STAGES if stage not in chosen.unknown]
    ideal, served, _, fed = (
        {item.name: form[item.name].tolist(item.dtype) for item in inputs} for form in chosen.features.forms
    )
    labels = [float(label) if np.isfinite(label) else None for label in scored.labels]
    rows = []
    for place, keys in enumerate(chosen.rows.table.select(chosen.keys).to_pylist()):
        parts = parts_of(Shares(*(share[:, place] for share in shares)), STAGES, known)
        score = Measure(float(scored.cells[CELLS[0]][place]), float(scored.cells[CELLS[-1]][place]), parts)
        forms = {"ideal": ideal, "served": served, "fed": fed}
        features = {item.name: {form: values[item.name][place] for form, values in forms.items()} for item in inputs}
        rows.append(ExplainedRow(keys, score, features, labels[place]))
    return rows


def page_file(result: Explanation) -> Path:
    return result.folder / f"{result.id}.html"


def page(result: Explanation) -> str:
    blocks: list[Block] = [Heading(f"{result.name}: answer {result.id}", 1), Paragraph(_origin(result))]
    blocks += [*_notes(result)]
    for number, row in enumerate(result.rows[:ON_PAGE]):
        blocks += [*_row(number, row, result), BlockGroup("plots", [waterfall("score of the row", row.score)])]
    blocks += [*_further(result, ON_PAGE)]
    return to_html(f"Answer {result.id}", blocks)


def explanation_blocks(result: Explanation) -> Iterator[Block]:
    yield Paragraph(_origin(result))
    for number, row in enumerate(result.rows[:SHOWN]):
        yield from _row(number, row, result)
    yield from _further(result, SHOWN)
    yield from _notes(result)
    yield Paragraph(f"Page: {page_file(result)}")


def _origin(result: Explanation) -> tuple[Any, ...]:
    return (f"{result.name}, {result.at}, package ", code(result.package[:12]), f" in {result.precision}")


def _further(result: Explanation, shown: int) -> Iterator[Block]:
    if len(result.rows) > shown:
        yield Paragraph(f"{len(result.rows) - shown:,} more rows: use --json.")


def _row(number: int, row: ExplainedRow, result: Explanation) -> Iterator[Block]:
    keys = ", ".join(f"{name} {value}" for name, value in row.keys.items())
    score = row.score
    moved = f"{cell(score.ideal)} to {cell(score.answer)}, {decimal(score.difference, sign='+')}"
    yield Heading(f"Row {number + 1}{f', {keys}' if keys else ''}: {moved}", 2)
    yield parts_table(score)
    if row.differing:
        rows = [[name, *(cell(row.features[name][form]) for form in _FORMS)] for name in row.differing]
        yield TableBlock(["input", *_FORMS], rows, numbers=_FORMS)
    same = len(row.features) - len(row.differing)
    label = "" if row.label is None else f" The label is {row.label:g}."
    known = ", as far as known" if result.unknown else ""
    yield Paragraph(f"{same} of {len(row.features)} inputs were ideal{known}.{label}")


def _notes(result: Explanation) -> Iterator[Block]:
    for stage, why in result.unknown.items():
        yield Paragraph((strong(stage), f" has no part: {why}."))
    for why, count in result.left_out.items():
        yield Paragraph(f"{count:,} rows were left out: {why}.")
