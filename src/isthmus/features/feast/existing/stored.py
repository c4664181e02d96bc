"""Read the rows of a Feast online store, without creating or locking anything."""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from feast.infra.key_encoding_utils import deserialize_entity_key
from feast.infra.online_stores.helpers import compute_table_id, get_online_store_from_config

from isthmus.features import clock
from isthmus.features.audit.compare import OnlineRows
from isthmus.features.audit.history import BYTES
from isthmus.features.errors import DependencyError
from isthmus.features.feast.existing import encoding
from isthmus.features.feast.existing.repository import View
from isthmus.features.values.columns import Ints

_PIECE, _BATCH = 100_000, 2_000
"""Rows that are fetched from SQLite at a time, and keys that are read from another store at a time."""
_FEW = 50_000
"""Most keys that are looked up in a large SQLite table. Otherwise, the whole table is read."""
_SECOND = 1_000_000
_SQLITE = ("sqlite", "feast.infra.online_stores.sqlite.SqliteOnlineStore")
_Columns = Iterator[tuple[Any, ...]]
"""Pieces of a SQLite table with a row per value, each as four columns: keys, features, values and event times."""


def resolution(view: View) -> int:
    """Return the precision of event times in the online store, in microseconds. Feast's SQLite store keeps seconds."""
    return _SECOND if view.repository.section("online_store", "sqlite")["type"] in _SQLITE else 1


def read_online(view: View, keys: pa.Array, *, every: bool) -> OnlineRows:
    """Return the online rows of these entity keys. `every` is True if `keys` has all keys of the source.

    Raise DependencyError if the store cannot be reached or its library is missing.
    """
    with view.repository.reaching(f"{view.where}, online store"):
        rows = _from_sqlite(view, keys) if resolution(view) == _SECOND else _from_feast(view, keys)
        return rows if every else replace(rows, unknown=0)


def _from_feast(view: View, keys: pa.Array) -> OnlineRows:
    """Read rows through the store's own class, many keys at a time."""
    config = view.repository.config(view.repository.section("online_store", "sqlite"))
    store, names = get_online_store_from_config(config.online_store), list(view.types)
    present, event = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
    values: dict[str, list[bytes | None]] = {name: [] for name in names}
    for start in range(0, len(keys), _BATCH):
        batch = [deserialize_entity_key(key) for key in keys[start : start + _BATCH].to_pylist()]
        for n, (at, row) in enumerate(store.online_read(config, view.feast, batch, list(names)), start):
            # For a missing key, Redis returns the year 1970 and nulls.
            if row is not None and at is not None and at.timestamp() != 0:
                present[n], event[n] = True, clock.micros(at.replace(tzinfo=UTC) if at.tzinfo is None else at)
            for name in names:
                values[name].append(row[name].SerializeToString() if present[n] and row and name in row else None)
    cells = {name: encoding.stored(pa.array(values[name], BYTES), dtype) for name, dtype in view.types.items()}
    return OnlineRows(present, event, cells)


def _from_sqlite(view: View, keys: pa.Array) -> OnlineRows:
    repository, config = view.repository, view.repository.store.config
    file = repository.folder / str(repository.section("online_store", "sqlite").get("path", "data/online.db"))
    name = compute_table_id(repository.project, view.feast, config.registry.enable_online_feature_view_versioning)
    table = '"' + name.replace('"', '""') + '"'
    query = f"SELECT entity_key, feature_name, value, event_ts FROM {table}"  # noqa: S608 - quoted
    with _unlocked(file, repository.scratch) as connection:
        (last,) = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()  # noqa: S608 - quoted
        few = len(keys) <= _FEW and (last or 0) > 20 * len(keys) * len(view.types)
        return _arrange(view, keys, _lookups(connection, query, keys) if few else _pieces(connection.execute(query)))


def _pieces(cursor: sqlite3.Cursor) -> _Columns:
    while rows := cursor.fetchmany(_PIECE):
        yield tuple(zip(*rows, strict=True))


