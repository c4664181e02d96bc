"""Latest rows, changes between versions, and writes to Redis by the executors."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus import DependencyError
from isthmus.features.offline.history import ViewHistory, table_schema
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import EVERYTHING, OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Int64, String
from isthmus.features.values.arrow import from_arrow
from isthmus.transforms import engine
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import onlinewrite
from isthmus.transforms.views.tablefiles import history
from tests.features.support import ALL, bits_of, latest, make_contract, make_view, same_bits, table
from tests.servers import redis_cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEW = make_view({name: ALL[name] for name in ALL}, {"store": String, "n": Int64}, ttl=None)
NARROW = make_view({"a": Int64}, {"k": Int64}, name="narrow")
ENGINES = ["sail", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.accept])]


@pytest.fixture(scope="module", params=ENGINES)
def spark(request: pytest.FixtureRequest) -> "Iterator[SparkSession]":
    with engine.session(request.param) as session:
        yield session


@pytest.fixture(params=["one server", pytest.param("cluster", marks=pytest.mark.accept)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "cluster":
        with redis_cluster(tmp_path / "cluster") as ports:
            yield f"redis+cluster://127.0.0.1:{ports[0]}"
    else:
        with EmbeddedRedis(tmp_path / "redis") as server:
            yield server.url


def _rows(count: int) -> pa.Table:
    chance = np.random.default_rng(0)
    values = {"bool": True, "int32": -1, "int64": 1 << 62, "float32": -0.0, "float64": float("nan"),
              "unixtimestamp": -1, "string": "é", "bytes": b"\0"}  # fmt: skip
    values |= {f"array_{name}": [value, value] for name, value in values.items()}
    rows: list[dict[str, Any]] = []
    for n in range(count):
        moment = {"_event": int(chance.integers(0, 4)), "_known": int(chance.integers(0, 4))}
        given = {name: None if chance.random() < 0.1 else value for name, value in values.items()}
        rows.append({"store": f"s{n % 7}", "n": int(chance.integers(0, count // 4)), **moment, **given})
    unique = {(row["store"], row["n"], row["_event"], row["_known"]): row for row in rows}
    return table(VIEW, list(unique.values()))


def _frame(spark: "SparkSession", rows: pa.Table, folder: Path) -> "DataFrame":
    pq.write_table(rows, folder / "rows.parquet")
    return Store(str(folder), {}).read(spark, ["rows.parquet"], table_schema(VIEW))


def test_latest_is_what_the_embedded_store_says(spark: "SparkSession", tmp_path: Path) -> None:
    rows = _rows(2000)
    frame = _frame(spark, rows, tmp_path)
    for at in (-1, 1, 3):
        found = onlinewrite.latest(VIEW, frame, at).toArrow()
        expected = latest(ViewHistory(VIEW, rows, 0), at)
        order = [("store", "ascending"), ("n", "ascending")]
        assert same_bits(found.sort_by(order), expected.sort_by(order))


def test_an_engine_reads_the_files_of_each_version(spark: "SparkSession", tmp_path: Path) -> None:
    store = OfflineStore(tmp_path)
    for values in (range(50), range(1, 49)):
        rows = table(NARROW, [{"k": k, "_event": 1, "_known": 1, "a": k} for k in values]).drop_columns("content_hash")
        version = store.write(store.prepare(NARROW, rows)).version
        read = history(spark, NARROW, Store(store.root, {}), version).toArrow().sort_by("k")
        assert read["k"].to_pylist() == read["a"].to_pylist() == list(values)


def test_executors_write_what_any_writer_writes(spark: "SparkSession", tmp_path: Path, url: str) -> None:
    rows = _rows(6000)
    expected = latest(ViewHistory(VIEW, rows, 0), 3)
    contract = make_contract(VIEW, NARROW)
    frame = onlinewrite.latest(VIEW, _frame(spark, rows, tmp_path), 3)
    counts = onlinewrite.total(onlinewrite.write_online(frame, VIEW, contract, url, EVERYTHING))
    assert (counts.compared, counts.changed, counts.written) == (len(expected),) * 3
    with connect(url) as client:
        keys = {"store": expected["store"].to_pylist(), "n": expected["n"].to_pylist()}
        answer = OnlineStore(client, contract).read(VIEW, keys, 3)
        for field in VIEW.fields:
            assert bits_of(answer.columns[field.name], field.dtype) == bits_of(
                from_arrow(expected[field.name], field.dtype), field.dtype
            )
    again = onlinewrite.total(onlinewrite.write_online(frame, VIEW, contract, url, EVERYTHING))
    assert (again.compared, again.changed, again.written) == (len(expected), 0, 0)
    assert onlinewrite.write_online(frame.limit(0), VIEW, contract, url, None) == []


def test_a_password_is_not_shown(spark: "SparkSession", tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    frame = _frame(spark, _rows(40), tmp_path)
    url = "redis://me:hunter2@127.0.0.1:1/0"
    with pytest.raises(
        DependencyError, match=r"writing traffic to Redis at redis://.*127.0.0.1:1/0: an executor failed"
    ) as caught:
        onlinewrite.write_online(frame, VIEW, make_contract(VIEW), url, None)
    assert "hunter2" not in str(caught.value)
    write = onlinewrite._Write(make_contract(VIEW).dumps(), "traffic", url, None)
    frame.mapInArrow(write, "compared bigint, changed bigint, written bigint").explain(extended=True)
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err
