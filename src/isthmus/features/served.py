"""What serving answered in the past: the log of materializations, replayed over the versions of the offline tables.

A row that became readable online at time r answered from r until the next row of its key became readable, or until the
key was removed. So the point-in-time join over those moments, instead of the moments at which rows could have been
known, gives a training set with the lag that serving had. Rows that were pushed are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.changes import State, matches
from isthmus.features.clock import Status
from isthmus.features.columns import ARROW, from_arrow
from isthmus.features.contract import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.materializations import Log
from isthmus.features.offline import OfflineStore
from isthmus.features.pointintime import History, point_in_time, status_column, table_schema
from isthmus.features.types import Bool, UnixTimestamp
from isthmus.features.verdict import compare

_EVENT, _THERE = Column("_event", UnixTimestamp), Column("_there", Bool)
"""What a row of the past has besides its features; no declared name begins with an underscore."""

_TIME = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class Difference:
    """How the answers of serving differ from the ideal join, for one feature.

    Attributes:
        compared: rows of the spine.
        differing: rows with another value, nulls included.
        lag_seconds: how much older the row served was, in the mean of all rows for which both sides have one; None if
            there is none.
    """

    compared: int
    differing: int
    lag_seconds: float | None


def served(offline: OfflineStore, view: ViewContract) -> History:
    """What became readable when, as a history whose times are those moments.

    Raises:
        DataError: nothing of the view was ever materialized under its contract, or a version that was is gone.
    """
    entries = Log(offline.root).of(view)
    if not entries:
        raise DataError(
            f"log of materializations, view {view.name}", "nothing was materialized under this contract",
            remedy="run `isthmus materialize`; a training set as served begins with the first run",
        )  # fmt: skip
    parts: list[pa.Table] = []
    before: State | None = None
    readable = -(1 << 63)
    for entry in entries:
        history = offline.history(view, entry.version)
        if offline.fingerprint(history) != entry.fingerprint:
            raise DataError(
                f"offline table of {view.name}", f"version {entry.version} is not the one that was materialized",
                remedy="it was removed and built again: what was served before is not known any more",
            )  # fmt: skip
        with offline.reading(view.name):
            state = State.of(history, entry.at)
            # Two runs of a project whose clock stands still became readable one after the other, too.
            readable = max(entry.readable, readable + 1)
            parts += _became(view, before, state, readable)
        before = state
    return History(_past(view), pa.concat_tables(parts), entries[-1].version)


def as_served(
    spine: pa.Table, offline: OfflineStore, histories: Sequence[History], threads: int = 2
) -> tuple[pa.Table, dict[str, dict[str, Difference]]]:
    """Joins to each row of a spine what serving answered at that moment.

    Args:
        spine: as `point_in_time` takes it.
        offline: where the histories are from.
        histories: of the views to join, for the comparison with the ideal join.
        threads: CPU threads.

    Returns:
        The columns of `point_in_time`, and view to feature to how they differ from it.
    """
    result, report = spine, {}
    for history in histories:
        view = history.view
        past = point_in_time(spine, [served(offline, view)], threads)
        ideal = point_in_time(spine, [replace(history, view=_with_event(view))], threads)
        answered = _answered(spine, view, past)
        for name, column in answered.items():
            result = result.append_column(name, column)
        report[view.name] = _differences(view, ideal, past, answered)
    return result, report


def _became(view: ViewContract, before: State | None, state: State, readable: int) -> list[pa.Table]:
    """The rows that a run made readable, and the keys that it took away."""
    fresh, gone = np.arange(len(state.content)), None
    if before is not None:
        old = matches(before.keys, state.keys)
        fresh = np.flatnonzero(~before.same(old, state))
        left = np.ones(len(before.content), bool)
        left[old[old >= 0]] = False
        gone = before.keys.filter(pa.array(left))
    schema = table_schema(_past(view))
    tables = []
    for rows in state.rows(fresh):
        moment = pa.array(np.full(len(rows), readable)).cast(_TIME)
        extra = {_EVENT.name: rows["event_timestamp"], _THERE.name: pa.array(np.ones(len(rows), bool))}
        tables.append(_in_form(schema, rows, moment, extra))
    if gone is not None and len(gone):
        moment = pa.array(np.full(len(gone), readable)).cast(_TIME)
        tables.append(_in_form(schema, gone, moment, {}))
    return tables or [schema.empty_table()]


def _in_form(schema: pa.Schema, rows: pa.Table, moment: pa.Array, extra: dict[str, pa.Array]) -> pa.Table:
    columns = []
    for field in schema:
        if field.name in ("event_timestamp", "known_at"):
            columns.append(moment)
        elif field.name in extra:
            columns.append(extra[field.name])
        elif field.name in rows.column_names:
            columns.append(rows[field.name])
        elif field.name == "content_hash":
            columns.append(pa.array(np.zeros(len(rows), np.int64)))
        else:
            columns.append(pa.nulls(len(rows), field.type))
    return pa.table([column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)


def _past(view: ViewContract) -> ViewContract:
    """A view of rows as they became readable: its ttl counts from another time than its order."""
    return replace(view, fields=(*view.fields, _EVENT, _THERE), ttl=None)


def _with_event(view: ViewContract) -> ViewContract:
    return replace(view, fields=(*view.fields, Column("event_timestamp", UnixTimestamp)))


def _answered(spine: pa.Table, view: ViewContract, past: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The features and the status of a view by its own ttl."""
    event = past[view.full_name(_EVENT.name)]
    at = spine["event_timestamp"].cast(_TIME).cast(pa.int64())
    there = pc.fill_null(past[view.full_name(_THERE.name)], False)
    age = pc.subtract(at, pc.fill_null(event.cast(pa.int64()), 0))
    expired = pc.and_(there, pc.greater(age, view.ttl)) if view.ttl is not None else pc.and_(there, pc.invert(there))
    valid = pc.and_(there, pc.invert(expired))
    columns, empty = {}, valid
    for column in view.fields:
        name = view.full_name(column.name)
        kept = past[name]
        columns[name] = pc.if_else(valid, kept, pa.scalar(None, ARROW[column.dtype.name]))
        empty = pc.and_(empty, kept.is_null())
    labels = [Status.PRESENT.label, Status.NULL.label, Status.EXPIRED.label, Status.NOT_FOUND.label]
    status = pc.if_else(empty, labels[1], pc.if_else(valid, labels[0], pc.if_else(expired, labels[2], labels[3])))
    form = past.schema.field(status_column(view)).type
    columns[status_column(view)] = pc.cast(status, pa.string()).dictionary_encode().cast(form)
    return columns


def _differences(
    view: ViewContract, ideal: pa.Table, past: pa.Table, answered: dict[str, pa.ChunkedArray]
) -> dict[str, Difference]:
    names = (view.full_name("event_timestamp"), view.full_name(_EVENT.name))
    events = [table[name].cast(pa.int64()) for table, name in zip((ideal, past), names, strict=True)]
    lags = pc.drop_null(pc.subtract(*events)).to_numpy()
    lag = float(lags.mean() / 1e6) if len(lags) else None
    found = {}
    for column in view.fields:
        name = view.full_name(column.name)
        sides = [from_arrow(side, column.dtype) for side in (ideal[name], answered[name])]
        differing = compare([""] * len(ideal), sides[0], sides[1], column.dtype).differing
        found[column.name] = Difference(len(ideal), differing, lag)
    return found
