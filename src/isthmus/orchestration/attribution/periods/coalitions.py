"""A change between two periods, split among what changed: the population, its features, the contract and the model.

A mean of rows is one of segments: the share of each, and the mean within it (Kitagawa, 1955,
doi:10.1080/01621459.1955.10501299; Oaxaca, 1973, doi:10.2307/2525981; Blinder, 1973, doi:10.2307/144855). The shares
are the population, the rows within a segment its features. With shares of one period and rows of the other, each row
counts by its segment, so that measures that are no means can be split as well (DiNardo, Fortin and Lemieux, 1996,
doi:10.2307/2171954). Of the four that may be swapped, each has its Shapley value (Shorrocks, 2013,
doi:10.1007/s10888-011-9214-z).
"""

from collections.abc import Callable, Sequence

import numpy as np

from isthmus.features.values.columns import Ints
from isthmus.orchestration.attribution.shapley import Numbers

POPULATION, FEATURES, CONTRACT, MODEL = PARTS = ("population", "features", "contract", "model")
MEANINGS = {
    POPULATION: "what share of the rows each segment has",
    FEATURES: "the rows within a segment: their features, and what came of them",
    CONTRACT: "how stored features are computed",
    MODEL: "the package that answers, with the request transforms in it",
}

Weighted = Callable[[Numbers, Numbers], float]
"""A measure of scores (n,) with weights (n,), whose sum is 1."""


def weights(before: Ints, after: Ints) -> Numbers:
    """How much each row counts, float64 (2, 2, n + m): by the period of the population, then by that of the features.

    `before` and `after` are the segments of the n and m rows of the two periods, counted from 0; neither is empty. The
    rows of a segment that one period alone has are the only ones that are known of it: they stand for the other
    period, too, and the segment is a matter of the population.
    """
    sides = (before, after)
    count = int(max(before.max(), after.max())) + 1
    counts = [np.bincount(side, minlength=count) for side in sides]
    found = np.zeros((2, 2, len(before) + len(after)))
    places = (slice(len(before)), slice(len(before), None))
    for population, own in enumerate(sides):
        for features, rows in enumerate(sides):
            share = counts[population][rows] / len(own)
            found[population, features, places[features]] = share / counts[features][rows]
            if population != features:
                found[population, features, places[population]] = (counts[features][own] == 0) / len(own)
    return found


def coalition_values(measure: Weighted, weight: Numbers, scores: Sequence[Sequence[Numbers]]) -> Numbers:
    """The values of the coalitions of `PARTS`, float64 (16,): bit i is set if part i is that of the second period.

    `weight` is that of `weights`; `scores` are those of all rows, (n + m,), by contract, then by model.
    """
    answers = [[scores[contract][model] for model in (0, 1)] for contract in (0, 1)]
    known: dict[tuple[int, ...], float] = {}
    values = np.empty(1 << len(PARTS))
    for coalition in range(len(values)):
        population, features, contract, model = (coalition >> place & 1 for place in range(len(PARTS)))
        # The same scores have the same value, to the bit: what did not change has no part.
        case = (population, features, id(answers[contract][model]))
        if case not in known:
            known[case] = measure(answers[contract][model], weight[population, features])
        values[coalition] = known[case]
    return values
