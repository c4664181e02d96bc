"""Splits rows into training, validation and test parts, by time or by a column."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.outputs.identity import identities
from isthmus.distill.types import Array, Index
from isthmus.features import clock
from isthmus.features.days import DAY
from isthmus.features.errors import DataError

PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """The row numbers of the training, validation and test parts, ascending, and the boundaries of a split by time.

    The two boundaries are in microseconds since 1970 UTC. Training rows are before the first boundary, validation rows
    before the second, and test rows at or after it. A training or validation row whose label became known after the end
    of its part is in no part. In a split by a column, `boundaries` is None, and every row is in a part.
    """

    train: Index
    validation: Index
    test: Index
    boundaries: tuple[int, int] | None

    def drop_unlabeled(self, labeled: Array) -> "Split":
        """Return the split without validation and test rows that have no label. `labeled` is bool, (n,).

        Training rows stay as they are. Raise a DataError if the validation or the test part has no label.
        """
        parts = {name: rows[labeled[rows]] for name in PARTS if len(rows := getattr(self, name))}
        return _filled(
            replace(self, validation=parts["validation"], test=parts["test"]),
            lambda: "no row with a label",
            "labels in each part: validation and test are measured with them",
            "use a longer period or different shares",
        )


def split(event_times: Index, label_times: Index, shares: tuple[float, float, float]) -> Split:
    """Split rows by event time into training, validation and test parts, so that training knows nothing of later rows.

    Leaves out training and validation rows whose label became known only after the end of their part.

    Args:
        event_times: event time of each row, (n,), in microseconds since 1970 UTC.
        label_times: time when each row's label became known, (n,), in microseconds since 1970 UTC.
        shares: shares of training, validation and test rows. Rows with equal event times stay together, so the actual
            shares may differ.

    Raises:
        DataError: a part is empty.
    """
    if not len(event_times):
        raise DataError("training set", "no rows", expected="at least one row in each part")
    ordered = np.sort(event_times)
    last = len(ordered) - 1
    first = int(ordered[min(int(shares[0] * len(ordered)), last)])
    second = int(ordered[min(int((shares[0] + shares[1]) * len(ordered)), last)])
    parts = Split(
        np.flatnonzero((event_times < first) & (label_times <= first)),
        np.flatnonzero((event_times >= first) & (event_times < second) & (label_times <= second)),
        np.flatnonzero(event_times >= second),
        (first, second),
    )
    for name, begin, end in (("train", int(ordered[0]), first), ("validation", first, second)):
        late = (
            label_times[(event_times >= begin) & (event_times < end)]
            - event_times[(event_times >= begin) & (event_times < end)]
        )
        if len(late) and not len(getattr(parts, name)):
            raise DataError(
                f"training set: {name} part",
                f"no rows: labels take {np.median(late) / DAY:.3g} days to become known, the part spans "
                f"{(end - begin) / DAY:.3g}",
                remedy="widen its share in `split`, take a longer period, or shorten the delay of the labels",
            )
    return _filled(
        parts,
        lambda: f"no rows with the boundaries {' and '.join(clock.moment(at).isoformat() for at in (first, second))}",
        "a row whose label was known by the end of the part",
        "use a longer period or different shares",
    )


def split_by_value(values: pa.ChunkedArray, shares: tuple[float, float, float]) -> Split:
    """Split rows by the values of a column, such as a customer's id, so that each value is in only one part.

    A hash of the value selects the part, so a value is in the same part in every table. `values` is the column, without
    nulls. `shares` are the approximate shares of the distinct values for training, validation and test. Raise a
    DataError if a part is empty.
    """
    first, second = (int(share * 2**64) for share in (shares[0], shares[0] + shares[1]))
    drawn = identities({"value": values})[:, :8].copy().view(">u8")[:, 0] if len(values) else np.array([], np.uint64)
    parts = Split(
        np.flatnonzero(drawn < first),
        np.flatnonzero((drawn >= first) & (drawn < second)),
        np.flatnonzero(drawn >= second),
        None,
    )
    return _filled(
        parts,
        lambda: f"no rows among {len(values):,} with {pc.count_distinct(values)} values",
        "at least one row",
        "split by a column with more values, or by different shares",
    )


def _filled(parts: Split, reason: Callable[[], str], expected: str, remedy: str) -> Split:
    # Compute the reason only if needed: Arrow cannot count distinct arrays or dictionaries.
    for name in PARTS:
        if not len(getattr(parts, name)):
            raise DataError(f"training set: {name} part", reason(), expected=expected, remedy=remedy)
    return parts


def split_table(
    table: pa.Table, shares: tuple[float, float, float], by: str | None = None, within: str | None = None
) -> Split:
    """Split a training set into training, validation and test rows.

    Args:
        table: training set. A split by time needs the columns `event_timestamp` and `known_at` (when the label became
            known). It leaves out training and validation rows whose label became known after the end of their part.
        shares: shares of training, validation and test rows.
        by: column of which each value is in only one part; None to split by time.
        within: column whose equal values mark a group of rows, such as the results of a query. A split by time keeps a
            group together, at the latest times of its rows. None if there are no groups.

    Raises:
        DataError: a column is missing, has nulls or has the wrong type, or a part would have no rows.
    """
    if by is not None:
        return split_by_value(required_column(table, by, "the values to split by"), shares)
    moments = pa.timestamp("us", tz="UTC")
    times = [whole_numbers(table, name, moments) for name in ("event_timestamp", "known_at")]
    if within is not None:
        groups = group_numbers(table, within)
        times = [_latest(column, groups) for column in times]
    event, known = times
    return split(event, known, shares)


def group_numbers(table: pa.Table, within: str) -> Index:
    values = required_column(table, within, "the groups of rows").combine_chunks()
    numbers: Index = pc.cast(values.dictionary_encode().indices, pa.int64()).to_numpy(zero_copy_only=False)
    return numbers


def _latest(times: Index, groups: Index) -> Index:
    latest = np.full(groups.max(initial=-1) + 1, np.iinfo(np.int64).min)
    np.maximum.at(latest, groups, times)
    return latest[groups]


def binary_labels(table: pa.Table, label: str, parts: Split) -> Index:
    labels = whole_numbers(table, label, pa.int64())
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise DataError(f"label {label}", f"{len(wrong)} values such as {wrong[0]}", expected="0 or 1")
    for name in PARTS:
        classes = np.unique(labels[getattr(parts, name)])
        if len(classes) == 1:
            reason, remedy = f"only {classes[0]} in the {name} part", "use a longer period or different shares"
            raise DataError(f"label {label}", reason, expected="both 0 and 1", remedy=remedy)
    return labels


def required_column(table: pa.Table, name: str, expected: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise DataError("training set", f"no column {name}", expected=expected)
    column = table[name]
    if column.null_count:
        raise DataError(f"column {name}", f"{column.null_count} nulls", expected="a value in every row")
    return column


def whole_numbers(table: pa.Table, name: str, dtype: pa.DataType) -> Index:
    column = required_column(table, name, f"{name} of type {dtype}")
    try:
        values: Index = pc.cast(pc.cast(column, dtype), pa.int64()).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {name}", str(error), expected=f"values of type {dtype}") from error
    return values
