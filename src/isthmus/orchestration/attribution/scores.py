"""Rows with the scores of all that a coalition of stages comes down to: what is split among the stages."""

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
from isthmus.orchestration.attribution.answers import Files, PackageModels
from isthmus.orchestration.attribution.inputs import Index, Rows, labels
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import (
    AS_ANSWERED,
    CELLS,
    IN_PRECISION,
    IN_RUNTIME,
    Features,
    scored,
)
from isthmus.orchestration.models.students import packaged
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES, Product
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import Package

REFUSED = "a request transform refuses them"


class Chosen(NamedTuple):
    """The rows that are compared.

    Attributes:
        rows: with the inputs of the teacher, which are ideal.
        features: the inputs of the student in their four forms.
        left_out: why rows were left out, and how many.
        unknown: stages of which nothing is known, and why.
        outputs: of the teacher, kept, by the places of `rows`; None where it is asked anew.
        recorded: what was answered; None where the runtime is asked.
        matched: of recorded rows, those that the training set has.
        keys: the columns of the rows that say what they are about.
    """

    rows: Rows
    features: Features
    left_out: dict[str, int]
    unknown: dict[str, str]
    outputs: TeacherOutputs | None = None
    recorded: Numbers | None = None
    matched: int | None = None
    keys: Sequence[str] = ()


Choose = Callable[[Scores, Material], Chosen]


@dataclass(frozen=True)
class Compared:
    """Rows, the scores of each cell, float64 (4, 5, n), and the labels, NaN where none is known.

    `places` are those of the rows among the chosen ones, and `inputs` those of the student's graph.
    """

    chosen: Chosen
    rows: Rows
    cells: Numbers
    places: Index
    labels: Numbers
    precision: str
    inputs: Sequence[ModelInput]


def compared(  # noqa: PLR0913 - what answers, and to what
    project: Project, declared: Distillation, package: Package, precision: str,
    product: Product, choose: Choose,
    progress: Progress,
) -> Compared:  # fmt: skip
    """Asks the models of a package for the scores of rows, which are chosen once its student is open.

    Raises:
        RequestError: the answers are no numbers, or there is no such file.
        DataError: a student or a table is gone, or a request transform refuses every row.
        ContractMismatch: the package cannot run under the contract in force.
    """
    _require_current(project, package)
    files = Files(package, precision, product.formats[-1])
    progress("opening the student", 0.0)
    with packaged(project, declared, package) as trained:
        scores = Scores(trained.task, trained.student)
        material = trained.task.material
        progress("joining what was served", 0.2)
        chosen = choose(scores, material)
        rows = chosen.rows
        kept = None if chosen.outputs is None else (chosen.outputs, rows.places)
        models = PackageModels(
            scores, package, files, {IN_PRECISION: RUNTIMES["ONNX Runtime"], IN_RUNTIME: product, AS_ANSWERED: product},
            rows.table, material.teacher_inputs, RequestInputs.of(project.applied(), declared.teacher.name), kept,
        )  # fmt: skip
        cells = scored(chosen.features, models, lambda model: progress(f"asking {model}", 0.4))
    if chosen.recorded is not None:
        answered_as(cells, chosen.recorded, probabilities=isinstance(declared.label, Binary))
    progress("splitting the difference", 0.9)
    answered = np.flatnonzero(np.isfinite(_needed(cells)).all(0))
    if len(answered) < len(rows.places):
        chosen.left_out[REFUSED] = chosen.left_out.get(REFUSED, 0) + len(rows.places) - len(answered)
        rows, cells = rows.take(answered), cells[..., answered]
    if not len(answered):
        raise DataError(f"attribution of {declared.name}", "a request transform refuses every row",
                        expected="a row that has an answer")  # fmt: skip
    return Compared(
        chosen, rows, cells, answered, labels(rows.table, material.label), files.precision, scores.student_inputs
    )


def answered_as(cells: Numbers, recorded: Numbers, *, probabilities: bool) -> None:
    """Has the runtime that answered say what it said; what it would have said of other features is as far away.

    So what it said differently than the runtime here is the part of the runtime alone, but where a probability would
    leave 0 to 1.
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
            remedy="run `isthmus training-set`, `isthmus distill` and `isthmus export`",
        )  # fmt: skip


def _needed(cells: Numbers) -> Numbers:
    """The cells of coalitions, (cells, n)."""
    forms, models = zip(*dict.fromkeys(CELLS), strict=True)
    needed: Numbers = cells[list(forms), list(models)]
    return needed
