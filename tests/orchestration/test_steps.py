"""The steps on a real project: Sail, Delta tables, the embedded Redis, Feast's registry."""

import hashlib
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from isthmus import ConfigurationError, ContractMismatch, DataError, DependencyError, GateFailed, RequestError
from isthmus.features import clock
from isthmus.features.embedded import EmbeddedRedis
from isthmus.features.offline import OfflineStore
from isthmus.features.online import connect
from isthmus.features.pointintime import join_naively
from isthmus.orchestration.materialization import materialize
from isthmus.orchestration.project import Project
from isthmus.orchestration.registration import apply
from isthmus.orchestration.tables import build
from isthmus.orchestration.trainingset import last_training_set, training_set
from isthmus.orchestration.verification import require_passed, verify
from tests.orchestration.shop import HOUR, Shop, order_rows

Open = Callable[[Shop], Project]
VIEWS = ["customer_orders", "shelf_demand", "customer_facts"]


def files(folder: Path) -> dict[str, str]:
    """Every file of a folder, with the hash of its bytes."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


# --- apply


def registry(shop: Shop) -> dict[str, list[str]]:
    """What Feast's own SDK reads, with nothing of ours between."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from feast import FeatureStore

        store = FeatureStore(repo_path=str(shop.state / "feast"))
        views = store.list_feature_views()
        return {
            "entities": sorted(entity.name for entity in store.list_entities()),
            "views": sorted(view.name for view in views),
            "services": sorted(service.name for service in store.list_feature_services()),
            "fields": sorted(f"{view.name}.{field.name}:{field.dtype}" for view in views for field in view.features),
            "keys": sorted(
                f"{view.name}.{field.name}:{field.dtype}" for view in views for field in view.entity_columns
            ),
            "ttl": sorted(f"{view.name}:{view.ttl}" for view in views),
            "contract": sorted(view.tags["isthmus.contract"] for view in views),
        }


def test_apply_registers_what_is_declared(built: Shop, project: Open) -> None:
    found = registry(built)
    assert found["entities"] == ["customer", "product", "store"]
    assert found["views"] == sorted(VIEWS)
    assert found["services"] == ["late_order_device", "late_order_server"]
    assert "customer_orders.late_rate_7d:Float32" in found["fields"]
    assert "customer_facts.token:Bytes" in found["fields"]
    assert found["keys"] == [
        "customer_facts.customer:Int64",
        "customer_orders.customer:Int64",
        "shelf_demand.product:Int32",
        "shelf_demand.store:String",
    ]
    assert found["ttl"] == ["customer_facts:0:00:00", "customer_orders:7 days, 0:00:00", "shelf_demand:3 days, 0:00:00"]
    views = project(built).definitions.contract.views.values()
    assert found["contract"] == sorted(view.hash for view in views)


def test_apply_again_changes_nothing(built: Shop, project: Open) -> None:
    contract = (built.state / "contract.json").read_bytes()
    before = registry(built)
    applied = apply(project(built))
    assert applied.changes == []
    assert (built.state / "contract.json").read_bytes() == contract
    assert registry(built) == before


def test_apply_removes_what_is_gone(built: Shop, project: Open) -> None:
    built.replace('    features=[customer_orders, shelf_demand, customer_facts[["member", "born"]], basket],\n',
                  "    features=[customer_orders, shelf_demand, basket],\n")  # fmt: skip
    text = built.definitions.read_text()
    begin, end = text.index("@transform(\n    entities=[customer],\n    sources=[customers]"), text.index("basket = ")
    built.definitions.write_text(text[:begin] + text[end:])
    applied = apply(project(built))
    assert "view customer_facts is gone" in applied.changes
    assert registry(built)["views"] == ["customer_orders", "shelf_demand"]


