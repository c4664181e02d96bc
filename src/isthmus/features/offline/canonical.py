"""The one form in which rows are stored: types, order, content hashes, and the digest of each day."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.contract import ViewContract
from isthmus.features.days import DAY, FIRST, LAST
from isthmus.features.errors import DataError
from isthmus.features.offline.commits import Day, digest
from isthmus.features.offline.history import table_schema
from isthmus.features.values.columns import from_arrow, micros, null_elements
from isthmus.features.values.rows import RowCodec


def declared_schema(view: ViewContract) -> pa.Schema:
    """The columns that a transform gives: those of the table without the content hash."""
    schema = table_schema(view)
    return schema.remove(schema.get_field_index("content_hash"))


def canonical(view: ViewContract, rows: pa.Table) -> pa.Table:
    """The rows in the one order and form in which they are stored, with their content hashes."""
    # The hash is that of the values as they are stored, so they take their types first.
    rows = cast(view, rows, declared_schema(view))
    columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
    content = table_schema(view).field("content_hash")
    rows = rows.append_column(content, pa.array(RowCodec(view).content(columns, len(rows))))
    event = micros(rows["event_timestamp"])
    if len(event) and not FIRST <= event.min() <= event.max() <= LAST:
        found = int(event.min() if event.min() < FIRST else event.max())
        raise DataError(f"view {view.name}, column event_timestamp", f"{found} microseconds since 1970 have no date",
                        expected="the years 1 to 9999")  # fmt: skip
    order = [("_day", "ascending"), *((name, "ascending") for name in _identity(view))]
    sorted_rows = rows.append_column("_day", pa.array(event // DAY)).sort_by(order)
    return sorted_rows.drop_columns(["_day"]).combine_chunks()


def _identity(view: ViewContract) -> list[str]:
    return [*(column.name for column in view.keys), "event_timestamp", "known_at"]


def cast(view: ViewContract, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of the schema, in its types, without loss."""
    columns = []
    for field in schema:
        where = f"view {view.name}, column {field.name}"
        count = rows.column_names.count(field.name)
        if count != 1:
            raise DataError(where, f"there are {count} columns of this name", expected="one")
        column = rows[field.name]
        if not field.nullable and column.null_count:
            raise DataError(where, f"{column.null_count} nulls", expected="no null")
        if pa.types.is_timestamp(field.type) and not getattr(column.type, "tz", None):
            raise DataError(where, f"has type {column.type}", expected="a timestamp with a time zone")
        if nulls := null_elements(column):
            raise DataError(
                where, f"its arrays hold {nulls} nulls", expected="arrays of values, or null in their place"
            )
        try:
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(where, f"does not fit its type ({error})", expected=str(field.type)) from None
    return pa.table(columns, schema=schema)


class Doubled:
    """Counts the rows that have key and times of another one: both lie on one day, so in one group of rows."""

    def __init__(self, view: ViewContract) -> None:
        self.view, self.count, self.first = view, 0, ""

    def look(self, rows: pa.Table) -> None:
        """Takes sorted rows into account."""
        identity, same = rows.select(_identity(self.view)), None
        for name in identity.column_names:
            column = identity[name]
            equal = pc.equal(column[1:], column[:-1]) if len(column) > 1 else pa.array([], pa.bool_())
            same = equal if same is None else pc.and_(same, equal)
        first = pc.index(same, True).as_py()
        if first < 0:
            return
        self.count += pc.sum(same).as_py()
        row = identity.slice(first, 1).to_pydict().items()
        self.first = self.first or ", ".join(f"{name}={value[0]}" for name, value in row)

    def refuse(self) -> None:
        """Raises a DataError if there was one."""
        if self.count:
            raise DataError(
                f"view {self.view.name}",
                f"{self.count} rows have the key and times of another row, first {self.first}",
                expected="one row per key, event_timestamp and known_at", remedy="aggregate in the transform",
            )  # fmt: skip


def by_day(view: ViewContract, rows: pa.Table) -> dict[int, tuple[Day, pa.Table]]:
    """Sorted rows cut into days, each with its entry in the commit."""
    days, starts = np.unique(micros(rows["event_timestamp"]) // DAY, return_index=True)
    identity = [column.name for column in table_schema(view) if not column.nullable]
    found = {}
    for day, start, end in zip(days.tolist(), starts, np.append(starts, len(rows))[1:], strict=True):
        part = rows.slice(start, end - start)
        found[day] = Day(len(part), digest(part.select(identity))), part
    return found


def ahead_of(rows: pa.Table, now: int) -> int:
    """How many rows nobody can be answered with yet."""
    return int(np.count_nonzero(np.maximum(micros(rows["event_timestamp"]), micros(rows["known_at"])) > now))
