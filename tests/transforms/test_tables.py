"""Tables of other systems as sources: all of them give the same rows, whatever happens to them once they are open."""

import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from isthmus import ConfigurationError, DataError, DependencyError, Source
from isthmus.features import clock
from isthmus.transforms import engine, sources
from isthmus.transforms.sources import NoRowsError
from isthmus.transforms.tables import delta, iceberg, parquet, sql
from isthmus.transforms.tables.table import SourceTable
from tests.databases import PASSWORD, postgresql
from tests.transforms.conftest import Read

TIME = pa.timestamp("us", tz="UTC")
FIRST = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = 3_600_000_000
ROWS = pa.table(
    {
        "at": pa.array([*(FIRST + timedelta(hours=12 * n, microseconds=n) for n in range(8)), None], TIME),
        "name": ["a", "b", None, "d", "Zürich", "", "'", '"', "null"],
        "cents": pa.array([0, -1, None, 2**62, 4, 5, 6, 7, 8], pa.int64()),
        "share": pa.array([0.5, -0.0, None, 1e300, 0.1, float("inf"), 6.0, 7.0, 8.0], pa.float64()),
        "late": pa.array([True, False, None, True, False, True, False, True, False]),
    }
)
QUERY = "SELECT * FROM orders -- all of them"


@dataclass(frozen=True)
class Place:
    """The source that names a table; ways to write to it, and to remove it."""

    source: Source
    write: Callable[[pa.Table], None]
    drop: Callable[[], object]
    opened: Callable[[], Any]


def _delta(root: Path) -> Iterator[Place]:
    source, folder = Source("orders", delta="orders", timestamp="at"), root / "orders"

    def write(rows: pa.Table) -> None:
        write_deltalake(folder, rows, mode="overwrite", schema_mode="overwrite")

    yield Place(source, write, lambda: shutil.rmtree(folder), lambda: delta.open_table(source, str(folder), {}))


def _iceberg(root: Path) -> Iterator[Place]:
    from pyiceberg import catalog as catalogs
    from pyiceberg.utils.config import Config

    source, name = Source("orders", iceberg="warehouse.shop.orders", timestamp="at"), "shop.orders"
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"TYPE": "sql", "URI": f"sqlite:///{root}/catalog.db", "WAREHOUSE": root.as_uri()}.items():
            patch.setenv(f"PYICEBERG_CATALOG__WAREHOUSE__{key}", value)
        # It reads the environment once, when it is imported.
        patch.setattr(catalogs, "_ENV_CONFIG", Config())
        catalog = catalogs.load_catalog("warehouse")
        catalog.create_namespace("shop")

        def write(rows: pa.Table) -> None:
            if catalog.table_exists(name):
                catalog.drop_table(name)
            catalog.create_table(name, schema=rows.schema).append(rows)

        yield Place(source, write, lambda: catalog.drop_table(name), lambda: iceberg.open_table(source))
        catalog.close()


def _duckdb(root: Path) -> Iterator[Place]:
    source = Source("orders", sql=QUERY, connection="SHOP_DATABASE", timestamp="at")

    def write(rows: pa.Table) -> None:
        with closing(duckdb.connect(str(root / "shop.duckdb"))) as connection:
            connection.register("written", rows)
            connection.execute("CREATE OR REPLACE TABLE orders AS SELECT * FROM written")

    def drop() -> None:
        with closing(duckdb.connect(str(root / "shop.duckdb"))) as connection:
            connection.execute("DROP TABLE orders")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_DATABASE", "duckdb:shop.duckdb")
        yield Place(source, write, drop, lambda: sql.open_table(source, root))