def test_apply_over_a_registry_that_is_none(built: Shop, project: Open) -> None:
    (built.state / "feast" / "registry.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(DependencyError, match=r"apply: Feast's registry in .*feast cannot be used \(.*not a database"):
        apply(project(built))


def test_a_failed_apply_leaves_the_contract(built: Shop, project: Open) -> None:
    before = files(built.state)
    built.replace("ttl=timedelta(days=3)", "ttl=timedelta(days=-3)")
    with pytest.raises(ConfigurationError):
        apply(project(built))
    assert files(built.state) == before


def test_nothing_goes_without_apply(shop: Shop, project: Open) -> None:
    for step in (build, materialize, training_set, verify):
        with pytest.raises(ContractMismatch, match=r"project shop: nothing has been applied. Run `isthmus apply`"):
            step(project(shop))
    assert not shop.state.exists()


def test_nothing_goes_after_an_edit_without_apply(built: Shop, project: Open) -> None:
    before = files(built.state)
    built.replace("SLOW = 60", "SLOW = 61")
    for step in (build, materialize, training_set, verify):
        with pytest.raises(
            ContractMismatch, match=r"have changed since the last apply \(view shelf_demand changed: code"
        ):
            step(project(built))
    assert files(built.state) == before


def test_a_contract_that_was_altered(built: Shop, project: Open) -> None:
    built.replace('"ttl": 259200000000', '"ttl": 259200000001', ".isthmus/contract.json")
    with pytest.raises(ContractMismatch, match=r"contract.json: its content has hash .*Run `isthmus apply`"):
        build(project(built))


# --- build


def test_a_second_build_leaves_the_same_bytes(built: Shop, project: Open) -> None:
    before = files(built.state / "offline")
    again = build(project(built))
    assert {name: (done.added, done.changed) for name, done in again.items()} == dict.fromkeys(VIEWS, (0, False))
    assert files(built.state / "offline") == before


def test_two_builds_from_nothing_are_equal(built: Shop, project: Open) -> None:
    def data() -> dict[str, list[str]]:
        names = files(built.state / "offline").items()
        return {
            view: sorted(sha for name, sha in names if name.startswith(view) and "_delta_log" not in name)
            for view in VIEWS
        }

    first = data()
    shutil.rmtree(built.state / "offline")
    build(project(built))
    assert data() == first


def test_new_rows_are_added(built: Shop, project: Open) -> None:
    orders = pq.read_table(built.orders)
    later = pa.array([max(orders["ordered_at"].to_pylist())], orders.schema.field("ordered_at").type)
    row = orders.slice(0, 1).set_column(3, "ordered_at", later).set_column(4, "delivered_at", later)
    pq.write_table(pa.concat_tables([orders, row]), built.orders)
    done = build(project(built))
    assert {name: (w.added, w.version) for name, w in done.items()} == {
        "customer_orders": (1, 1), "shelf_demand": (1, 1), "customer_facts": (0, 0),
    }  # fmt: skip


def test_one_view_alone(built: Shop, project: Open) -> None:
    assert list(build(project(built), ["shelf_demand"])) == ["shelf_demand"]
    with pytest.raises(
        RequestError, match="view 'demand': is not declared; expected one of customer_orders, shelf_demand"
    ):
        build(project(built), ["shelf_demand", "demand"])


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ('"city",\n        "member"', '"member"', "has no column 'city'"),
        ('F.col("born").cast("int")', 'F.col("born")', "column 'born' has type bigint; expected int, because"),
        ('return customers.select(', 'return customers.union(customers).select(', "50 rows have the key and times of"),
        ('return customers.select(', 'return customers.where("born < 0").select(', "returned no row"),
        ('return customers.select(', 'return customers.replace(0, None, "customer").select(', "customer is null in 1"),
        ('return customers.select(', 'return customers.selekt(', "failed in line .*selekt"),
        ('path="data/customers.csv"', 'path="data/none.csv"', "source customers: there is no .*none.csv"),
    ],
)  # fmt: skip
def test_a_bad_view_keeps_all_tables_as_they_were(
    built: Shop, project: Open, good: str, bad: str, message: str
) -> None:
    built.replace(good, bad)
    built.replace("SLOW = 60", "SLOW = 61")
    (built.state / "contract.json").write_bytes(project(built).definitions.contract.dumps())
    before = files(built.state / "offline")
    with pytest.raises((ConfigurationError, DataError), match=message):
        build(project(built))
    assert files(built.state / "offline") == before