def _lookups(connection: sqlite3.Connection, query: str, keys: pa.Array) -> _Columns:
    for start in range(0, len(keys), 500):
        some = keys[start : start + 500].to_pylist()
        yield from _pieces(connection.execute(f"{query} WHERE entity_key IN ({','.join('?' * len(some))})", some))


def _arrange(view: View, keys: pa.Array, pieces: _Columns) -> OnlineRows:
    """Arrange the values of a table by feature, in the order of `keys`."""
    names, distinct, offset = pa.array(list(view.types), pa.string()), [pa.array([], BYTES)], 0
    owners: list[tuple[Ints, Ints]] = []  # key and time of each row
    values: dict[str, list[tuple[Ints, pa.Array]]] = {name: [] for name in view.types}
    for key, feature, value, moments in pieces:
        encoded = pa.array(key, BYTES).dictionary_encode()
        owner = encoded.indices.to_numpy().astype(np.int64) + offset
        distinct.append(encoded.dictionary)
        offset += len(encoded.dictionary)
        owners.append((owner, _micros(moments)))
        column, named = pa.array(value, BYTES), pc.index_in(pa.array(feature, pa.string()), value_set=names)
        for n, name in enumerate(view.types):
            rows = pc.indices_nonzero(pc.fill_null(pc.equal(named, n), False))
            values[name].append((owner[rows.to_numpy()], column.take(rows)))
    everyone = pa.chunked_array(distinct)
    place = pc.fill_null(pc.index_in(everyone, value_set=keys), -1).to_numpy().astype(np.int64)
    present, event = np.zeros(len(keys), bool), np.zeros(len(keys), np.int64)
    for owner, micros in owners:
        at = place[owner]
        # A row has one event time, repeated for each value.
        present[at[at >= 0]], event[at[at >= 0]] = True, micros[at >= 0]
    cells = {}
    for name, dtype in view.types.items():
        parts, rows = values.pop(name), np.full(len(keys), -1)
        at = place[np.concatenate([np.empty(0, np.int64), *(owner for owner, _ in parts)])]
        rows[at[at >= 0]] = np.flatnonzero(at >= 0)
        column = pa.chunked_array([part for _, part in parts], BYTES)
        cells[name] = encoding.stored(column.take(pa.array(rows, mask=rows < 0)).combine_chunks(), dtype)
    return OnlineRows(present, event, cells, len(everyone.filter(pa.array(place < 0)).unique()))


def _micros(times: tuple[Any, ...]) -> Ints:
    """Return times as Feast reads them: it writes and reads seconds in the time zone of its process."""
    if isinstance(times[0], str):  # written by earlier versions of Feast
        written: Ints = pa.array([str(at)[:26] for at in times]).cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
        return written
    seconds = np.array(times, np.int64)
    if time.timezone == 0 and not time.daylight:
        return seconds * _SECOND
    distinct, places = np.unique(seconds, return_inverse=True)
    local = [datetime.fromtimestamp(at).replace(tzinfo=UTC) for at in distinct.tolist()]  # noqa: DTZ006 - as Feast does
    return np.array([clock.micros(at) for at in local], np.int64)[places]


@contextmanager
def _unlocked(file: Path, scratch: Path) -> Iterator[sqlite3.Connection]:
    """Open a database without taking locks or creating files next to it.

    A database with an unfinished or unmerged write is copied to `scratch` first, with its journal.
    """
    if not file.is_file():
        remedy = "run `feast apply` and `feast materialize`"
        raise DependencyError("online store", f"there is no database at {file}", remedy=remedy)
    journals = [file.with_name(file.name + end) for end in ("-wal", "-journal")]
    pending = [journal for journal in journals if journal.is_file() and journal.stat().st_size]
    for item in (file, *pending) if pending else ():
        shutil.copyfile(item, scratch / item.name)
    address = (
        f"{(scratch / file.name).as_uri()}?mode=rw" if pending else f"{file.resolve().as_uri()}?mode=ro&immutable=1"
    )
    with closing(sqlite3.connect(address, uri=True)) as connection:
        yield connection
