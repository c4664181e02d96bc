"""The values that serving returned in the past: a join that replays the logs of materializations and pushes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import Status
from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.days import FIRST
from isthmus.features.errors import DataError
from isthmus.features.offline.delta import VersionGoneError
from isthmus.features.offline.history import LatestRows, ViewHistory, index_of_keys, status_column, table_schema
from isthmus.features.offline.log import MaterializationLog
from isthmus.features.offline.pushes import ACCEPTED, STREAMED, PushLog
from isthmus.features.offline.scan import rebatch
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import BATCH, PASS, Join, apply_ttl
from isthmus.features.types import Bool, UnixTimestamp
from isthmus.features.values.arrow import ARROW, from_arrow, micros
from isthmus.features.values.columns import Ints, Mask
from isthmus.features.values.equality import equal_values
from isthmus.features.values.rows import RowCodec

# A row that became readable online at time r was served from r until the next row of its key became readable, or until
# the key was removed. A point-in-time join over those times, instead of the known times, yields a training set with the
# lag of serving. Pushed rows in the history were readable from the time of their push: the decisions of Redis's scripts
# are recomputed from the log of pushes.

EVENT, KNOWN, PRESENT = Column("_event", UnixTimestamp), Column("_known", UnixTimestamp), Column("_present", Bool)
"""Extra columns of the history of readable rows. No feature has such a name: they begin with an underscore."""

Order = tuple[int, int, int]
"""Event time, known time and content hash of a row. The greater of two is the newer."""

_IDEAL = Column("event_timestamp", UnixTimestamp)
_TIME = ARROW[UnixTimestamp.name]


@dataclass(frozen=True, slots=True)
class ServedDifference:
    """Differences of one feature, over all spine rows, between served values and an ideal join without lag.

    `lag_seconds` is the mean time from the served event to the ideal one, over rows with both; None without such rows.
    """

    compared: int
    differing: int
    lag_seconds: float | None


class ServedJoin:
    """Joins to a spine (table of training examples) the values that serving had at each row's time.

    It also compares these values with an ideal join without lag. It streams like `Join`, and takes its arguments.
    Creating it reads every materialized version of the tables, and holds one row per change of a key in memory. Pass
    the attribute `until` of an earlier join to replay only the runs that the earlier join has replayed. Raises
    DataError if a view was never materialized under its contract, or if a materialized version no longer exists. If
    later ones exist, and no rows were pushed before those, `batches` raises it for earlier rows only.

    Attributes:
        schema: columns of the result, as in `Join`.
        until: for each view, the time at which the last rows of a run became readable, in microseconds since 1970 UTC;
            under `VIEW|pushed`, the version of the log of pushes, if the view has one.
    """

    def __init__(  # noqa: PLR0913 - options of a join, by name
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
        self._status = status
        self._views = []
        for history in histories:
            view = history.view
            fields = [c for c in view.fields if features is None or c.name in features[view.name]]
            pushes = f"{view.name}|pushed"
            version = _push_log(offline, view).version() if until is None else until.get(pushes)
            past, self.until[view.name] = _readable(offline, view, None if until is None else until[view.name], version)
            if version is not None:
                self.until[pushes] = version
            ideal = replace(history, view=replace(view, fields=(*fields, _IDEAL)))
            joins = [Join(spine, [side], status=False, threads=threads, reading=offline.reading)
                     for side in (past, ideal)]  # fmt: skip
            self._views.append((view, fields, joins, _Comparison(view, fields), past))

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = 0
        for rows in rebatch(spine, PASS):
            result = rows
            for view, fields, joins, comparison, history in self._views:
                history.require_since(micros(rows["event_timestamp"]))
                past, ideal = (
                    pa.Table.from_batches(join.batches(rows.to_batches(), first), join.schema) for join in joins
                )
                present = pc.fill_null(past[view.full_name(PRESENT.name)], False)
                event = past[view.full_name(EVENT.name)]
                answers = apply_ttl(view, rows["event_timestamp"], event, present, past)
                comparison.add(ideal, past, answers)
                names = [view.full_name(column.name) for column in fields]
                for name in [*names, status_column(view)] if self._status else names:
                    result = result.append_column(name, answers[name])
            first += len(rows)
            yield from result.cast(self.schema).combine_chunks().to_batches(max_chunksize=BATCH)

    def report(self) -> dict[str, dict[str, ServedDifference]]:
        return {view.name: comparison.differences() for view, _, _, comparison, _ in self._views}


class ServedPushes:
    """A replay of a view's pushed and streamed rows.

    A pushed row was served from its push on, if it was newer than the row served until then; a streamed row always
    was. For each materialization run, in order, call `until` with its time and then `decide`.

    Attributes:
        rows: pushed rows by the time of their push.
        content: content hash of each of these rows.
        keys: the m distinct keys of these rows.
    """

    # A materialization run replaces all rows known by its horizon. A pushed row that became known later stays if it is
    # newer than the run's row.
    def __init__(self, view: ViewContract, pushed: pa.Table) -> None:
        self.rows = pushed.sort_by(ACCEPTED.name)
        names = [column.name for column in view.keys]
        self.keys = self.rows.select(names).group_by(names).aggregate([]).combine_chunks()
        self._key = index_of_keys(self.keys, self.rows.select(names))
        values = {column.name: from_arrow(self.rows[column.name], column.dtype) for column in view.fields}
        self.content = content = RowCodec(view).content(values, len(self.rows))
        times = (micros(self.rows[name]) for name in ("event_timestamp", "known_at"))
        self._order: list[Order] = list(zip(*(column.tolist() for column in (*times, content)), strict=True))
        self._accepted = self.rows[ACCEPTED.name].to_numpy()
        none = pa.nulls(len(self.rows), pa.bool_())
        streamed = self.rows[STREAMED.name] if STREAMED.name in self.rows.column_names else none
        self._streamed: list[bool] = pc.fill_null(streamed, False).to_pylist()
        self._next = 0
        self._served: list[Order | None] = [None] * len(self.keys)
        self._ahead = np.zeros(len(self.keys), bool)
        """Keys whose served row is a pushed row that no run has overruled yet."""

    def began(self, moment: int) -> bool:
        return bool((self._accepted <= moment).any())

    def skip(self, moment: int) -> None:
        self._next = int(np.searchsorted(self._accepted, moment, "right"))

    def until(self, moment: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Advance the replay to the time `moment`, in microseconds since 1970 UTC.

        Return the indices into `rows` of the pushed rows that lookups began to return since the last call, in order.
        """
        end = int(np.searchsorted(self._accepted, moment, "right"))
        readable: dict[tuple[int, int], int] = {}
        for place in range(self._next, end):
            key, order = int(self._key[place]), self._order[place]
            served = self._served[key]
            if served is None or order > served or self._streamed[place]:
                self._served[key], self._ahead[key] = order, True
                # If several rows were pushed at the same time, the newest counts.
                readable[key, int(self._accepted[place])] = place
        self._next = max(self._next, end)
        return np.array(list(readable.values()), np.int64)

    def decide(self, state: LatestRows, horizon: int) -> tuple[Mask, Mask]:
        """Advance the replay by a materialization run, and find out which pushed rows it replaced in Redis.

        `state` has the rows that the run wrote. `horizon` is the latest known time that it covered, in microseconds
        since 1970 UTC. Return two masks over the m `keys`. The first is True if the pushed row stayed: it became known
        after `horizon` and is newer than the run's row. The second is True if the run replaced or removed the pushed
        row.
        """
        stays, loses = np.zeros(len(self.keys), bool), np.zeros(len(self.keys), bool)
        for key, place in enumerate(index_of_keys(state.keys, self.keys.cast(state.keys.schema)).tolist()):
            row = None if place < 0 else (int(state.event[place]), int(state.known[place]), int(state.content[place]))
            served = self._served[key]
            if self._ahead[key] and served is not None and served[1] > horizon and (row is None or served > row):
                stays[key] = True
                continue
            loses[key] = self._ahead[key] and row != served
            self._served[key], self._ahead[key] = row, False
        return stays, loses


