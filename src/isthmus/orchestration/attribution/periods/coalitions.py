"""Split a change between two periods among population, features, contract and model.

A mean over rows combines segments: the share of each segment and the mean within it (Kitagawa, 1955,
doi:10.1080/01621459.1955.10501299; Oaxaca, 1973, doi:10.2307/2525981; Blinder, 1973, doi:10.2307/144855). The shares
are the population; the rows within a segment are the features. With shares from one period and rows from the other,
each row is weighted by its segment, which also splits measures that are not means (DiNardo, Fortin and Lemieux, 1996,
doi:10.2307/2171954). Each of the four parts gets its Shapley value (Shorrocks, 2013, doi:10.1007/s10888-011-9214-z).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.evaluation.slices import encode_column
from isthmus.features.errors import RequestError, one_of
from isthmus.features.values.columns import Ints
from isthmus.orchestration.attribution.shapley import Numbers

POPULATION, FEATURES, CONTRACT, MODEL = PARTS = ("population", "features", "contract", "model")
MEANINGS = {
    POPULATION: "the share of rows in each segment",
    FEATURES: "the rows within a segment: their features and outcomes",
    CONTRACT: "how stored features are computed",
    MODEL: "the package that answers, including its request transforms",
}

# Measure of scores (n,) with weights (n,) that sum to 1.
Weighted = Callable[[Numbers, Numbers], float]


class Segments(NamedTuple):
    """Segments of rows: the segment index of each row, shape (n,), and the column values of each segment."""

    places: Ints
    values: list[dict[str, str | None]]


def segments(table: pa.Table, columns: Sequence[str], exact: Sequence[str]) -> Segments:
    """Group rows into segments with equal values of `columns`, to compare the same kinds of rows in two periods.

    Numbers are first replaced by their quartile, except in the columns that `exact` names. Raise RequestError if a
    column is missing or `columns` is empty, and DataError if a column has an unsupported
    type, such as a list.
    """
    if missing := [name for name in columns if name not in table.column_names]:
        raise RequestError(f"--by {missing[0]}", "is not a column of the rows", expected=one_of(table.column_names))
    if not columns:
        raise RequestError("segments", "the rows have none of the join keys of the spine",
                           expected="--by with a column of the rows")  # fmt: skip
    words: list[list[str | None]] = []
    codes = np.empty((len(table), len(columns)), np.int64)
    for place, name in enumerate(columns):
        if name in exact:
            column = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
            own = [None if value is None else str(value) for value in column.dictionary.to_pylist()]
            codes[:, place] = pc.fill_null(column.indices, 0).to_numpy(zero_copy_only=False)
        else:
            own, codes[:, place] = encode_column(name, table[name])
        words.append(own)
    distinct, places = np.unique(codes, axis=0, return_inverse=True)
    values = [
        {name: own[code] for name, own, code in zip(columns, words, row, strict=True)} for row in distinct.tolist()
    ]
    return Segments(places.reshape(-1).astype(np.int64), values)


def weights(before: Ints, after: Ints) -> Numbers:
    """Compute row weights that give the rows of one period the segment shares of another, as float64 (2, 2, n + m).

    Used to separate a change of population from a change of features. Entry [p, f] weights the rows of period f by the
    segment shares of period p; period 0 is the earlier one. `before` and `after` have the segment index of each of the
    n rows of the earlier period and the m rows of the later one; neither is empty. The rows of a segment that occurs in
    only one period are used for both, so that such a segment counts as a change of population.
    """
    sides = (before, after)
    count = int(max(before.max(), after.max())) + 1
    counts = [np.bincount(side, minlength=count) for side in sides]
    result = np.zeros((2, 2, len(before) + len(after)))
    places = (slice(len(before)), slice(len(before), None))
    for population, own in enumerate(sides):
        for features, rows in enumerate(sides):
            share = counts[population][rows] / len(own)
            result[population, features, places[features]] = share / counts[features][rows]
            if population != features:
                result[population, features, places[population]] = (counts[features][own] == 0) / len(own)
    return result


def coalition_values(measure: Weighted, weight: Numbers, scores: Sequence[Sequence[Numbers]]) -> Numbers:
    """Compute a measure for each of the 16 subsets of the four causes, as input for `shapley`.

    The causes of a subset come from the later period, the rest from the earlier one.

    Return float64 (16,). Bits 0 to 3 of the index mean that population, features, contract and model come from the
    later period. `weight` is the result of `weights`. `scores[contract][model]` has the scores of the rows of both
    periods; index 0 means earlier.
    """
    answers = [[scores[contract][model] for model in (0, 1)] for contract in (0, 1)]
    cache: dict[tuple[int, ...], float] = {}
    values = np.empty(1 << len(PARTS))
    for coalition in range(len(values)):
        population, features, contract, model = (coalition >> place & 1 for place in range(len(PARTS)))
        # The same scores have the same value bit by bit, so that unchanged parts are exactly 0.
        case = (population, features, id(answers[contract][model]))
        if case not in cache:
            cache[case] = measure(answers[contract][model], weight[population, features])
        values[coalition] = cache[case]
    return values
