"""Feast's own SDK over our rows in a real Redis; where it can say what is right, Feast's SQLite store is the oracle."""

import asyncio
import gc
import math
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pandas as pd
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, DependencyError, RequestError
from isthmus.features.types import KEY_TYPES, TYPES, DataType, Float32, Int64
from tests.features.feast_project import (
    CITY,
    DRIVER,
    REGISTRY,
    answered,
    entity_key,
    frame,
    isthmus,
    now,
    online_store,
    repository,
    source,
    view,
    write,
)
from tests.features.support import VALUES, bits_of, columns_of, make_view
from tests.refusing import ARGUMENTS, PASSWORD
from tests.servers import redis_server
from tests.serving.support import free_port, wait

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import feast
    import feast.types as ft
    from feast.on_demand_feature_view import on_demand_feature_view
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import DoubleList, Int64List, Value
    from feast.value_type import ValueType

    from isthmus.features.feast import values as _feast_values
    from isthmus.features.feast.values import FORMS

# Feast and the pandas it calls warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

HOUR = timedelta(hours=1)


@pytest.fixture
def client(client: redis.Redis) -> redis.Redis:
    """Connected to an empty Redis."""
    client.flushall()
    return client


@pytest.fixture
def prod(tmp_path: Path, client: redis.Redis, url: str) -> feast.FeatureStore:
    """An empty project over an empty Redis."""
    return repository(tmp_path / "prod", isthmus(url))


def read(store: feast.FeatureStore, features: list[str], **keys: list[Any]) -> dict[str, list[tuple[Any, str]]]:
    rows = [dict(zip(keys, row, strict=True)) for row in zip(*keys.values(), strict=True)]
    found = answered(store.get_online_features(features, rows))
    return {name: values for name, values in found.items() if name not in keys}


# --- values


@given(st.data())
def test_values_survive_the_way_to_protos_and_back(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FORMS if name in TYPES]))
    dtype = TYPES[name]
    given = data.draw(st.lists(st.none() | VALUES[name], max_size=6))
    given = [_whole_seconds(value, dtype) for value in given]
    values = columns_of(make_view({"f": dtype}), [{"f": value} for value in given])["f"]
    protos = [Value.FromString(proto.SerializeToString()) for proto in _feast_values.to_protos(values, FORMS[name])]
    assert bits_of(_feast_values.from_protos(protos, FORMS[name], "here"), dtype) == bits_of(values, dtype)


def _whole_seconds(value: Any, dtype: DataType) -> Any:
    if value is None or "UnixTimestamp" not in dtype.name:
        return value
    if isinstance(value, int):
        return value // 1_000_000 * 1_000_000
    return type(value)(item // 1_000_000 * 1_000_000 for item in value)


def test_every_type_of_ours_has_a_form() -> None:
    assert TYPES.keys() <= FORMS.keys()


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(DataError, match="here: a value is a string_val; expected float_val"):
        _feast_values.from_protos([Value(float_val=1), Value(string_val="1")], FORMS["Float32"], "here")
    with pytest.raises(DataError, match="9223372036855 seconds"):
        _feast_values.from_protos([Value(unix_timestamp_val=9223372036855)], FORMS["UnixTimestamp"], "here")


def test_a_number_of_another_width_is_taken() -> None:
    """As Feast takes it; its own store returns what was written, ours the declared type."""
    numbers = [Value(double_val=0.1), Value(int64_val=3), Value(), Value(float_val=0.5), Value(int32_val=-2)]
    found = _feast_values.from_protos(numbers, FORMS["Float32"], "here")
    assert found.tolist(Float32) == [float(np.float32(0.1)), 3.0, None, 0.5, -2.0]
    whole = _feast_values.from_protos([Value(double_val=3), Value(int32_val=7)], FORMS["Int64"], "here")
    assert whole.tolist(Int64) == [3, 7]
    lists = [Value(double_list_val=DoubleList(val=[0.1, 2])), Value(int64_list_val=Int64List(val=[1]))]
    found = _feast_values.from_protos(lists, FORMS["Array(Float32)"], "here")
    assert [[*array] for array in found.data] == [[np.float32(0.1), 2], [1]]
    huge = Value(double_list_val=DoubleList(val=[math.inf, 1e300]))
    wrong = (Value(double_val=0.5), "Int64"), (Value(int64_val=2**31), "Int32"), (huge, "Array(Float32)")
    for value, dtype in wrong:
        with pytest.raises(
            DataError, match=rf"here: has a value that does not fit .*; expected {re.escape(dtype)}, as declared"
        ):
            _feast_values.from_protos([value], FORMS[dtype], "here")


SAMPLES: dict[str, list[Any]] = {
    "Bool": [True, False, None],
    "Int32": [-(2**31), 2**31 - 1, None],
    "Int64": [-(2**62), 2**62, None],
    "Float32": [0.1, float("inf"), None],
    "Float64": [0.1, -1e300, None],
    "UnixTimestamp": [datetime(1969, 1, 1, tzinfo=UTC), datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC), None],
    "String": ["é😀", "", None],
    "Bytes": [b"\x00\xff", b"", None],
    "ImageBytes": [b"\x89PNG", b"", None],
    "Json": ['{"a": [1]}', "[]", None],
    "Array(Bool)": [[True, False], [], None],
    "Array(Int32)": [[1, -(2**31)], [2], None],
    "Array(Int64)": [[1, 2**62], [], None],
    "Array(Float32)": [[0.1, 2.0], [], None],
    "Array(Float64)": [[0.1, 1e300], [3.0], None],
    "Array(String)": [["é", ""], ["b"], None],
    "Array(Bytes)": [[b"\0", b""], [b"x"], None],
}


