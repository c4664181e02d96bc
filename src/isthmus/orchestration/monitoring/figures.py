"""Quality measures of labeled answers: overall, by week and by slice."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import asdict

from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluation import confidence
from isthmus.distill.evaluation.interval import Interval
from isthmus.distill.evaluation.metrics import log_losses
from isthmus.distill.evaluation.slices import column_slices
from isthmus.distill.labels import SEVERAL, Binary, Classes, Number
from isthmus.distill.types import Array
from isthmus.features import clock
from isthmus.features.errors import DataError, RequestError
from isthmus.features.production import MeasuredValue, Quality, SliceQuality, Week
from isthmus.features.values.columns import Ints, Mask

# Labeled answers that a slice needs: small slices would be the worst by chance.
FEWEST = 100
# Worst slices that a report lists.
SLICES = 10
_DAY = timedelta(days=1) // clock.MICROSECOND
# 1970-01-01 was a Thursday: the first Monday came four days later.
_MONDAY = 4 * _DAY
_CLIP = 1e-7
Measures = Mapping[str, MeasuredValue]
# From (n,) labels and (n, width) outputs.
Measuring = Callable[[Array, Array], Measures]


def main_measure(declared: Distillation) -> tuple[str, bool]:
    label = declared.label
    if isinstance(label, Binary):
        return "auc", True
    if isinstance(label, Classes) and label != SEVERAL:
        return "log_loss", False
    if isinstance(label, Number):
        return ("rmse" if label.loss == "squared" else "mae"), False
    raise RequestError(
        f"production of {declared.name}", f"labels of {label or declared.kind} have no measure",
        expected="a Tabular with a Binary, Classes or Number label",
    )  # fmt: skip


def measuring(declared: Distillation) -> Measuring:
    if isinstance(declared.label, Binary):
        return _binary
    return _classes if isinstance(declared.label, Classes) else _number


def numeric_labels(declared: Distillation, column: pa.ChunkedArray) -> Array:
    values: Array = pc.cast(column, pa.float64(), safe=False).to_numpy()
    binary = isinstance(declared.label, Binary)
    fits = (values == 0) | (values == 1) if binary else np.isfinite(values)
    wrong = values[~fits & pc.is_valid(column).to_numpy()]
    if len(wrong):
        raise DataError(
            f"label {declared.spine.label.name}", f"{len(wrong):,} values such as {wrong[0]:g}",
            expected="0 or 1" if binary else "finite numbers", remedy="remove these rows from the spine",
        )  # fmt: skip
    return values


def class_indices(column: pa.ChunkedArray, classes: Sequence[str]) -> pa.ChunkedArray:
    if not pa.types.is_string(column.type):
        column = column.cast(pa.int64())  # truth values, too
    return pc.fill_null(pc.index_in(column.cast(pa.string()), value_set=pa.array(classes, pa.string())), -1)


def quality(measured: Measuring, labels: Array, outputs: Array, chosen: Mask) -> Quality:
    labels, outputs = labels[chosen], outputs[chosen]
    return Quality(answers=len(chosen), rows=len(labels), measures=measured(labels, outputs) if len(labels) else {})


def weeks(measured: Measuring, labels: Array, outputs: Array, chosen: Mask, at: Ints) -> tuple[Week, ...]:
    number = (at - _MONDAY) // (7 * _DAY)
    found = []
    for week in np.unique(number).tolist():
        own = number == week
        year, name, _ = clock.moment(week * 7 * _DAY + _MONDAY).isocalendar()
        part = quality(measured, labels[own], outputs[own], chosen[own])
        found.append(Week(week=f"{year}-W{name:02}", **asdict(part)))
    return tuple(found)


def slices(
    measured: Measuring, labels: Array, outputs: Array, chosen: Mask, columns: pa.Table, decides: tuple[str, bool]
) -> tuple[SliceQuality, ...]:
    name, more = decides
    found = []
    for column in columns.column_names:
        for value, rows in column_slices(column, columns[column], FEWEST):
            part = quality(measured, labels[rows], outputs[rows], chosen[rows])
            if part.rows >= FEWEST and name in part.measures:
                found.append(SliceQuality(column=column, value=value, **asdict(part)))
    return tuple(sorted(found, key=lambda each: each.measures[name].value * (1 if more else -1)))


def _binary(labels: Array, outputs: Array) -> Measures:
    scores = outputs[:, 0]
    area = confidence.auc(labels, scores)
    measured = {} if area is None else {"auc": area}
    measured |= {
        "log_loss": _loss(log_losses(labels, scores)),
        "brier": _loss(np.square(scores - labels)),
        "ece": confidence.calibration_error(labels, scores),
        "score": confidence.mean(scores),
        "label": confidence.share(int(labels.sum()), len(labels)),
    }
    return _plain(measured)


def _number(labels: Array, outputs: Array) -> Measures:
    error = outputs[:, 0] - labels
    return _plain(
        {
            "rmse": confidence.root_mean(np.square(error)),
            "mae": _loss(np.abs(error)),
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
    found = confidence.mean(values)
    return found if found.low is None else found._replace(low=max(found.low, 0.0))


def _plain(measured: Mapping[str, Interval]) -> Measures:
    return {name: MeasuredValue(*found) for name, found in measured.items() if math.isfinite(found.value)}
