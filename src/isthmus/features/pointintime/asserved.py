"""What serving answered in the past: the log of materializations, replayed over the versions of the offline tables.

A row that became readable online at time r answered from r until the next row of its key became readable, or until the
key was removed. So the point-in-time join over those moments, instead of the moments at which rows could have been
known, gives a training set with the lag that serving had. Rows that were pushed are not in it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import Status
from isthmus.features.contract.contract import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import ViewHistory, status_column, table_schema
from isthmus.features.offline.log import MaterializationLog
from isthmus.features.offline.scan import in_lots
from isthmus.features.offline.snapshot import Snapshot, matches
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import BATCH, PASS, Join
from isthmus.features.types import Bool, UnixTimestamp
from isthmus.features.values.columns import ARROW, from_arrow
from isthmus.features.verdict import compare

_EVENT, _THERE = Column("_event", UnixTimestamp), Column("_there", Bool)
"""What a row of the past has besides its features; no declared name begins with an underscore."""

_IDEAL = Column("event_timestamp", UnixTimestamp)
_VALID = [Status.PRESENT.label, Status.NULL.label]

_TIME = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class ServedDifference:
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


class ServedJoin:
    """The join of a spine to what serving answered at each row's moment, beside the ideal join.

    It streams like `Join`, but what became readable is held in memory: a row for each change of a key.

    Args:
        spine: the columns of the spine.
        offline: where the histories are from.
        histories: of the views to join, for the comparison with the ideal join.
        features: as `Join` takes them.
        status: whether to say what each view answered.
        threads: CPU threads.
        until: view to the moment after which the log is not read on; by default it is read whole.

    Attributes:
        schema: the columns of the result, those of `Join`.
        until: view to the moment at which the last rows that are replayed became readable.

    Raises:
        DataError: nothing of a view was ever materialized under its contract, or a version that was is gone.
    """

    def __init__(
        self,
        spine: pa.Schema,
        offline: OfflineStore,
        histories: Sequence[ViewHistory],
        *,
        features: Mapping[str, Sequence[str]] | None = None,
        status: bool = True,
        threads: int = 2,
        until: Mapping[str, int] | None = None,
    ) -> None:
        self.schema = Join(spine, histories, features=features, status=status).schema
        self.until: dict[str, int] = {}
        self._status, self._names = status, spine.names
        self._views = []
        for history in histories:
            view = history.view
            wanted = [c for c in view.fields if features is None or c.name in features[view.name]]
            past, self.until[view.name] = served(offline, view, None if until is None else until[view.name])
            ideal = replace(history, view=replace(view, fields=(*view.fields, _IDEAL)))
            named = [*(column.name for column in wanted), _IDEAL.name]
            joins = (
                Join(spine, [past], status=False, threads=threads, reading=offline.reading),
                Join(spine, [ideal], features={view.name: named}, status=False, threads=threads,
                     reading=offline.reading),
            )  # fmt: skip
            self._views.append((view, wanted, joins, _Sums(view, wanted)))

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Joins batches of any sizes, none included.

        Raises:
            DataError: a row has no time, or a value that does not fit its type.
        """
        for rows in in_lots(spine, PASS):
            result = rows
            for view, wanted, joins, sums in self._views:
                past, ideal = (pa.Table.from_batches(join.batches(rows.to_batches()), join.schema) for join in joins)
                answered = _answered(rows, view, past)
                sums.add(ideal, past, answered)
                for column in wanted:
                    result = result.append_column(view.full_name(column.name), answered[view.full_name(column.name)])
                if self._status:
                    result = result.append_column(status_column(view), answered[status_column(view)])
            yield from result.cast(self.schema).combine_chunks().to_batches(max_chunksize=BATCH)

    def report(self) -> dict[str, dict[str, ServedDifference]]:
        """View to feature to how the rows that were joined so far differ from the ideal join."""
        return {view.name: sums.differences() for view, _, _, sums in self._views}


def served(offline: OfflineStore, view: ViewContract, until: int | None = None) -> tuple[ViewHistory, int]:
    """What became readable when, as a history whose times are those moments; and the last of those moments.

    Raises:
        DataError: nothing of the view was ever materialized under its contract, or a version that was is gone.
    """
    entries = [entry for entry in MaterializationLog(offline.root).of(view) if until is None or entry.readable <= until]
    if not entries:
        raise DataError(
            f"log of materializations, view {view.name}", "nothing was materialized under this contract",
            remedy="run `isthmus materialize`; a training set as served begins with the first run",
        )  # fmt: skip
    parts: list[pa.Table] = []
    before: Snapshot | None = None
    readable = -(1 << 63)
    for entry in entries:
        history = offline.history(view, entry.version)
        if history.fingerprint != entry.fingerprint:
            raise DataError(
                f"offline table of {view.name}", f"version {entry.version} is not the one that was materialized",
                remedy="it was removed and built again: what was served before is not known any more",
            )  # fmt: skip
        with offline.reading(view.table):
            state = Snapshot.of(history, entry.at)
            # Two runs of a project whose clock stands still became readable one after the other, too.
            readable = max(entry.readable, readable + 1)
            parts += _became(view, before, state, readable)
        before = state
    return ViewHistory(_past(view), pa.concat_tables(parts), entries[-1].version), entries[-1].readable


def _became(view: ViewContract, before: Snapshot | None, state: Snapshot, readable: int) -> list[pa.Table]:
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
    columns[status_column(view)] = pc.cast(status, pa.string())
    return columns


class _Sums:
    """What is counted of a view while rows go by."""

    def __init__(self, view: ViewContract, wanted: Sequence[Column]) -> None:
        self._view, self._wanted = view, wanted
        self._differing = dict.fromkeys((column.name for column in wanted), 0)
        self._rows = self._lagging = 0
        self._lag = 0.0

    def add(self, ideal: pa.Table, past: pa.Table, answered: Mapping[str, pa.ChunkedArray]) -> None:
        """Counts some rows."""
        view = self._view
        self._rows += len(ideal)
        for column in self._wanted:
            name = view.full_name(column.name)
            left, right = (from_arrow(side, column.dtype) for side in (ideal[name], answered[name]))
            self._differing[column.name] += compare([""] * len(ideal), left, right, column.dtype).differing
        there = pc.is_in(answered[status_column(view)].cast(pa.string()), pa.array(_VALID))
        newest, held = (
            table[view.full_name(c.name)].cast(pa.int64()) for table, c in ((ideal, _IDEAL), (past, _EVENT))
        )
        lags = pc.drop_null(pc.subtract(newest, pc.if_else(there, held, None))).to_numpy()
        self._lag, self._lagging = self._lag + float(lags.sum() / 1e6), self._lagging + len(lags)

    def differences(self) -> dict[str, ServedDifference]:
        """Feature to what was found."""
        lag = self._lag / self._lagging if self._lagging else None
        return {name: ServedDifference(self._rows, differing, lag) for name, differing in self._differing.items()}