def served_history(offline: OfflineStore, view: ViewContract) -> ViewHistory:
    """Replay the log of materializations and pushes, to find out which values of a view were served at any time.

    Return one row per change of a key. `event_timestamp` and `known_at` are the time since which lookups returned the
    row. The columns `EVENT` and `KNOWN` have the row's own times. They and the column `PRESENT` are null if the key was
    removed at that time. `since` has the time from which this is known. Raise DataError if the view was never
    materialized under its current definition, or a materialized version of its table no longer exists.
    """
    return _readable(offline, view, None, _push_log(offline, view).version())[0]


def _push_log(offline: OfflineStore, view: ViewContract) -> PushLog:
    return PushLog(offline.root, view.table, offline.storage_options)


def _readable(
    offline: OfflineStore, view: ViewContract, until: int | None, version: int | None
) -> tuple[ViewHistory, int]:
    log = _push_log(offline, view)
    pushed = None if version is None else ServedPushes(view, log.rows(view, version=version, streamed=True))
    entries = [
        entry
        for entry in MaterializationLog(offline.root, offline.storage_options).runs(view)
        if until is None or entry.readable <= until
    ]
    if not entries:
        raise DataError(
            f"log of materializations, view {view.name}", "nothing was materialized under this contract",
            remedy="run `isthmus materialize --full`; a training set as served starts with that run",
        )  # fmt: skip
    since, parts = FIRST, list[pa.Table]()
    before: LatestRows | None = None
    readable = until_now = -(1 << 63)
    for n, entry in enumerate(entries):
        try:
            history = offline.history(view, entry.version)
        except VersionGoneError:
            rest = entries[n + 1 :]
            if not rest or (pushed is not None and pushed.began(rest[0].readable)):
                raise
            # Without earlier pushed rows, the next run's rows are all that was served from then on.
            since, parts, before = rest[0].readable, [], None
            continue
        if history.fingerprint != entry.fingerprint:
            raise DataError(
                f"offline table of {view.name}", f"version {entry.version} differs from the materialized version",
                remedy="the table was removed and rebuilt, so the values served before are unknown",
            )  # fmt: skip
        with offline.reading(view.table):
            state = LatestRows.of(history, entry.at)
            # If the clock did not advance, successive runs still became readable one after the other.
            readable = max(entry.readable, readable + 1)
            stays = again = None
            until_now = max(until_now, state.horizon)
            if pushed is not None:
                if before is None:
                    pushed.skip(readable)
                parts += _pushed(view, pushed, readable - 1)
                stays, again = (pushed.keys.filter(pa.array(keys)) for keys in pushed.decide(state, until_now))
            parts += _changes(view, before, state, readable, stays, again)
        before = state
    if pushed is not None:
        parts += _pushed(view, pushed, (1 << 63) - 1)
    past = ViewHistory(_past(view), pa.concat_tables(parts), entries[-1].version, since=since)
    return past, entries[-1].readable


