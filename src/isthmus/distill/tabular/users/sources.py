"""Sources of a user's predictions for a table, and the rows that they predict for."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from isthmus.distill.tabular.tensors import columns
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.types import Array, Index
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.values.columns import Values
from isthmus.package.inputs import ModelInput, elements

IMAGE = "image"


class TeacherRows(NamedTuple):
    """The rows of a training set, as a user's model sees them.

    Attributes:
        table: the training set.
        inputs: features of the teacher.
        train: numbers of the training rows, int64.
        labels: labels to fit a model to, one per row of the table: 0 and 1, class names, numbers, or relevance; for
            several classes per row, 0 and 1 by class, (n, classes).
        classes: names of the label's classes; None for other labels.
        recipe: plain data that identifies the table, the label and the training rows.
        spine: declaration of the training examples, which names their join keys.
        root: folder of the project, to which paths are relative.
        threads: threads that a model may use.
        numeric: True for a Number, a Rank, a Picture or an Embedding: a model gives values, not probabilities.
        texts: names of features that are texts; other Strings are categories.
        states: True if a `Pretrained` also returns its pooled last states.
        images: returns images, float32 (rows, 3, side, side), that models get in place of features; None for features.
        pooling: pooling of the last states of a Pretrained, for an Embedding; else None.
    """

    table: pa.Table
    inputs: Sequence[ModelInput]
    train: Index
    labels: Array
    classes: Sequence[str] | None
    recipe: Mapping[str, Any]
    spine: Spine
    root: Path
    threads: int
    numeric: bool
    texts: Collection[str] = ()
    states: bool = False
    images: Callable[[Index], Array] | None = None
    pooling: Literal["mean", "first"] | None = None

    @property
    def several(self) -> bool:
        return self.labels.ndim > 1

    def columns(self, rows: Index) -> Columns:
        """Return a column per feature, or the single column `IMAGE`."""
        if self.images is not None:
            return {IMAGE: Values(self.images(rows), np.ones(len(rows), bool))}
        return columns(self.table.take(rows), self.inputs)


class PredictionSource(ABC):
    """A declared teacher: predicts for rows of the training set, by their numbers, or for new rows."""

    runtime: str
    costly = False
    cached = True

    def __init__(self, name: str, missing: str, rows: TeacherRows) -> None:
        self.name, self.refuses, self._rows = name, missing == "refuse", rows

    @property
    def where(self) -> str:
        return f"teacher {self.name}"

    @abstractmethod
    def identity(self) -> Any:
        """Return plain data that changes when the predictions may change."""

    @abstractmethod
    def predict(self, rows: Columns) -> Prediction:
        """Predict for new rows, given as a column per feature."""

    def predict_rows(self, rows: Index) -> Prediction:
        return self.predict(self._rows.columns(rows))

    def size(self) -> tuple[int, int] | None:
        return None

    def _file(self, name: str) -> Path:
        path = self._rows.root / name
        if not path.exists():
            raise DataError(self.where, f"{name} not found", expected=f"a file in {self._rows.root}")
        return path


def numbers(item: ModelInput, values: Values) -> Array:
    """Return the numbers of an input, float64 (n, 1), or (n, size) for an array; NaN for null."""
    if item.size is not None:
        return elements(item, values).astype(np.float64)
    return np.where(values.valid, values.data.astype(np.float64), np.nan)[:, None]


def to_floats(output: Any, where: str) -> Array:
    try:
        return np.asarray(output, np.float64)
    except (TypeError, ValueError) as error:
        problem = Problem("output", f"a {type(output).__name__}: {error}", "an array of numbers")
        raise ConfigurationError(where, [problem]) from error


def digest(path: Path) -> str:
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as content:
                sha.update(f"{file.relative_to(path)} {file.stat().st_size} ".encode())
                sha.update(hashlib.file_digest(content, "sha256").digest())
    return sha.hexdigest()