def _postgresql(root: Path, server: str) -> Iterator[Place]:
    from adbc_driver_postgresql import dbapi

    source = Source("orders", sql=f"{QUERY}\n;", connection="SHOP_DATABASE", timestamp="at")
    address = f"postgresql://shop:{quote(PASSWORD, safe='')}@{server}"

    @contextmanager
    def cursor() -> Iterator[Any]:
        with closing(dbapi.connect(address)) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("SET lock_timeout = '2s'")
            yield cursor
            connection.commit()

    def write(rows: pa.Table) -> None:
        with cursor() as into:
            into.adbc_ingest("orders", rows, mode="replace")

    def drop() -> None:
        with cursor() as into:
            into.execute("DROP TABLE orders")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_DATABASE", address)
        yield Place(source, write, drop, lambda: sql.open_table(source, root))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgresql(tmp_path_factory.mktemp("postgresql") / "server") as address:
        yield address


KINDS = ["delta", "iceberg", "duckdb", pytest.param("postgresql", marks=pytest.mark.accept)]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A table with the rows, in each system."""
    kinds: dict[str, Callable[[Path], Iterator[Place]]] = {"delta": _delta, "iceberg": _iceberg, "duckdb": _duckdb}
    if request.param == "postgresql":
        made = _postgresql(tmp_path, request.getfixturevalue("server"))
    else:
        made = kinds[request.param](tmp_path)
    for place in made:
        place.write(ROWS)
        yield place


def rows(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=repr)


def landed(place: Place, root: Path, within: tuple[int, int] | None = None) -> pa.Table:
    (root / "landed").mkdir(exist_ok=True)
    found = sources.land(place.source, root, within, root / "landed")
    return pq.read_table(found.file)


def test_the_same_rows_from_every_system(place: Place, read: Read, sail: Any, tmp_path: Path) -> None:
    assert rows(landed(place, tmp_path)) == rows(ROWS)
    found = sources.land(place.source, tmp_path, None, tmp_path / "landed")
    frame = sources.read(sail, place.source, tmp_path, tmp_path / "staging", found)
    types = ["timestamp", "string", "bigint", "double", "boolean"]
    assert frame.dtypes == list(zip(ROWS.column_names, types, strict=True))
    assert rows(frame.toArrow().cast(ROWS.schema)) == rows(ROWS)
    # Before a build, `apply` sees the columns.
    assert read(place.source).dtypes == frame.dtypes


def test_a_range_has_its_rows_and_those_without_a_time(place: Place, tmp_path: Path) -> None:
    first = clock.micros(FIRST)
    for start, end, count in ((0, 4 * 12, 4), (12, 13, 1), (1, 11, 0), (-(10**5), 10**5, 8)):
        found = landed(place, tmp_path, (first + start * HOUR, first + end * HOUR))
        assert found["at"].null_count == 1
        assert len(found) == 1 + count
    # Spark's statistics are cut off to milliseconds, so a range is read in whole seconds.
    assert len(landed(place, tmp_path, (first + 12 * HOUR + 1, first + 12 * HOUR + 2))) == 2


def test_what_others_do_to_a_table_that_is_open_changes_nothing(place: Place, tmp_path: Path) -> None:
    from adbc_driver_manager import Error

    with place.opened() as table:
        before: SourceTable = table
        other = ROWS.slice(0, 2).set_column(2, "cents", pa.array(["retyped", "rows"]))
        # DuckDB lets nobody write, PostgreSQL has DROP TABLE wait; the other two write a new version.
        for change in (lambda: place.write(other), place.drop):
            # Without its files a Delta table is an error: see below.
            if not (place.source.delta and change is place.drop):
                with pytest.raises((duckdb.Error, Error)) if place.source.sql else nullcontext():
                    change()
        assert rows(pa.Table.from_batches(before.batches(None, None)).select(ROWS.column_names)) == rows(ROWS)


def test_the_version_follows_the_rows(place: Place, tmp_path: Path) -> None:
    first = sources.content(place.source, tmp_path)
    assert sources.content(place.source, tmp_path) == first
    (tmp_path / "landed").mkdir()
    found = sources.land(place.source, tmp_path, None, tmp_path / "landed")
    assert found.content == first
    place.drop()
    place.write(ROWS.slice(0, 3))
    # Nothing of a server's table changes with every row, so its views are always outdated.
    assert (first is None) == os.environ.get("SHOP_DATABASE", "").startswith("postgresql:")
    assert first is None or sources.content(place.source, tmp_path) != first


@pytest.mark.parametrize("place", KINDS[2:], indirect=True)
def test_a_query_has_the_version_that_another_one_gives(place: Place, tmp_path: Path) -> None:
    query = 'SELECT max("at"), count(*), sum(cents) FROM orders;'
    versioned = replace(place.source, version_sql=query)
    (tmp_path / "landed").mkdir()
    first = sources.content(versioned, tmp_path)
    assert first
    assert sources.land(versioned, tmp_path, None, tmp_path / "landed").content == first
    place.write(ROWS.slice(0, 3))
    assert sources.content(versioned, tmp_path) not in (first, None)
    # Another query answers about something else; without a value nothing is said.
    assert sources.content(replace(versioned, version_sql=f"{query} "), tmp_path) != first
    for nothing in ('SELECT max("at") FROM orders WHERE false', "SELECT name FROM orders WHERE false"):
        assert sources.content(replace(versioned, version_sql=nothing), tmp_path) is None


@pytest.mark.accept
def test_a_version_is_that_of_the_rows_that_are_read(server: str, tmp_path: Path) -> None:
    from adbc_driver_postgresql import dbapi

    for place in _postgresql(tmp_path, server):
        place.write(ROWS)
        for query in ("SELECT count(*) FROM orders", "SELECT pg_current_snapshot()::text"):
            source = replace(place.source, version_sql=query)
            first = sql.version(source, tmp_path)
            with (
                sql.open_table(source, tmp_path) as table,
                closing(dbapi.connect(os.environ["SHOP_DATABASE"])) as other,
                closing(other.cursor()) as cursor,
            ):
                before = first and sql.version(source, tmp_path)
                cursor.adbc_ingest("orders", ROWS.slice(0, 1), mode="append")
                other.commit()
                assert table.version == before == first
                rows = sum(map(len, table.batches(None, None)))
            assert sql.version(source, tmp_path) not in (first, None)
            with sql.open_table(source, tmp_path) as table:
                assert sum(map(len, table.batches(None, None))) == rows + 1


def test_a_table_that_is_not_there(place: Place, tmp_path: Path) -> None:
    place.drop()
    with pytest.raises(
        DataError, match=r"source orders: .*(no Delta table|has no Iceberg table|not found|cannot be read)"
    ) as caught:
        landed(place, tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_a_table_without_a_row(place: Place, tmp_path: Path) -> None:
    place.write(ROWS.slice(0, 0))
    for within in (None, (0, 1)):
        with pytest.raises(NoRowsError, match=r"source orders: .* has no rows. Add data"):
            landed(place, tmp_path, within)
    place.write(ROWS.slice(0, 2))
    assert len(landed(place, tmp_path, (0, 1))) == 0


def test_time_columns_of_a_table(place: Place, tmp_path: Path) -> None:
    naive = ROWS.set_column(0, "at", ROWS["at"].cast(pa.timestamp("us")))
    place.write(naive)
    with pytest.raises(ConfigurationError, match=r"source orders, timestamp: column 'at' has type timestamp_ntz"):
        landed(place, tmp_path)
    wrong = replace(place, source=replace(place.source, timestamp="name", known="when"))
    with pytest.raises(ConfigurationError) as caught:
        landed(wrong, tmp_path)
    assert [problem.where for problem in caught.value.problems] == ["source orders, timestamp", "source orders, known"]


@pytest.mark.parametrize("kind", [pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.accept])])
def test_apache_spark_reads_the_same_rows(kind: str, tmp_path: Path) -> None:
    for made in (_delta(tmp_path), _duckdb(tmp_path), _iceberg(tmp_path)):
        for place in made:
            place.write(ROWS)
            landed(place, tmp_path)
            found = sources.land(place.source, tmp_path, None, tmp_path / "landed")
            with engine.session(kind) as spark:
                frame = sources.read(spark, place.source, tmp_path, tmp_path / "staging", found)
                assert rows(frame.toArrow().cast(ROWS.schema)) == rows(ROWS)


def test_a_file_of_a_delta_table_that_is_gone(tmp_path: Path) -> None:
    (place,) = _delta(tmp_path)
    place.write(ROWS)
    next((tmp_path / "orders").glob("*.parquet")).unlink()
    with pytest.raises(DataError, match=r"source orders: .*orders cannot be read \(.*Nothing was written"):
        landed(place, tmp_path)


def test_the_folder_of_a_delta_table_is_no_folder_of_parquet(read: Read, tmp_path: Path) -> None:
    # Its deleted rows would count.
    (place,) = _delta(tmp_path)
    place.write(ROWS)
    with pytest.raises(
        ConfigurationError, match=r'orders is a Delta table; expected delta="orders". Name it with delta='
    ):
        read(Source("orders", path="orders"))
    with (
        pytest.raises(ConfigurationError, match="is a Delta table"),
        parquet.open_table(Source("orders", path=f"file://{tmp_path}/orders"), {}),
    ):
        pass


def test_files_of_objects_are_those_that_engines_see(tmp_path: Path) -> None:
    seen = ["part-0.parquet", "june/part-1.parquet"]
    for name in (*seen, "_SUCCESS", "_temporary/0/part-2.parquet", ".spark/part-3.parquet", "june/.part-4.parquet"):
        file = tmp_path / "rows" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [1]}), file)
    with parquet.open_table(Source("s", path=f"file://{tmp_path}/rows", timestamp="n"), {}) as table:
        assert sum(map(len, table.batches(None, None))) == len(seen)
    with parquet.open_table(Source("s", path=f"file://{tmp_path}/rows/part-0.parquet", timestamp="n"), {}) as table:
        assert sum(map(len, table.batches(None, None))) == 1


def test_columns_that_spark_has_no_type_for(tmp_path: Path) -> None:
    for place in _duckdb(tmp_path):
        place.write(ROWS)
        odd = "SELECT *, TIME '10:00' AS opens, INTERVAL 1 DAY AS within FROM orders"
        with pytest.raises(DataError, match=r"columns that Spark does not read: opens .*, within .*cast them"):
            landed(replace(place, source=replace(place.source, sql=odd)), tmp_path)
        fine = "SELECT *, TIMESTAMP_NS '2024-01-01 00:00:00.000001001' AS fine FROM orders"
        with pytest.raises(DataError, match=r"column fine: .* a value that does not fit .*lose data.*or in the query"):
            landed(replace(place, source=replace(place.source, sql=fine)), tmp_path)


def test_columns_of_a_database_in_types_of_spark(sail: Any, tmp_path: Path) -> None:
    query = """SELECT "at", 1::UTINYINT AS a, 2::USMALLINT AS b, 3::UINTEGER AS c, 4::UBIGINT AS d, 5::HUGEINT AS e,
        1.25::DECIMAL(10, 2) AS f, 'x'::ENUM ('x', 'y') AS g, NULL AS h, [1::UINTEGER] AS i, {'j': 1::UTINYINT} AS j,
        'b'::BLOB AS k, uuid() AS l FROM orders"""
    for place in _duckdb(tmp_path):
        place.write(ROWS)
        source = replace(place.source, sql=query)
        (tmp_path / "landed").mkdir()
        found = sources.land(source, tmp_path, None, tmp_path / "landed")
        frame = sources.read(sail, source, tmp_path, tmp_path, found)
        row = frame.toArrow().to_pylist()[0]
        assert [row[name] for name in "abcdg"] == [1, 2, 3, 4, "x"]
        assert (float(row["e"]), float(row["f"]), row["h"], row["i"], row["j"]) == (5.0, 1.25, None, [1], {"j": 1})
        assert row["k"] == b"b"


@pytest.mark.accept
def test_columns_of_postgresql_in_types_of_spark(server: str, sail: Any, tmp_path: Path) -> None:
    query = """SELECT at, 1::smallint a, 2::int b, 1.5::real c, 1.25::numeric d, 'x'::varchar(3) e, '{}'::jsonb f,
        gen_random_uuid() g, ARRAY[1.0::float8] h, '2024-01-01'::date i, NULL j, 'b'::bytea k FROM orders"""
    for place in _postgresql(tmp_path, server):
        place.write(ROWS)
        source = replace(place.source, sql=query)
        (tmp_path / "landed").mkdir()
        found = sources.land(source, tmp_path, None, tmp_path / "landed")
        row = sources.read(sail, source, tmp_path, tmp_path, found).toArrow().to_pylist()[0]
        assert [row[name] for name in "abcdefhjk"] == [1, 2, 1.5, "1.25", "x", "{}", [1.0], None, b"b"]
        assert len(row["g"]) == 16


@pytest.mark.parametrize(
    ("address", "found"),
    [
        (None, "is not set"),
        ("mysql://u:sesame@h/d", "does not start with a known scheme"),
        ("postgresql://u:ses@me@h/d", "has an @, %"),
        ("postgresql://u:ses%ame@h/d", "has an @, %"),
        ("postgresql://u:ses/ame@h/d", "has an @, %, /"),
        ("postgresql://u:ses/a?me@localhost:1/d", "has an @, %, / or [?]"),
        ("postgresql://u:ses?me@localhost:1/d", "has an @, %, / or [?]"),
        ("postgresql://u/x:sesame@localhost:1/d", "has an @, %, /"),
        ("postgresql://localhost:1?password=ses@me", "has an @, %, /"),
        ("postgresql:/u:sesame@h/d", "does not start with a known scheme"),
    ],
)
def test_an_address_that_is_none(
    address: str | None, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if address:
        monkeypatch.setenv("SHOP_DATABASE", address)
    source = Source("orders", sql=QUERY, connection="SHOP_DATABASE")
    with pytest.raises(ConfigurationError, match=f"the variable SHOP_DATABASE: {found}") as caught:
        sources.land(source, tmp_path, None, tmp_path)
    assert "ses" not in str(caught.value)


def test_a_database_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Source("orders", sql=QUERY, connection="SHOP_DATABASE")
    monkeypatch.setenv("SHOP_DATABASE", "postgresql://shop:sesame@127.0.0.1:1/shop")
    with pytest.raises(
        DependencyError, match=r"database 127.0.0.1/shop does not answer .*correct the variable SHOP_DA"
    ):
        sources.land(source, tmp_path, None, tmp_path)
    monkeypatch.setenv("SHOP_DATABASE", "duckdb:gone.duckdb")
    with pytest.raises(DataError, match=r"DuckDB file .*gone.duckdb not found. Correct the variable SHOP_DATABASE"):
        sources.land(source, tmp_path, None, tmp_path)
    (tmp_path / "gone.duckdb").write_bytes(b"neither" * 999)
    with pytest.raises(DependencyError, match=r"gone.duckdb does not answer \("):
        sources.land(source, tmp_path, None, tmp_path)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("u:ses%40me@[::1]x/d", "[::1]x/d"),
        ("u:ses%40me@[::1/d", ""),
        ("u:ses%00me@h/d", "h/d"),
        ("u:ses me@h/d", "h/d"),
        ("u:ses[me@127.0.0.1:1/d", "127.0.0.1/d"),
        ("u:ses#me@127.0.0.1:1/d?connect_timeout=9", "127.0.0.1/d"),
        ("/d?port=1&host=127.0.0.1&password=ses%00me", "localhost/d"),
    ],
)
def test_the_driver_quotes_an_address_without_its_password(
    address: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOP_DATABASE", f"postgresql://{address}")
    with pytest.raises(DependencyError, match=rf"the database {re.escape(place)}.*does not answer \(") as caught:
        sources.land(Source("orders", sql=QUERY, connection="SHOP_DATABASE"), tmp_path, None, tmp_path)
    shown = "".join(traceback.format_exception(caught.value))
    assert not re.search("ses[^s]{1,3}me", shown)


@pytest.mark.accept
def test_a_password_that_is_wrong_and_a_query_that_is_refused(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Source("orders", sql="SELECT * FROM nothing", connection="SHOP_DATABASE")
    monkeypatch.setenv("SHOP_DATABASE", f"postgresql://shop:open-sesame@{server}")
    with pytest.raises(DependencyError, match=r"does not answer .*password authentication failed") as caught:
        sources.land(source, tmp_path, None, tmp_path)
    assert "sesame" not in str(caught.value)
    monkeypatch.setenv("SHOP_DATABASE", f"postgresql://shop:{quote(PASSWORD, safe='')}@{server}")
    with pytest.raises(DataError, match='relation "nothing" does not exist') as refused:
        sources.land(source, tmp_path, None, tmp_path)
    assert "\n" not in str(refused.value)
    unknown = replace(source, sql="SELECT 1 AS n", version_sql="SELECT max(n) FROM nothing")
    with pytest.raises(DataError, match=r'source orders, version_sql: .*relation "nothing" does not exist'):
        sources.content(unknown, tmp_path)
    writing = replace(source, sql="SELECT nextval('numbers')")
    with pytest.raises(DataError):
        sources.land(writing, tmp_path, None, tmp_path)


def test_a_catalog_that_is_not_configured(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"catalog nowhere does not answer \(.*PYICEBERG_CATALOG__NOWHERE__URI"):
        sources.land(Source("orders", iceberg="nowhere.shop.orders"), tmp_path, None, tmp_path)


@pytest.mark.parametrize("address", ["shop://u:sesame@h/d", "postgresql://u:ses@me:ses@h:ses/d"])
def test_an_address_of_a_catalog_that_is_none(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pyiceberg import catalog as catalogs
    from pyiceberg.utils.config import Config

    monkeypatch.setenv("PYICEBERG_CATALOG__WAREHOUSE__URI", address)
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())
    with pytest.raises(
        DependencyError, match=r"warehouse does not answer \(ValueError: pyiceberg cannot read its address"
    ) as caught:
        sources.land(Source("orders", iceberg="warehouse.shop.orders"), tmp_path, None, tmp_path)
    assert "ses" not in str(caught.value).replace("address", "")


def test_files_of_an_iceberg_table_that_are_gone(tmp_path: Path) -> None:
    for place in _iceberg(tmp_path):
        place.write(ROWS)
        for suffix in ("parquet", "metadata.json"):
            for file in (tmp_path / "shop").rglob(f"*.{suffix}"):
                file.unlink()
            with pytest.raises(DataError, match=r"warehouse.shop.orders cannot be read \(.*Nothing was written"):
                landed(place, tmp_path)


@pytest.mark.parametrize(
    ("library", "name", "source"),
    [
        ("deltalake", "offline", Source("orders", delta="orders")),
        ("pyiceberg", "iceberg", Source("orders", iceberg="a.b.c")),
        ("adbc_driver_manager", "sql", Source("orders", sql=QUERY, connection="SHOP_DATABASE")),
    ],
)
def test_a_library_that_is_not_installed(
    library: str, name: str, source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOP_DATABASE", "postgresql://shop@127.0.0.1:1/shop")
    for module in [module for module in sys.modules if module.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DependencyError, match=rf"pip install 'isthmus\[{name}\]'"):
        sources.land(source, tmp_path, None, tmp_path)
