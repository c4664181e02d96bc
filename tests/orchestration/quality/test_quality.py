"""Expectations, drift and statistics on a real project: planted faults are found and named, clean data are not."""

import json
from collections.abc import Callable
from datetime import datetime

import dagster as dg
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from isthmus import DataError, GateFailed, RequestError
from isthmus.dagster import build_definitions
from isthmus.features.days import Days
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.quality.statistics import measure, read
from isthmus.features.redis.connection import connect
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import STATISTICS
from isthmus.orchestration.quality import gate
from isthmus.orchestration.quality.baseline import TrainingStatistics
from isthmus.orchestration.quality.measure import QualityReport, quality, require_quality
from isthmus.orchestration.quality.page import page
from isthmus.orchestration.tables.build import build, build_range
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from tests.commandline import run
from tests.orchestration.shop import HOUR, ORDERS, START, VIEWS, Open, Shop, cut, files, order_rows

PROMISES = """
    ttl=timedelta(days=7),
    expectations=[
        Expect.present("orders_7d"),
        Expect.between("mean_amount_7d", 100, 9_000),
        Expect.between("late_rate_7d", 0, 1),
        Expect.rows(at_least=2_000, at_most=5_000),
        Expect.fresh(within=timedelta(days=3)),
        Expect.drift("mean_amount_7d", psi=0.25),
    ],
)
def customer_orders("""


@pytest.fixture
def promising(built: Shop) -> Shop:
    """The shop, with expectations that its orders meet."""
    built.replace("\n    ttl=timedelta(days=7),\n)\ndef customer_orders(", PROMISES)
    built.replace("    Entity,\n", "    Entity,\n    Expect,\n")
    return built


def change(shop: Shop, rows: pa.Table) -> None:
    pq.write_table(rows, shop.orders)


def replaced(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), name, values.cast(rows[name].type))


def cents_times(factor: int) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: replaced(rows, "cents", pc.multiply(rows["cents"], factor))


def flooded(rows: pa.Table) -> pa.Table:
    return replaced(rows, "late", pa.nulls(len(rows), pa.int64()))


def stale(rows: pa.Table) -> pa.Table:
    moved = {
        name: pc.subtract(pc.cast(rows[name], pa.int64()), 20 * 24 * HOUR) for name in ("ordered_at", "delivered_at")
    }
    for name, values in moved.items():
        rows = replaced(rows, name, values)
    return rows


def doubled(rows: pa.Table) -> pa.Table:
    """Every order three times, each known a second later: its key and times are those of no other row."""
    again = replaced(rows, "delivered_at", pc.add(pc.cast(rows["delivered_at"], pa.int64()), 1_000_000))
    third = replaced(rows, "delivered_at", pc.add(pc.cast(rows["delivered_at"], pa.int64()), 2_000_000))
    return pa.concat_tables([rows, again, third])


def test_expectations_change_neither_contract_nor_tables(promising: Shop, project: Open) -> None:
    before = files(promising.state / "offline")
    assert apply(project(promising)).changes == []
    assert not build(project(promising))["customer_orders"].changed
    assert files(promising.state / "offline") == before
    assert quality(project(promising)).passed


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (cents_times(1000), "feature mean_amount_7d: 2,400 of 2,400 rows do not fit, first .* at customer=[0-9]+"),
        (stale, "view customer_orders: the latest event is at 2024-02-08 .*; expected fresh within 3 days"),
        (doubled, "view customer_orders: 7,200 rows; expected rows from 2000 to 5000"),
    ],
)  # fmt: skip
def test_a_build_that_breaks_a_promise_writes_nothing(
    promising: Shop, project: Open, fault: Callable[[pa.Table], pa.Table], sentence: str
) -> None:
    before = files(promising.state / "offline")
    change(promising, fault(order_rows()))
    with pytest.raises(GateFailed, match=sentence) as caught:
        build(project(promising), ["customer_orders", "customer_facts"])
    assert "nothing was written" in str(caught.value)
    assert files(promising.state / "offline") == before
    # What is not built does not stand in the way of what is.
    build(project(promising), ["customer_facts"])


