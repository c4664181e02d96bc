"""Score rows for every coalition of stages: the input of an attribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from isthmus.distill.declaration import Distillation
from isthmus.distill.labels import Binary
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.tabular.scores import Scores
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.features.errors import ContractMismatch, DataError
from isthmus.features.progress import Progress
from isthmus.orchestration.artifacts import outdated
from isthmus.orchestration.attribution.answers import ModelFiles, PackageModels
from isthmus.orchestration.attribution.inputs import Index, TrainingRows, labels
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import (
    AS_ANSWERED,
    CELLS,
    IN_PRECISION,
    IN_RUNTIME,
    Features,
    score_cells,
)
from isthmus.orchestration.models.students import packaged
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES, Product
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import Package

REFUSED = "a request transform refuses them"


class ChosenRows(NamedTuple):
    """The rows to compare.

    Attributes:
        rows: rows with the teacher's ideal inputs.
        features: student inputs in four forms.
        left_out: number of skipped rows by reason.
        unknown: stages without a part, with the reason.
        outputs: cached teacher outputs by the places of `rows`; None if the teacher must run.
        recorded: recorded scores; None if the runtime must run.
        matched: number of recorded rows that the training set has.
        keys: columns that identify the rows.
    """

    rows: TrainingRows
    features: Features
    left_out: dict[str, int]
    unknown: dict[str, str]
    outputs: TeacherOutputs | None = None
    recorded: Numbers | None = None
    matched: int | None = None
    keys: Sequence[str] = ()


Choose = Callable[[Scores, Material], ChosenRows]


@dataclass(frozen=True)
class ScoredRows:
    """Rows with the score of each cell, float64 (4, 5, n), and labels, NaN if unknown.

    `places` are the indices of the rows among the chosen rows; `inputs` are the inputs of the student's graph.
    """

    chosen: ChosenRows
    rows: TrainingRows
    cells: Numbers
    places: Index
    labels: Numbers
    precision: str
    inputs: Sequence[ModelInput]


def score_rows(  # noqa: PLR0913 - the models and their rows
    project: Project, declared: Distillation, package: Package, precision: str,
    product: Product, choose: Choose,
    progress: Progress,
) -> ScoredRows:  # fmt: skip
    """Open the student, choose rows, and score them with all models of a package.

    Raises:
        RequestError: scores are not numbers, or the package has no such file.
        DataError: a student or a table is gone, or a request transform refuses every row.
        ContractMismatch: the package cannot run under the current contract.
    """
    _require_current(project, package)
    files = ModelFiles(package, precision, product.formats[-1])
    progress("opening the student", 0.0)
    with packaged(project, declared, package) as trained:
        scores = Scores(trained.task, trained.student)
        material = trained.task.material
        progress("joining what was served", 0.2)
        chosen = choose(scores, material)
        rows = chosen.rows
        cached = None if chosen.outputs is None else (chosen.outputs, rows.places)
        models = PackageModels(
            scores, package, files, {IN_PRECISION: RUNTIMES["ONNX Runtime"], IN_RUNTIME: product, AS_ANSWERED: product},
            rows.table, material.teacher_inputs, RequestInputs.of(project.applied(), declared.teacher.name), cached,
        )  # fmt: skip
        cells = score_cells(chosen.features, models, lambda model: progress(f"running {model}", 0.4))
    if chosen.recorded is not None:
        use_recorded(cells, chosen.recorded, probabilities=isinstance(declared.label, Binary))
    progress("splitting the difference", 0.9)
    finite = np.flatnonzero(np.isfinite(_used(cells)).all(0))
    if len(finite) < len(rows.places):
        chosen.left_out[REFUSED] = chosen.left_out.get(REFUSED, 0) + len(rows.places) - len(finite)
        rows, cells = rows.take(finite), cells[..., finite]
    if not len(finite):
        raise DataError(f"attribution of {declared.name}", "a request transform refuses every row",
                        expected="at least one row that it accepts")  # fmt: skip
    return ScoredRows(
        chosen, rows, cells, finite, labels(rows.table, material.label), files.precision, scores.student_inputs
    )


def use_recorded(cells: Numbers, recorded: Numbers, *, probabilities: bool) -> None:
    """Replace the scores of the runtime that answered with the recorded scores.

    Its scores for other features move by the same distance, so that the deviation from this machine's runtime counts as
    the runtime's part, except where a probability would leave 0 to 1.
    """
    moved = recorded - cells[CELLS[-1]]
    for model in (IN_RUNTIME, AS_ANSWERED):
        cells[:, model] += moved
    if probabilities:
        np.clip(cells, 0, 1, out=cells)
    cells[CELLS[-1]] = recorded


def _require_current(project: Project, package: Package) -> None:
    contract = project.applied()
    if changes := outdated(package.files.folder, contract):
        raise ContractMismatch(
            str(package.files.folder), f"cannot run under contract {contract.hash[:12]} ({'; '.join(changes)})",
            remedy="run `isthmus features training-set`, `isthmus distill` and `isthmus model export`",
        )  # fmt: skip


def _used(cells: Numbers) -> Numbers:
    """Return the cells that coalitions use, shape (cells, n)."""
    forms, models = zip(*dict.fromkeys(CELLS), strict=True)
    used: Numbers = cells[list(forms), list(models)]
    return used
