"""`build` of ranges on a real project: what is computed, what is written, what a kill leaves, what is refused."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from isthmus import ConfigurationError, ContractMismatch, DataError, GateFailed, RequestError
from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.apply.diff import apply_diff
from isthmus.orchestration.graph.outline import compile_outline
from isthmus.orchestration.tables.build import build, build_range, day_range, outdated_views
from isthmus.orchestration.training.set import training_set
from tests.commandline import run
from tests.features.support import DAY, same_bits
from tests.orchestration.cli.test_cli import refused
from tests.orchestration.shop import START, Open, Shop, files, order_rows

KILLS = int(os.environ.get("TEST_KILLS", "2"))
FIRST = START // DAY
YEAR = Days(FIRST, FIRST + 60)
ORDERS_VIEW = "customer_orders"


@pytest.fixture
def reaching(built: Shop, project: Open) -> Shop:
    """A project whose customer_orders says that it looks back seven days; applied, and built whole."""
    built.replace("    ttl=timedelta(days=7),\n", "    ttl=timedelta(days=7),\n    lookback=timedelta(days=7),\n")
    apply(project(built))
    build(project(built))
    return built


def stored(shop: Shop, project: Open, view: str = ORDERS_VIEW) -> tuple[pa.Table, str]:
    opened = project(shop)
    store = OfflineStore(opened.offline)
    history = store.history(opened.definitions.contract.views[view])
    return history.table(), history.fingerprint


def change_orders(shop: Shop, first: int, end: int) -> None:
    """Other prices for the orders of some days."""
    orders = pq.read_table(shop.orders)
    at = orders["ordered_at"].cast(pa.int64())
    inside = pc.and_(pc.greater_equal(at, first * DAY), pc.less(at, end * DAY))
    cents = pc.if_else(inside, pc.add(orders["cents"], 1), orders["cents"])
    pq.write_table(orders.set_column(orders.schema.get_field_index("cents"), "cents", cents), shop.orders)


def watched() -> tuple[list[str], Any]:
    told: list[str] = []

    def progress(text: str, _: float) -> None:
        told.append(text)

    return told, progress


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.accept)])
def test_any_ranges_that_cover_everything_make_the_table_of_one_build(reaching: Shop, project: Open, seed: int) -> None:
    expected = {view: stored(reaching, project, view) for view in (ORDERS_VIEW, "shelf_demand")}
    shutil.rmtree(reaching.state / "offline")
    chance = random.Random(seed)
    borders = [FIRST - 3, *sorted(chance.sample(range(FIRST, FIRST + 60), 2)), FIRST + 61]
    ranges = [Days(first, end) for first, end in pairwise(borders)]
    chance.shuffle(ranges)
    for days in [Days(FIRST + 20, FIRST + 25), *ranges]:
        build_range(project(reaching), list(expected), within=days, step=chance.choice([7, 20]))
    for view, (rows, fingerprint) in expected.items():
        assert stored(reaching, project, view)[1] == fingerprint
        assert same_bits(stored(reaching, project, view)[0], rows)


def test_a_range_of_changed_sources(reaching: Shop, project: Open) -> None:
    before = stored(reaching, project)[0]
    change_orders(reaching, FIRST, FIRST + 60)
    done = build_range(project(reaching), [ORDERS_VIEW], within=Days(FIRST + 10, FIRST + 20))
    assert done[ORDERS_VIEW].changed
    after = stored(reaching, project)[0]
    day = pc.floor(pc.divide(pc.subtract(after["event_timestamp"].cast(pa.int64()), START), DAY))
    inside = pc.and_(pc.greater_equal(day, 10), pc.less(day, 20))
    assert same_bits(after.filter(pc.invert(inside)), before.filter(pc.invert(inside)))
    assert pc.all(pc.not_equal(after.filter(inside)["mean_amount_7d"], before.filter(inside)["mean_amount_7d"])).as_py()
    # The whole build of the same sources has the same rows there.
    build(project(reaching), [ORDERS_VIEW])
    assert same_bits(stored(reaching, project)[0].filter(inside), after.filter(inside))


@pytest.mark.parametrize(("reach", "told"), [("0", "0"), ("1", "1 day"), ("3", "3 days"), ("6", "6 days")])
def test_a_lookback_that_is_too_short_is_refused(reaching: Shop, project: Open, reach: str, told: str) -> None:
    """It would give wrong rows: the engine reads no more than it says."""
    expected = stored(reaching, project)
    reaching.replace("lookback=timedelta(days=7)", f"lookback=timedelta(days={reach})")
    apply(project(reaching))
    build(project(reaching), [ORDERS_VIEW])
    for within in (Days(FIRST + 10, FIRST + 11), Days(FIRST - 40, FIRST + 60)):
        sentence = rf"customer_orders: reads beyond its lookback of {told}: with a longer one, .* at customer="
        with pytest.raises(DataError, match=sentence):
            build_range(project(reaching), [ORDERS_VIEW], within=within, step=50)
        assert stored(reaching, project)[1] == expected[1]


def test_a_lookback_is_long_enough_where_only_rounding_differs(reaching: Shop, project: Open) -> None:
    reaching.replace('F.avg("cents").over(week)', '(F.avg("cents").over(week) * (1 + 1e-13 * F.rand()))')
    apply(project(reaching))
    build(project(reaching), [ORDERS_VIEW])
    build_range(project(reaching), [ORDERS_VIEW], within=Days(FIRST + 10, FIRST + 12))
    build_range(project(reaching), [ORDERS_VIEW], within=Days(FIRST + 100, FIRST + 102))
    reaching.replace("(1 + 1e-13 * F.rand())", "F.rand()")
    apply(project(reaching))
    build(project(reaching), [ORDERS_VIEW])
    with pytest.raises(DataError, match=r"mean_amount_7d differs in .* rows, .*is random"):
        build_range(project(reaching), [ORDERS_VIEW], within=Days(FIRST + 10, FIRST + 12))


@pytest.mark.accept
def test_a_lookback_is_long_enough_where_only_the_rounding_of_arrays_differs(reaching: Shop, project: Open) -> None:
    reaching.append("""

