"""The canonical form of stored rows: their types, order and content hashes, and the digest of each day."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, FIRST, LAST, day_of
from isthmus.features.errors import DataError
from isthmus.features.offline.commits import Day, digest
from isthmus.features.offline.history import table_schema
from isthmus.features.values.arrow import from_arrow, micros, null_elements
from isthmus.features.values.columns import Mask
from isthmus.features.values.rows import RowCodec


def declared_schema(view: ViewContract) -> pa.Schema:
    schema = table_schema(view)
    return schema.remove(schema.get_field_index("content_hash"))


def canonical(view: ViewContract, rows: pa.Table) -> pa.Table:
    """Bring rows of a view into the form of its table: cast them, add content hashes, and sort by day, key and times.

    Raise DataError if a column is missing, a value does not fit, or an event time is outside the years 1 to 9999.
    """
    # The content hash covers the stored values, so cast them before.
    rows = cast(view, rows, declared_schema(view))
    columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
    content = table_schema(view).field("content_hash")
    rows = rows.append_column(content, pa.array(RowCodec(view).content(columns, len(rows))))
    event = micros(rows["event_timestamp"])
    if len(event) and not FIRST <= event.min() <= event.max() <= LAST:
        time = int(event.min() if event.min() < FIRST else event.max())
        raise DataError(f"view {view.name}, column event_timestamp", f"{time} microseconds since 1970 have no date",
                        expected="the years 1 to 9999")  # fmt: skip
    return in_order(view, rows)


def in_order(view: ViewContract, rows: pa.Table) -> pa.Table:
    order = [("_day", "ascending"), *((name, "ascending") for name in identity(view))]
    sorted_rows = rows.append_column("_day", pa.array(micros(rows["event_timestamp"]) // DAY)).sort_by(order)
    return sorted_rows.drop_columns(["_day"]).combine_chunks()


def identity(view: ViewContract) -> list[str]:
    return [*(column.name for column in view.keys), "event_timestamp", "known_at"]


def cast(view: ViewContract, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Select the columns of `schema` from rows of a view, and cast them without loss.

    Raise DataError if a column is missing or repeated, a value does not fit, or a time column lacks a time zone. Also
    raise DataError for a null key, a null time, or a null inside an array. Features may be null.
    """
    columns = []
    for field in schema:
        where = f"view {view.name}, column {field.name}"
        count = rows.column_names.count(field.name)
        if count != 1:
            raise DataError(where, f"there are {count} columns with this name", expected="one")
        column = rows[field.name]
        if not field.nullable and column.null_count:
            raise DataError(where, f"{column.null_count} nulls", expected="no nulls")
        if pa.types.is_timestamp(field.type) and not getattr(column.type, "tz", None):
            raise DataError(where, f"has type {column.type}", expected="a timestamp with a time zone")
        if nulls := null_elements(column):
            raise DataError(
                where, f"its arrays hold {nulls} nulls", expected="arrays without nulls; a whole array may be null"
            )
        try:
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(where, f"does not fit its type ({error})", expected=str(field.type)) from None
    return pa.table(columns, schema=schema)


def merge(view: ViewContract, rows: pa.Table, pushed: pa.Table) -> tuple[pa.Table, int]:
    """Merge rows of a view with pushed rows; return the merged table and how many of `rows` pushed rows replaced.

    Both tables and the result are in the form of `canonical`. If two rows have the same key and times, the one with the
    greater content hash wins, so the order of arrival does not matter. Of two equal rows, the row in `rows` stays.
    """
    if not len(pushed):
        return rows, 0
    both = pa.concat_tables([
        rows.append_column("_pushed", pa.array(np.zeros(len(rows), bool))),
        pushed.append_column("_pushed", pa.array(np.ones(len(pushed), bool))),
    ])  # fmt: skip
    day = pa.array(micros(both["event_timestamp"]) // DAY)
    first = [("_day", "ascending"), *((name, "ascending") for name in identity(view))]
    order = [*first, ("content_hash", "descending"), ("_pushed", "ascending")]
    both = both.append_column("_day", day).sort_by(order).drop_columns(["_day"])
    both = both.filter(pa.array(np.append(True, ~equals_next(view, both))))
    left = len(both) - int(np.count_nonzero(both["_pushed"].to_numpy()))
    return both.drop_columns(["_pushed"]).combine_chunks(), len(rows) - left


def canonical_pushes(view: ViewContract, pushed: pa.Table) -> pa.Table:
    rows = canonical(view, pushed)
    return merge(view, rows.slice(0, 0), rows)[0]


def rows_not_in(rows: pa.Table, stored: pa.Table) -> pa.Table:
    """Return the rows of `rows` that are not in `stored`. Only the columns of `stored` are compared.

    The compared columns must not have nulls, because a null never equals another.
    """
    if not len(rows) or not len(stored):
        return rows
    names = stored.column_names
    numbered = rows.select(names).append_column("_n", pa.array(np.arange(len(rows))))
    left = numbered.join(stored, names, join_type="left anti")["_n"]
    return rows if len(left) == len(rows) else rows.take(left.sort())


def equals_next(view: ViewContract, rows: pa.Table) -> Mask:
    same: Mask = np.ones(max(0, len(rows) - 1), bool)
    for name in identity(view) if len(same) else ():
        column = rows[name].combine_chunks()
        same &= pc.equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    return same


@dataclass
class Duplicates:
    """A counter of rows that repeat a key and times. Pass whole days of canonical rows to `add`, then call `refuse`."""

    view: ViewContract
    count: int = 0
    first: str = ""
    day: int = 0  # of the first

    def add(self, rows: pa.Table) -> None:
        same = np.flatnonzero(equals_next(self.view, rows))
        if not len(same):
            return
        row = rows.select(identity(self.view)).slice(int(same[0]), 1).to_pydict()
        first = ", ".join(f"{name}={value[0]}" for name, value in row.items())
        self.include(len(same), first, day_of(int(micros(rows["event_timestamp"])[same[0]])))

    def include(self, count: int, first: str, day: int) -> None:
        """Add the result of another counter, which has seen other days."""
        if count and (not self.count or day < self.day):
            self.first, self.day = first, day
        self.count += count

    def raise_if_any(self) -> None:
        if self.count:
            raise DataError(
                f"view {self.view.name}",
                f"{self.count} rows have the key and times of another row, first {self.first}",
                expected="one row per key, event_timestamp and known_at", remedy="aggregate in the transform",
            )  # fmt: skip


def by_day(view: ViewContract, rows: pa.Table) -> dict[int, tuple[Day, pa.Table]]:
    days, starts = np.unique(micros(rows["event_timestamp"]) // DAY, return_index=True)
    identity = [column.name for column in table_schema(view) if not column.nullable]
    parts = {}
    for day, start, end in zip(days.tolist(), starts, np.append(starts, len(rows))[1:], strict=True):
        part = rows.slice(start, end - start)
        parts[day] = Day(len(part), digest(part.select(identity))), part
    return parts


def ahead_of(rows: pa.Table, now: int) -> int:
    return int(np.count_nonzero(np.maximum(micros(rows["event_timestamp"]), micros(rows["known_at"])) > now))