# Types of Feast's that our rows hold as they are.
WHOLE: list[tuple[Any, list[Any]]] = [
    (ft.Map, [{"b": {"c": [1, 2]}, "a": "é"}, {"n": 1.5}, None]),
    (ft.ScalarMap, [{1: "a", 2: "b"}, {3: "c"}, None]),
    (ft.Struct({"name": ft.String, "age": ft.Int64}), [{"name": "x", "age": 3}, {"name": "", "age": 0}, None]),
    (ft.Set(ft.String), [{"a", "b"}, {""}, None]),
    (ft.Set(ft.Int64), [{1, -(2**62)}, {2}, None]),
    (ft.Array(ft.Map), [[{"a": 1}], [{"b": "x"}, {"c": "y"}], None]),
    (ft.Array(ft.Array(ft.Int64)), [[[1, 2], [3]], [[]], None]),
    (ft.Array(ft.Struct({"a": ft.Int64})), [[{"a": 1}, {"a": 2}], [{"a": 3}], None]),
    (ft.Array(ft.Json), [['{"z": 1}'], ["[]"], None]),
    (ft.Array(ft.Decimal), [[Decimal("1.50")], [Decimal("-2")], None]),
    (ft.ZonedTimestamp, [datetime(2024, 5, 6, tzinfo=UTC), datetime(1969, 1, 1, tzinfo=UTC), None]),
]


def _type(name: str) -> Any:
    return ft.Array(getattr(ft, name[6:-1])) if name.startswith("Array(") else getattr(ft, name)


def _everything(folder: Path, online: str) -> feast.FeatureStore:
    """A project whose view has every type, with three rows: two of values and one of nulls."""
    store = repository(folder, online)
    samples = [*((_type(name), values) for name, values in SAMPLES.items()), *WHOLE]
    fields = {f"f{n}": (dtype, _protos(values, dtype)) for n, (dtype, values) in enumerate(samples)}
    store.apply([DRIVER, view(folder, {field: dtype for field, (dtype, _) in fields.items()})])
    ago = now() - HOUR
    rows = [({field: found[n] for field, (_, found) in fields.items()}, entity_key(driver=n)) for n in range(3)]
    write(store, [(key, row, ago, ago) for row, key in rows])
    return store


def _protos(values: list[Any], dtype: Any) -> list[Value]:
    from feast.type_map import python_values_to_proto_values

    made: list[Value] = python_values_to_proto_values(values, dtype.to_value_type())
    return made


def test_types_are_those_of_feasts_own_store(tmp_path: Path, client: redis.Redis, url: str) -> None:
    ours = _everything(tmp_path / "ours", isthmus(url))
    theirs = _everything(tmp_path / "theirs", f"{{type: sqlite, path: {tmp_path}/online.db}}")
    features = [f"stats:{field.name}" for field in ours.get_feature_view("stats").features]
    rows = [{"driver": n} for n in (2, 0, 1, 0, 77)]
    found, wanted = (store.get_online_features(features, rows).to_dict() for store in (ours, theirs))
    assert found == wanted
    assert any(value is not None for value in found["f0"])


def test_numbers_as_they_were_written(tmp_path: Path, client: redis.Redis, url: str) -> None:
    answers = []
    for online in (isthmus(url, types="written"), f"{{type: sqlite, path: {tmp_path}/online.db}}"):
        store = repository(tmp_path, online)
        store.apply([DRIVER, view(tmp_path, {"rate": ft.Float32, "trips": ft.Int32, "list": ft.Array(ft.Float32)})])
        numbers = {"rate": Value(double_val=0.1), "trips": Value(int64_val=2**40),
                   "list": Value(double_list_val=DoubleList(val=[0.1]))}  # fmt: skip
        write(store, [(entity_key(driver=1), numbers, now() - HOUR, None)])
        table = store.get_feature_view("stats")
        ((_, found),) = online_store(store).online_read(store.config, table, [entity_key(driver=1)])
        assert found == numbers
        features = ["stats:rate", "stats:trips", "stats:list"]
        answers.append(store.get_online_features(features, {"driver": [1, 2]}).to_dict())
    assert answers[0] == answers[1]


# --- the answer


def test_answers_are_those_of_feasts_own_store(tmp_path: Path, client: redis.Redis, url: str) -> None:
    """Several views, join keys in several orders, an alias, no entity, duplicates, nobody, full names, services."""
    answers = []
    for name, online in (("ours", isthmus(url)), ("theirs", f"{{type: sqlite, path: {tmp_path}/online.db}}")):
        folder = tmp_path / name
        store = repository(folder, online)
        trips = view(folder, {"rate": ft.Float32, "trips": ft.Int64})
        pairs = view(folder, {"share": ft.Float64}, [DRIVER, CITY], name="pairs")
        weather = view(folder, {"sun": ft.Bool, "place": ft.String}, [CITY], name="weather")
        world = view(folder, {"day": ft.String}, [], name="world")
        home = weather.with_name("home").with_join_key_map({"city": "home_city"})
        service = feast.FeatureService(name="all", features=[trips[["trips"]], weather.with_name("here"), home, pairs])
        store.apply([DRIVER, CITY, trips, pairs, weather, world, service])
        store.write_to_online_store("stats", frame(driver=[1, 2, 3], rate=[0.1, None, 0.3], trips=[1, 2, 3]))
        store.write_to_online_store("pairs", frame(driver=[1, 2], city=["x", "y"], share=[0.25, 0.5]))
        store.write_to_online_store("weather", frame(city=["x", "y"], sun=[True, False], place=["park", ""]))
        # Feast writes a view without entities by `materialize` alone.
        frame(day=["monday"]).to_parquet(folder / "world_rows.parquet")
        store.materialize(now() - HOUR, now(), feature_views=["world"])
        rows = [{"driver": n, "city": c} for n, c in ((3, "x"), (1, "x"), (2, "y"), (1, "x"), (2, "x"), (9, "?"))]
        features = ["stats:rate", "weather:place", "pairs:share", "world:day", "weather:sun"]
        named = {n: dict(row, home_city="y") for n, row in enumerate(rows)}.values()
        found = [
            store.get_online_features(features, rows).to_dict(),
            store.get_online_features(features, rows[:1], full_feature_names=True).to_dict(),
            store.get_online_features(["stats:trips"], {"driver": [2, 1]}).to_dict(),
            store.get_online_features(["world:day"], {"driver": [2, 1]}).to_dict(),
            store.get_online_features(store.get_feature_service("all"), list(named), full_feature_names=True).to_dict(),
        ]
        with pytest.raises(KeyError):
            store.get_online_features(["stats:sun"], rows)
        answers.append(found)
    assert answers[0] == answers[1]
    assert answers[0][0]["share"] == [None, 0.25, 0.5, 0.25, None, None]
    assert answers[0][0]["day"] == ["monday"] * 6