def data_file(shop: Shop, view: str) -> Path:
    (file,) = (shop.state / "offline" / view).glob("*.parquet")
    return file


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_half_written_table(built: Shop, project: Open, damage: Callable[[Path], None]) -> None:
    damage(data_file(built, "shelf_demand"))
    table = built.state / "offline" / "shelf_demand"
    for step in (materialize, training_set, verify):
        with pytest.raises(
            DataError, match=rf"offline table of shelf_demand: {table} cannot be read .*`isthmus build`"
        ):
            step(project(built))
    shutil.rmtree(table)
    build(project(built))
    require_passed(verify(project(built)))


def test_a_commit_that_was_never_finished(built: Shop, project: Open) -> None:
    """A killed writer leaves a data file that no commit names: nobody reads it."""
    file = data_file(built, "shelf_demand")
    shutil.copy(file, file.with_name("part-00000-left-behind.snappy.parquet"))
    assert not build(project(built))["shelf_demand"].changed
    require_passed(verify(project(built), every=True))


def test_a_table_of_another_contract(built: Shop, project: Open) -> None:
    built.replace("SLOW = 60", "SLOW = 61")
    apply(project(built))
    for step in (materialize, training_set, verify):
        with pytest.raises(ContractMismatch, match=r"offline table of shelf_demand: built under .*Run `isthmus build`"):
            step(project(built))
    build(project(built))
    materialize(project(built))
    assert verify(project(built), every=True).passed


# --- materialize


def test_a_second_materialization_writes_nothing(built: Shop, project: Open) -> None:
    again = materialize(project(built))
    assert {name: (m.changed, m.written) for name, m in again.items()} == dict.fromkeys(VIEWS, (0, 0))
    assert {name: m.compared for name, m in again.items()} == {
        "customer_orders": 60, "shelf_demand": 60, "customer_facts": 50,
    }  # fmt: skip


def test_expired_rows_are_counted(built: Shop, project: Open) -> None:
    built.replace("2024-03-01T00:00:00Z", "2025-03-01T00:00:00Z", "isthmus.toml")
    counts = materialize(project(built))
    assert {name: m.expired for name, m in counts.items()} == {
        "customer_orders": 60, "shelf_demand": 60, "customer_facts": 0,
    }  # fmt: skip


def test_what_is_not_known_yet_is_not_served(built: Shop, project: Open) -> None:
    shutil.rmtree(built.state / "redis")
    built.replace("2024-03-01T00:00:00Z", "2024-01-01T12:00:00Z", "isthmus.toml")
    at = clock.micros(project(built).settings.project.now)  # type: ignore[arg-type]  # the line above sets it
    known = order_rows().filter(pa.compute.less_equal(order_rows()["delivered_at"].cast(pa.int64()), at))
    expected = len(set(known["customer"].to_pylist()))
    assert 0 < expected < 60
    assert materialize(project(built))["customer_orders"].written == expected
    require_passed(verify(project(built), every=True))


