"""`explain`: what made a recorded prediction differ from the ideal one, row by row."""

from typing import Any

import numpy as np

from isthmus.distill.declaration import STAGES
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.attribution.recordings.explanation import ExplainedRow, Explanation, page, page_file
from isthmus.orchestration.attribution.recordings.predictions import prediction
from isthmus.orchestration.attribution.recordings.questions import choose_recorded
from isthmus.orchestration.attribution.report import Measure, Part
from isthmus.orchestration.attribution.scores import Compared, compared
from isthmus.orchestration.attribution.shapley import shapley
from isthmus.orchestration.attribution.stages import CELLS, NEEDS, coalitions
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES


def explain(project: Project, identity: str, *, progress: Progress = silent) -> Explanation:
    """Splits the difference of a recorded prediction from the ideal one among the stages between them.

    The ideal one is the teacher's, to the features that the history has now for the moment of the answer.

    Raises:
        RequestError: the table has no such answer, it is a lookup, or its model answers with no number.
        DataError: its package, its student or a history is gone, or no row can be computed again.
        ContractMismatch: its package cannot run under the contract in force.
    """
    progress("reading the recorded answer", 0.0)
    answered = prediction(project, identity)
    package = answered.package
    artifacts = Artifacts.of(project, package.manifest.name)
    declared = artifacts.declared
    choose = choose_recorded(project, artifacts, answered)
    product = RUNTIMES["ONNX Runtime"]
    found = compared(project, declared, package, answered.precision, product, choose, progress)
    one = answered.part.slice(0, 1).to_pylist()[0]
    result = Explanation(
        identity, one["at"].isoformat().replace("+00:00", "Z"), declared.name, package.files.digest, found.precision,
        _rows(found), found.chosen.left_out, found.chosen.unknown,
        project.state / "attribution" / declared.name / "answers",
    )  # fmt: skip
    write_atomically(page_file(result), page(result).encode(), mode=0o600)
    progress("the answer is explained", 1.0)
    return result


def _rows(found: Compared) -> list[ExplainedRow]:
    shares = shapley(coalitions(found.cells), NEEDS)
    known = [stage for stage in STAGES if stage not in found.chosen.unknown]
    forms = {"ideal": 0, "served": 1, "fed": 3}
    values = {name: _listed(found, form) for name, form in forms.items()}
    labels = [float(label) if np.isfinite(label) else None for label in found.labels]
    keys = found.rows.table.select(found.chosen.keys).to_pylist()
    rows = []
    for place in range(len(found.rows.places)):
        parts = {stage: Part(*(float(part[STAGES.index(stage), place]) for part in shares)) for stage in known}
        score = Measure(float(found.cells[CELLS[0]][place]), float(found.cells[CELLS[-1]][place]), parts)
        features = {
            name: {form: values[form][name][place] for form in forms} for name in found.chosen.features.forms[0]
        }
        rows.append(ExplainedRow(keys[place], score, features, labels[place]))
    return rows


def _listed(found: Compared, form: int) -> dict[str, list[Any]]:
    columns = found.chosen.features.forms[form]
    return {item.name: columns[item.name].take(found.places).tolist(item.dtype) for item in found.inputs}
