"""Drift of a feature's values from a reference, computed from the statistics of both."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.contract.schema import Column
from isthmus.features.errors import DependencyError
from isthmus.features.quality.statistics import POINTS, SAMPLE, FeatureStatistics, Measurement, read
from isthmus.features.values.arrow import micros

# * Population stability index, sum over bins of (p - q) ln(p / q) for the shares p of the reference and q of the new
#   rows (Siddiqi 2006, "Credit Risk Scorecards"; it is the symmetrized Kullback-Leibler divergence). Numbers fall into
#   bins between the deciles of the reference; a value that makes up a decile by itself has its own bin. Categories fall
#   into the reference's most frequent ones, plus one bin for the remainder. Null has a bin, and NaN and infinities
#   share one. A share below half a row of the smaller side, or below half a point (`statistics.POINTS`), counts as that
#   half, so that an empty bin gives no infinity.
# * Kolmogorov-Smirnov statistic, the largest gap between the two distribution functions (`scipy.stats.ks_2samp`).
# * Wasserstein distance of first order, the area between them (`scipy.stats.wasserstein_distance`), in standard
#   deviations of the reference.
#
# The last two use the points of the statistics, so they are off by at most 1/256. They do not apply to categories.
#
# A feature has drifted if a measure exceeds all three limits below. Fewer than a hundred new rows, with fewer than ten
# in a decile, are measured but not judged.
#
# * The threshold. The three thresholds agree: a normal distribution that moves by half a standard deviation has an
#   index of 0.25, a gap of 0.197 and a distance of 0.5.
# * Chance: the value that as many rows of the same distribution exceed once in a thousand times. For the index, it is
#   the 0.999 quantile of chi-square with (bins - 1) degrees of freedom, times 1/n + 1/m (Yurdakul and Naranjo 2020,
#   "Statistical properties of the population stability index", Journal of Risk Model Validation 14:4). For the gap, it
#   is 1.95 sqrt(1/n + 1/m) (Smirnov 1948). For the distance, it is 3.09 sqrt(1/n + 1/m).
# * Usual variation. Chance assumes independent rows, but rows of the same night or rolling window are not independent:
#   four hours never look like a year. So windows of the reference, each as long as the new rows' window, are compared
#   with the whole reference, too. The largest of their measures is the usual variation.

WINDOWS = 50
"""Maximum number of windows of the reference."""

LEAST = 100
"""Fewer new rows than this are not judged."""

BINS = 10
CATEGORIES = 20
_WINDOW_SAMPLE = 4_096
_RARE = 3.0902
"""0.999 quantile of the normal distribution."""
_Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


class Thresholds(msgspec.Struct, frozen=True):
    psi: float = 0.25
    ks: float = 0.2
    wasserstein: float = 0.5


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The drift of a feature, by its population stability index (`psi`) and two other measures.

    Attributes:
        rows: number of new rows.
        ks: Kolmogorov-Smirnov statistic; None for categories, or if a side has no numbers.
        wasserstein: distance in standard deviations of the reference; None like `ks`, or if the reference is constant.
        exceeded: names of the measures that exceed threshold, chance and usual variation.
        unseen: most frequent categories missing from the reference; empty if the reference has too many to name.
    """

    rows: int
    psi: float
    ks: float | None = None
    wasserstein: float | None = None
    exceeded: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def drift(
    reference: FeatureStatistics,
    new: FeatureStatistics,
    windows: Sequence[FeatureStatistics] = (),
) -> Drift:
    """Measure how far the values of a feature in new rows have drifted from a reference, such as the training set.

    `exceeded` of the result names the measures that exceed both their threshold and what chance explains. `windows`
    has statistics of parts of the reference, from the function `windows`. A measure is not named if it is as large
    between one of these parts and the reference. With fewer than `LEAST` new rows, no measure is named.
    If either side has no rows, the population stability index is 0. Raises DependencyError for numbers if SciPy is not
    installed.
    """
    limits = Thresholds()
    if not reference.rows or not new.rows:
        return Drift(rows=new.rows, psi=0.0)
    index, chance = psi(reference, new)
    values = {"psi": index, **_numeric(reference, new)}
    spread = math.sqrt(_inverse_rows(reference.rows - reference.nulls, new.rows - new.nulls))
    bounds = {
        "psi": max(limits.psi, chance),
        "ks": max(limits.ks, 1.9495 * spread),
        "wasserstein": max(limits.wasserstein, _RARE * spread),
    }
    judged = new.rows >= LEAST
    exceeded = [name for name, value in values.items() if judged and value > bounds[name]]
    if exceeded:
        usual = [{"psi": psi(reference, part)[0], **_numeric(reference, part)} for part in windows if part.rows]
        exceeded = [name for name in exceeded if all(values[name] > part.get(name, 0.0) for part in usual)]
    return Drift(
        rows=new.rows,
        psi=index,
        ks=values.get("ks"),
        wasserstein=values.get("wasserstein"),
        exceeded=tuple(exceeded),
        unseen=_unseen(reference, new),
    )


