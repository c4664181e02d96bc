"""The verdict over a real project: every way in which the two sides can differ is found and named."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from isthmus import DataError, GateFailed
from isthmus.features import clock
from isthmus.features.columns import from_python
from isthmus.features.connection import connect
from isthmus.features.embedded import EmbeddedRedis
from isthmus.features.online import OnlineStore
from isthmus.orchestration.materialization import materialize
from isthmus.orchestration.registration import apply
from isthmus.orchestration.tables import build
from isthmus.orchestration.verification import require_passed, verify
from tests.orchestration.shop import HOUR, Open, Shop


def test_verify_passes_on_every_key(built: Shop, project: Open) -> None:
    verdict = verify(project(built), every=True)
    assert (verdict.passed, verdict.differing) == (True, 0)
    assert verdict.compared == 60 * 5 + 60 * 4 + 50 * 9
    assert (built.state / "verdicts" / "late_order.json").exists()
    require_passed(verdict)


_TICKETS = """
ticket = Entity("ticket", join_keys={"opened": UnixTimestamp, "token": Bytes, "late_one": Bool})


@transform(entities=[ticket], sources=[orders], schema=[Field("sums", Array(Int64))])
def tickets(orders: DataFrame) -> DataFrame:
    token = F.col("store").cast("binary").alias("token")
    late = (F.col("late") > 0).alias("late_one")
    times = ["ordered_at", "delivered_at"]
    sums = F.array("cents", "late").alias("sums")
    return orders.select(F.col("ordered_at").alias("opened"), token, late, *times, sums)
