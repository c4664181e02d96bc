"""Feast's `materialize` through our engine: into our rows in a real Redis, and into Feast's SQLite store."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from isthmus.features.errors import DataError, DependencyError, RequestError
from tests.features.feast_project import (
    CITY,
    DRIVER,
    ENGINE,
    FEASTS_ENGINE,
    OFFLINE,
    answered,
    isthmus,
    now,
    repository,
    view,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import feast
    import feast.types as ft
    from feast.errors import FeastJoinKeysDuringMaterialization
    from feast.feature_view import FeatureViewState

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)

HOUR = timedelta(hours=1)


@pytest.fixture
def client(client: redis.Redis) -> redis.Redis:
    """Connected to an empty Redis."""
    client.flushall()
    return client


def frame(ago: list[float], **columns: Any) -> pd.DataFrame:
    """Rows that became true, and were created, some hours ago."""
    created = columns.pop("created", ago)
    moments = [[now() - hours * HOUR for hours in part] for part in (ago, created)]
    return pd.DataFrame({"event_timestamp": moments[0], "created": moments[1], **columns})


def read(store: feast.FeatureStore, features: list[str], **keys: list[Any]) -> dict[str, list[Any]]:
    found = answered(store.get_online_features(features, keys))
    return {name: [value for value, _ in values] for name, values in found.items() if name not in keys}


TYPES = {"f": ft.Float32, "d": ft.Float64, "i": ft.Int32, "n": ft.Int64, "b": ft.Bool, "s": ft.String, "y": ft.Bytes,
         "t": ft.UnixTimestamp, "lf": ft.Array(ft.Float32), "ls": ft.Array(ft.String)}  # fmt: skip


def _everything(folder: Path, online: str, offline: str, engine: str) -> dict[str, Any]:
    """What is served after two materialisations of views of all types, of two keys and of none."""
    store = repository(folder, online, offline=offline, engine=engine)
    day = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    values = {
        "f": np.array([0.1, 0.2, 0.3, np.nan], np.float32), "d": [0.1, -1e300, 3.0, 4.0],
        "i": np.array([1, -2, 3, 4], np.int32), "n": [1, 2**62, 3, 4], "b": [True, False, True, False],
        "s": ["é", "", None, "d"], "y": [b"\x00", b"", b"c", None], "t": [day, day, None, day],
        "lf": [np.array([0.5], np.float32), np.array([], np.float32), None, np.array([1, 2], np.float32)],
        "ls": [["a", "é"], [], None, ["b"]],
    }  # fmt: skip
    frame([5, 4, 4, 1], driver=[1, 1, 2, 3], **values).to_parquet(folder / "stats_rows.parquet")
    frame([5, 4, 1], driver=[1, 1, 1], city=["x", "x", "y"], share=[0.1, 0.2, 0.3]).to_parquet(
        folder / "pairs_rows.parquet"
    )
    frame([5, 4], day=["monday", "tuesday"]).to_parquet(folder / "world_rows.parquet")
    pairs = view(folder, {"share": ft.Float64}, [DRIVER, CITY], name="pairs")
    store.apply([DRIVER, CITY, view(folder, TYPES), pairs, view(folder, {"day": ft.String}, [], name="world")])
    features = [*(f"stats:{name}" for name in TYPES), "pairs:share", "world:day"]
    keys: dict[str, list[Any]] = {"driver": [1, 2, 3, 9], "city": ["x", "y", "x", "x"]}
    store.materialize(now() - 6 * HOUR, now() - 2 * HOUR)
    before = read(store, features, **keys)
    store.materialize_incremental(now())
    return {"before": before, "after": read(store, features, **keys)}


def test_what_is_served_is_what_feasts_own_engine_writes(tmp_path: Path, client: redis.Redis, url: str) -> None:
    sqlite = f"{{type: sqlite, path: {tmp_path}/online.db}}"
    wanted = _everything(tmp_path / "a", sqlite, "{type: dask}", FEASTS_ENGINE)
    (tmp_path / "online.db").unlink()
    assert wanted["before"]["n"] == [2**62, 3, None, None]
    assert wanted["after"]["n"] == [2**62, 3, 4, None]
    assert _everything(tmp_path / "b", isthmus(url), OFFLINE, ENGINE) == wanted
    client.flushall()
    assert _everything(tmp_path / "c", isthmus(url), "{type: dask}", ENGINE) == wanted
    assert _everything(tmp_path / "d", sqlite, OFFLINE, ENGINE) == wanted


# Types of Feast's that our rows hold as protos: the type, its column's type, and values, the last one of three null.
TEXTS = pa.map_(pa.string(), pa.string())
WHOLE: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "map": (ft.Map, TEXTS, [{"b": "é", "a": ""}, {"c": "x"}, None]),
    "counts": (ft.Map, pa.struct([("n", pa.int32())]), [{"n": 7}, {"n": -1}, None]),
    "json": (ft.Map, pa.string(), ['{"a": [1, 2]}', "{}", None]),
    "scalars": (ft.ScalarMap, pa.map_(pa.int64(), pa.string()), [{1: "a", 2: "b"}, {3: "c"}, None]),
    "struct": (
        ft.Struct({"name": ft.String, "age": ft.Int64}), pa.struct([("name", pa.string()), ("age", pa.int64())]),
        [{"name": "x", "age": 2**62}, {"name": "", "age": 0}, None],
    ),
    "set": (ft.Set(ft.Int64), pa.list_(pa.int64()), [[2**62, 1], [2], None]),
    "maps": (ft.Array(ft.Map), pa.list_(TEXTS), [[{"a": "b"}, {"c": "d"}], [{"e": "f"}], None]),
    "nested": (ft.Array(ft.Array(ft.Int64)), pa.list_(pa.list_(pa.int64())), [[[1, 2], [3]], [[4]], None]),
    "zoned": (
        ft.ZonedTimestamp, pa.timestamp("us", "Europe/Berlin"),
        [datetime(2024, 5, 6, tzinfo=UTC), datetime(1969, 1, 1, tzinfo=UTC), None],
    ),
}  # fmt: skip


def _of_all_kinds(folder: Path, **columns: pa.Array) -> None:
    times = pa.array([now() - HOUR] * 3, pa.timestamp("us", "UTC"))
    pq.write_table(
        pa.table({"driver": [1, 2, 3], "event_timestamp": times, "created": times, **columns}),
        folder / "stats_rows.parquet",
    )


def test_types_that_rows_hold_whole(tmp_path: Path, client: redis.Redis, url: str) -> None:
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    columns = {name: pa.array(values, kind) for name, (_, kind, values) in WHOLE.items()}
    _of_all_kinds(tmp_path, **columns)
    store.apply([DRIVER, view(tmp_path, {name: dtype for name, (dtype, *_) in WHOLE.items()})])
    store.materialize(now() - 6 * HOUR, now())
    found = read(store, [f"stats:{name}" for name in WHOLE], driver=[1, 2, 3, 9])
    wanted = {name: [*values, None] for name, (*_, values) in WHOLE.items()}
    wanted["json"][:2] = [{"a": [1, 2]}, {}]
    wanted["set"][:2] = [{2**62, 1}, {2}]
    assert found == wanted
    assert str(found["zoned"][0].tzinfo) == "Europe/Berlin"
    assert [type(value["n"]) for value in found["counts"][:2]] == [int, int]


def test_a_column_of_nans_is_nulls_of_any_type(tmp_path: Path, client: redis.Redis, url: str) -> None:
    """pandas writes a column without values as doubles."""
    types = {
        f"t{n}": dtype
        for n, dtype in enumerate(
            [*TYPES.values(), ft.Json, ft.Uuid, ft.Decimal, *(ft.Array(ft.Bool), ft.Array(ft.UnixTimestamp)),
             *(dtype for dtype, *_ in WHOLE.values())]
        )
    }  # fmt: skip
    for kind, nothing in [("pandas", float("nan")), ("nans", float("nan")), ("nulls", None)]:
        client.flushall()
        store = repository(tmp_path / kind, isthmus(url), offline=OFFLINE, engine=ENGINE)
        rows = pa.array([nothing] * 3, pa.null() if kind == "nulls" else pa.float64(), from_pandas=kind == "pandas")
        _of_all_kinds(tmp_path / kind, **dict.fromkeys([*types, "created"], rows))
        store.apply([DRIVER, view(tmp_path / kind, types)])
        store.materialize(now() - 6 * HOUR, now())
        found = read(store, [f"stats:{name}" for name in types], driver=[1, 2, 3])
        floats = [name for name, dtype in types.items() if dtype in (ft.Float32, ft.Float64)]
        for name, values in found.items():
            kept = kind == "nans" and name in floats
            assert [value is None or (kept and math.isnan(value)) for value in values] == [True] * 3, name


def test_a_value_that_does_not_fit_its_type_is_refused(tmp_path: Path, client: redis.Redis, url: str) -> None:
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    store.apply([DRIVER, view(tmp_path, {"map": ft.Map, "rate": ft.Float32, "list": ft.Array(ft.Float32)})])
    fine = {"map": pa.nulls(3), "rate": pa.array([1.5, math.inf, None]), "list": pa.array([[math.inf], [], None])}
    twice = pa.MapArray.from_arrays([0, 2, 2, 2], ["a", "a"], ["b", "c"])
    wrong: dict[str, list[pa.Array]] = {
        "map": [pa.array([1, 2, 3]), pa.array(["{", "", "x"]), twice],
        "rate": [pa.array([1e300, None, 1])],
        "list": [pa.array([[], None, [math.inf, 1e300]])],
    }
    for name, column in [(name, column) for name, columns in wrong.items() for column in columns]:
        _of_all_kinds(tmp_path, **{**fine, name: column})
        with pytest.raises(DataError, match=rf"stats\.{name}: has a value that does not fit"):
            store.materialize(now() - 6 * HOUR, now())
    assert read(store, ["stats:map"], driver=[1]) == {"map": [None]}
    _of_all_kinds(tmp_path, **fine)
    store.materialize(now() - 6 * HOUR, now())
    assert read(store, ["stats:rate", "stats:list"], driver=[1, 2]) == {
        "rate": [1.5, math.inf],
        "list": [[math.inf], []],
    }


def test_rows_that_were_created_late_are_materialised(tmp_path: Path, client: redis.Redis, url: str) -> None:
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    path = tmp_path / "stats_rows.parquet"
    first = frame([5], driver=[1], trips=[1])
    first.to_parquet(path)
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    store.materialize(now() - 6 * HOUR, now() - 2 * HOUR)
    assert read(store, ["stats:trips"], driver=[1]) == {"trips": [1]}
    late = frame([4, 3, 1], created=[1, 0.5, -1], driver=[1, 2, 1], trips=[2, 3, 4])
    pd.concat([first, late]).to_parquet(path)
    # The last one is created in the future. Where that hides it, it must not hide what is true now.
    strict = repository(tmp_path, isthmus(url), offline=OFFLINE.replace("}", ", known_at: created}"), engine=ENGINE)
    strict.materialize_incremental(now())
    assert read(strict, ["stats:trips"], driver=[1, 2]) == {"trips": [2, 3]}
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    store.materialize(now() - 6 * HOUR, now())
    assert read(store, ["stats:trips"], driver=[1, 2]) == {"trips": [4, 3]}


def test_a_view_stays_readable_while_it_is_materialised_and_when_that_fails(
    tmp_path: Path, client: redis.Redis, url: str
) -> None:
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    path = tmp_path / "stats_rows.parquet"
    frame([5], driver=[1], trips=[1]).to_parquet(path)
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    store.materialize(now() - 6 * HOUR, now())
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read"):
        store.materialize(now() - 6 * HOUR, now())
    assert read(store, ["stats:trips"], driver=[1]) == {"trips": [1]}
    frame([5], driver=[1], trips=["1"]).to_parquet(path)
    with pytest.raises(DataError, match=r"stats\.trips: has type string; expected Int64, as declared"):
        store.materialize(now() - 6 * HOUR, now())
    assert read(store, ["stats:trips"], driver=[1]) == {"trips": [1]}


FILE = "{registry_type: file, path: registry.pb}"
"""Feast's own kind of registry: there the mark of a view is stored, with SQL it is lost again."""