def test_statuses_are_true(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"rate": ft.Float32, "trips": ft.Int64}, ttl=2 * HOUR)])
    ago, old, next_year = now() - HOUR, now() - 3 * HOUR, now() + timedelta(days=365)
    rows = pd.DataFrame(
        {
            "driver": [1, 2, 3, 4, 5],
            "event_timestamp": [ago, ago, old, next_year, ago],
            "created": [ago, ago, old, next_year, next_year],
            "rate": [0.5, None, 0.7, 0.8, 0.9],
            "trips": [1, 2, 3, 4, 5],
        }
    )
    prod.write_to_online_store("stats", rows)
    expected: dict[str, list[tuple[Any, str]]] = {
        "rate": [(None, "OUTSIDE_MAX_AGE"), (0.5, "PRESENT"), (None, "NULL_VALUE"), (np.float32(0.8), "PRESENT"),
                 (np.float32(0.9), "PRESENT"), (None, "NOT_FOUND"), (0.5, "PRESENT")],
        "trips": [(None, "OUTSIDE_MAX_AGE"), (1, "PRESENT"), (2, "PRESENT"), (4, "PRESENT"),
                  (5, "PRESENT"), (None, "NOT_FOUND"), (1, "PRESENT")],
    }  # fmt: skip
    keys = [3, 1, 2, 4, 5, 6, 1]
    assert read(prod, ["stats:rate", "stats:trips"], driver=keys) == expected
    response = prod.get_online_features(["stats:trips"], {"driver": keys})
    times = response.to_dict(include_event_timestamps=True)["trips__ts"]
    assert times == [int(t.timestamp()) if t else 0 for t in (old, ago, ago, next_year, ago, None, ago)]

    table, store = prod.get_feature_view("stats"), online_store(prod)
    found = store.online_read(prod.config, table, [entity_key(driver=n) for n in keys], ["trips"])
    assert found == [
        (old, None), (ago, {"trips": Value(int64_val=1)}), (ago, {"trips": Value(int64_val=2)}),
        (next_year, {"trips": Value(int64_val=4)}), (ago, {"trips": Value(int64_val=5)}), (None, None),
        (ago, {"trips": Value(int64_val=1)}),
    ]  # fmt: skip


def test_expired_values_and_keys_as_with_feasts_own_store(tmp_path: Path, client: redis.Redis, url: str) -> None:
    options = {"serve_expired": "true", "key_ttl_seconds": "100"}
    store, plain = (repository(tmp_path, isthmus(url, **more)) for more in (options, {}))
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}, ttl=HOUR)])
    times = [now() - 3 * HOUR, now() + HOUR]
    rows = pd.DataFrame({"driver": [1, 2], "event_timestamp": times, "created": times, "trips": [7, 8]})
    for writer, forgotten in ((plain, False), (store, True)):
        writer.write_to_online_store("stats", rows)
        feasts = [(7, "PRESENT"), (8, "PRESENT"), (None, "NOT_FOUND")]
        assert read(store, ["stats:trips"], driver=[1, 2, 3]) == {"trips": feasts}
        ours = [(None, "OUTSIDE_MAX_AGE"), (8, "PRESENT"), (None, "NOT_FOUND")]
        assert read(plain, ["stats:trips"], driver=[1, 2, 3]) == {"trips": ours}
        names = [key for key in client.scan_iter(_type="HASH") if not key.endswith(b":tables")]
        assert len(names) == 2
        assert all((0 < client.ttl(name) <= 100) == forgotten for name in names)


def test_keys_do_not_expire_where_isthmus_has_materialized(tmp_path: Path, client: redis.Redis, url: str) -> None:
    store = repository(tmp_path, isthmus(url, key_ttl_seconds="100"))
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    store.write_to_online_store("stats", frame(driver=[1], trips=[7]))
    client.hset("prod:tables", "facts", "{}")
    refusal = r"online_store\.key_ttl_seconds: would also delete rows that `isthmus materialize` wrote\. Remove it"
    with pytest.raises(ConfigurationError, match=refusal):
        store.write_to_online_store("stats", frame(driver=[1], trips=[8]))
    assert read(store, ["stats:trips"], driver=[1]) == {"trips": [(7, "PRESENT")]}


