"""The points that no other point beats."""

import numpy as np

from isthmus.distill.types import Array


def front(points: Array) -> Array:
    """Which of (n, k) points are on the Pareto front, (n,) bool: less is better in each of the k numbers.

    A point is not, if another one is nowhere greater and somewhere less. Equal points are on it together.
    """
    on = np.zeros(len(points), bool)
    # Whoever beats a point has a smaller one of the sums of ranks: all that may be on it was met before.
    ranks = sum(np.unique(column, return_inverse=True)[1] for column in points.T)
    for place in np.argsort(ranks, kind="stable"):
        kept = points[on]
        beaten = (kept <= points[place]).all(1) & (kept < points[place]).any(1)
        on[place] = not beaten.any()
    return on


def front_naively(points: Array) -> Array:
    """The same, by its definition."""
    return np.array(
        [
            not any(all(a <= b for a, b in zip(other, one, strict=True)) and tuple(other) != tuple(one)
                    for other in points)
            for one in points
        ],
        bool,
    )  # fmt: skip