KILLED = """
import sys, warnings
warnings.simplefilter("ignore")
from datetime import UTC, datetime, timedelta
import feast
from isthmus.features.online.store import OnlineStore
write = OnlineStore.write
def written(self, *args, **more):
    write(self, *args, **more)
    print("writing", flush=True)
    sys.stdin.read()
OnlineStore.write = written
now = datetime.now(UTC)
feast.FeatureStore(repo_path=sys.argv[1]).materialize(now - timedelta(hours=9), now)
"""


@pytest.mark.accept
@pytest.mark.parametrize("engine", [ENGINE, FEASTS_ENGINE])
def test_a_kill_leaves_the_view_readable(tmp_path: Path, client: redis.Redis, url: str, engine: str) -> None:
    """Under Feast's own engine it does not: that is what ours is for. A setting of Feast's registry helps both."""
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=engine, registry=FILE)
    path = tmp_path / "stats_rows.parquet"
    frame([5], driver=[1], trips=[1]).to_parquet(path)
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    store.materialize(now() - 6 * HOUR, now())
    frame([4, 4], driver=[1, 2], trips=[2, 3]).to_parquet(path)
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "writing" not in (line := process.stdout.readline()):
            assert line or process.poll() is None, "it ended before it wrote"
        if engine == ENGINE:
            assert read(_opened(tmp_path), ["stats:trips"], driver=[1]) == {"trips": [2]}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    if engine == FEASTS_ENGINE:
        assert _opened(tmp_path).get_feature_view("stats").state == FeatureViewState.MATERIALIZING
        with pytest.raises(ValueError, match="in state 'MATERIALIZING' and cannot serve"):
            read(_opened(tmp_path), ["stats:trips"], driver=[1])
        serving = FILE.replace("}", ", serve_features_while_materializing: true}")
        repository(tmp_path, isthmus(url), offline=OFFLINE, engine=engine, registry=serving)
        assert read(_opened(tmp_path), ["stats:trips"], driver=[1, 2]) == {"trips": [2, 3]}
        repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE, registry=FILE)
    else:
        assert read(_opened(tmp_path), ["stats:trips"], driver=[1, 2]) == {"trips": [2, 3]}
    # The next run ends what was left, whichever engine began it.
    _opened(tmp_path).materialize(now() - 6 * HOUR, now())
    assert read(_opened(tmp_path), ["stats:trips"], driver=[1, 2]) == {"trips": [2, 3]}
    assert _opened(tmp_path).get_feature_view("stats").state == FeatureViewState.AVAILABLE_ONLINE