def test_reading_directly(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, CITY, view(tmp_path, {"a": ft.Int32, "b": ft.Int32}, [DRIVER, CITY])])
    prod.write_to_online_store("stats", frame(driver=[1], city=["x"], a=[2], b=[3]))
    table, store = prod.get_feature_view("stats"), online_store(prod)
    # The order of join keys in a proto is the caller's.
    for key in (entity_key(driver=1, city="x"), entity_key(city="x", driver=1)):
        (found,) = store.online_read(prod.config, table, [key])
        assert found[1] == {"a": Value(int32_val=2), "b": Value(int32_val=3)}
    assert store.online_read(prod.config, table, []) == []
    with pytest.raises(RequestError, match="view stats: no feature 'c'; expected one of a, b"):
        store.online_read(prod.config, table, [entity_key(driver=1, city="x")], ["c"])
    with pytest.raises(RequestError, match="an entity key of driver; expected city, driver"):
        store.online_read(prod.config, table, [entity_key(driver=1)])
    with pytest.raises(RequestError, match="join key driver is string_val"):
        store.online_read(prod.config, table, [entity_key(driver="1", city="x")])
    null = EntityKey(join_keys=["driver", "city"], entity_values=[Value(), Value(string_val="x")])
    with pytest.raises(RequestError, match="join key driver is null"):
        store.online_read(prod.config, table, [null])


KEYS: dict[str, list[Any]] = {
    "Int32": [-(2**31), 0],
    "Int64": [2**63 - 1, -1],
    "String": ["é:,", ""],
    "Bool": [True, False],
    "Bytes": [b"\0:", b""],
    "UnixTimestamp": [datetime(1969, 1, 1, tzinfo=UTC), datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)],
}


@pytest.mark.parametrize("name", [dtype.name for dtype in KEY_TYPES])
def test_keys_of_every_type(prod: feast.FeatureStore, client: redis.Redis, tmp_path: Path, name: str) -> None:
    kind = getattr(ft, name)
    thing = feast.Entity(name="thing", join_keys=["thing"], value_type=kind.to_value_type())
    fields = [feast.Field(name="thing", dtype=kind), feast.Field(name="size", dtype=ft.Int64)]
    prod.apply([thing, feast.FeatureView(name="stats", entities=[thing], schema=fields, source=source(tmp_path))])
    keys = [EntityKey(join_keys=["thing"], entity_values=[value]) for value in _protos(KEYS[name], kind)]
    # Long ago, so that the answer depends on keys alone, whatever the clock of the machine does meanwhile.
    ago = datetime(2024, 5, 6, tzinfo=UTC)
    write(prod, [(key, {"size": Value(int64_val=n)}, ago, None) for n, key in enumerate(keys)])
    held = {key: client.hgetall(key) for key in client.scan_iter()}
    found = read(prod, ["stats:size"], thing=KEYS[name])["size"]
    assert found == [(0, "PRESENT"), (1, "PRESENT")], held


def test_documents_are_not_searched(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"a": ft.Int32})])
    with pytest.raises(NotImplementedError, match="IsthmusOnlineStore does not support online retrieval"):
        online_store(prod).retrieve_online_documents(prod.config, prod.get_feature_view("stats"), ["a"], [1.0], 3)


# --- writes


def test_the_newest_row_wins(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    start = now() - HOUR

    def after(*rows: tuple[int, int | None, int]) -> Any:
        """Rows of (event, created, value): minutes after the start. Returns what is answered then."""
        minute = timedelta(minutes=1)
        data = [
            (entity_key(driver=1), {"trips": Value(int64_val=value)}, start + event * minute,
             None if created is None else start + created * minute)
            for event, created, value in rows
        ]  # fmt: skip
        write(prod, data)
        return read(prod, ["stats:trips"], driver=[1])["trips"][0][0]

    assert after((10, 11, 1)) == 1
    assert after((9, 30, 2)) == 1, "true earlier, be it learned later"
    assert after((10, 12, 3)) == 3, "a correction: true at the same time, learned later"
    assert after((10, 11, 4)) == 3, "the correction came first"
    assert after((11, None, 5)) == 5, "known when it became true"
    assert after((11, 10, 6)) == 5
    assert after((20, 20, 7), (30, 31, 8), (30, 30, 9), (25, 40, 10)) == 8, "one key several times in a batch"


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock on the wall is not UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo")
def test_times_without_a_zone_are_utc(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}, ttl=HOUR)])
    table, store = prod.get_feature_view("stats"), online_store(prod)
    naive = datetime.now(UTC).replace(tzinfo=None) - timedelta(minutes=30)
    elsewhere = pd.Timestamp(now() - timedelta(minutes=30)).tz_convert("Asia/Tokyo")
    row = {"trips": Value(int64_val=1)}
    write(prod, [(entity_key(driver=1), row, naive, naive), (entity_key(driver=2), row, elsewhere, pd.NaT)])
    found = store.online_read(prod.config, table, [entity_key(driver=1), entity_key(driver=2)])
    assert [event for event, _ in found] == [naive.replace(tzinfo=UTC), elsewhere.to_pydatetime()]
    with pytest.raises(DataError, match="a row has no event timestamp"):
        write(prod, [(entity_key(driver=1), row, pd.NaT, None)])


@pytest.mark.parametrize("rows", [0, 1, 2_501])
def test_batches_of_any_size(prod: feast.FeatureStore, tmp_path: Path, rows: int) -> None:
    prod.apply([DRIVER, view(tmp_path, {"trips": ft.Int64, "name": ft.String})])
    ago = now() - HOUR
    told: list[int] = []
    values = [{"trips": Value(int64_val=n), "name": Value(string_val=str(n))} for n in range(rows)]
    write(prod, [(entity_key(driver=n), row, ago, ago) for n, row in enumerate(values)], told.append)
    table, store = prod.get_feature_view("stats"), online_store(prod)
    assert sum(told) == rows
    found = store.online_read(prod.config, table, [entity_key(driver=n) for n in range(rows)])
    assert [values and values["trips"].int64_val for _, values in found] == list(range(rows))