@transform(
    entities=[customer],
    sources=[orders],
    schema=[Field("prices", Array(Float64)), Field("counts", Array(Int64)), Field("words", Array(String))],
    ttl=None,
    lookback=timedelta(days=7),
)
def arrays(orders: DataFrame) -> DataFrame:
    cents, odd = F.col("cents"), F.col("cents") % 2 == 1
    return orders.select(
        "customer", "ordered_at", "delivered_at",
        F.when(odd, F.array(F.lit(float("nan")), cents * (1 + 1e-13 * F.rand()))).alias("prices"),
        F.when(odd, F.array("cents")).otherwise(F.slice(F.array("cents"), 1, 0)).alias("counts"),
        F.array(cents.cast("string")).alias("words"),
    )
""")

    def found() -> str:
        apply(project(reaching))
        build(project(reaching), ["arrays"])
        try:
            build_range(project(reaching), ["arrays"], within=Days(FIRST + 10, FIRST + 12))
        except DataError as error:
            return str(error)
        return ""

    assert not found()
    reaching.replace("1e-13 * F.rand()", "F.rand()")
    assert "prices differs in" in found()
    reaching.replace("(1 + F.rand())", "1.0")
    reaching.replace('otherwise(F.slice(F.array("cents"), 1, 0))', 'when(F.rand() < 0.5, F.array("cents", "cents"))')
    assert "counts differs in" in found()


def test_a_run_that_was_stopped_goes_on_where_it_was(reaching: Shop, project: Open) -> None:
    change_orders(reaching, FIRST, FIRST + 60)

    class Stopped(Exception):
        pass

    def stop(text: str, done: float) -> None:
        if done > 0.5:
            raise Stopped

    with pytest.raises(Stopped):
        build_range(project(reaching), [ORDERS_VIEW], within=YEAR, step=10, progress=stop)
    told, progress = watched()
    build_range(project(reaching), [ORDERS_VIEW], within=YEAR, step=10, progress=progress)
    computed = [text for text in told if text.startswith("computing")]
    assert computed == [
        "computing customer_orders, 2024-02-10 to 2024-02-20", "computing customer_orders, 2024-02-20 to 2024-03-01",
    ]  # fmt: skip
    fingerprint = stored(reaching, project)[1]
    told, progress = watched()
    again = build_range(project(reaching), [ORDERS_VIEW], within=YEAR, step=7, progress=progress)
    assert told == ["all tables are written"]
    assert not again[ORDERS_VIEW].changed
    # Other content is computed again, all of it.
    change_orders(reaching, FIRST + 58, FIRST + 59)
    told, progress = watched()
    build_range(project(reaching), [ORDERS_VIEW], within=YEAR, step=30, progress=progress)
    assert sum(text.startswith("computing") for text in told) == 2
    assert stored(reaching, project)[1] != fingerprint
    assert not build(project(reaching), [ORDERS_VIEW])[ORDERS_VIEW].changed


def test_catching_up(reaching: Shop, project: Open) -> None:
    """From the end of the table, less what may come late, to the project's present."""
    orders = order_rows()
    at = orders["ordered_at"].cast(pa.int64())
    reaching.replace("lookback=timedelta(days=7),", "lookback=timedelta(days=7),\n    lateness=timedelta(days=2),")
    assert apply(project(reaching)).changes == [], "lateness is not part of the contract"
    late = (FIRST + 28) * DAY
    early = orders.filter(pc.less(at, (FIRST + 30) * DAY)).filter(pc.invert(
        pc.and_(pc.greater_equal(at.filter(pc.less(at, (FIRST + 30) * DAY)), late + DAY // 3),
                pc.less(at.filter(pc.less(at, (FIRST + 30) * DAY)), late + DAY))))  # fmt: skip
    pq.write_table(early, reaching.orders)
    reaching.replace("2024-03-01T00:00:00Z", "2024-01-31T00:00:00Z", "isthmus.toml")
    build(project(reaching))
    assert len(early) < 60 * 2400
    pq.write_table(orders, reaching.orders)
    reaching.replace("2024-01-31T00:00:00Z", "2024-03-01T00:00:00Z", "isthmus.toml")
    told, progress = watched()
    build_range(project(reaching), [ORDERS_VIEW], progress=progress)
    computed = [text for text in told if text.startswith("computing")]
    assert computed[0] == "computing customer_orders, 2024-01-28 to 2024-02-27"
    assert computed[-1].endswith("to 2024-03-02")
    caught_up = stored(reaching, project)[1]
    build(project(reaching), [ORDERS_VIEW])
    assert stored(reaching, project)[1] == caught_up
    shutil.rmtree(reaching.state / "offline" / ORDERS_VIEW)
    assert build_range(project(reaching), [ORDERS_VIEW])[ORDERS_VIEW].version == 0
    assert stored(reaching, project)[1] == caught_up


def test_rows_of_the_future_are_stored_and_said(built: Shop, project: Open) -> None:
    built.replace("2024-03-01T00:00:00Z", "2024-02-15T12:00:00Z", "isthmus.toml")
    told, progress = watched()
    assert not build(project(built), progress=progress)[ORDERS_VIEW].changed, (
        "the whole table holds what the transform says"
    )
    rows = stored(built, project)[0]
    now = clock.micros(project(built).settings.project.now)  # type: ignore[arg-type]  # the line above sets it
    ahead = sum(
        event > now or known > now
        for event, known in zip(*(rows[name].cast(pa.int64()).to_pylist() for name in ("event_timestamp", "known_at")),
                                strict=True)
    )  # fmt: skip
    assert f"customer_orders has {ahead} rows in the future, which are used from their time on" in told
    shutil.rmtree(built.state / "offline" / ORDERS_VIEW)
    build_range(project(built), [ORDERS_VIEW], within=Days(FIRST, FIRST + 46))
    assert max(stored(built, project)[0]["event_timestamp"].to_pylist()).day == 15
    assert build_range(project(built), [ORDERS_VIEW])[ORDERS_VIEW].added == 0, "tomorrow's rows come tomorrow"


# --- what is refused


def test_a_source_that_changed_under_us(reaching: Shop, project: Open) -> None:
    before = files(reaching.state / "offline")
    orders = pq.read_table(reaching.orders)
    place = orders.schema.get_field_index("cents")
    pq.write_table(orders.set_column(place, "cents", orders["cents"].cast(pa.float64())), reaching.orders)
    with pytest.raises(DataError, match=r"source orders, column cents: has type double and had bigint when "
                                        r"customer_orders was built.*`isthmus build customer_orders`"):  # fmt: skip
        build_range(project(reaching), [ORDERS_VIEW], within=YEAR)
    pq.write_table(orders.drop_columns(["cents"]), reaching.orders)
    sentence = (
        "source orders, column cents: no longer exists; view customer_orders .*; expected bigint, as when customer"
    )
    with pytest.raises(DataError, match=sentence):
        build_range(project(reaching), [ORDERS_VIEW], within=YEAR)
    with pytest.raises(DataError, match=sentence):
        build(project(reaching))
    pq.write_table(orders.drop_columns(["ordered_at"]), reaching.orders)
    with pytest.raises(ConfigurationError, match="source orders, timestamp: no column 'ordered_at'"):
        build_range(project(reaching), [ORDERS_VIEW], within=YEAR)
    assert files(reaching.state / "offline") == before
    pq.write_table(orders.append_column("more", orders["cents"]), reaching.orders)
    assert not build_range(project(reaching), [ORDERS_VIEW], within=YEAR)[ORDERS_VIEW].changed


def test_a_whole_build_takes_up_the_types_of_a_source_that_changed(reaching: Shop, project: Open) -> None:
    """Also where the rows are what they were: what is refused says that such a build helps."""
    before = stored(reaching, project)
    orders = pq.read_table(reaching.orders)
    place = orders.schema.get_field_index("cents")
    pq.write_table(orders.set_column(place, "cents", orders["cents"].cast(pa.float64())), reaching.orders)
    assert build(project(reaching), [ORDERS_VIEW])[ORDERS_VIEW].changed
    build_range(project(reaching), [ORDERS_VIEW], within=YEAR)
    assert stored(reaching, project) == before
    assert not build(project(reaching), [ORDERS_VIEW])[ORDERS_VIEW].changed


def as_delta(shop: Shop) -> Path:
    """The orders of a shop as a Delta table of two files, one for each half of them."""
    folder, orders = shop.root / "data" / "orders", pq.read_table(shop.orders)
    for half in (orders.slice(0, len(orders) // 2), orders.slice(len(orders) // 2)):
        write_deltalake(folder, half, mode="append")
    shop.orders.unlink()
    shop.replace('path="data/orders.parquet"', 'delta="data/orders"')
    return folder


def replaced(folder: Path, retyped: bool = False) -> None:
    """Other orders in the place of a Delta table's."""
    orders = DeltaTable(folder).to_pyarrow_table()
    cents = pc.add(orders["cents"], 1)
    other = orders.set_column(
        orders.schema.get_field_index("cents"), "cents", cents.cast("string") if retyped else cents
    )
    write_deltalake(folder, other, mode="overwrite", schema_mode="overwrite")


@pytest.mark.accept
def test_a_delta_table_makes_the_rows_of_its_file(reaching: Shop, project: Open) -> None:
    before = {view: stored(reaching, project, view) for view in (ORDERS_VIEW, "shelf_demand")}
    folder = as_delta(reaching)
    apply(project(reaching))
    assert outdated_views(project(reaching)) == ["customer_orders", "shelf_demand"]
    written = build(project(reaching))
    assert not written[ORDERS_VIEW].changed
    assert outdated_views(project(reaching)) == []
    shutil.rmtree(reaching.state / "offline")
    build_range(project(reaching), within=YEAR)
    for view, (table, fingerprint) in before.items():
        assert same_bits(stored(reaching, project, view)[0], table)
        assert stored(reaching, project, view)[1] == fingerprint
    # What was built from this version is not computed again; a range reads no file of other days.
    written = build_range(project(reaching), [ORDERS_VIEW], within=YEAR)
    assert not written[ORDERS_VIEW].changed
    next(
        file for file in folder.glob("*.parquet") if pq.read_table(file)["ordered_at"][0].value > START + 20 * DAY
    ).unlink()
    written = build_range(project(reaching), [ORDERS_VIEW], within=Days(FIRST + 1, FIRST + 9))
    assert not written[ORDERS_VIEW].changed
    assert not list(reaching.state.glob("landed*"))


def test_a_delta_table_that_is_replaced_under_a_build(reaching: Shop, project: Open) -> None:
    before, folder = stored(reaching, project)[1], as_delta(reaching)
    apply(project(reaching))
    changes: list[Callable[[], None]] = [lambda: replaced(folder, retyped=True), lambda: shutil.rmtree(folder)]

    def progress(text: str, _: float) -> None:
        if text.startswith("computing") and changes:
            changes.pop(0)()

    written = build(project(reaching), progress=progress)
    assert not changes
    assert not written[ORDERS_VIEW].changed
    assert stored(reaching, project)[1] == before
    with pytest.raises(DataError, match=r"source orders: no Delta table at .*data/orders. Correct delta="):
        build(project(reaching))
    assert stored(reaching, project)[1] == before


def test_a_delta_table_that_was_replaced_or_retyped(reaching: Shop, project: Open) -> None:
    folder = as_delta(reaching)
    apply(project(reaching))
    build(project(reaching))
    replaced(folder)
    assert outdated_views(project(reaching)) == ["customer_orders", "shelf_demand"]
    days = Days(FIRST + 5, FIRST + 7)
    assert build_range(project(reaching), [ORDERS_VIEW], within=days)[ORDERS_VIEW].changed
    before = stored(reaching, project)[1]
    replaced(folder, retyped=True)
    with pytest.raises(
        DataError, match="source orders, column cents: has type string and had bigint when customer_ord"
    ):
        build_range(project(reaching), [ORDERS_VIEW], within=days)
    assert stored(reaching, project)[1] == before


@pytest.mark.accept
def test_a_query_is_read_for_each_build(reaching: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stored(reaching, project)[1]
    with closing(duckdb.connect(str(reaching.root / "shop.duckdb"))) as database:
        database.execute(f"CREATE TABLE orders AS SELECT * FROM '{reaching.orders}'")  # noqa: S608 - our own file
    reaching.orders.unlink()
    query = 'sql="SELECT * FROM orders", connection="SHOP_DATABASE"'
    reaching.replace('path="data/orders.parquet"', query)
    apply(project(reaching))
    # What is read decides the values, so it is part of the contract; where it is read from is not.
    contract = reaching.state / "contract.next.json"
    assert "SELECT * FROM orders" in contract.read_text()
    assert "SHOP_DATABASE" not in contract.read_text()
    with pytest.raises(ConfigurationError, match="the variable SHOP_DATABASE: is not set; expected postgresql://"):
        build(project(reaching))
    monkeypatch.setenv("SHOP_DATABASE", "duckdb:shop.duckdb")
    build(project(reaching))
    assert stored(reaching, project)[1] == before
    assert outdated_views(project(reaching)) == []
    with closing(duckdb.connect(str(reaching.root / "shop.duckdb"))) as database:
        database.execute("DELETE FROM orders WHERE cents % 2 = 0")
    assert outdated_views(project(reaching)) == ["customer_orders", "shelf_demand"]
    # What the query's own version says is believed; it decides no values.
    same = contract.read_text()
    reaching.replace('="SHOP_DATABASE"', '="SHOP_DATABASE", version_sql="SELECT sum(cents), count(*) FROM orders;"')
    apply(project(reaching))
    assert contract.read_text() == same
    assert outdated_views(project(reaching)) == ["customer_orders", "shelf_demand"]
    build(project(reaching))
    for change, others in (("store = 'nowhere'", []), ("cents = cents + 1", ["customer_orders", "shelf_demand"])):
        with closing(duckdb.connect(str(reaching.root / "shop.duckdb"))) as database:
            database.execute(f"UPDATE orders SET {change}")  # noqa: S608 - one of these two
        assert outdated_views(project(reaching)) == others
    assert [each.version_sql for each in compile_outline(project(reaching)).sources if each.name == "orders"] == [
        "SELECT sum(cents), count(*) FROM orders;"
    ]
    assert build_range(project(reaching), [ORDERS_VIEW], within=Days(FIRST, FIRST + 9))[ORDERS_VIEW].changed


def test_a_part_of_another_contract(reaching: Shop, project: Open) -> None:
    reaching.replace("SLOW = 60", "SLOW = 61")
    apply(project(reaching))
    before = files(reaching.state / "offline")
    for within in (YEAR, None):
        with pytest.raises(ContractMismatch, match=r"offline table of shelf_demand: .*`isthmus build shelf_demand`"):
            build_range(project(reaching), within=within)
    assert files(reaching.state / "offline") == before


def test_a_range_on_the_command_line(built: Shop) -> None:
    assert "--from soon: is not a day" in refused(built, "build", "--from", "soon", code=2)
    done = run("build", ORDERS_VIEW, "--from", "2024-02-01", "--to", "2024-02-03T00:00:00Z", "--json", cwd=built.root)
    assert done.returncode == 0, done.stderr
    assert "customer_orders, 2024-02-01 to 2024-02-03" in done.stderr


@pytest.mark.parametrize(
    ("first", "end", "step", "catch_up", "sentence"),
    [
        (None, "2024-01-01", None, False, "--to 2024-01-01: needs --from"),
        ("2024-01-01", None, None, True, "--catch-up: cannot be used with --from or --to"),
        (None, None, 7, False, "--step 7: needs --from or --catch-up"),
        ("2024-01-01", None, 0, False, "--step 0: is not a number of days"),
        ("2024-02-01", "2024-01-01", None, False, "2024-02-01 to 2024-01-01 contains no day"),
    ],
)
def test_options_that_contradict_each_other(
    shop: Shop, project: Open, first: str | None, end: str | None, step: int | None, catch_up: bool, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        day_range(project(shop), first, end, step, catch_up=catch_up)


def test_without_an_end_a_range_ends_with_today(shop: Shop, project: Open) -> None:
    assert day_range(project(shop), "2024-01-01", None, None, catch_up=False) == Days(FIRST, FIRST + 61)
    assert day_range(project(shop), None, None, None, catch_up=False) is None


# --- evolution


def test_a_difference_is_told_before_anything_is_touched(built: Shop, project: Open) -> None:
    training_set(project(built))
    assert apply_diff(project(built)).lines() == [
        "the definitions match the applied contract",
        "keep customer_orders, which has 2,400 rows of 59 days",
        "keep shelf_demand, which has 2,400 rows of 59 days",
        "keep customer_facts, which has 50 rows of 12 days",
    ]
    built.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=8)")
    built.replace("SLOW = 60", "SLOW = 61")
    built.replace(
        '        Field("member", Bool),\n', '        Field("member", Bool),\n        Field("joined", Int64),\n'
    )
    built.replace('        "member",\n', '        "member",\n        F.unix_micros("joined_at").alias("joined"),\n')
    before = files(built.state)
    found = apply_diff(project(built))
    assert {name: (change.action, change.why, change.rows) for name, change in found.tables.items()} == {
        "customer_orders": ("record", ["ttl"], 2400),
        "shelf_demand": ("rebuild", ["code"], 2400),
        "customer_facts": ("rebuild", ["fields", "code"], 50),
    }
    assert found.changes == [
        "view customer_facts: feature joined is new; its code changed",
        "view customer_orders: ttl was 7 days, is 8 days",
        "view shelf_demand: its code changed",
    ]
    assert found.stale == {"training set": ["late_order"], "package": [], "deployment": []}
    assert files(built.state) == before
    apply(project(built))
    done = build(project(built))
    assert stored(built, project, "customer_facts")[0]["joined"].null_count == 0
    written = {name: len(list((built.state / "offline" / name).rglob("*.parquet"))) for name in done}
    assert written["customer_orders"] == 59, "a new ttl writes no row again"
    assert 59 < written["shelf_demand"] < 2 * 59, "only days with other rows are written"
    assert written["customer_facts"] == 2 * 12
    assert {change.action for change in apply_diff(project(built)).tables.values()} == {"keep"}


def test_what_only_reads_rows_otherwise_computes_none_again(built: Shop, project: Open) -> None:
    built.replace('Field("orders_7d", Int64)', 'Field("orders_7d", Int64, "device")')
    apply(project(built))
    before = {name: text for name, text in files(built.state / "offline").items() if name.endswith(".parquet")}
    change = apply_diff(project(built)).tables["customer_orders"]
    assert (change.action, change.why, change.rows) == ("record", ["fields"], 2400)
    with pytest.raises(ContractMismatch, match=r"built under \w+: the definition changed since.*isthmus build"):
        stored(built, project, "customer_orders")
    notes: list[str] = []
    done = build(project(built), ["customer_orders"], progress=lambda text, _: notes.append(text))
    assert (done["customer_orders"].changed, done["customer_orders"].rows, notes) == (
        True,
        2400,
        ["all tables are written"],
    )
    after = {name: text for name, text in files(built.state / "offline").items() if name.endswith(".parquet")}
    assert after == before
    assert outdated_views(project(built)) == []
    assert len(stored(built, project, "customer_orders")[0]) == 2400
    # Other rows in the source, or an expectation that they break: nothing is taken as it is.
    built.replace("    Entity,\n", "    Entity,\n    Expect,\n")
    built.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=8), expectations=[Expect.rows(at_most=9)]")
    apply(project(built))
    with pytest.raises(GateFailed, match="rows from 0 to 9"):
        build(project(built), ["customer_orders"])
    built.replace("Expect.rows(at_most=9)", "")
    pq.write_table(pq.read_table(built.orders).slice(1), built.orders)
    apply(project(built))
    build(project(built), ["customer_orders"], progress=lambda text, _: notes.append(text))
    assert "computing customer_orders" in notes


def test_a_difference_is_checked_as_apply_checks_it(built: Shop, project: Open) -> None:
    built.orders.unlink()
    with pytest.raises(ConfigurationError, match=r"source orders.*orders\.parquet"):
        apply_diff(project(built))


def test_another_type_needs_another_version(built: Shop, project: Open) -> None:
    built.replace('Field("mean_amount_7d", Float64)', 'Field("mean_amount_7d", Float32)')
    built.replace('F.avg("cents").over(week).alias', 'F.avg("cents").over(week).cast("float").alias')
    assert apply_diff(project(built)).tables["customer_orders"].action == "refuse"
    before = files(built.state)
    with pytest.raises(
        ConfigurationError,
        match=r"customer_orders, mean_amount_7d: its table holds double; expected float. Declare .* with version=2,",
    ):
        apply(project(built))
    assert files(built.state) == before
    built.replace("    ttl=timedelta(days=7),\n", "    ttl=timedelta(days=7),\n    version=2,\n")
    assert {name: change.action for name, change in apply_diff(project(built)).tables.items()} == {
        "customer_orders.v2": "build", "shelf_demand": "keep", "customer_facts": "keep", "customer_orders": "leave",
    }  # fmt: skip
    apply(project(built))
    build(project(built))
    assert stored(built, project)[0].schema.field("mean_amount_7d").type == pa.float32()
    assert (built.state / "offline" / "customer_orders.v2").is_dir()


# --- kill


def killed_builds(shop: Shop, project: Open, kills: int, longest: float) -> int:
    """Kills builds of changed sources at chance moments; returns how many ran into it."""
    old = stored(shop, project)
    sources = pq.read_table(shop.orders)
    change_orders(shop, FIRST, FIRST + 60)
    build(project(shop), [ORDERS_VIEW])
    new = stored(shop, project)
    assert old[1] != new[1]
    known: dict[Any, set[Any]] = {}
    for rows in (old[0], new[0]):
        for row in zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True):
            known.setdefault((row[0], row[1]), set()).add(row)
    pq.write_table(sources, shop.orders)
    build(project(shop), [ORDERS_VIEW])
    assert stored(shop, project)[1] == old[1]
    change_orders(shop, FIRST, FIRST + 60)
    command = [str(Path(sys.executable).with_name("isthmus")), "build", ORDERS_VIEW]
    chance, hit = random.Random(7), 0
    for n in count():
        if n >= kills and hit:
            break
        assert n < kills + 10, "no build took long enough to be killed"
        ranged = ["--from", "2024-01-01", "--to", "2024-03-01", "--step", "6"] if n % 3 else []
        with subprocess.Popen(
            [*command, *ranged], cwd=shop.root, stderr=subprocess.PIPE, start_new_session=True
        ) as run:
            assert run.stderr
            run.stderr.readline()  # the first progress: the engine is up
            # Sooner after those that were through.
            until = time.monotonic() + chance.uniform(0, longest) / 2 ** (n - hit)
            while time.monotonic() < until and run.poll() is None:
                rows = stored(shop, project)[0]
                assert len(rows) == len(old[0])
                for row in zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True):
                    assert row in known[(row[0], row[1])], "a reader met neither the old nor the new row"
            hit += run.poll() is None
            run.send_signal(signal.SIGKILL)
        if stored(shop, project)[1] == new[1]:
            # It was through: the next one has to do again what the first had to.
            pq.write_table(sources, shop.orders)
            build(project(shop), [ORDERS_VIEW])
            assert stored(shop, project)[1] == old[1]
            change_orders(shop, FIRST, FIRST + 60)
    build_range(project(shop), [ORDERS_VIEW], within=YEAR)
    assert stored(shop, project)[1] == new[1]
    assert same_bits(stored(shop, project)[0], new[0])
    return hit


@pytest.mark.accept
@pytest.mark.thorough
def test_a_build_that_is_killed_leaves_old_or_new_rows(reaching: Shop, project: Open) -> None:
    assert killed_builds(reaching, project, KILLS, longest=2.0) > 0


def test_a_column_that_becomes_text_is_refused_until_it_is_declared(built: Shop, project: Open) -> None:
    """As for tables that an earlier version built from guessed types."""
    file, types = built.root / "data" / "customers.csv", '"born": Int64, "visits": Int64, '
    header, *lines = file.read_text().splitlines()
    file.write_text("".join(f"{line}\n" for line in [f"{header},visits", *(f"{line},7" for line in lines[1:])]))
    built.replace('"born": Int64, ', types)
    build(project(built), ["customer_facts"])
    before = stored(built, project, "customer_facts")
    built.replace('"visits": Int64, ', "")
    apply(project(built))
    assert outdated_views(project(built)) == ["customer_facts"]
    for again in (build, build_range):
        with pytest.raises(DataError, match=r"source customers: visits \(bigint\) had types when") as caught:
            again(project(built), ["customer_facts"])
    assert caught.value.remedy.startswith("write types={'visits': Int64} in the source, with String")
    built.replace('"born": Int64, ', types)
    assert outdated_views(project(built)) == []
    built.replace('"visits": Int64', '"visits": String')
    build(project(built), ["customer_facts"])
    assert stored(built, project, "customer_facts")[0].equals(before[0])