"""


def test_times_bytes_and_truth_values_are_keys_from_raw_data_to_verdict(shop: Shop, project: Open) -> None:
    shop.append(_TICKETS)
    apply(project(shop))
    build(project(shop))
    materialize(project(shop))
    assert materialize(project(shop))["tickets"].written == 0
    verdict = verify(project(shop), every=True)
    assert verdict.passed
    rows = len(pq.read_table(shop.orders))
    assert verdict.views["tickets"]["sums"].compared == rows
    with EmbeddedRedis(shop.state / "redis") as server, connect(server.url) as client:
        client.hdel(sorted(client.keys("shop:late_one,opened,token:*"))[0], "tickets")
    assert failed(shop, project) == {f"tickets.{name}": 1 for name in ("sums", "status", "event_timestamp")}


def failed(shop: Shop, project: Open, *, every: bool = True) -> dict[str, int]:
    """What `verify` finds to differ; it must refuse."""
    verdict = verify(project(shop), every=every)
    with pytest.raises(
        GateFailed, match=rf"verdict: {verdict.differing} of {verdict.compared} values differ: "
    ) as caught:
        require_passed(verdict)
    assert caught.value.exit_code == 1
    found = {
        f"{view}.{feature}": result.differing
        for view, features in verdict.views.items()
        for feature, result in features.items()
        if result.differing
    }
    assert all(name in str(caught.value) for name in list(found)[:5])
    return found


def test_verify_names_an_online_value_that_was_altered(built: Shop, project: Open) -> None:
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        key = sorted(client.keys("shop:customer:*"))[0]
        row = bytearray(client.hget(key, "customer_orders"))
        row[-1] ^= 1
        client.hset(key, "customer_orders", bytes(row))
    assert failed(built, project) == {"customer_orders.late_rate_7d": 1}


def test_verify_names_an_online_row_that_is_gone(built: Shop, project: Open) -> None:
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        client.hdel(sorted(client.keys("shop:product,store:*"))[0], "shelf_demand")
    found = failed(built, project)
    assert found["shelf_demand.status"] == 1
    assert set(found) <= {f"shelf_demand.{name}" for name in ("status", "event_timestamp", "sold_1d", "distance")}


def alter_born(shop: Shop) -> None:
    """Changes one value of the table of customers and leaves its hashes and its commit as they were."""
    path = shop.state / "offline" / "customer_facts"
    table = DeltaTable(path)
    commit = {key: value for key, value in table.history(1)[0].items() if key.startswith("isthmus.")}
    rows = pa.table(table.to_pyarrow_table())
    born = rows["born"].to_pylist()
    place = next(n for n, year in enumerate(born) if year is not None)
    born[place] += 1
    rows = rows.set_column(
        rows.column_names.index("born"), rows.schema.field("born"), pa.chunked_array([born], pa.int32())
    )
    write_deltalake(path, rows, mode="overwrite", commit_properties=CommitProperties(custom_metadata=commit))


def test_verify_names_an_offline_row_that_was_altered(built: Shop, project: Open) -> None:
    alter_born(built)
    assert failed(built, project, every=False) == {"customer_facts.born": 1}


def test_verify_finds_an_offline_row_whose_content_is_not_what_was_written(built: Shop, project: Open) -> None:
    alter_born(built)
    with pytest.raises(DataError, match=r"customer_facts: .*\(1 of 50 rows are not what was written\)"):
        verify(project(built), every=True)


def test_a_pushed_row_is_left_out_until_the_table_has_caught_up(built: Shop, project: Open) -> None:
    contract, now = project(built).applied(), project(built).now()
    view = contract.view("customer_orders")
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        values = {"orders_7d": 99, "mean_amount_7d": 0.5, "late_rate_7d": 0.5}
        pushed = {c.name: from_python([values.get(c.name)], c.dtype) for c in view.fields}
        at = np.array([now])
        counts = OnlineStore(client, contract).write(view, {"customer": [0]}, at, at, pushed)
        assert counts.written == 1
        verdict = verify(project(built), every=True)
        assert verdict.ahead == {"customer_orders": 1, "shelf_demand": 0, "customer_facts": 0}
        assert require_passed(verdict).views["customer_orders"]["orders_7d"].compared == 59
        key = sorted(client.keys("shop:customer:*"))[5]
        client.hdel(key, "customer_orders")
    assert failed(built, project)["customer_orders.status"] == 1


def test_a_row_from_the_future_hides_nothing(built: Shop, project: Open) -> None:
    contract, later = project(built).applied(), np.array([project(built).now() + HOUR])
    view = contract.view("customer_orders")
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        nothing = {c.name: from_python([None], c.dtype) for c in view.fields}
        OnlineStore(client, contract).write(view, {"customer": [0]}, later, later, nothing)
    assert failed(built, project)["customer_orders.status"] == 1


def test_materialize_decides_until_what_the_whole_history_knows(built: Shop, project: Open) -> None:
    """The row that became known last may have been superseded before: the table knows of its time all the same."""
    orders, now = pq.read_table(built.orders), project(built).now()
    landed = pa.array([now - 1_000_000], pa.int64()).cast(orders.schema.field("delivered_at").type)
    late = orders.slice(0, 1).set_column(4, "delivered_at", landed)
    pq.write_table(pa.concat_tables([late, orders.slice(1)]), built.orders)
    build(project(built))
    contract, known = project(built).applied(), np.array([now - 2_000_000])
    view = contract.view("customer_orders")
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        nothing = {c.name: from_python([None], c.dtype) for c in view.fields}
        OnlineStore(client, contract).write(view, {"customer": [1_000_003]}, known, known, nothing)
        materialize(project(built))
    verdict = require_passed(verify(project(built), every=True))
    assert set(verdict.ahead.values()) == {0}


def test_verify_finds_a_key_that_only_redis_has(built: Shop, project: Open) -> None:
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        key = sorted(client.keys("shop:customer:*"))[0]
        client.hset(key[:-8] + b"\x07" * 8, "customer_facts", client.hget(key, "customer_facts"))
    found = failed(built, project)
    assert found["customer_facts.status"] == 1


def test_verify_sees_that_redis_is_behind_the_tables(built: Shop, project: Open) -> None:
    orders = pq.read_table(built.orders)
    last = orders.slice(len(orders) - 1)
    later = pa.array(
        [clock.moment(clock.micros(last["ordered_at"][0].as_py()) + HOUR)], orders.schema.field("ordered_at").type
    )
    more = last.set_column(3, "ordered_at", later).set_column(4, "delivered_at", later)
    pq.write_table(pa.concat_tables([orders, more]), built.orders)
    build(project(built))
    found = failed(built, project)
    assert found["customer_orders.orders_7d"] == 1
    materialize(project(built))
    require_passed(verify(project(built), every=True))


def test_a_verdict_is_of_the_contract(built: Shop, project: Open) -> None:
    verdict = verify(project(built))
    assert verdict.contract == project(built).definitions.contract.hash
    assert verdict.at == project(built).now()
