"""Builds from tables of other systems: what happens to a table, or to a build, leaves whole rows, each once."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from isthmus import DataError
from isthmus.features.days import Days
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build, build_range
from tests.databases import PASSWORD, postgresql
from tests.features.support import DAY
from tests.objectstore import ACCESS, SECRET, object_store
from tests.orchestration.shop import START, Open, Shop
from tests.orchestration.tables.test_build import ORDERS_VIEW, stored

FIRST = START // DAY
KILLS = int(os.environ.get("TEST_KILLS", "6"))
QUERY = 'sql="SELECT * FROM orders", connection="SHOP_DATABASE"'


@dataclass(frozen=True)
class Place:
    """How a source names the table of orders, and what others do to it."""

    source: str
    write: Callable[[pa.Table], None]
    drop: Callable[[], None]


@pytest.fixture(
    params=["iceberg", *(pytest.param(kind, marks=pytest.mark.accept) for kind in ("duckdb", "postgresql", "objects"))]
)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    kinds = {"duckdb": _duckdb, "iceberg": _iceberg, "postgresql": _postgresql, "objects": _objects}
    yield from kinds[request.param](tmp_path, monkeypatch)


def _duckdb(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    file = root / "orders.duckdb"
    patch.setenv("SHOP_DATABASE", f"duckdb:{file}")

    def write(rows: pa.Table) -> None:
        with closing(duckdb.connect(str(file))) as connection:
            connection.register("written", rows)
            connection.execute("CREATE OR REPLACE TABLE orders AS SELECT * FROM written")

    def drop() -> None:
        with closing(duckdb.connect(str(file))) as connection:
            connection.execute("DROP TABLE orders")

    yield Place(QUERY, write, drop)


def configure(patch: pytest.MonkeyPatch, **properties: str) -> None:
    """Configures the Iceberg catalog `warehouse` by variables, as a new process would find them."""
    from pyiceberg import catalog as catalogs
    from pyiceberg.utils.config import Config

    for key, value in properties.items():
        patch.setenv(f"PYICEBERG_CATALOG__WAREHOUSE__{key}", value)
    # It reads the environment once, when it is imported.
    patch.setattr(catalogs, "_ENV_CONFIG", Config())


def in_storage(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Configures how the catalog's files in object storage are reached."""
    key = {"S3__ACCESS_KEY_ID": ACCESS, "S3__SECRET_ACCESS_KEY": SECRET, "S3__REGION": "us-east-1"}
    configure(patch, S3__ENDPOINT=endpoint, **key)


def iceberg(root: Path, patch: pytest.MonkeyPatch, warehouse: str) -> Iterator[Place]:
    from pyiceberg import catalog as catalogs

    configure(patch, TYPE="sql", URI=f"sqlite:///{root}/catalog.db", WAREHOUSE=warehouse)
    catalog, name = catalogs.load_catalog("warehouse"), "shop.orders"
    catalog.create_namespace("shop")

    def write(rows: pa.Table) -> None:
        if catalog.table_exists(name):
            catalog.drop_table(name)
        catalog.create_table(name, schema=rows.schema).append(rows)

    yield Place('iceberg="warehouse.shop.orders"', write, lambda: catalog.drop_table(name))
    catalog.close()