def test_a_range_that_breaks_a_promise_says_which_days_were_not_written(promising: Shop, project: Open) -> None:
    """The steps before are there."""
    rows = order_rows()
    late = pc.greater(rows["ordered_at"].cast(pa.int64()), START + 45 * 24 * HOUR)
    change(promising, replaced(rows, "cents", pc.if_else(late, pc.multiply(rows["cents"], 1000), rows["cents"])))
    first = START // (24 * HOUR)
    with pytest.raises(GateFailed, match="of 2024-02-10 to 2024-03-01, nothing was written"):
        build_range(project(promising), ["customer_orders"], within=Days(first, first + 60), step=20)


def test_a_table_that_breaks_a_promise_is_not_served(promising: Shop, project: Open) -> None:
    """Every step of a range kept what each row must hold; there are too many rows all the same."""
    change(promising, doubled(order_rows()))
    first = START // (24 * HOUR)
    assert build_range(project(promising), ["customer_orders"], within=Days(first, first + 60))["customer_orders"].added
    with project(promising).redis() as url, connect(url) as client:
        before = {name: client.dump(name) for name in client.scan_iter()}
        sentence = "materialize: view customer_orders: 7,200 rows; expected rows from 2000 to 5000.*nothing was written"
        with pytest.raises(GateFailed, match=sentence):
            materialize(project(promising))
        assert {name: client.dump(name) for name in client.scan_iter()} == before
        assert len(before) > 0
    materialize(project(promising), ["shelf_demand", "customer_facts"])


def test_on_the_command_line(promising: Shop) -> None:
    change(promising, cents_times(1000)(order_rows()))
    done = run("build", "--json", cwd=promising.root)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"] == "GateFailed"
    assert "view customer_orders, feature mean_amount_7d" in done.stderr
    # The table is still the good one.
    done = run("features", "quality", "--json", "--html", "report.html", cwd=promising.root)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    text = (promising.root / "report.html").read_text()
    assert "customer_orders" in text
    assert "<script" not in text
    done = run("features", "quality", "customer_orders", cwd=promising.root)
    assert "mean_amount_7d" in done.stdout
    assert "holds" in done.stdout


def test_statistics_stand_beside_the_training_set(built: Shop, project: Open) -> None:
    opened = project(built)
    made = training_set(opened)
    kept = msgspec.json.decode((made.path / STATISTICS).read_bytes(), type=TrainingStatistics)
    assert (kept.training_set, kept.contract, kept.rows) == (made.id, made.contract, ORDERS)
    contract = opened.definitions.contract
    inputs = [*contract.inputs("late_order_server"), *contract.inputs("late_order_device")]
    assert list(kept.features) == list(dict.fromkeys(column.name for column in inputs))
    table = made.table()
    for name, one in kept.features.items():
        assert (one.rows, one.nulls) == (ORDERS, table[name].null_count)
    history: ViewHistory = OfflineStore(opened.offline).history(contract.views["customer_facts"])
    rows, features = measure(history.view.fields, read(history.table(), [field.name for field in history.view.fields]))
    facts = kept.views["customer_facts"]
    assert (facts.rows, facts.features) == (rows, features)
    assert (facts.contract, facts.fingerprint) == (history.view.hash, made.tables_sha256["customer_facts"])


def later(rows: int, change: Callable[[pa.Table], pa.Table] = lambda rows: rows) -> pa.Table:
    """The orders of two months, and as many again of two months more."""
    more = order_rows(rows, seed=7)
    for name in ("ordered_at", "delivered_at"):
        more = replaced(more, name, pc.add(pc.cast(more[name], pa.int64()), 60 * 24 * HOUR))
    return pa.concat_tables([order_rows(rows), change(more)])


def after(shop: Shop, project: Open, fault: Callable[[pa.Table], pa.Table]) -> QualityReport:
    training_set(project(shop))
    change(shop, later(ORDERS, fault))
    shop.replace("now = 2024-03-01", "now = 2024-04-30", "isthmus.toml")
    build(project(shop))
    return quality(project(shop))


def drifted(report: QualityReport) -> dict[str, tuple[str, ...]]:
    return {
        f"{view}.{feature}": one.exceeded
        for view, found in report.views.items()
        for against in found.drift
        for feature, one in against.features.items()
        if one.exceeded
    }


def test_more_of_the_same_is_no_drift(built: Shop, project: Open) -> None:
    report = after(built, project, lambda rows: rows)
    assert {name: found.drift[0].rows for name, found in report.views.items()} == {
        "customer_orders": 2400, "shelf_demand": 2400, "customer_facts": 0,
    }  # fmt: skip
    assert drifted(report) == {}
    require_quality(report)