def test_writers_side_by_side_leave_the_newest(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    start, chance, minute = now() - 24 * HOUR, random.Random(7), timedelta(minutes=1)
    rows = [(key, chance.randrange(40), chance.randrange(40)) for key in range(8) for _ in range(120)]
    chance.shuffle(rows)

    def write_some(part: list[tuple[int, int, int]]) -> None:
        for at in range(0, len(part), 7):
            batch = part[at : at + 7]
            values = [{"trips": Value(int64_val=event * 100 + created)} for _, event, created in batch]
            times = [(start + event * minute, start + created * minute) for _, event, created in batch]
            keys = [entity_key(driver=key) for key, _, _ in batch]
            write(prod, [(key, row, *both) for key, row, both in zip(keys, values, times, strict=True)])

    writers = [threading.Thread(target=write_some, args=(rows[n::6],)) for n in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    newest = [max((event, created) for key, event, created in rows if key == wanted) for wanted in range(8)]
    found = read(prod, ["stats:trips"], driver=list(range(8)))["trips"]
    assert found == [(event * 100 + created, "PRESENT") for event, created in newest]


def test_a_feature_that_a_row_lacks_is_null(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"a": ft.Int64, "b": ft.Int64})])
    write(prod, [(entity_key(driver=1), {"a": Value(int64_val=1)}, now() - HOUR, None)])
    assert read(prod, ["stats:a", "stats:b"], driver=[1]) == {"a": [(1, "PRESENT")], "b": [(None, "NULL_VALUE")]}


def test_materialize_and_push(prod: feast.FeatureStore, tmp_path: Path) -> None:
    stats = view(tmp_path, {"trips": ft.Int64})
    push = feast.PushSource(name="pushed", batch_source=stats.batch_source)
    pushed = feast.FeatureView(
        name="live", entities=[DRIVER], source=push,
        schema=[feast.Field(name="driver", dtype=ft.Int64), feast.Field(name="trips", dtype=ft.Int64)],
    )  # fmt: skip
    ago = now() - HOUR
    rows = frame(driver=[1, 1, 2], trips=[1, 2, 3])
    rows["event_timestamp"] = [ago, ago, ago - HOUR]
    rows["created"] = [ago, ago + timedelta(minutes=1), ago]
    rows.to_parquet(tmp_path / "stats_rows.parquet")
    prod.apply([DRIVER, stats, pushed])
    prod.materialize(ago - timedelta(minutes=1), now(), feature_views=["stats"])
    assert read(prod, ["stats:trips"], driver=[1, 2])["trips"] == [(2, "PRESENT"), (None, "NOT_FOUND")]
    later = frame(driver=[2], trips=[4])
    pd.concat([rows, later]).to_parquet(tmp_path / "stats_rows.parquet")
    prod.materialize_incremental(now(), feature_views=["stats"])
    assert read(prod, ["stats:trips"], driver=[1, 2])["trips"][0] == (2, "PRESENT")
    prod.materialize(ago - 3 * HOUR, now(), feature_views=["stats"])
    assert read(prod, ["stats:trips"], driver=[1, 2])["trips"] == [(2, "PRESENT"), (4, "PRESENT")]
    prod.push("pushed", frame(driver=[1], trips=[9]))
    assert read(prod, ["live:trips"], driver=[1])["trips"] == [(9, "PRESENT")]


@pytest.mark.filterwarnings("ignore:On demand feature view is an experimental feature")
def test_views_on_demand(prod: feast.FeatureStore, tmp_path: Path) -> None:
    stats = view(tmp_path, {"trips": ft.Int64})
    asked = feast.RequestSource(name="asked", schema=[feast.Field(name="more", dtype=ft.Int64)])

    @on_demand_feature_view(sources=[stats, asked], schema=[feast.Field(name="total", dtype=ft.Int64)], mode="python")  # type: ignore[untyped-decorator]  # so in Feast
    def total(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"total": [trips + more for trips, more in zip(inputs["trips"], inputs["more"], strict=True)]}

    @on_demand_feature_view(
        entities=[DRIVER], sources=[stats], schema=[feast.Field(name="twice", dtype=ft.Int64)], mode="pandas",
        write_to_online_store=True,
    )  # type: ignore[untyped-decorator]  # fmt: skip
    def twice(inputs: pd.DataFrame) -> pd.DataFrame:
        return inputs[["trips"]].rename(columns={"trips": "twice"}) * 2

    prod.apply([DRIVER, stats, total, twice])
    prod.write_to_online_store("stats", frame(driver=[1, 2], trips=[10, 20]))
    prod.write_to_online_store("twice", frame(driver=[1, 2], trips=[10, 20]))
    found = prod.get_online_features(["total:total", "twice:twice"], {"driver": [2, 1], "more": [5, 6]}).to_dict()
    assert found == {"driver": [2, 1], "twice": [40, 20], "total": [25, 16]}


