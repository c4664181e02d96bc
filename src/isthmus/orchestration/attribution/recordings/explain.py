"""Explain row by row why a recorded prediction differs from the ideal one (`isthmus answers explain`)."""

from typing import Any

import numpy as np

from isthmus.distill.gates import STAGES
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.attribution.recordings.explanation import ExplainedRow, Explanation, page, page_file
from isthmus.orchestration.attribution.recordings.predictions import prediction
from isthmus.orchestration.attribution.recordings.questions import choose_recorded
from isthmus.orchestration.attribution.report import Measure, Part
from isthmus.orchestration.attribution.scores import ScoredRows, score_rows
from isthmus.orchestration.attribution.shapley import shapley
from isthmus.orchestration.attribution.stages import CELLS, NEEDS, coalitions
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES


def explain(project: Project, identity: str, *, progress: Progress = silent) -> Explanation:
    """Attribute the gap between a recorded prediction and the ideal one to the stages in between, and write a page.

    The ideal prediction is the teacher's, from the features that the history has now for the moment of the answer.

    Raises:
        RequestError: the table lacks the answer, it is not a prediction, or its score is not a number.
        DataError: its package, its student or a history is gone, or no row can be recomputed.
        ContractMismatch: its package cannot run under the current contract.
    """
    progress("reading the recorded answer", 0.0)
    answers = prediction(project, identity)
    package = answers.package
    artifacts = Artifacts.of(project, package.manifest.name)
    declared = artifacts.declared
    choose = choose_recorded(project, artifacts, answers)
    product = RUNTIMES["ONNX Runtime"]
    scored = score_rows(project, declared, package, answers.precision, product, choose, progress)
    first = answers.part.slice(0, 1).to_pylist()[0]
    result = Explanation(
        identity, first["at"].isoformat().replace("+00:00", "Z"), declared.name, package.files.digest, scored.precision,
        _rows(scored), scored.chosen.left_out, scored.chosen.unknown,
        project.state / "attribution" / declared.name / "answers",
    )  # fmt: skip
    write_atomically(page_file(result), page(result).encode(), mode=0o600)
    progress("the answer is explained", 1.0)
    return result


def _rows(scored: ScoredRows) -> list[ExplainedRow]:
    shares = shapley(coalitions(scored.cells), NEEDS)
    known = [stage for stage in STAGES if stage not in scored.chosen.unknown]
    forms = {"ideal": 0, "served": 1, "fed": 3}
    values = {name: _inputs(scored, form) for name, form in forms.items()}
    labels = [float(label) if np.isfinite(label) else None for label in scored.labels]
    keys = scored.rows.table.select(scored.chosen.keys).to_pylist()
    rows = []
    for place in range(len(scored.rows.places)):
        parts = {stage: Part(*(float(part[STAGES.index(stage), place]) for part in shares)) for stage in known}
        score = Measure(float(scored.cells[CELLS[0]][place]), float(scored.cells[CELLS[-1]][place]), parts)
        features = {
            name: {form: values[form][name][place] for form in forms} for name in scored.chosen.features.forms[0]
        }
        rows.append(ExplainedRow(keys[place], score, features, labels[place]))
    return rows


def _inputs(scored: ScoredRows, form: int) -> dict[str, list[Any]]:
    columns = scored.chosen.features.forms[form]
    return {item.name: columns[item.name].take(scored.places).tolist(item.dtype) for item in scored.inputs}
