"""The tables of the offline benchmark: feature rows with corrections and late arrivals, and a spine with edge cases."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEYS = ["store_id", "user_id"]
VIEWS = ["a", "b"]
FEATURES = 10
COLUMNS = [f"{view}__f{n}" for view in VIEWS for n in range(FEATURES)]
TTL_DAYS = 7
STORES, USERS, DAYS = 20, 1_000, 90

_START = np.datetime64("2026-06-01T00:00:00", "us")
_MINUTE = 60_000_000
_HOUR, _DAY = 60 * _MINUTE, 1_440 * _MINUTE

Ints = np.ndarray[Any, np.dtype[np.int64]]


def write_tables(folder: Path, rows: int, spine_rows: int, repeat: int = 1) -> None:
    """Write `a.parquet` and `b.parquet` with `rows` rows each, and `spine.parquet` with `spine_rows` rows.

    2 % of the feature rows correct another row (same key and event time, later `created`), and 5 % arrive up to three
    days late. In the spine, 1 % of the rows have the exact time of an event, 0.5 % repeat another row, 0.1 % have a key
    that does not exist, and 0.2 % are pairs at one time whose keys are equal when concatenated without a separator,
    such as (s1, 123) and (s11, 23). The same arguments give the same values. `repeat` writes everything that many
    times, with different keys.
    """
    chance = np.random.default_rng(0)
    views = {name: _view(chance, rows) for name in VIEWS}
    tables = {**views, "spine": _spine(chance, spine_rows, views["a"])}
    for name, table in tables.items():
        with pq.ParquetWriter(folder / f"{name}.parquet", table.schema) as file:
            for n in range(repeat):
                file.write_table(_shifted(table, n, len(table) if name == "spine" else 0))


def changed(table: pa.Table, share: float, hour: int, *, restamp: bool) -> pa.Table:
    """Return a table of the online benchmark in which a share of the rows has new values and the time `hour`.

    With `restamp` all rows get the new time, as from a job that recomputes its whole table every hour.
    """
    chance = np.random.default_rng(hour)
    chosen = np.zeros(len(table), bool)
    chosen[chance.choice(len(table), int(len(table) * share), replace=False)] = True
    columns: dict[str, Any] = {"user_id": table["user_id"]}
    for name in table.column_names[1:-1]:
        fresh = chance.standard_normal(len(table), dtype=np.float32)
        columns[name] = np.where(chosen, fresh, table[name].to_numpy())
    old = table["event_timestamp"].to_numpy()
    moved = np.where(chosen | restamp, _START + np.timedelta64(hour * _HOUR, "us"), old)
    return pa.table({**columns, "event_timestamp": pa.array(moved, pa.timestamp("us", tz="UTC"))})


def _view(chance: np.random.Generator, rows: int) -> pa.Table:
    corrections = rows // 50
    first = rows - corrections
    entity = chance.integers(0, STORES * USERS, first)
    event = chance.integers(0, DAYS * _DAY, first)
    lag = chance.integers(_MINUTE, 10 * _MINUTE, first)
    late = chance.random(first) < 0.05
    lag[late] = chance.integers(_HOUR, 3 * _DAY, int(late.sum()))
    corrected = chance.choice(first, corrections, replace=False)
    lag = np.concatenate([lag, lag[corrected] + chance.integers(_MINUTE, 3 * _DAY, corrections)])
    order = chance.permutation(rows)
    entity, event = (np.concatenate([values, values[corrected]])[order] for values in (entity, event))
    features = {f"f{n}": chance.standard_normal(rows, dtype=np.float32) for n in range(FEATURES)}
    return pa.table(
        {**_keys(entity), "event_timestamp": _times(event), "created": _times(event + lag[order]), **features}
    )


def _spine(chance: np.random.Generator, rows: int, view: pa.Table) -> pa.Table:
    exact, repeats, unknown, twins = rows // 100, rows // 200, rows // 1000, rows // 1000
    plain = rows - exact - repeats - unknown - 2 * twins
    entity, at = chance.integers(0, STORES * USERS, plain), chance.integers(0, DAYS * _DAY, plain)
    again = chance.integers(0, plain, repeats)
    missing = chance.integers(0, USERS, unknown) + (STORES + 1) * USERS
    moment = chance.integers(0, DAYS * _DAY, twins)
    number = chance.integers(100, 200, twins)
    twin = {"store_id": pa.array(["s11"] * twins), "user_id": pa.array([str(n)[1:] for n in number])}
    hits = view.take(chance.integers(0, len(view), exact)).select([*KEYS, "event_timestamp"])
    parts = [
        pa.table({**keys, "event_timestamp": _times(times)})
        for keys, times in [
            (_keys(entity), at), (_keys(entity[again]), at[again]),
            (_keys(missing), chance.integers(0, DAYS * _DAY, unknown)), (_keys(USERS + number), moment), (twin, moment),
        ]
    ]  # fmt: skip
    spine = pa.concat_tables([*parts, hits]).take(chance.permutation(rows))
    return spine.add_column(0, "row_id", pa.array(np.arange(rows)))


def _shifted(table: pa.Table, n: int, rows: int) -> pa.Table:
    """Return the n-th repetition of a table, with other stores and row numbers."""
    if n == 0:
        return table
    stores = pa.array([f"{store}.{n}" for store in table["store_id"].to_pylist()])
    table = table.set_column(table.column_names.index("store_id"), "store_id", stores)
    return table.set_column(0, "row_id", pa.array(table["row_id"].to_numpy() + n * rows)) if rows else table


def _keys(entity: Ints) -> dict[str, pa.Array]:
    stores = np.char.add("s", (entity // USERS).astype(str))
    return {"store_id": pa.array(stores), "user_id": pa.array((entity % USERS).astype(str))}


def _times(micros: Ints) -> pa.Array:
    return pa.array(_START + micros.astype("timedelta64[us]"), pa.timestamp("us", tz="UTC"))
