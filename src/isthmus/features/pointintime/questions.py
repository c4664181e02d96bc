"""The keys and times of a spine, and the checks on its columns."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.pointintime.asof import Integers
from isthmus.features.values.arrow import ARROW, micros


def check(spine: pa.Schema, parts: Sequence[tuple[ViewContract, Sequence[str]]]) -> None:
    """Check that these views, each with the columns that it adds, can be joined to a spine.

    Raises:
        DataError: the spine lacks a column, `event_timestamp` has no time zone, a key has another type than in
            a view, or two columns would share a name.
    """
    if "event_timestamp" not in spine.names:
        raise DataError("spine", "has no column event_timestamp", remedy="give each row's time this name")
    if spine.names.count("event_timestamp") > 1:
        raise DataError("spine", "has two columns event_timestamp", expected="one")
    time = spine.field("event_timestamp").type
    if not pa.types.is_timestamp(time) or time.tz is None:
        raise DataError("spine, event_timestamp", f"has type {time}", expected="a timestamp with a time zone",
                        remedy="add a time zone; in pandas, pandas.to_datetime(times, utc=True)")  # fmt: skip
    names = list(spine.names)
    for view, added in parts:
        for column in view.keys:
            if names.count(column.name) > 1:
                raise DataError("spine", f"has two columns {column.name}", expected="one")
            if column.name not in spine.names:
                raise DataError("spine", f"has no column {column.name}", expected=f"every key of {view.name}")
            actual, expected = spine.field(column.name).type, ARROW[column.dtype.name]
            if not _fits(actual.value_type if pa.types.is_dictionary(actual) else actual, expected):
                raise DataError(f"spine, {column.name}", f"has type {actual}", expected=str(expected),
                                remedy=f"cast it to {expected}")  # fmt: skip
        if clash := sorted({*added} & {*names}):
            raise DataError("spine", f"has a column {clash[0]}",
                            expected="column names that differ from features, and each view once")  # fmt: skip
        names += added


def _fits(actual: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether a column of type `actual` can hold keys of type `expected`, unless values are out of range."""
    integers = pa.types.is_integer(actual) and pa.types.is_integer(expected)
    texts = pa.types.is_string(expected) and (pa.types.is_large_string(actual) or pa.types.is_string_view(actual))
    blobs = pa.types.is_binary(expected) and (pa.types.is_large_binary(actual) or pa.types.is_binary_view(actual))
    times = pa.types.is_timestamp(actual) and actual.tz is not None and pa.types.is_timestamp(expected)
    # A column of nulls has no type; its rows match nothing.
    return bool(actual == expected or pa.types.is_null(actual) or integers or texts or blobs or times)


def moments(spine: pa.Table, first: int) -> Integers:
    """Return the times of spine rows in microseconds; `first` is the number of the first row, for messages."""
    times = spine["event_timestamp"]
    if times.null_count:
        row = first + pc.index(times.is_null(), True).as_py()
        raise DataError("spine, event_timestamp", f"is null in row {row}", expected="no nulls")
    return micros(cast(spine, "event_timestamp", pa.timestamp("us", tz="UTC"), first))


def cast(spine: pa.Table, name: str, expected: pa.DataType, first: int) -> pa.ChunkedArray:
    """Cast a column to the type of the history; `first` is the number of the first row, for messages."""
    column = spine[name]
    try:
        return column.cast(expected)
    except pa.ArrowInvalid as error:
        row = first + _misfit(column, expected)
        raise DataError(f"spine, {name}", f"has a value in row {row} that does not fit ({error})",
                        expected=str(expected)) from None  # fmt: skip


def _misfit(column: pa.ChunkedArray, expected: pa.DataType) -> int:
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(expected)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
