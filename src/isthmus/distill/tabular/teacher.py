"""The teacher of tables: histogram gradient boosting on raw inputs, fitted at its first answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import sklearn
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from isthmus.distill.tabular.tensors import Tensors, vocabularies
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Array, Index

MIN_SAMPLES_LEAF = 100
LEAVES = 31
_LARGEST = np.finfo(np.float32).max


class Learner(NamedTuple):
    """What learns, with its options, and how it answers rows of a matrix under a key.

    Attributes:
        classes: names of its classes, whose numbers are its labels; None of numbers, and of a label of 0 and 1.
    """

    kind: type[HistGradientBoostingClassifier] | type[HistGradientBoostingRegressor]
    key: str
    options: Mapping[str, Any] = {}
    classes: Sequence[str] | None = None

    def answer(self, model: Any, rows: Array) -> Array:
        """Logits (n,) of the second of two classes, logits (n, classes) of named classes, or values (n,)."""
        if isinstance(model, HistGradientBoostingRegressor):
            values: Array = model.predict(rows)
            return values
        logits: Array = model.decision_function(rows)
        return np.stack([np.zeros_like(logits), logits], 1) if self.classes and logits.ndim == 1 else logits


BINARY = Learner(HistGradientBoostingClassifier, "logits")


class Boosting(Teacher):
    """Gradient boosting on the training rows of a table; its batches are row numbers of that table.

    A category that is not in the training part is missing to the learner, like null. The same arguments lead to the
    same logits, whatever the number of threads.

    `data` reads the inputs of all rows of the table, with (n,) labels as the learner takes them; `train` has the
    numbers of the rows to learn from. The recipe is plain data that identify table, labels and training rows. It is the
    fingerprint, so that nothing is fitted where all outputs are cached.
    """

    def __init__(  # noqa: PLR0913 - options of the learner, by name
        self, name: str, data: Callable[[], Tensors], labels: Array, train: Index, *, rounds: int, learning_rate: float,
        threads: int, recipe: Mapping[str, Any], learner: Learner = BINARY,
    ) -> None:  # fmt: skip
        super().__init__(name, (learner.key,), labels=learner.classes)
        self._learner = learner
        self._data, self._labels, self._train, self._threads = data, labels, train, threads
        self._recipe = {
            **recipe, "library": self.runtime, "learner": learner.kind.__name__,
            "rounds": rounds, "learning_rate": learning_rate, "leaves": LEAVES, "min_samples_leaf": MIN_SAMPLES_LEAF,
        }  # fmt: skip

    @cached_property
    def _fitted(self) -> "_Fitted":
        data = self._data()
        words = vocabularies(data[self._train])
        numbers = data.numeric.shape[1]
        matrix = np.concatenate([data.numeric, _codes(data.categories, words)], axis=1)
        # The learner refuses columns without values and infinite values.
        empty = np.isnan(matrix[self._train]).all(axis=0)
        matrix[:, empty] = 0.0
        np.clip(matrix, -_LARGEST, _LARGEST, out=matrix)
        model = self._learner.kind(
            max_iter=self._recipe["rounds"],
            learning_rate=self._recipe["learning_rate"],
            max_leaf_nodes=LEAVES,
            min_samples_leaf=min(MIN_SAMPLES_LEAF, max(1, len(self._train) // LEAVES)),
            categorical_features=list(range(numbers, matrix.shape[1])),
            early_stopping=False,
            random_state=0,
            **self._learner.options,
        )
        with threadpool_limits(self._threads):
            return _Fitted(model.fit(matrix[self._train], self._labels[self._train]), matrix, words, empty)

    def _answer(self, batch: Index) -> Mapping[str, Any]:
        return {self._learner.key: self._scores(self._fitted.matrix[batch])}

    def answers(self, data: Tensors) -> Array:
        """Its answers to rows that its table may not have, float32 (n,) or (n, classes)."""
        matrix = np.concatenate([data.numeric, _codes(data.categories, self._fitted.words)], axis=1)
        matrix[:, self._fitted.empty] = 0.0
        return self._scores(np.clip(matrix, -_LARGEST, _LARGEST, out=matrix))

    def _scores(self, matrix: Array) -> Array:
        # For a single row, threads take longer than the work.
        with threadpool_limits(self._threads if len(matrix) > 1 else 1):
            return self._learner.answer(self._fitted.model, matrix).astype(np.float32)

    @property
    def runtime(self) -> str:
        """scikit-learn."""
        return f"scikit-learn {sklearn.__version__}"

    def _identity(self) -> Any:
        return self._recipe

    def size(self) -> tuple[int, int]:
        """Parameters (a feature and a threshold per split, a value per leaf) and bytes of the trees' arrays."""
        trees = [tree for step in self._fitted.model._predictors for tree in step]  # scikit-learn has no view of them
        leaves = sum(int(tree.nodes["is_leaf"].sum()) for tree in trees)
        splits = sum(len(tree.nodes) for tree in trees) - leaves
        return 2 * splits + leaves, sum(tree.nodes.nbytes + tree.raw_left_cat_bitsets.nbytes for tree in trees)


class _Fitted(NamedTuple):
    """A learner that has learned, the matrix of its table, the known texts, and the columns without a known value."""

    model: Any
    matrix: Array
    words: Sequence[Sequence[str]]
    empty: Array


def _codes(categories: Array, vocabularies: Sequence[Sequence[str]]) -> Array:
    """Float32 codes from 0 on, NaN for texts that are in no vocabulary."""
    codes = np.full(categories.shape, np.nan, np.float32)
    for position, vocabulary in enumerate(vocabularies):
        places = {text: float(place) for place, text in enumerate(vocabulary)}
        codes[:, position] = [places.get(text, np.nan) for text in categories[:, position]]
    return codes
