"""Rows that Redis returned for recorded answers, and the rows of the history for the same keys and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features.clock import Status
from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.offline.history import ViewHistory, index_of_keys
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.pointintime.join import Join
from isthmus.features.types import Int64, UnixTimestamp
from isthmus.features.values.arrow import ARROW, from_arrow, to_arrow
from isthmus.features.values.columns import Ints, Mask, Values, from_python

_EVENT, _KNOWN = Column("event_timestamp", UnixTimestamp), Column("known_at", UnixTimestamp)
_CONTENT = Column("content_hash", Int64)

_TIME = ARROW[UnixTimestamp.name]


@dataclass(frozen=True)
class StoredRows:
    """Rows of one view as stored at given times, one row for each of n keys. Arrays have shape (n,).

    `event` and `known` are in microseconds since 1970 UTC, 0 without a row. `content` is a hash of the values, 0 if the
    row is missing or expired. `status` has codes of `Status`. `columns` has feature values, null unless the status is
    PRESENT.
    """

    event: Ints
    known: Ints
    content: Ints
    status: Ints
    columns: Mapping[str, Values]

    def same(self, other: "StoredRows") -> Mask:
        """Compare stored rows with other rows for the same keys. Return a mask that is True for equal rows.

        Equal rows have the same status, times and content hash. Times count only if both rows exist. Content hashes
        count only if the row is neither missing nor expired.
        """
        there = (self.status <= Status.EXPIRED) & (other.status <= Status.EXPIRED)
        times = (self.event == other.event) & (self.known == other.known)
        # A missing row may have times: those of a row that is not readable yet.
        same: Mask = (self.status == other.status) & (
            np.where(there, times, True) & (np.where(self.status <= Status.NULL, self.content == other.content, True))
        )
        return same

    def take(self, rows: Ints) -> "StoredRows":
        columns = {name: values.take(rows) for name, values in self.columns.items()}
        return StoredRows(self.event[rows], self.known[rows], self.content[rows], self.status[rows], columns)


def from_history(
    history: ViewHistory, view: ViewContract, keys: Mapping[str, Sequence[Any]], at: Ints, *,
    times: tuple[Column, Column] = (_EVENT, _KNOWN),
) -> StoredRows:  # fmt: skip
    """Look up the row of each key that was readable in the offline history at a time, as a point-in-time join does.

    `history` is the table of the view, and `view` has the features to return. `keys` has values by join key. `at` has a
    time for each key, in microseconds since 1970 UTC. Features of a missing or expired row are null. `times` names the
    two columns of the history to return as event time and known time. It does not change which rows are returned. Raise
    DataError for times before a replay of served values begins.
    """
    history.require_since(at)
    extra = tuple(dict.fromkeys((*times, _CONTENT)))
    whole = replace(history.view, fields=(*view.fields, *extra), ttl=None)
    columns = {"event_timestamp": pa.array(at).cast(_TIME)}
    for column in view.keys:
        values = to_arrow(from_python(keys[column.name], column.dtype), column.dtype)
        columns[column.name] = values.cast(ARROW[column.dtype.name])
    spine = pa.table(columns)
    join = Join(spine.schema, [replace(history, view=whole)], status=False)
    joined = pa.Table.from_batches(join.batches(spine.to_batches()), join.schema)

    def read(column: Column) -> Values:
        return from_arrow(joined[whole.full_name(column.name)], column.dtype)

    event, known = map(read, times)
    content = read(_CONTENT)
    there = event.valid
    expired = there & (at - event.data > view.ttl) if view.ttl is not None else np.zeros(len(at), bool)
    valid = there & ~expired
    features = {column.name: read(column) for column in view.fields}
    filled = np.logical_or.reduce([np.zeros(len(at), bool), *(values.valid for values in features.values())])
    status = np.where(valid, np.where(filled, Status.PRESENT, Status.NULL), Status.NOT_FOUND)
    status = np.where(expired, Status.EXPIRED, status).astype(np.int64)
    return StoredRows(
        event.data, known.data, np.where(valid, content.data, 0), status,
        {name: _where(values, valid) for name, values in features.items()},
    )  # fmt: skip


def columns_of(history: ViewHistory, names: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
    data = ds.dataset(history.data) if isinstance(history.data, pa.Table) else history.data
    return data.to_table([*names], filter=condition)


def find_recorded(
    history: ViewHistory, view: ViewContract, keys: Mapping[str, Sequence[Any]], then: StoredRows
) -> tuple[dict[str, Values], Mask]:
    """Find the feature values of rows that Redis returned, given their keys, times and content hashes.

    Searches the history for rows with the same keys, times and hashes. `then` has the recorded times and hashes.
    Returns values by feature, and a mask with an entry per row, True if its values are known. It is False for rows that
    only Redis had or that were removed from the history. It is True, and the values are null, for a row that was
    missing, expired, or had only nulls.
    """
    present = np.flatnonzero(then.status == Status.PRESENT)
    columns = {"event_timestamp": pa.array(then.event[present]).cast(_TIME)}
    columns |= {"known_at": pa.array(then.known[present]).cast(_TIME), "content_hash": pa.array(then.content[present])}
    for column in view.keys:
        values = from_python([keys[column.name][row] for row in present.tolist()], column.dtype)
        columns[column.name] = to_arrow(values, column.dtype).cast(ARROW[column.dtype.name])
    lookup = pa.table(columns)
    names = [*lookup.column_names, *(column.name for column in view.fields)]
    rows = columns_of(history, names, ds.field("content_hash").isin(pc.unique(lookup["content_hash"])))
    places = np.full(len(then.status), -1)
    if len(rows):
        distinct = rows.select(lookup.column_names)
        places[present] = index_of_keys(distinct.cast(lookup.schema), lookup)
    known = (places >= 0) | (then.status != Status.PRESENT)
    matched = rows.take(pa.array(places, mask=places < 0))
    return {column.name: from_arrow(matched[column.name], column.dtype) for column in view.fields}, known


def with_values(
    history: ViewHistory, keys: Mapping[str, Sequence[Any]], now: StoredRows, then: StoredRows
) -> tuple[StoredRows, Mask]:
    known = np.ones(len(now.status), bool)
    differing = np.flatnonzero(~now.same(then))
    if not len(differing):
        return now, known
    view = history.view
    own = {column.name: [keys[column.name][row] for row in differing.tolist()] for column in view.keys}
    recorded, known[differing] = find_recorded(history, view, own, then.take(differing))
    changed = {}
    for name, values in now.columns.items():
        data, valid = values.data.copy(), values.valid.copy()
        data[differing], valid[differing] = recorded[name].data, recorded[name].valid
        changed[name] = Values(data, valid)
    return replace(then, columns=changed), known


def view_answers(stored: Mapping[str, StoredRows]) -> dict[str, ViewAnswer]:
    answers: dict[str, ViewAnswer] = {}
    for name, rows in stored.items():
        columns: Any = rows.columns
        answers[name] = ViewAnswer(columns, rows.status.astype(np.uint8), rows.event, rows.known)
    return answers


def _where(values: Values, there: Mask) -> Values:
    if there.all():
        return values
    data = values.data.copy()
    data[~there] = None if data.dtype == object else 0
    return Values(data, values.valid & there)
