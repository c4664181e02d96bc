"""Verification of stored views: compare, for each key, the values in training with the answer of a server."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.types import Index, evenly_spaced
from isthmus.features import clock
from isthmus.features.contract.schema import RESERVED, STATUS, Column
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.publishing.changes import key_values
from isthmus.features.types import Int64, String, UnixTimestamp
from isthmus.features.values.arrow import from_arrow
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import KeyValue
from isthmus.orchestration.verification.client import Client
from isthmus.orchestration.verification.sides import SAMPLE, SINGLES, ComparedRows, OnlineSide, questions_at
from isthmus.package.verdict import FeatureVerdict, Sample, Verdict
from isthmus.serving.wire.encode import LABELS

# Names in a verdict for event time, known time and content hash of the compared rows.
EVENT, KNOWN, CONTENT = RESERVED


def compare_view(
    offline: OfflineStore, history: ViewHistory, online: OnlineSide, verdict: Verdict, *, all_keys: bool
) -> None:
    """Compare a view's offline rows with the answers of a server, key by key, and add the result to `verdict`.

    Compares features, status, event time, known time and content hash for a sample of keys, and looks some keys up one
    at a time. Skips keys whose row in Redis is newer than the table, and counts them in `verdict.ahead`. With
    `all_keys`, compares every key of table and Redis, and first raises DataError if a content hash in the table is
    wrong.
    """
    view = history.view
    served_keys = online.keys(view) if all_keys else None
    if all_keys:
        offline.require_unaltered(history)
    with offline.reading(view.table):
        keys, count = _keys(history, online.at, served_keys)
        trained = offline_values(keys, history)
    served = _served(online.api, keys, history)
    singles = evenly_spaced(len(keys), SINGLES)
    alone = _served(online.api.one_row_per_request(), keys.take(pa.array(singles)), history)
    # Read after the answers, so that a row pushed in between is skipped rather than reported as a difference.
    ahead, served[KNOWN], served[CONTENT] = online.stored(history, keys)
    # If training has no row for a key, use the time of the served row.
    moments = (side[EVENT].tolist(UnixTimestamp) for side in (trained, served))
    times = [served_at if trained_at is None else trained_at for trained_at, served_at in zip(*moments, strict=True)]
    rows = ComparedRows.of(keys, [column.name for column in view.keys], times)
    types = {column.name: column.dtype for column in view.fields}
    types |= {STATUS: String, EVENT: UnixTimestamp, KNOWN: UnixTimestamp, CONTENT: Int64}
    settled_rows = np.flatnonzero(~ahead)
    settled = ~ahead[singles]
    settled_singles = singles[settled]

    def compared(name: str, places: Index, online: Values) -> FeatureVerdict:
        return rows.take(places).compare(trained[name].take(places), online, types[name])

    verdict.views[view.name] = {name: compared(name, settled_rows, served[name].take(settled_rows)) for name in types}
    for name, values in alone.items():
        verdict.singly[f"{view.name}.{name}"] = compared(name, settled_singles, values.take(settled))
    verdict.ahead[view.name] = int(np.count_nonzero(ahead))
    if len(keys) < count:
        verdict.samples[f"keys of {view.name}"] = Sample(len(keys), count)


def _keys(history: ViewHistory, at: int, served: Mapping[str, Sequence[KeyValue]] | None) -> tuple[pa.Table, int]:
    names = [column.name for column in history.view.keys]
    data = history.data if isinstance(history.data, pa.Table) else history.data.to_table(columns=names)
    keys = data.select(names)
    if served is not None:
        served_keys = pa.table([pa.array(served[name], keys[name].type) for name in names], keys.schema)
        keys = pa.concat_tables([keys, served_keys])
    keys = keys.group_by(names).aggregate([]).sort_by([(name, "ascending") for name in names])
    count = len(keys)
    if served is None and count > SAMPLE:
        seed = int.from_bytes(hashlib.sha256(history.view.name.encode()).digest()[:8], "little")
        keys = keys.take(pa.array(np.sort(np.random.default_rng(seed).choice(count, SAMPLE, replace=False))))
    return questions_at(keys, at), count


def offline_values(keys: pa.Table, history: ViewHistory) -> dict[str, Values]:
    view = history.view
    # Joined like features; these columns show which answers are null.
    more = Column(EVENT, UnixTimestamp), Column(KNOWN, UnixTimestamp), Column(CONTENT, Int64)
    timed = replace(view, fields=(*view.fields, *more))
    joined = point_in_time(keys, [replace(history, view=timed)])
    words = pc.cast(joined[status_column(view)], pa.string())
    empty = reduce(pc.and_, [joined[view.full_name(column.name)].is_null() for column in view.fields])
    null = pc.and_(empty, pc.equal(words, clock.Status.PRESENT.label))
    words = pc.if_else(null, clock.Status.NULL.label, words)
    return {**_values(joined, timed.fields, history), STATUS: from_arrow(words, String)}


def _served(api: Client, keys: pa.Table, history: ViewHistory) -> dict[str, Values]:
    view = history.view
    features = [(view.name, column.name) for column in view.fields]
    answer = api.lookup(features, key_values(view, keys), len(keys))
    words = pc.cast(answer[status_column(view)], pa.string())
    labels = pa.array([status.label for status in clock.Status])
    words = labels.take(pc.index_in(words, pa.array(LABELS)).combine_chunks())
    expired = pc.is_in(words, pa.array([clock.Status.EXPIRED.label]))
    event = pc.if_else(expired, None, answer[view.full_name(EVENT)])
    return {
        **_values(answer, view.fields, history),
        STATUS: from_arrow(words, String),
        EVENT: from_arrow(event, UnixTimestamp),
    }


def _values(table: pa.Table, fields: Sequence[Column], history: ViewHistory) -> dict[str, Values]:
    return {column.name: from_arrow(table[history.view.full_name(column.name)], column.dtype) for column in fields}