def _iceberg(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield from iceberg(root, patch, root.as_uri())


def _objects(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with object_store(root / "objects") as store:
        in_storage(patch, store.endpoint)
        yield from iceberg(root, patch, "s3://shop/warehouse")


def _postgresql(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    from adbc_driver_postgresql import dbapi

    with postgresql(root / "postgresql") as server:
        address = f"postgresql://shop:{quote(PASSWORD, safe='')}@{server}"
        patch.setenv("SHOP_DATABASE", address)

        def write(rows: pa.Table) -> None:
            with closing(dbapi.connect(address)) as connection, closing(connection.cursor()) as cursor:
                cursor.adbc_ingest("orders", rows, mode="replace")
                connection.commit()

        def drop() -> None:
            with closing(dbapi.connect(address)) as connection, closing(connection.cursor()) as cursor:
                cursor.execute("DROP TABLE orders")
                connection.commit()

        yield Place(QUERY, write, drop)


@pytest.fixture
def reaching(built: Shop, project: Open, place: Place) -> Shop:
    """A project that is to read its orders there, built from files; one view says that it looks back seven days."""
    built.replace("    ttl=timedelta(days=7),\n", "    ttl=timedelta(days=7),\n    lookback=timedelta(days=7),\n")
    apply(project(built))
    build(project(built))
    place.write(pq.read_table(built.orders))
    return built


def move(shop: Shop, project: Open, place: Place) -> None:
    shop.replace('path="data/orders.parquet"', place.source)
    apply(project(shop))


def priced(orders: pa.Table, more: int, *, text: bool = False) -> pa.Table:
    cents = pc.add(orders["cents"], more)
    return orders.set_column(orders.schema.get_field_index("cents"), "cents", cents.cast("string") if text else cents)


def _build(project: Project, within: Days | None) -> None:
    build_range(project, [ORDERS_VIEW], within=within) if within else build(project, [ORDERS_VIEW])


@pytest.mark.accept
def test_a_table_that_is_replaced_retyped_or_dropped(reaching: Shop, project: Open, place: Place) -> None:
    orders, before = pq.read_table(reaching.orders), stored(reaching, project)[1]
    move(reaching, project, place)
    changes: list[Callable[[], None]] = [lambda: place.write(priced(orders, 1, text=True)), place.drop]

    def progress(text: str, _: float) -> None:
        if text.startswith("computing") and changes:
            changes.pop(0)()

    # Under a build, once it has begun to compute.
    build(project(reaching), progress=progress)
    assert not changes
    assert stored(reaching, project)[1] == before
    # It was dropped.
    days = Days(FIRST + 5, FIRST + 7)
    for within in (None, days):
        with pytest.raises(
            DataError, match=r"source orders: .*(no Delta table|has no Iceberg table|not found|cannot be read)"
        ):
            _build(project(reaching), within)
    # It came back with text in the place of numbers.
    place.write(priced(orders, 0, text=True))
    with pytest.raises(DataError, match="column cents: has type string and had bigint when customer_orders was built"):
        build_range(project(reaching), [ORDERS_VIEW], within=days)
    # Or without the column.
    place.write(orders.drop_columns(["cents"]))
    for within in (None, days):
        with pytest.raises(DataError, match=r"source orders, column cents: no longer exists; .*expected bigint"):
            _build(project(reaching), within)
    assert stored(reaching, project)[1] == before
    # Other rows in its place are other rows of those days alone.
    place.write(priced(orders, 1))
    assert build_range(project(reaching), [ORDERS_VIEW], within=days)[ORDERS_VIEW].changed
    place.write(orders)
    assert build_range(project(reaching), [ORDERS_VIEW], within=days)[ORDERS_VIEW].changed
    assert stored(reaching, project)[1] == before
    assert not list(reaching.state.glob("landed*"))


@pytest.mark.accept
@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_a_build_of_ranges_that_is_killed_is_finished_by_the_next(reaching: Shop, project: Open, place: Place) -> None:
    """Nothing identifies the rows of a server: days are computed again, and those that are there stay as they are."""
    orders = pq.read_table(reaching.orders)
    move(reaching, project, place)
    build(project(reaching), [ORDERS_VIEW])
    old, whole = stored(reaching, project), Days(FIRST, FIRST + 60)
    place.write(priced(orders, 1))
    build(project(reaching), [ORDERS_VIEW])
    new = stored(reaching, project)
    known = {tuple(row.values()) for rows in (old[0], new[0]) for row in rows.to_pylist()}
    ranged = ["build", ORDERS_VIEW, "--from", "2024-01-01", "--to", "2024-03-01", "--step", "3"]
    command = [sys.executable, "-c", "from isthmus.orchestration.cli.cli import main; main()", *ranged]
    chance, hit, between = random.Random(7), 0, 0
    for kill in range(KILLS):
        place.write(priced(orders, kill % 2))
        with subprocess.Popen(
            command, cwd=reaching.root, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as run:
            assert run.stderr
            for line in run.stderr:
                # From when on it commits steps.
                if "rows in total" in line:
                    break
            time.sleep(chance.uniform(0, 0.3))
            hit += run.poll() is None
            run.send_signal(signal.SIGKILL)
        rows = stored(reaching, project)[0].to_pylist()
        assert len(rows) == len(old[0])
        assert known.issuperset(tuple(row.values()) for row in rows)
        assert len({(row["customer"], row["event_timestamp"], row["known_at"]) for row in rows}) == len(rows)
        between += stored(reaching, project)[1] not in (old[1], new[1])
    assert hit
    assert between, "some were killed between two steps"
    for turn, wanted in ((1, new), (0, old)):
        place.write(priced(orders, turn))
        build_range(project(reaching), [ORDERS_VIEW], within=whole)
        assert stored(reaching, project)[1] == wanted[1]
    assert not list(reaching.state.glob("landed*")), "what a killed run has landed is gone"