def test_a_view_without_entities_may_be_written_directly(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([view(tmp_path, {"day": ft.String}, [], name="world")])
    frame(day=["monday"]).to_parquet(tmp_path / "world_rows.parquet")
    assert prod.get_online_features(["world:day"], {"driver": [1]}).to_dict()["day"] == [None]
    prod.materialize(now() - HOUR, now())
    assert prod.get_online_features(["world:day"], {"driver": [1, 2]}).to_dict()["day"] == ["monday"] * 2
    prod.write_to_online_store("world", frame(day=["tuesday"]))
    assert prod.get_online_features(["world:day"], {"driver": [1, 2]}).to_dict()["day"] == ["tuesday"] * 2


# --- asyncio


def test_asyncio_answers_the_same(prod: feast.FeatureStore, tmp_path: Path, client: redis.Redis) -> None:
    prod.apply([DRIVER, view(tmp_path, {"rate": ft.Float32, "trips": ft.Int64}, ttl=HOUR)])
    assert online_store(prod).async_supported.read
    assert online_store(prod).async_supported.write
    features, rows = ["stats:rate", "stats:trips"], {"driver": [2, 1, 9, 1]}

    async def first() -> Any:
        await prod.initialize()
        await prod.write_to_online_store_async("stats", frame(driver=[1, 2], rate=[0.5, None], trips=[1, 2]))
        asked = [prod.get_online_features_async(features, rows) for _ in range(20)]
        found = [answered(response) for response in await asyncio.gather(*asked)]
        table = prod.get_feature_view("stats")
        direct = await online_store(prod).online_read_async(prod.config, table, [entity_key(driver=1)], ["trips"])
        return found, direct[0][1]

    async def second() -> Any:
        # Another event loop, in which no connection of the first one can be used.
        response = await prod.get_online_features_async(features, rows)
        left = gc.collect() and len(cast("list[Any]", client.client_list()))
        await prod.close()
        return answered(response), left

    with warnings.catch_warnings():
        # The first loop ends without `close`: Python says of its connections that nobody has closed them.
        warnings.simplefilter("ignore", ResourceWarning)
        found, direct = asyncio.run(first())
        most = len(cast("list[Any]", client.client_list()))
        again, left = asyncio.run(second())
    assert direct == {"trips": Value(int64_val=1)}
    assert found == [answered(prod.get_online_features(features, rows))] * 20
    assert again == found[0]
    assert left < most - 15, "connections of a loop that has ended stay open"


# --- the schema


def test_rows_of_another_schema_are_refused_until_they_are_written_again(
    prod: feast.FeatureStore, tmp_path: Path
) -> None:
    prod.apply([DRIVER, view(tmp_path, {"rate": ft.Float32, "trips": ft.Int64})])
    prod.write_to_online_store("stats", frame(driver=[1, 2], rate=[0.5, 0.6], trips=[1, 2]))
    # The same bits under other names would be read without a complaint.
    prod.apply([view(tmp_path, {"rate": ft.Int32, "trips": ft.Int64})])
    prod.refresh_registry()  # type: ignore[no-untyped-call]  # so in Feast
    with pytest.raises(ContractMismatch, match="Write the view's rows again"):
        read(prod, ["stats:rate"], driver=[1])
    assert read(prod, ["stats:rate"], driver=[3])["rate"] == [(None, "NOT_FOUND")]
    older = frame(driver=[1], rate=[7], trips=[1])
    older["event_timestamp"] -= HOUR
    prod.write_to_online_store("stats", older)
    assert read(prod, ["stats:rate"], driver=[1])["rate"] == [(7, "PRESENT")]


def test_what_is_not_in_the_rows_may_change(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"rate": ft.Float32, "trips": ft.Int64})])
    prod.write_to_online_store("stats", frame(driver=[1], rate=[0.5], trips=[1]))
    prod.apply(
        [view(tmp_path, {"trips": ft.Int64, "rate": ft.Float32}, ttl=HOUR, description="new", tags={"team": "a"})]
    )
    prod.refresh_registry()  # type: ignore[no-untyped-call]  # so in Feast
    assert read(prod, ["stats:rate"], driver=[1])["rate"] == [(0.5, "PRESENT")]
    prod.apply([view(tmp_path, {"trips": ft.Int64, "rate": ft.Float32}, ttl=timedelta(seconds=1))])
    prod.refresh_registry()  # type: ignore[no-untyped-call]  # so in Feast
    assert read(prod, ["stats:rate"], driver=[1])["rate"] == [(None, "OUTSIDE_MAX_AGE")]


def test_types_that_rows_cannot_hold_are_named_together(prod: feast.FeatureStore, tmp_path: Path) -> None:
    price = feast.Entity(name="price", join_keys=["price"], value_type=ValueType.DOUBLE)
    bought = [feast.Field(name="price", dtype=ft.Float64), feast.Field(name="a", dtype=ft.Int64)]
    good = view(tmp_path, {"a": ft.Int64}, name="good")
    bad = feast.FeatureView(name="bad", entities=[DRIVER, price], schema=bought, source=source(tmp_path, "bad"))
    worse = feast.FeatureView(name="worse", entities=[price], schema=bought, source=source(tmp_path, "worse"))
    with pytest.raises(ConfigurationError) as caught:
        prod.apply([DRIVER, price, good, bad, worse])
    assert {problem.where for problem in caught.value.problems} == {"bad.price", "worse.price"}
    assert "is a join key of type Float64; expected one of Bool, Bytes" in str(caught.value)


def test_a_value_that_a_row_holds_whole_is_none_of_another_type(prod: feast.FeatureStore, tmp_path: Path) -> None:
    prod.apply([DRIVER, view(tmp_path, {"a": ft.Map})])
    ago = now() - HOUR
    with pytest.raises(DataError, match=r"stats\.a: a value is a string_val; expected map_val, or null"):
        write(prod, [(entity_key(driver=1), {"a": Value(string_val="{}")}, ago, ago)])
    write(prod, [(entity_key(driver=1), {"a": _protos([{"x": 1}], ft.Map)[0]}, ago, ago)])
    assert read(prod, ["stats:a"], driver=[1])["a"] == [({"x": 1}, "PRESENT")]
    # Bytes, too, to a row.
    for other in (ft.Bytes, ft.Set(ft.String), ft.Struct({"x": ft.Int64})):
        prod.apply([view(tmp_path, {"a": other})])
        prod.refresh_registry()  # type: ignore[no-untyped-call]  # so in Feast
        with pytest.raises(ContractMismatch, match="Write the view's rows again"):
            read(prod, ["stats:a"], driver=[1])


