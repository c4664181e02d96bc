"""The tabular teacher: histogram gradient boosting on raw inputs, fitted on first use."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import sklearn
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.multioutput import MultiOutputClassifier
from threadpoolctl import threadpool_limits

from isthmus.distill.tabular.tensors import TabularTensors, vocabularies
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Array, Index

MIN_SAMPLES_LEAF = 100
LEAVES = 31
_LARGEST = np.finfo(np.float32).max


class Learner(NamedTuple):
    """A scikit-learn class with its options. `key` names its output; `classes` has class names by label, or is None."""

    kind: type[HistGradientBoostingClassifier] | type[HistGradientBoostingRegressor]
    key: str
    options: Mapping[str, Any] = {}
    classes: Sequence[str] | None = None

    def answer(self, model: Any, rows: Array) -> Array:
        if isinstance(model, HistGradientBoostingRegressor):
            values: Array = model.predict(rows)
            return values
        if isinstance(model, MultiOutputClassifier):
            return np.stack([each.decision_function(rows) for each in model.estimators_], 1)
        logits: Array = model.decision_function(rows)
        return np.stack([np.zeros_like(logits), logits], 1) if self.classes and logits.ndim == 1 else logits


BINARY = Learner(HistGradientBoostingClassifier, "logits")


class Boosting(Teacher):
    """A teacher by gradient boosting, fitted to the training rows of a table on first use; batches are row numbers.

    `data` reads the inputs of all rows, `labels` and `weights` have a value for each row (no weights if None), and
    `train` has the numbers of the training rows. `recipe` is plain data that identifies table, labels, weights and
    training rows. With the options it is the teacher's fingerprint, so nothing is fitted if all outputs are cached.
    Texts that the training rows lack are treated like null. The number of threads does not change the outputs.
    """

    def __init__(  # noqa: PLR0913 - options of the learner, by name
        self, name: str, data: Callable[[], TabularTensors], labels: Array, train: Index, *, rounds: int,
        learning_rate: float, threads: int, recipe: Mapping[str, Any], learner: Learner = BINARY,
        weights: Array | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, (learner.key,), labels=learner.classes)
        self._learner = learner
        self._data, self._labels, self._train, self._threads = data, labels, train, threads
        self._row_weights = None if weights is None else weights[train]
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
        # scikit-learn rejects empty columns and infinite values.
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
        if self._labels.ndim > 1:
            model = MultiOutputClassifier(model)
        with threadpool_limits(self._threads):
            model.fit(matrix[self._train], self._labels[self._train], sample_weight=self._row_weights)
            return _Fitted(model, matrix, words, empty)

    def _answer(self, batch: Index) -> Mapping[str, Any]:
        return {self._learner.key: self._scores(self._fitted.matrix[batch])}

    def answers(self, data: TabularTensors) -> Array:
        matrix = np.concatenate([data.numeric, _codes(data.categories, self._fitted.words)], axis=1)
        matrix[:, self._fitted.empty] = 0.0
        return self._scores(np.clip(matrix, -_LARGEST, _LARGEST, out=matrix))

    def _scores(self, matrix: Array) -> Array:
        # For a single row, starting threads costs more than predicting.
        with threadpool_limits(self._threads if len(matrix) > 1 else 1):
            return self._learner.answer(self._fitted.model, matrix).astype(np.float32)

    @property
    def runtime(self) -> str:
        return f"scikit-learn {sklearn.__version__}"

    def _identity(self) -> Any:
        return self._recipe

    def size(self) -> tuple[int, int]:
        models = getattr(self._fitted.model, "estimators_", [self._fitted.model])
        trees = [
            tree for model in models for step in model._predictors for tree in step
        ]  # scikit-learn has no public access to the trees
        leaves = sum(int(tree.nodes["is_leaf"].sum()) for tree in trees)
        splits = sum(len(tree.nodes) for tree in trees) - leaves
        return 2 * splits + leaves, sum(tree.nodes.nbytes + tree.raw_left_cat_bitsets.nbytes for tree in trees)


class _Fitted(NamedTuple):
    model: Any
    matrix: Array
    words: Sequence[Sequence[str]]
    empty: Array


def _codes(categories: Array, vocabularies: Sequence[Sequence[str]]) -> Array:
    codes = np.full(categories.shape, np.nan, np.float32)
    for position, vocabulary in enumerate(vocabularies):
        places = {text: float(place) for place, text in enumerate(vocabulary)}
        codes[:, position] = [places.get(text, np.nan) for text in categories[:, position]]
    return codes