@pytest.mark.accept
@pytest.mark.parametrize(
    ("fault", "feature"),
    [
        (cents_times(1000), "customer_orders.mean_amount_7d"),
        (flooded, "customer_orders.late_rate_7d"),
        (lambda rows: replaced(rows, "distance", pc.multiply(rows["distance"], 0.1)), "shelf_demand.distance"),
    ],
)
def test_a_planted_fault_is_found_and_named(
    built: Shop, project: Open, fault: Callable[[pa.Table], pa.Table], feature: str
) -> None:
    report = after(built, project, fault)
    assert list(drifted(report)) == [feature]
    name = feature.split(".")[1]
    with pytest.raises(GateFailed, match=f"feature {name}: .*after training set .* of late_order"):
        require_quality(report)
    headline = page(report).split("<h2>")[0]
    assert f"feature {name}: " in headline, "the page begins with what has drifted"
    assert "population stability index" in page(report)


def test_drift_stops_a_build_that_promises_none(promising: Shop, project: Open) -> None:
    promising.replace('        Expect.between("mean_amount_7d", 100, 9_000),\n', "")
    training_set(project(promising))
    before = files(promising.state / "offline")
    promising.replace("now = 2024-03-01", "now = 2024-04-30", "isthmus.toml")
    change(promising, later(ORDERS, cents_times(1000)))
    with pytest.raises(GateFailed, match=r"feature mean_amount_7d: psi .* of 2,400 rows after .*\(psi\) at most"):
        build(project(promising))
    assert files(promising.state / "offline") == before
    change(promising, later(ORDERS))
    assert build(project(promising))["customer_orders"].changed


def test_a_window_of_time(built: Shop, project: Open) -> None:
    training_set(project(built))
    opened = project(built)
    report = quality(opened, ["shelf_demand"], since=datetime(2024, 2, 1), until=datetime(2024, 2, 8))  # noqa: DTZ001 - UTC
    (against,) = report.views["shelf_demand"].drift
    orders = np.array(pc.cast(order_rows()["ordered_at"], pa.int64()))
    assert against.rows == int(((orders > against.after) & (orders <= (against.until or 0))).sum()) > 0
    with pytest.raises(RequestError, match="is not before"):
        quality(opened, since=datetime(2024, 2, 8), until=datetime(2024, 2, 1))  # noqa: DTZ001


def test_statistics_that_are_damaged_or_missing(built: Shop, project: Open) -> None:
    made = training_set(project(built))
    cut(made.path / STATISTICS)
    with pytest.raises(
        DataError, match=r"training set of late_order: its statistics cannot be read .*`isthmus features training-set`"
    ):
        quality(project(built))
    (made.path / STATISTICS).unlink()
    assert all(found.drift == [] for found in quality(project(built)).views.values())
    training_set(project(built))
    assert (made.path / STATISTICS).exists()


@pytest.mark.accept
def test_a_broken_promise_stops_dagster_before_the_online_store(promising: Shop, project: Open) -> None:
    """The table was good when it was written; a month later it is stale."""
    promising.replace("now = 2024-03-01", "now = 2024-04-01", "isthmus.toml")
    definitions = build_definitions(promising.root)
    keys = [dg.AssetKey(["online", name]) for name in VIEWS]
    job = dg.define_asset_job("online", dg.AssetSelection.assets(*keys) | dg.AssetSelection.checks(
        *(dg.AssetCheckKey(dg.AssetKey(["offline", name]), "meets_its_expectations") for name in VIEWS)))  # fmt: skip
    resolved = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("online")
    with dg.DagsterInstance.ephemeral() as instance:
        result = resolved.execute_in_process(instance=instance, raise_on_error=False)
    evaluations = {e.asset_key.path[-1]: e for e in result.get_asset_check_evaluations()}
    assert {name: e.passed for name, e in evaluations.items()} == {
        **dict.fromkeys(VIEWS, True),
        "customer_orders": False,
    }
    assert "the latest event is at" in str(evaluations["customer_orders"].metadata["found"].value)
    assert "| orders_7d | Int64 |" in str(evaluations["customer_orders"].metadata["statistics"].value)
    assert not result.success
    assert [e.asset_key for e in result.get_asset_materialization_events()] == []


def test_rows_may_be_a_dataset(promising: Shop, project: Open) -> None:
    opened = project(promising)
    data = OfflineStore(opened.offline).history(opened.definitions.contract.views["customer_orders"]).data
    gate.require(gate.findings(opened, "customer_orders", data))
