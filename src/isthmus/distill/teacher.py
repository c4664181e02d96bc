"""The learner of the teacher and of the reference: histogram gradient boosting on all rows' raw inputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from isthmus.distill.cache import Outputs
from isthmus.distill.dataset import Array, Tensors, vocabularies
from isthmus.distill.evaluate import latency
from isthmus.distill.split import Index

MIN_SAMPLES_LEAF = 100
LEAVES = 31
_LARGEST = np.finfo(np.float32).max


def boost(data: Tensors, labels: Array, train: Index, *, rounds: int, learning_rate: float, threads: int) -> Outputs:
    """Fits the learner on the training rows and asks it about every row.

    A category the training part did not hold is missing to the learner, like null. The same arguments give the same
    logits, whatever the number of threads.
    """
    words = vocabularies(data[train])
    numbers = data.numeric.shape[1]
    matrix = np.concatenate([data.numeric, _codes(data.categories, words)], axis=1)
    # The learner takes neither a column without values nor an infinite value.
    matrix[:, np.isnan(matrix[train]).all(axis=0)] = 0.0
    np.clip(matrix, -_LARGEST, _LARGEST, out=matrix)
    model = HistGradientBoostingClassifier(
        max_iter=rounds,
        learning_rate=learning_rate,
        max_leaf_nodes=LEAVES,
        min_samples_leaf=min(MIN_SAMPLES_LEAF, max(1, len(train) // LEAVES)),
        categorical_features=list(range(numbers, matrix.shape[1])),
        early_stopping=False,
        random_state=0,
    )
    with threadpool_limits(threads):
        model.fit(matrix[train], labels[train])
        logits = model.decision_function(matrix).astype(np.float32)
    with threadpool_limits(1):
        row = matrix[:1]
        timing = latency(lambda: model.predict_proba(row), calls=200)
    parameters, size = _size(model)
    return Outputs(logits, parameters, size, timing["p50_us"], timing["p99_us"])


def settings(rounds: int, learning_rate: float) -> dict[str, Any]:
    """What the outputs depend on besides the data, for the key of the cache."""
    return {
        "learner": "HistGradientBoostingClassifier",
        "rounds": rounds,
        "learning_rate": learning_rate,
        "leaves": LEAVES,
        "min_samples_leaf": MIN_SAMPLES_LEAF,
    }


def _codes(categories: Array, vocabularies: Sequence[Sequence[str]]) -> Array:
    """Float32 codes from 0 on, NaN for what no vocabulary holds."""
    codes = np.full(categories.shape, np.nan, np.float32)
    for position, vocabulary in enumerate(vocabularies):
        places = {text: float(place) for place, text in enumerate(vocabulary)}
        codes[:, position] = [places.get(text, np.nan) for text in categories[:, position]]
    return codes


def _size(model: HistGradientBoostingClassifier) -> tuple[int, int]:
    """Parameters (a feature and a threshold per split, a value per leaf) and bytes of the trees' arrays."""
    trees = [tree for step in model._predictors for tree in step]  # scikit-learn has no public view of the trees
    leaves = sum(int(tree.nodes["is_leaf"].sum()) for tree in trees)
    splits = sum(len(tree.nodes) for tree in trees) - leaves
    return 2 * splits + leaves, sum(tree.nodes.nbytes + tree.raw_left_cat_bitsets.nbytes for tree in trees)
