"""The columns of a spine in which its questions stand: keys and moments."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.pointintime.asof import Integers
from isthmus.features.values.columns import ARROW, micros


def check(spine: pa.Schema, parts: Sequence[tuple[ViewContract, Sequence[str]]]) -> None:
    """Refuses a spine to which views cannot be joined.

    Args:
        spine: its columns.
        parts: the views, and the columns that each of them adds.

    Raises:
        DataError: it lacks a column, a column has another type than a view's key, or two columns would share a name.
    """
    if "event_timestamp" not in spine.names:
        raise DataError("spine", "has no column event_timestamp", remedy="name the moment of each question so")
    if spine.names.count("event_timestamp") > 1:
        raise DataError("spine", "has two columns event_timestamp", expected="one")
    time = spine.field("event_timestamp").type
    if not pa.types.is_timestamp(time) or time.tz is None:
        raise DataError("spine, event_timestamp", f"has type {time}", expected="a timestamp with a time zone")
    taken = list(spine.names)
    for view, added in parts:
        for column in view.keys:
            if taken.count(column.name) > 1:
                raise DataError("spine", f"has two columns {column.name}", expected="one")
            if column.name not in spine.names:
                raise DataError("spine", f"has no column {column.name}", expected=f"every key of {view.name}")
            found, wanted = spine.field(column.name).type, ARROW[column.dtype.name]
            if not _fits(found.value_type if pa.types.is_dictionary(found) else found, wanted):
                raise DataError(f"spine, {column.name}", f"has type {found}", expected=str(wanted))
        clash = sorted({*added} & {*taken})
        if clash:
            raise DataError("spine", f"has a column {clash[0]}",
                            expected="no column named like a feature, and each view once")  # fmt: skip
        taken += added


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can be keys of another: all of them, or those that fit."""
    integers = pa.types.is_integer(found) and pa.types.is_integer(wanted)
    texts = pa.types.is_string(wanted) and (pa.types.is_large_string(found) or pa.types.is_string_view(found))
    blobs = pa.types.is_binary(wanted) and (pa.types.is_large_binary(found) or pa.types.is_binary_view(found))
    moments = pa.types.is_timestamp(found) and found.tz is not None and pa.types.is_timestamp(wanted)
    # A column without any value has no type of its own; its rows find nothing.
    return bool(found == wanted or pa.types.is_null(found) or integers or texts or blobs or moments)


def moments(spine: pa.Table, first: int) -> Integers:
    """The times of the questions in microseconds; `first` is the number of the first row, for messages."""
    times = spine["event_timestamp"]
    if times.null_count:
        row = first + pc.index(times.is_null(), True).as_py()
        raise DataError("spine, event_timestamp", f"is null in row {row}", expected="no null")
    return micros(cast(spine, "event_timestamp", pa.timestamp("us", tz="UTC"), first))


def cast(spine: pa.Table, name: str, wanted: pa.DataType, first: int) -> pa.ChunkedArray:
    """The column in the type in which the history has it: every value, or an error."""
    column = spine[name]
    try:
        return column.cast(wanted)
    except pa.ArrowInvalid as error:
        found = f"has a value in row {first + _misfit(column, wanted)} that does not fit ({error})"
        raise DataError(f"spine, {name}", found, expected=str(wanted)) from None


def _misfit(column: pa.ChunkedArray, wanted: pa.DataType) -> int:
    """The first value of a column that does not fit a type, where there is one: looked for by halves."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(wanted)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
