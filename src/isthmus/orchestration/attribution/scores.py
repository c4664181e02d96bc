"""Score rows with the teacher, the student and the files of a package, for every coalition of stages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from isthmus.distill.labels import Binary
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.tabular.scores import Scores
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Case, Material
from isthmus.distill.teachers.teacher import ANSWERED
from isthmus.distill.types import in_batches
from isthmus.features.errors import ContractMismatch, DataError, RequestError, one_of
from isthmus.features.progress import Progress
from isthmus.features.values.columns import Values
from isthmus.orchestration.artifacts import Artifacts, contract_changes
from isthmus.orchestration.attribution.inputs import Index, TrainingRows, labels
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import (
    AS_ANSWERED,
    CELLS,
    IN_PRECISION,
    IN_RUNTIME,
    STUDENT,
    Columns,
    Features,
    score_cells,
)
from isthmus.orchestration.models.students import student_of_package
from isthmus.orchestration.runtimes.products import RUNTIMES, Product
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import Head
from isthmus.package.inputs import feeds
from isthmus.package.manifest import Format, Package, Variant

REFUSED = "a request transform refuses them, or the teacher has no answer"
# Precision of the student in torch.
FLOATS = "fp32"
# Rows per call of a model file.
BATCH = 1 << 15


@dataclass(frozen=True, eq=False)
class ChosenRows:
    """Rows to score in an attribution.

    Attributes:
        rows: rows with the teacher's ideal inputs.
        left_out: number of skipped rows by reason.
        unknown: stages whose effect is not known, with the reason.
        outputs: cached teacher outputs of the whole training set; None if the teacher must run.
        recorded: recorded scores, shape (n,); None if the runtime must run.
        matched: number of recorded rows that have a matching training row; None if the rows are not recorded answers.
        keys: columns that identify the rows in an explanation.
    """

    rows: TrainingRows
    features: Features
    left_out: dict[str, int]
    unknown: dict[str, str]
    outputs: OutputCache | None = None
    recorded: Numbers | None = None
    matched: int | None = None
    keys: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The rows that every model can score, the score of each cell, float64 (4, 5, n), and labels, NaN if unknown."""

    chosen: ChosenRows
    cells: Numbers
    labels: Numbers


@contextmanager
def open_models(
    artifacts: Artifacts, package: Package, precision: str, product: Product, progress: Progress
) -> Iterator["PackageModels"]:
    """Open the teacher, the student and the model files of a package during the block, to score rows with each of them.

    `precision` selects the model files, and `product` is the runtime that runs them. Raise RequestError if the label is
    not Binary or Number, or the package lacks a file. Raise DataError if the student or its training set is gone, and
    ContractMismatch if the package cannot run under the current contract.
    """
    contract, declared, folder = artifacts.project.applied(), artifacts.declared, package.files.folder
    if changes := contract_changes(folder, contract):
        raise ContractMismatch(
            str(folder), f"cannot run under contract {contract.hash[:12]} ({'; '.join(changes)})",
            remedy="run `isthmus features training-set`, `isthmus distill` and `isthmus model export`",
        )  # fmt: skip
    files = _model_files(package, precision, product.formats[-1])
    requests = RequestInputs.of(contract, declared.teacher.name)
    progress("opening the student", 0.0)
    with student_of_package(artifacts.project, declared, package) as trained:
        scores = Scores(trained.task, trained.student)
        yield PackageModels(scores, trained.task.material, package, files, product, requests)


def _model_files(package: Package, precision: str, suffix: Format) -> dict[int, Variant]:
    """Choose the model files that separate the effect of the precision from the effect of the runtime, by model number.

    The model numbers are IN_PRECISION, IN_RUNTIME and AS_ANSWERED; for fp32, the result has IN_RUNTIME only.
    """
    kinds: dict[int, tuple[str, Format]] = {IN_RUNTIME: (FLOATS, suffix)}
    if precision != FLOATS:
        kinds |= {IN_PRECISION: (precision, "onnx"), AS_ANSWERED: (precision, suffix)}
    files = {(variant.precision, variant.format): variant for variant in package.manifest.variants}
    chosen: dict[int, Variant] = {}
    for model, kind in kinds.items():
        if kind not in files:
            raise RequestError(
                f"package {package.manifest.name}", f"no {kind[0]} model in {kind[1]} format",
                expected=one_of([" in ".join(known) for known in files]),
                remedy="choose another --precision or --runtime, or export that file",
            )  # fmt: skip
        chosen[model] = files[kind]
    return chosen