def test_redis_unreachable(built: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_STORES__ONLINE", "redis://user:secret@127.0.0.1:1")
    for step in (materialize, verify):
        started = time.monotonic()
        with pytest.raises(
            DependencyError, match=r"Redis at redis://127.0.0.1:1: does not answer .*stores.online"
        ) as caught:
            step(project(built))
        assert time.monotonic() - started < 10
        assert "secret" not in str(caught.value)


# --- training-set


def test_a_training_set_is_what_the_oracle_says(built: Shop, project: Open) -> None:
    orders = pq.read_table(built.orders)
    pq.write_table(pa.concat_tables([orders, orders.slice(700, 9)]), built.orders)
    opened = project(built)
    # The surplus rows are questions asked twice; the views would refuse them, so they are not built again.
    made = training_set(opened)
    table = made.table()
    assert (made.rows_in, made.rows_out, len(table)) == (2409, 2409, 2409)
    spine = table.select([name for name in table.column_names if "__" not in name])
    assert spine["event_timestamp"].to_pylist() == sorted(spine["event_timestamp"].to_pylist())
    assert sorted(spine["event_timestamp"].to_pylist()) == sorted(pq.read_table(built.orders)["ordered_at"].to_pylist())
    offline = OfflineStore(opened.offline)
    for view in opened.definitions.contract.views.values():
        expected = join_naively(spine, offline.history(view))
        for name in expected.column_names[len(spine.column_names) :]:
            assert table[name].to_pylist() == expected[name].to_pylist()
    statuses = {status for view in VIEWS for status in table[f"{view}__status"].to_pylist()}
    assert statuses == {"present", "null", "expired", "not_found"}


def test_a_training_set_is_made_once(built: Shop, project: Open) -> None:
    first = training_set(project(built))
    before = files(built.state / "training")
    second = training_set(project(built))
    assert second == first
    assert files(built.state / "training") == before
    assert first.tables == dict.fromkeys(VIEWS, 0)
    folder = built.state / "training" / "late_order"
    assert (folder / "latest").read_text() == first.id
    opened = project(built)
    assert last_training_set(opened, opened.definitions.distillations["late_order"]) == first


def test_a_table_built_anew_from_other_data_makes_another_training_set(built: Shop, project: Open) -> None:
    first = training_set(project(built))
    customers = built.root / "data" / "customers.csv"
    customers.write_text(customers.read_text().replace("1951", "1851"))
    shutil.rmtree(built.state / "offline" / "customer_facts")
    build(project(built))
    second = training_set(project(built))
    assert second.tables == first.tables
    assert second.id != first.id
    assert second.table()["customer_facts__born"].to_pylist().count(1851) > 0


def test_a_moved_project_keeps_its_training_set(built: Shop, project: Open, tmp_path: Path) -> None:
    training_set(project(built))
    moved = Shop(built.root.rename(tmp_path / "elsewhere"))
    opened = project(moved)
    found = last_training_set(opened, opened.definitions.distillations["late_order"])
    assert found.path.is_relative_to(moved.root)
    assert len(found.table()) == 2400


def test_a_training_set_that_is_damaged(built: Shop, project: Open) -> None:
    made = training_set(project(built))
    cut(made.path / "data.parquet")
    with pytest.raises(DataError, match=rf"training set {made.id}: .*cannot be read .*Remove {made.path} and run"):
        made.table()
    (made.path / "record.json").write_text("{}")
    opened = project(built)
    with pytest.raises(
        DataError, match=r"training set of late_order: its record cannot be read .*Run `isthmus training-set`"
    ):
        last_training_set(opened, opened.definitions.distillations["late_order"])


def test_unknown_distillation(built: Shop, project: Open) -> None:
    with pytest.raises(RequestError, match="distillation: 'early' is not declared; expected one of late_order"):
        training_set(project(built), "early")


# --- verify


def test_verify_passes_on_every_key(built: Shop, project: Open) -> None:
    verdict = verify(project(built), every=True)
    assert (verdict.passed, verdict.differing) == (True, 0)
    assert verdict.compared == 60 * 4 + 60 * 3 + 50 * 6
    assert (built.state / "verdicts" / "late_order.json").exists()
    require_passed(verdict)


def failed(shop: Shop, project: Open) -> dict[str, int]:
    """What `verify` finds to differ; it must refuse."""
    verdict = verify(project(shop), every=True)
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
    assert set(found) <= {"shelf_demand.status", "shelf_demand.sold_1d", "shelf_demand.distance"}


def test_verify_names_an_offline_row_that_was_altered(built: Shop, project: Open) -> None:
    path = built.state / "offline" / "customer_facts"
    table = DeltaTable(path)
    commit = {key: value for key, value in table.history(1)[0].items() if key.startswith("isthmus.")}
    rows = pa.table(table.to_pyarrow_table())
    born = rows["born"].to_pylist()
    born[1] += 1
    rows = rows.set_column(
        rows.column_names.index("born"), rows.schema.field("born"), pa.chunked_array([born], pa.int32())
    )
    write_deltalake(path, rows, mode="overwrite", commit_properties=CommitProperties(custom_metadata=commit))
    assert failed(built, project) == {"customer_facts.born": 1}


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