def _changes(
    view: ViewContract,
    before: LatestRows | None,
    state: LatestRows,
    readable: int,
    stays: pa.Table | None,
    loses: pa.Table | None,
) -> list[pa.Table]:
    # Keys in `stays` have a newer pushed row, which the run did not change; keys in `loses` lost their pushed row.
    fresh, removed = np.ones(len(state.content), bool), state.keys.slice(0, 0)
    if before is not None:
        old = index_of_keys(before.keys, state.keys)
        fresh = ~before.equal_rows(old, state)
        removed = before.keys.filter(pa.array(~np.isin(np.arange(len(before.content)), old)))
    if loses is not None and len(loses):
        places = index_of_keys(state.keys, loses.cast(state.keys.schema))
        fresh[places[places >= 0]] = True
        gone = loses.cast(state.keys.schema).filter(pa.array(places < 0))
        removed = pa.concat_tables([removed, gone.filter(pa.array(index_of_keys(removed, gone) < 0))])
    if stays is not None and len(stays):
        fresh &= index_of_keys(stays.cast(state.keys.schema), state.keys) < 0
        removed = removed.filter(pa.array(index_of_keys(stays.cast(state.keys.schema), removed) < 0))
    rows = state.rows(np.flatnonzero(fresh))
    return [*(_past_rows(view, readable, part) for part in rows), _past_rows(view, readable, removed)]


def _pushed(view: ViewContract, pushed: ServedPushes, moment: int) -> list[pa.Table]:
    places = pushed.until(moment)
    if not len(places):
        return []
    rows = pushed.rows.take(pa.array(places)).append_column("content_hash", pa.array(pushed.content[places]))
    accepted = rows[ACCEPTED.name].to_numpy()
    return [_past_rows(view, accepted, rows)]


def _past_rows(view: ViewContract, readable: int | Ints, rows: pa.Table) -> pa.Table:
    moment = pa.array(np.broadcast_to(np.asarray(readable, np.int64), len(rows))).cast(_TIME)
    columns = {"content_hash": np.zeros(len(rows), np.int64)} | dict(zip(rows.column_names, rows.columns, strict=True))
    if "event_timestamp" in columns:
        columns |= {EVENT.name: columns["event_timestamp"], KNOWN.name: columns["known_at"]}
        columns |= {PRESENT.name: np.ones(len(rows), bool)}
    columns |= {"event_timestamp": moment, "known_at": moment}
    schema = table_schema(_past(view))
    columns = {field.name: columns.get(field.name, pa.nulls(len(rows), field.type)) for field in schema}
    return pa.table(columns, schema)


def _past(view: ViewContract) -> ViewContract:
    return replace(view, fields=(*view.fields, EVENT, KNOWN, PRESENT), ttl=None)


class _Comparison:
    def __init__(self, view: ViewContract, fields: Sequence[Column]) -> None:
        self._view, self._fields = view, fields
        self._differing = dict.fromkeys((column.name for column in fields), 0)
        self._rows = self._lagging = 0
        self._lag = 0.0

    def add(self, ideal: pa.Table, past: pa.Table, answers: Mapping[str, pa.ChunkedArray]) -> None:
        view = self._view
        self._rows += len(ideal)
        for column in self._fields:
            name = view.full_name(column.name)
            left, right = (from_arrow(side, column.dtype) for side in (ideal[name], answers[name]))
            self._differing[column.name] += int((~equal_values(left, right, column.dtype)).sum())
        valid = pc.is_in(answers[status_column(view)], pa.array([Status.PRESENT.label, Status.NULL.label]))
        newest, served = (
            table[view.full_name(c.name)].cast(pa.int64()) for table, c in ((ideal, _IDEAL), (past, EVENT))
        )
        lags = pc.drop_null(pc.subtract(newest, pc.if_else(valid, served, None))).to_numpy()
        self._lag, self._lagging = self._lag + float(lags.sum() / 1e6), self._lagging + len(lags)

    def differences(self) -> dict[str, ServedDifference]:
        lag = self._lag / self._lagging if self._lagging else None
        return {name: ServedDifference(self._rows, differing, lag) for name, differing in self._differing.items()}
