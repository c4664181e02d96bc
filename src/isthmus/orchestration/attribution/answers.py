"""Scores of teacher, student and model files for rows with any features."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.tabular.scores import Scores
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Case
from isthmus.distill.types import in_batches
from isthmus.features.errors import RequestError, one_of
from isthmus.features.values.columns import Values
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import (
    AS_ANSWERED,
    IN_PRECISION,
    IN_RUNTIME,
    STUDENT,
    Columns,
    Index,
)
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import Head
from isthmus.package.inputs import ModelInput, feeds
from isthmus.package.inspect import Runtime
from isthmus.package.manifest import Format, Package, Variant

# Precision of the student in torch.
FLOATS = "fp32"
# Rows per call of a model file.
BATCH = 1 << 15


class ModelFiles:
    """The model files that separate the effect of the precision from the effect of the runtime.

    Attributes:
        distinct: files of the package by model; in fp32, IN_RUNTIME is the only file.

    Raises:
        RequestError: the package has no such file.
    """

    def __init__(self, package: Package, precision: str, suffix: Format) -> None:
        self.precision, self.format = precision, suffix
        self.distinct: dict[int, Variant] = {}
        kinds: dict[int, tuple[str, Format]] = {IN_RUNTIME: (FLOATS, suffix)}
        if precision != FLOATS:
            kinds |= {IN_PRECISION: (precision, "onnx"), AS_ANSWERED: (precision, suffix)}
        files = {(variant.precision, variant.format): variant for variant in package.manifest.variants}
        for model, kind in kinds.items():
            if kind not in files:
                raise RequestError(
                    f"package {package.manifest.name}", f"no {kind[0]} model in {kind[1]} format",
                    expected=one_of([" in ".join(known) for known in files]),
                    remedy="choose another --precision or --runtime, or export that file",
                )  # fmt: skip
            self.distinct[model] = files[kind]

    def known(self, student: Numbers, answers: Mapping[int, Numbers]) -> dict[int, Numbers]:
        """Complete the scores of all models from the scores of the student and of the files."""
        return {STUDENT: student, IN_PRECISION: student, AS_ANSWERED: answers[IN_RUNTIME], **answers}


@dataclass(frozen=True, eq=False)
class PackageModels:
    """The models of a package, applied to rows.

    `table` has the teacher's ideal features. `outputs` are cached teacher outputs with the places of the rows in the
    cache; None if the rows come from another training set than the student's. `requests` are the request transforms of
    the teacher.
    """

    scores: Scores
    package: Package
    files: ModelFiles
    runtimes: Mapping[int, Callable[[], Runtime]]
    table: pa.Table
    teacher_inputs: Sequence[ModelInput]
    requests: RequestInputs
    outputs: tuple[TeacherOutputs, Index] | None

    def teacher(self, rows: Index, features: Columns | None) -> Numbers:
        """Return the teacher's scores. Inputs that the student does not read stay ideal, since they are not served."""
        if features is None and self.outputs is not None:
            cached, places = self.outputs
            (answers,) = cached.float32(places[rows]).values()
            return self.scores.scores(answers).astype(np.float64)
        part = self.table.take(pa.array(rows))
        if features is None:
            return self.scores.teacher(columns(part, self.teacher_inputs)).astype(np.float64)
        raw = {**columns(part, self.requests.fed(self.teacher_inputs)), **features}
        complete, refused = self.requests.complete(raw)
        answers = self.scores.teacher(complete).astype(np.float64)
        answers[refused] = np.nan
        return answers

    def students(self, features: Sequence[Columns]) -> list[dict[int, Numbers]]:
        """Return scores of the student and of each file; each file is opened once for all tables."""
        batches = [[self._student_case(batch) for batch in _batches(table)] for table in features]
        cases = [case for table in batches for _, case in table]
        students = [np.concatenate([answer for answer, _ in table]) for table in batches]
        ends = np.cumsum([len(table) for table in batches])[:-1]
        output = self.package.manifest.outputs[0].name
        answers: list[dict[int, Numbers]] = [{} for _ in features]
        for model, (variant, runtime) in self._distinct().items():
            parts = [part[output].astype(np.float64) for part in runtime().ask(self.package, variant, cases)]
            for table, student, begin, end in zip(answers, students, [0, *ends], [*ends, len(parts)], strict=True):
                # The output of a graph is undefined for rows that a request transform refuses.
                table[model] = np.where(np.isfinite(student), np.concatenate(parts[begin:end]), np.nan)
        return [self.files.known(student, table) for student, table in zip(students, answers, strict=True)]

    def _distinct(self) -> dict[int, tuple[Variant, Callable[[], Runtime]]]:
        return {model: (variant, self.runtimes[model]) for model, variant in self.files.distinct.items()}

    def _student_case(self, rows: Columns) -> tuple[Numbers, Case]:
        """Return the student's scores, and a case with the inputs that the package derives from raw values."""
        student, case = self.scores.student(rows)
        manifest = self.package.manifest
        core = case.core
        if HEAD in manifest.files and any(variant.core for variant in self.files.distinct.values()):
            # Feed the core with the featurizer that devices use.
            core = Head.loads(self.package.files.read(HEAD)).feeds(rows).tensors
        return student, replace(case, feeds=feeds(manifest.model_inputs, rows), core=core)


def _batches(table: Columns) -> Iterator[dict[str, Values]]:
    count = len(next(iter(table.values())).data)
    for rows in in_batches(np.arange(count), BATCH):
        yield {name: values.take(rows) for name, values in table.items()}