@dataclass(frozen=True, eq=False)
class PackageModels:
    """The teacher, the student and the model files of a package, with the runtime (`product`) that runs the files.

    `files` has IN_RUNTIME, and for other precisions than fp32 also IN_PRECISION and AS_ANSWERED.
    """

    scores: Scores
    material: Material
    package: Package
    files: Mapping[int, Variant]
    product: Product
    requests: RequestInputs

    def score(self, chosen: ChosenRows, progress: Progress) -> ScoredRows:
        teacher = partial(self._teacher, chosen)
        cells = score_cells(chosen.features, teacher, self._students, lambda model: progress(f"running {model}", 0.4))
        declared = self.material.declaration
        if chosen.recorded is not None:
            substitute_recorded_scores(cells, chosen.recorded, probabilities=isinstance(declared.label, Binary))
        progress("splitting the difference", 0.9)
        forms, models = zip(*dict.fromkeys(CELLS), strict=True)
        finite = np.flatnonzero(np.isfinite(cells[list(forms), list(models)]).all(0))
        if not len(finite):
            raise DataError(f"attribution of {declared.name}", "a request transform refuses every row",
                            expected="at least one row that it accepts")  # fmt: skip
        if refused := len(chosen.rows.places) - len(finite):
            chosen.left_out[REFUSED] = chosen.left_out.get(REFUSED, 0) + refused
            cells = cells[..., finite]
            chosen = replace(chosen, rows=chosen.rows.take(finite), features=chosen.features.take(finite))
        return ScoredRows(chosen, cells, labels(chosen.rows.table, self.material.label))

    def _teacher(self, chosen: ChosenRows, rows: Index, features: Columns | None) -> Numbers:
        """Return the teacher's scores. Inputs that the student does not read stay ideal, since they are not served."""
        if features is None and chosen.outputs is not None:
            outputs = chosen.outputs.float32(chosen.rows.places[rows])
            scores = self.scores.from_outputs(outputs[self.scores.task.keys[0]]).astype(np.float64)
            return np.where(outputs[ANSWERED] > 0, scores, np.nan) if ANSWERED in outputs else scores
        part, inputs = chosen.rows.table.take(pa.array(rows)), self.material.teacher_inputs
        if features is None:
            return self.scores.teacher(columns(part, inputs)).astype(np.float64)
        complete, refused = self.requests.complete({**columns(part, self.requests.graph_inputs(inputs)), **features})
        answers = self.scores.teacher(complete).astype(np.float64)
        answers[refused] = np.nan
        return answers

    def _students(self, features: Sequence[Columns]) -> list[dict[int, Numbers]]:
        batches = [[self._student_case(batch) for batch in _batches(table)] for table in features]
        cases = [case for table in batches for _, case in table]
        students = [np.concatenate([answer for answer, _ in table]) for table in batches]
        ends = np.cumsum([len(table) for table in batches])[:-1]
        output = self.package.manifest.outputs[0].name
        answers: list[dict[int, Numbers]] = [{STUDENT: student, IN_PRECISION: student} for student in students]
        for model, variant in self.files.items():
            runtime = RUNTIMES["ONNX Runtime"] if model == IN_PRECISION else self.product
            parts = [part[output].astype(np.float64) for part in runtime().ask(self.package, variant, cases)]
            for table, student, begin, end in zip(answers, students, [0, *ends], [*ends, len(parts)], strict=True):
                # The output of a graph is undefined for rows that a request transform refuses.
                table[model] = np.where(np.isfinite(student), np.concatenate(parts[begin:end]), np.nan)
        return [{AS_ANSWERED: table[IN_RUNTIME], **table} for table in answers]

    def _student_case(self, rows: Columns) -> tuple[Numbers, Case]:
        student, case = self.scores.student(rows)
        manifest = self.package.manifest
        core = case.core
        if HEAD in manifest.files and any(variant.core for variant in self.files.values()):
            # Feed the core with the featurizer that devices use.
            core = Head.loads(self.package.files.read(HEAD)).feeds(rows).tensors
        return student, replace(case, feeds=feeds(self.package.model_inputs, rows), core=core)


def _batches(table: Columns) -> Iterator[dict[str, Values]]:
    count = len(next(iter(table.values())).data)
    for rows in in_batches(np.arange(count), BATCH):
        yield {name: values.take(rows) for name, values in table.items()}


def substitute_recorded_scores(cells: Numbers, recorded: Numbers, *, probabilities: bool) -> None:
    """Put recorded scores in place of the scores that this machine's runtime gave for the same inputs, in `cells`.

    A difference between the two therefore counts as an effect of the runtime that recorded the scores. All other scores
    of that runtime move by the same difference. `cells` is the result of `score_cells`; `recorded` has shape (n,). With
    `probabilities`, moved scores are clipped to 0 to 1.
    """
    moved = recorded - cells[CELLS[-1]]
    for model in (IN_RUNTIME, AS_ANSWERED):
        cells[:, model] += moved
    if probabilities:
        np.clip(cells, 0, 1, out=cells)
    cells[CELLS[-1]] = recorded
