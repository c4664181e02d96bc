"""What teacher, student and model files answer to rows, each with any features."""

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

FLOATS = "fp32"
"""The precision of the student in torch."""
BATCH = 1 << 15
"""Rows that a model file is asked at once."""


class Files:
    """The model files that tell precision from runtime.

    Attributes:
        distinct: of a package, by model; in floats, what is as answered is in the runtime alone.

    Raises:
        RequestError: there is no such file.
    """

    def __init__(self, package: Package, precision: str, suffix: Format) -> None:
        self.precision, self.format = precision, suffix
        self.distinct: dict[int, Variant] = {}
        wanted: dict[int, tuple[str, Format]] = {IN_RUNTIME: (FLOATS, suffix)}
        if precision != FLOATS:
            wanted |= {IN_PRECISION: (precision, "onnx"), AS_ANSWERED: (precision, suffix)}
        files = {(variant.precision, variant.format): variant for variant in package.manifest.variants}
        for model, kind in wanted.items():
            if kind not in files:
                raise RequestError(
                    f"package {package.manifest.name}", f"no {kind[0]} model in {kind[1]} format",
                    expected=one_of([" in ".join(known) for known in files]),
                    remedy="name another --precision or --runtime, or export that file, too",
                )  # fmt: skip
            self.distinct[model] = files[kind]

    def known(self, student: Numbers, answers: Mapping[int, Numbers]) -> dict[int, Numbers]:
        """The scores of all models, of those of the student and of the files."""
        return {STUDENT: student, IN_PRECISION: student, AS_ANSWERED: answers[IN_RUNTIME], **answers}


@dataclass(frozen=True, eq=False)
class PackageModels:
    """The models of a package over rows, of which `table` has the ideal features of the teacher.

    `outputs` are those of the teacher that are kept, by the places of rows; None where the rows are of another
    training set than that of the student. `requests` are the request transforms of the teacher.
    """

    scores: Scores
    package: Package
    files: Files
    runtimes: Mapping[int, Callable[[], Runtime]]
    table: pa.Table
    teacher_inputs: Sequence[ModelInput]
    requests: RequestInputs
    outputs: tuple[TeacherOutputs, Index] | None

    def teacher(self, rows: Index, features: Columns | None) -> Numbers:
        """Scores of the teacher. What a student does not read stays ideal: it is not served for it."""
        if features is None and self.outputs is not None:
            kept, places = self.outputs
            (answers,) = kept.float32(places[rows]).values()
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
        """Scores of the student and of each file. A file is opened once for all features."""
        batches = [[self._answered(batch) for batch in _batches(table)] for table in features]
        cases = [case for table in batches for _, case in table]
        students = [np.concatenate([answer for answer, _ in table]) for table in batches]
        ends = np.cumsum([len(table) for table in batches])[:-1]
        output = self.package.manifest.outputs[0].name
        answers: list[dict[int, Numbers]] = [{} for _ in features]
        for model, (variant, runtime) in self._distinct().items():
            found = [part[output].astype(np.float64) for part in runtime().ask(self.package, variant, cases)]
            for table, student, begin, end in zip(answers, students, [0, *ends], [*ends, len(found)], strict=True):
                # A graph answers anything where a request transform refuses a row.
                table[model] = np.where(np.isfinite(student), np.concatenate(found[begin:end]), np.nan)
        return [self.files.known(student, table) for student, table in zip(students, answers, strict=True)]

    def _distinct(self) -> dict[int, tuple[Variant, Callable[[], Runtime]]]:
        return {model: (variant, self.runtimes[model]) for model, variant in self.files.distinct.items()}

    def _answered(self, rows: Columns) -> tuple[Numbers, Case]:
        """The student's scores, and the case with what the package makes of raw values."""
        student, case = self.scores.student(rows)
        manifest = self.package.manifest
        core = case.core
        if HEAD in manifest.files and any(variant.core for variant in self.files.distinct.values()):
            # What feeds a core on a device feeds it here.
            core = Head.loads(self.package.files.read(HEAD)).feeds(rows).tensors
        return student, replace(case, feeds=feeds(manifest.model_inputs, rows), core=core)


def _batches(table: Columns) -> Iterator[dict[str, Values]]:
    count = len(next(iter(table.values())).data)
    for rows in in_batches(np.arange(count), BATCH):
        yield {name: values.take(rows) for name, values in table.items()}