def test_equal_maps_are_equal_rows() -> None:
    form = _feast_values.encoding_of(ft.Map)
    assert form is not None
    names = [f"n{n}" for n in range(40)]
    maps = [{name: name for name in order} for order in (names, names[::-1], sorted(names, key=hash))]
    found = _feast_values.from_protos(_protos(maps, ft.Map), form, "here").data
    assert found[0] == found[1] == found[2]


# --- removal


PROJECTS = ["prod", "preprod", "prod2", "pro", "d", "prod_eu"]


@pytest.fixture
def neighbours(tmp_path: Path, client: redis.Redis, url: str) -> dict[str, feast.FeatureStore]:
    """Projects whose names begin and end with each other's, with the same views and the same keys."""
    stores = {}
    for name in PROJECTS:
        folder = tmp_path / name
        stores[name] = repository(folder, isthmus(url), project=name)
        weather = view(folder, {"sun": ft.Int64}, [CITY], name="weather")
        stores[name].apply([DRIVER, CITY, view(folder, {"trips": ft.Int64}), weather,
                            view(folder, {"trips": ft.Int64}, name="stats_1d")])  # fmt: skip
        for table in ("stats", "stats_1d"):
            stores[name].write_to_online_store(table, frame(driver=[1, 2], trips=[1, 2]))
        stores[name].write_to_online_store("weather", frame(city=["prod:driver:", "*"], sun=[1, 0]))
    return stores


def rows_in(client: Any) -> set[tuple[bytes, bytes]]:
    return {(key, field) for key in client.keys("*") if client.type(key) == b"hash" for field in client.hkeys(key)}


def test_a_removed_view_takes_its_rows_along_and_no_others(
    neighbours: dict[str, feast.FeatureStore], client: redis.Redis
) -> None:
    client.set("prod:driver:foreign", "no hash")
    client.hset("production", "stats", "not ours")
    before = rows_in(client)
    prod = neighbours["prod"]
    gone = prod.get_feature_view("stats")
    kept = [prod.get_feature_view(name) for name in ("stats_1d", "weather")]
    prod.apply([DRIVER, CITY, *kept], objects_to_delete=[gone], partial=False)
    removed = {row for row in before if row[0].startswith(b"prod:driver:") and row[1] == b"stats"}
    assert len(removed) == 2
    assert rows_in(client) == before - removed
    prod.apply([gone])
    assert read(prod, ["stats:trips"], driver=[1])["trips"] == [(None, "NOT_FOUND")]
    assert read(prod, ["stats_1d:trips"], driver=[1])["trips"] == [(1, "PRESENT")]
    assert read(neighbours["preprod"], ["stats:trips"], driver=[1])["trips"] == [(1, "PRESENT")]


def test_versions_of_a_view_lie_side_by_side(tmp_path: Path, client: redis.Redis, url: str) -> None:
    registry = REGISTRY.format(folder=tmp_path).replace("}", ", enable_online_feature_view_versioning: true}")
    store = repository(tmp_path, isthmus(url), registry=registry)
    other = view(tmp_path, {"trips": ft.Int64}, name="stats_v1")
    for schema in ({"trips": ft.Int64}, {"trips": ft.Float64}, {"trips": ft.String}):
        store.apply([DRIVER, other, view(tmp_path, schema)])
        store.refresh_registry()  # type: ignore[no-untyped-call]  # so in Feast
        assert read(store, ["stats:trips"], driver=[1])["trips"] == [(None, "NOT_FOUND")]
        value = {ft.Int64: 1, ft.Float64: 2.5, ft.String: "three"}[schema["trips"]]
        store.write_to_online_store("stats", frame(driver=[1], trips=[value]))
    features = [f"stats{version}:trips" for version in ("@v0", "@v1", "@v2", "")]
    response = store.get_online_features(features, {"driver": [1]}, full_feature_names=True).to_dict()
    assert response == {
        "driver": [1], "stats@v0__trips": [1], "stats@v1__trips": [2.5], "stats@v2__trips": ["three"],
        "stats__trips": ["three"],
    }  # fmt: skip

    first: Any = store.registry.get_feature_view_by_version("stats", "prod", 1)
    last = store.get_feature_view("stats")
    online_store(store).update(store.config, [first], [last], [], [], False)
    assert {field for _, field in rows_in(client)} == {b"stats", b"stats@v2"}
    store.write_to_online_store("stats_v1", frame(driver=[1], trips=[4]))
    # A new view of that name begins its versions anew.
    store.apply([DRIVER, other], objects_to_delete=[last], partial=False)
    assert {field for _, field in rows_in(client)} == {b"stats_v1"}


def _records(client: Any) -> set[bytes]:
    """What Redis knows of tables: who has been told of which, what others wrote, and who is writing."""
    keys = client.keys("*:tables*")
    return {key + b" " + field for key in keys if client.type(key) == b"hash" for field in client.hkeys(key)} | {
        key for key in keys if client.type(key) != b"hash"
    }


@pytest.mark.parametrize("whole", [False, True])
def test_what_redis_knows_of_a_table_goes_with_its_view(
    neighbours: dict[str, feast.FeatureStore], client: redis.Redis, whole: bool
) -> None:
    for project in PROJECTS:
        for name in ("stats", "stats_1d", "weather"):
            client.hset(f"{project}:tables", name, "{}")
            client.zadd(f"{project}:tables|{name}|suspects", {"k": 1})
            client.set(f"{project}:tables|{name}|lock", "held")
    before = _records(client)
    assert len(before) == 9 * len(PROJECTS)
    prod = neighbours["prod"]
    if whole:
        prod.teardown()  # type: ignore[no-untyped-call]  # so in Feast
    else:
        kept = [prod.get_feature_view(name) for name in ("stats_1d", "weather")]
        prod.apply([DRIVER, CITY, *kept], objects_to_delete=[prod.get_feature_view("stats")], partial=False)
    views = ("stats", "stats_1d", "weather") if whole else ("stats",)
    forms = ("prod:tables {}", "prod:tables|{}|suspects", "prod:tables|{}|lock")
    gone = {form.format(name).encode() for name in views for form in forms}
    assert gone <= before
    assert _records(client) == before - gone


