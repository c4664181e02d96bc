"""A teacher that users bring: the weighted mean of one or more sources of predictions."""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from isthmus.distill.language.objective import STATE
from isthmus.distill.language.teachers import DeclaredTeacher, Onnx, Pretrained, TeacherFunction
from isthmus.distill.tabular.users.function import FunctionSource
from isthmus.distill.tabular.users.onnx import OnnxSource
from isthmus.distill.tabular.users.prediction import Convert, logits, probabilities
from isthmus.distill.tabular.users.pretrained import PretrainedSource
from isthmus.distill.tabular.users.sources import PredictionSource, TeacherRows
from isthmus.distill.tabular.users.stored import StoredSource
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.teachers.teacher import ANSWERED, ReadOutputs, Teacher
from isthmus.distill.types import Array, Index
from isthmus.features.errors import DataError


class UserTeacher(Teacher):
    """The weighted mean of one or more teachers that a `Tabular` or a `Text` declares; batches are row numbers.

    Probabilities are averaged, not logits. A row that a teacher does not answer gets the mean of the others; with
    `missing="labels"`, a row that none answers has 0 in the output "answered". Nothing is loaded or fitted before the
    first answer, so nothing runs if all outputs are cached.
    """

    def __init__(
        self, sources: Sequence[tuple[PredictionSource, float]], key: str, rows: TeacherRows, *, convert: Convert,
        abstains: bool, lenient: bool = False,
    ) -> None:  # fmt: skip
        keys = (key, *([STATE] if rows.states else []), *([ANSWERED] if abstains else []))
        super().__init__(" + ".join(source.name for source, _ in sources), keys, labels=rows.classes)
        self._sources, self._key, self._rows, self._convert = sources, key, rows, convert
        self._readers: list[ReadOutputs | None] = [None for _ in sources]
        self._lenient = lenient
        self.costly = any(source.costly for source, _ in sources)
        self.shareable = not any(isinstance(source, FunctionSource) for source, _ in sources)

    @cached_property
    def parts(self) -> Sequence[Teacher | None]:
        """A teacher per source, with the fingerprint of that source declared alone with `missing="labels"`.

        So outputs are computed once per source, whatever its weight, its `missing` and the sources beside it. Empty for
        such a source itself. None for outputs of a file, which are not cached.
        """
        if len(self._sources) == 1 and self._sources[0][1] == 1 and ANSWERED in self.keys:
            return ()
        return [
            UserTeacher([(source, 1.0)], self._key, self._rows, convert=self._convert, abstains=True, lenient=True)
            if source.cached
            else None
            for source, _ in self._sources
        ]

    def reading(self, parts: Sequence[ReadOutputs | None]) -> "UserTeacher":
        teacher = copy.copy(self)
        teacher._readers = [*parts]
        return teacher

    @property
    def runtime(self) -> str:
        return ", ".join(dict.fromkeys(source.runtime for source, _ in self._sources))

    def size(self) -> tuple[int, int] | None:
        """Return the number of parameters of all models and their bytes; None if one cannot be counted."""
        sizes = [source.size() for source, _ in self._sources]
        known = [size for size in sizes if size is not None]
        return (sum(n for n, _ in known), sum(b for _, b in known)) if len(known) == len(sizes) else None

    def answers(self, rows: Columns) -> Array:
        """Return scores of rows outside the training set, float32 (n,) or (n, classes); NaN in rows without an answer.

        `rows` has a column per input. Raise a DataError for a teacher that has outputs only for rows of a file.
        """
        parts = [self._convert(source.predict(rows), source.where) for source, _ in self._sources]
        return self._mean(parts).astype(np.float32)

    def _answer(self, batch: Index) -> Mapping[str, Any]:
        pairs = zip(self._sources, self._readers, strict=True)
        read = [self._read(source, reader, batch) for (source, _), reader in pairs]
        parts = [scores for scores, _ in read]
        for part, (source, _) in zip(parts, self._sources, strict=True):
            if source.refuses and not self._lenient:
                self._require_answers(source, _lacks(part), batch)
        scores = self._mean(parts)
        lacks = _lacks(scores)
        outputs = {self._key: np.where(lacks.reshape(-1, *(1,) * (scores.ndim - 1)), 0.0, scores)}
        outputs |= {ANSWERED: ~lacks} if ANSWERED in self.keys else {}
        # States of several sources cannot be averaged.
        return {**outputs, STATE: read[0][1]} if STATE in self.keys else outputs

    def _read(self, source: PredictionSource, reader: ReadOutputs | None, batch: Index) -> tuple[Array, Array | None]:
        if reader is None:
            prediction = source.predict_rows(batch)
            return self._convert(prediction, source.where), prediction.states
        outputs = reader(batch)
        scores: Array = outputs[self._key].astype(np.float64)
        scores[outputs[ANSWERED] == 0] = np.nan
        return scores, outputs.get(STATE)

    def _require_answers(self, source: PredictionSource, lacks: Array, batch: Index) -> None:
        if lacks.any():
            raise DataError(
                source.where, f"{int(lacks.sum()):,} of {len(batch):,} rows have no answer, such as "
                f"{self._described(int(batch[int(lacks.argmax())]))}", expected="an answer for every row",
                remedy='to learn these rows from their labels alone, pass missing="labels" to the teacher',
            )  # fmt: skip

    def _mean(self, parts: Sequence[Array]) -> Array:
        if len(parts) == 1:
            return parts[0]
        shape = parts[0].shape
        if self._rows.several:  # each class is a binary label
            parts = [part.ravel() for part in parts]
        weights = np.array([weight for _, weight in self._sources]).reshape(-1, *(1,) * parts[0].ndim)
        scores, log = np.stack(parts), self._key == "logits"
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            values = probabilities(scores) if log else scores
            share = np.where(np.isnan(values), 0.0, weights)
            mean: Array = (np.where(share > 0, values, 0.0) * share).sum(0) / share.sum(0)
            return (logits(mean) if log else mean).reshape(shape)

    def _described(self, row: int) -> str:
        named = [key for entity in self._rows.spine.entities for key in entity.join_keys]
        names = [name for name in (*named, "event_timestamp") if name in self._rows.table.column_names]
        return ", ".join(f"{name} {self._rows.table[name][row].as_py()}" for name in names) or f"row {row}"

    def _identity(self) -> Any:
        weights = [weight for _, weight in self._sources]
        inputs: list[Any] = [[item.name, item.dtype.name] for item in self._rows.inputs]
        inputs += [["as texts", *sorted(self._rows.texts)]] if self._rows.texts else []
        return ["user", [source.identity() for source, _ in self._sources], weights, inputs, dict(self._rows.recipe)]


def _lacks(scores: Array) -> Array:
    return np.asarray(np.isnan(scores).reshape(len(scores), -1).any(1))


def sources(
    declared: Sequence[tuple[DeclaredTeacher, float]], rows: TeacherRows
) -> list[tuple[PredictionSource, float]]:
    """Create the source of predictions of each declared teacher, with its weight. Imports functions, loads no model."""
    return [(_source(teacher, rows), weight) for teacher, weight in declared]


def _source(declared: DeclaredTeacher, rows: TeacherRows) -> PredictionSource:
    if isinstance(declared, TeacherFunction):
        return FunctionSource(declared, rows)
    if isinstance(declared, Pretrained):
        return PretrainedSource(declared, rows)
    return OnnxSource(declared, rows) if isinstance(declared, Onnx) else StoredSource(declared, rows)