def _opened(folder: Path) -> feast.FeatureStore:
    """The project as another process sees it."""
    return feast.FeatureStore(repo_path=str(folder))


def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    store = repository(tmp_path, isthmus("redis://user:secret@127.0.0.1:1/0"), offline=OFFLINE, engine=ENGINE)
    frame([5], driver=[1], trips=[1]).to_parquet(tmp_path / "stats_rows.parquet")
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    with pytest.raises(DependencyError, match="does not answer") as caught:
        store.materialize(now() - 6 * HOUR, now())
    assert "secret" not in str(caught.value)


def test_views_that_feast_transforms_are_computed_by_feast(tmp_path: Path, client: redis.Redis, url: str) -> None:
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    frame([5, 4], driver=[1, 1], trips=[1, 2]).to_parquet(tmp_path / "stats_rows.parquet")
    base = view(tmp_path, {"twice": ft.Int64})

    def twice(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(twice=rows["trips"] * 2)

    doubled = feast.BatchFeatureView(
        name="doubled", entities=[DRIVER], schema=base.schema, source=base.batch_source, mode="pandas", udf=twice,
        udf_string="twice", online=True,
    )  # fmt: skip
    store.apply([DRIVER, doubled])
    store.materialize(now() - 6 * HOUR, now())
    assert read(store, ["doubled:twice"], driver=[1]) == {"twice": [4]}


def test_a_mapped_join_key_without_a_type_or_as_text_over_numbers(
    tmp_path: Path, client: redis.Redis, url: str
) -> None:
    """Feast says String of a key whose type it does not know, and its own stores do not mind."""
    store = repository(tmp_path, isthmus(url), offline=OFFLINE, engine=ENGINE)
    path = tmp_path / "stats_rows.parquet"
    frame([5, 4], driver=[1, 2], trips=[1, 2]).rename(columns={"driver": "who"}).to_parquet(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver = feast.Entity(name="driver", join_keys=["driver"])
    spine = pd.DataFrame({"driver": [2, 1], "event_timestamp": [now()] * 2})
    for fields in ({"trips": ft.Int64}, {"driver": ft.String, "trips": ft.Int64}):
        stats = view(tmp_path, fields, [driver])
        assert stats.batch_source is not None
        stats.batch_source.field_mapping = {"who": "driver"}
        store.apply([driver, stats])
        assert store.get_historical_features(spine, ["stats:trips"]).to_df()["trips"].tolist() == [2, 1]
        store.materialize(now() - 6 * HOUR, now())
        assert read(store, ["stats:trips"], driver=[2, 9, 1]) == {"trips": [2, None, 1]}
        if "driver" not in fields:
            assert store.get_online_features(["stats:trips"], [{"driver": np.int32(2)}]).to_dict()["trips"] == [2]
            # Feast leaves the key out, so that the row would be found by nobody.
            with pytest.raises(
                RequestError, match=r"view stats: a row lacks a join key.*; expected a value for driver"
            ):
                store.write_to_online_store("stats", frame([1], driver=[9], trips=[3]))
    store.write_to_online_store("stats", frame([1], driver=[9], trips=[3]))
    assert read(store, ["stats:trips"], driver=[9]) == {"trips": [3]}
    frame([5], driver=[1], trips=[1]).to_parquet(path)
    with pytest.raises(FeastJoinKeysDuringMaterialization, match="who"):
        store.materialize(now() - 6 * HOUR, now())
