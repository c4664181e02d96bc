"""The figures of answers with known labels: of all, of each week, of each slice."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluation import confidence
from isthmus.distill.evaluation.interval import Interval
from isthmus.distill.evaluation.slices import parts
from isthmus.distill.labels import Binary, Classes, Number
from isthmus.distill.types import Array
from isthmus.features import clock
from isthmus.features.errors import DataError, RequestError
from isthmus.features.production import MeasuredValue, Quality, SliceQuality, Week
from isthmus.features.values.columns import Ints, Mask

FEWEST = 100
"""Answers with labels of a slice, at least: the figures of a few would be the worst by chance."""
SLICES = 10
"""The worst slices, which a report names."""
_DAY = timedelta(days=1) // clock.MICROSECOND
_MONDAY = 4 * _DAY
"""1970-01-01 was a Thursday: the first Monday came four days later."""
_CLIP = 1e-7
Measures = Mapping[str, MeasuredValue]
Measuring = Callable[[Array, Array], Measures]
"""Of (n,) labels and (n, width) outputs."""


def metric(declared: Distillation) -> tuple[str, bool]:
    """The measure that decides, and whether more of it is better.

    Raises:
        RequestError: answers of such a model have no measure by labels.
    """
    label = declared.label
    if isinstance(label, Binary):
        return "auc", True
    if isinstance(label, Classes):
        return "log_loss", False
    if isinstance(label, Number):
        return ("rmse" if label.loss == "squared" else "mae"), False
    raise RequestError(
        f"production of {declared.name}", f"there is none of {label or declared.kind}",
        expected="a Tabular whose label is Binary, Classes or a Number",
    )  # fmt: skip


def measuring(declared: Distillation) -> Measuring:
    """The measures of a label."""
    if isinstance(declared.label, Binary):
        return _binary
    return _classes if isinstance(declared.label, Classes) else _number


def numbers(declared: Distillation, column: pa.ChunkedArray) -> Array:
    """The label of each row as a number, NaN for null.

    Raises:
        DataError: a label is none that a training set may have.
    """
    values: Array = pc.cast(column, pa.float64(), safe=False).to_numpy()
    binary = isinstance(declared.label, Binary)
    fits = (values == 0) | (values == 1) if binary else np.isfinite(values)
    wrong = values[~fits & pc.is_valid(column).to_numpy()]
    if len(wrong):
        raise DataError(
            f"label {declared.spine.label.name}", f"{len(wrong):,} values such as {wrong[0]:g}",
            expected="0 or 1" if binary else "finite numbers", remedy="leave these rows out of the spine",
        )  # fmt: skip
    return values


def class_places(column: pa.ChunkedArray, classes: Sequence[str]) -> pa.ChunkedArray:
    """The place of each label among the classes of a package, which are texts; -1 of one that it has not."""
    if not pa.types.is_string(column.type):
        column = column.cast(pa.int64())  # truth values, too
    return pc.fill_null(pc.index_in(column.cast(pa.string()), value_set=pa.array(classes, pa.string())), -1)


def quality(measured: Measuring, labels: Array, outputs: Array, chosen: Mask) -> Quality:
    """Of answers, those with a label being `chosen`."""
    labels, outputs = labels[chosen], outputs[chosen]
    return Quality(answers=len(chosen), rows=len(labels), measures=measured(labels, outputs) if len(labels) else {})


def weeks(measured: Measuring, labels: Array, outputs: Array, chosen: Mask, at: Ints) -> tuple[Week, ...]:
    """By ISO weeks in UTC, in their order."""
    number = (at - _MONDAY) // (7 * _DAY)
    found = []
    for week in np.unique(number).tolist():
        own = number == week
        year, name, _ = clock.moment(week * 7 * _DAY + _MONDAY).isocalendar()
        part = quality(measured, labels[own], outputs[own], chosen[own])
        found.append(
            Week(week=f"{year}-W{name:02}", answers=part.answers, rows=part.rows, measures=part.measures)
        )  # fmt: skip
    return tuple(found)


def slices(
    measured: Measuring, labels: Array, outputs: Array, chosen: Mask, columns: pa.Table, decides: tuple[str, bool]
) -> tuple[SliceQuality, ...]:
    """The slices of at least `FEWEST` labels, cut as those of a report; the worst comes first."""
    name, more = decides
    found = []
    for column in columns.column_names:
        for value, rows in parts(column, columns[column], FEWEST):
            part = quality(measured, labels[rows], outputs[rows], chosen[rows])
            if part.rows >= FEWEST and name in part.measures:
                found.append(
                    SliceQuality(
                        column=column, value=value, answers=part.answers, rows=part.rows, measures=part.measures
                    )
                )
    return tuple(sorted(found, key=lambda each: each.measures[name].value * (1 if more else -1)))


def _binary(labels: Array, outputs: Array) -> Measures:
    scores = outputs[:, 0]
    clipped = np.clip(scores, _CLIP, 1 - _CLIP)
    area = confidence.auc(labels, scores)
    measured = {} if area is None else {"auc": area}
    measured |= {
        "log_loss": _loss(-np.where(labels == 1, np.log(clipped), np.log1p(-clipped))),
        "brier": _loss(np.square(scores - labels)),
        "ece": confidence.calibration_error(labels, scores),
        "score": confidence.mean(scores),
        "label": confidence.share(int(labels.sum()), len(labels)),
    }
    return _plain(measured)


def _number(labels: Array, outputs: Array) -> Measures:
    apart = outputs[:, 0] - labels
    return _plain(
        {
            "rmse": confidence.root_mean(np.square(apart)),
            "mae": _loss(np.abs(apart)),
            "score": confidence.mean(outputs[:, 0]),
            "label": confidence.mean(labels),
        }
    )


def _classes(labels: Array, outputs: Array) -> Measures:
    places = labels.astype(np.int64)
    # A class that the package does not know has no probability.
    right = np.where(places >= 0, outputs[np.arange(len(places)), np.maximum(places, 0)], 0.0)
    named = outputs.argmax(1) == places
    return _plain(
        {
            "log_loss": _loss(-np.log(np.maximum(right, _CLIP))),
            "accuracy": confidence.share(int(named.sum()), len(named)),
            "ece": confidence.calibration_error(named.astype(np.int64), outputs.max(1)),
        }
    )


def _loss(values: Array) -> Interval:
    """The mean of what is never negative: neither is the truth."""
    found = confidence.mean(values)
    return found if found.low is None else found._replace(low=max(found.low, 0.0))


def _plain(measured: Mapping[str, Interval]) -> Measures:
    return {name: MeasuredValue(*found) for name, found in measured.items() if math.isfinite(found.value)}