def windows(
    columns: Sequence[Column], data: ds.Dataset | pa.Table, until: int, window_micros: int
) -> dict[str, list[FeatureStatistics]]:
    """Measure a feature's usual variation: split the rows of a reference into windows of time, and measure each.

    Return lists of statistics by column name, newest window first, for `drift`. `until` is the end of the newest
    window, in microseconds since 1970 UTC, and `window_micros` the length of each in microseconds. If there are more
    than `WINDOWS` windows, an even selection is measured. Windows without rows are left out. The lists are empty if
    fewer than two windows fit.
    """
    first = until
    for batch in read(data, ["event_timestamp"], until=until):
        if len(batch):
            first = min(first, int(micros(batch["event_timestamp"]).min()))
    count = (until - first) // window_micros
    if count < 2:
        return {column.name: [] for column in columns}
    numbers = np.unique(np.linspace(0, count - 1, min(count, WINDOWS)).astype(np.int64))
    parts = [Measurement(columns, _WINDOW_SAMPLE) for _ in numbers]
    for batch in read(data, [*(column.name for column in columns), "event_timestamp"], until=until):
        place = (until - micros(batch["event_timestamp"])) // window_micros
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], numbers, side="left")
        ends = np.searchsorted(place[order], numbers, side="right")
        for part, start, end in zip(parts, starts, ends, strict=True):
            if start < end:
                part.add(batch.take(pa.array(order[start:end])))
    measured = [part.features() for part in parts if part.rows]
    return {column.name: [features[column.name] for features in measured] for column in columns}


def _numeric(reference: FeatureStatistics, new: FeatureStatistics) -> dict[str, float]:
    if not reference.points or not new.points:
        return {}
    try:
        from scipy.stats import ks_2samp, wasserstein_distance
    except ImportError as error:
        raise DependencyError("drift", f"SciPy cannot be imported ({error})",
                              remedy="install it with: pip install 'isthmus[orchestration]'") from error  # fmt: skip
    # The p-value, which is not used, is undefined for single values; a distance can exceed the range of floats.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        measures = {"ks": float(ks_2samp(reference.points, new.points, method="asymp").statistic)}
        if reference.deviation:
            distance = float(wasserstein_distance(reference.points, new.points))
            measures["wasserstein"] = distance / reference.deviation
    return measures


def psi(reference: FeatureStatistics, new: FeatureStatistics) -> tuple[float, float]:
    """Return the population stability index of new rows against a reference, to judge drift.

    The second number is the index that rows without drift exceed by chance once in 1,000 times. Both sides must have
    rows.
    """
    if reference.categorical:
        names = list(reference.top)[:CATEGORIES]
        shares = [_category_shares(side, names) for side in (reference, new)]
    else:
        edges = _edges(reference.points)
        shares = [_number_shares(side, edges) for side in (reference, new)]
    least = 0.5 / min(reference.rows, new.rows, POINTS)
    p, q = (np.maximum(side, least) for side in shares)
    filled = int(((shares[0] > 0) | (shares[1] > 0)).sum())
    return float(np.sum((p - q) * np.log(p / q))), _chi_square(filled - 1) * _inverse_rows(reference.rows, new.rows)


def _edges(points: Sequence[float]) -> _Numbers:
    """Return the upper ends of all bins but the last: the deciles, and the number just below a repeated decile."""
    deciles = [points[min(n * len(points) // BINS, len(points) - 1)] for n in range(1, BINS)] if points else []
    twice = {value for value in deciles if deciles.count(value) > 1}
    return np.array(sorted({*deciles, *(math.nextafter(value, -math.inf) for value in twice)}), np.float64)


def _number_shares(side: FeatureStatistics, edges: _Numbers) -> _Numbers:
    counts = np.bincount(np.searchsorted(edges, np.array(side.points), side="left"), minlength=len(edges) + 1)
    finite = side.rows - side.nulls - side.not_finite
    inside = counts * (finite / side.rows / max(len(side.points), 1))
    return np.concatenate([[side.nulls / side.rows, side.not_finite / side.rows], inside])


def _category_shares(side: FeatureStatistics, names: Sequence[str]) -> _Numbers:
    named = [side.top.get(name, 0.0) for name in names]
    nulls = side.nulls / side.rows
    return np.array([nulls, *named, max(0.0, 1.0 - nulls - sum(named))])


def _unseen(reference: FeatureStatistics, new: FeatureStatistics) -> tuple[str, ...]:
    if not reference.categorical or reference.distinct > len(reference.top):
        return ()
    return tuple(name for name in new.top if name not in reference.top)[:5]


def _inverse_rows(n: int, m: int) -> float:
    return 1 / max(min(n, SAMPLE), 1) + 1 / max(min(m, SAMPLE), 1)


def _chi_square(freedom: int) -> float:
    """Return the 0.999 quantile of chi-square, by Wilson and Hilferty (1931). Without degrees of freedom, return 0."""
    if freedom < 1:
        return 0.0
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + _RARE * math.sqrt(part)) ** 3)