def test_teardown_is_of_one_project(neighbours: dict[str, feast.FeatureStore], client: redis.Redis) -> None:
    left = rows_in(client)
    assert len(left) == 6 * len(PROJECTS)
    for name in PROJECTS:
        neighbours[name].teardown()  # type: ignore[no-untyped-call]  # so in Feast
        left = {row for row in left if not row[0].startswith(name.encode() + b":")}
        assert rows_in(client) == left
    assert left == set()


# --- outages


def test_a_redis_that_is_not_there(tmp_path: Path) -> None:
    store = repository(tmp_path, isthmus("redis://user:secret@127.0.0.1:1/0"))
    fields = view(tmp_path, {"a": ft.Int64})
    store.apply([DRIVER, fields])
    asked: list[Callable[[], Any]] = [
        lambda: store.get_online_features(["stats:a"], {"driver": [1]}),
        lambda: asyncio.run(store.get_online_features_async(["stats:a"], {"driver": [1]})),
        lambda: asyncio.run(store.initialize()),
        lambda: store.write_to_online_store("stats", frame(driver=[1], a=[1])),
        lambda: store.apply([], objects_to_delete=[fields], partial=False),
    ]
    for ask in asked:
        with pytest.raises(DependencyError, match=r"correct online_store\.url in feature_store\.yaml") as caught:
            ask()
        assert "secret" not in str(caught.value)
    assert "secret" not in repr(store.config.online_store)


def test_a_redis_that_refuses(tmp_path: Path) -> None:
    port = free_port()
    admin = redis.Redis(port=port, password=PASSWORD)
    with redis_server(tmp_path / "redis", "--port", str(port), *ARGUMENTS, client=admin), admin:
        store = repository(tmp_path, isthmus(f"redis://:{PASSWORD}@127.0.0.1:{port}"))
        store.apply([DRIVER, view(tmp_path, {"a": ft.Int64})])
        store.write_to_online_store("stats", frame(driver=[1], a=[1]))
        admin.config_set("maxmemory", 1)
        with pytest.raises(DependencyError, match="is out of memory and takes no writes") as caught:
            store.write_to_online_store("stats", frame(driver=[1], a=[2]))
        assert not caught.value.passes
        assert read(store, ["stats:a"], driver=[1])["a"][0][0] == 1
        admin.config_set("maxmemory", 0)
        store.write_to_online_store("stats", frame(driver=[1], a=[2]))
        admin.config_set("requirepass", "another")
        fresh = feast.FeatureStore(config=store.config)
        asked: list[Callable[[], Any]] = [
            lambda: fresh.get_online_features(["stats:a"], {"driver": [1]}),
            lambda: asyncio.run(fresh.get_online_features_async(["stats:a"], {"driver": [1]})),
            lambda: asyncio.run(fresh.initialize()),
            lambda: fresh.write_to_online_store("stats", frame(driver=[1], a=[1])),
        ]
        for ask in asked:
            with pytest.raises(DependencyError, match=r"not accept.*online_store\.url in feature_store\.yaml") as e:
                ask()
            assert PASSWORD not in str(e.value)


# --- Feast's server


@pytest.mark.accept
def test_feasts_server_reads_and_pushes_through_it(prod: feast.FeatureStore, tmp_path: Path) -> None:
    stats = view(tmp_path, {"rate": ft.Float32, "trips": ft.Int64}, ttl=2 * HOUR)
    push = feast.PushSource(name="pushed", batch_source=stats.batch_source)
    live = feast.FeatureView(
        name="live", entities=[DRIVER], source=push,
        schema=[feast.Field(name="driver", dtype=ft.Int64), feast.Field(name="trips", dtype=ft.Int64)],
    )  # fmt: skip
    prod.apply([DRIVER, stats, live])
    rows = frame(driver=[1, 2, 3], rate=[0.5, None, 0.25], trips=[1, 2, 3])
    rows.loc[2, "event_timestamp"] -= 3 * HOUR
    prod.write_to_online_store("stats", rows)
    port = free_port()
    log = tmp_path / "serve.log"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "feast.cli.cli",
        "-c",
        str(prod.repo_path),
        "serve",
        "-p",
        str(port),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            wait(lambda: process.poll() is not None or _up(http), f"Feast's server, see {log}", 120)
            asked = {"features": ["stats:rate", "stats:trips"], "entities": {"driver": [3, 1, 2, 9]}}
            answer = http.post("/get-online-features", json=asked).raise_for_status().json()
            found = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
            assert found["rate"]["values"] == [None, 0.5, None, None]
            assert found["rate"]["statuses"] == ["OUTSIDE_MAX_AGE", "PRESENT", "NULL_VALUE", "NOT_FOUND"]
            assert found["trips"]["values"] == [None, 1, 2, None]
            moment = (now() - HOUR).isoformat()
            columns = {"driver": [5], "trips": [50], "event_timestamp": [moment], "created": [moment]}
            http.post("/push", json={"push_source_name": "pushed", "df": columns, "to": "online"}).raise_for_status()
    finally:
        process.terminate()
        process.wait(20)
    assert read(prod, ["live:trips"], driver=[5])["trips"] == [(50, "PRESENT")]


def _up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
