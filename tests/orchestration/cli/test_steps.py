"""The steps on a real project: Sail, Delta tables, the embedded Redis, Feast's registry."""

import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from isthmus import ConfigurationError, ContractMismatch, DataError, DependencyError, RequestError
from isthmus.features import clock
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.frames import view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.scaffold import init
from isthmus.orchestration.server.serve import address, serving
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import require_passed, verify
from tests.orchestration.shop import VIEWS, Open, Shop, cut, data_file, files, order_rows
from tests.orchestration.verification.test_verification import failed
from tests.servers import free_port, redis_cluster, redis_server

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
    assert "customer_facts.trips:Array(Float64)" in found["fields"]
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


def test_apply_registers_again_what_somebody_else_has_changed(built: Shop, project: Open) -> None:
    first = apply(project(built)).registered
    note = built.state / "feast" / "registered.json"
    assert json.loads(note.read_bytes())["objects"] == first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from feast import FeatureStore

        FeatureStore(repo_path=str(built.state / "feast")).delete_feature_service("late_order_device")
    assert apply(project(built)).registered == first
    assert "late_order_device" in registry(built)["services"]
    built.replace('description="What a phone has"', 'description="What a phone knows"')
    apply(project(built))
    assert b"What a phone knows" in (built.state / "feast" / "registry.pb").read_bytes()
    note.write_text("damaged")
    assert apply(project(built)).registered == first


def test_a_copied_project_has_a_registry_of_its_own(built: Shop, project: Open) -> None:
    before = registry(built)
    copied = Shop(shutil.copytree(built.root, built.root.with_name("copied")))
    shutil.rmtree(built.root)
    assert registry(copied) == before
    assert str(built.root) not in (copied.state / "feast" / "feature_store.yaml").read_text()
    spine = pd.DataFrame({"customer": [1], "event_timestamp": [datetime(2024, 5, 20, tzinfo=UTC)]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from feast import FeatureStore

        store = FeatureStore(repo_path=str(copied.state / "feast"))
        found = store.get_historical_features(spine, ["customer_facts:member"]).to_df()
    assert len(found) == 1
    # Feast's own offline stores read the path in the registry, which is right after an apply.
    apply(project(copied))
    assert str(copied.root).encode() in (copied.state / "feast" / "registry.pb").read_bytes()


@pytest.mark.accept
def test_a_client_with_feast_alone_looks_values_up(built: Shop, project: Open) -> None:
    opened = project(built)
    apply(opened)
    script = (
        "import json, sys\n"
        "sys.modules['isthmus'] = None\n"
        "from feast import FeatureStore\n"
        "store = FeatureStore(sys.argv[1])\n"
        "found = store.get_online_features(['customer_facts:member'], [{'customer': 1}, {'customer': -1}])\n"
        "print(json.dumps(found.to_dict()))\n"
    )
    with serving(opened, port=free_port()):
        command = [sys.executable, "-W", "ignore", "-c", script, str(opened.state / "feast" / "client")]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["customer"] == [1, -1]
    assert found["member"][1] is None
    assert "isthmus" not in (opened.state / "feast" / "client" / "feature_store.yaml").read_text()


def test_feast_is_shown_the_port_of_the_server(built: Shop, project: Open) -> None:
    """That of the settings, until a server is started at another one."""
    file, opened = built.state / "feast" / "feature_store.yaml", project(built)
    assert address(opened) in file.read_text()
    port = free_port()
    with serving(opened, port=port):
        assert f"  path: http://127.0.0.1:{port}\n" in file.read_text()
        built.replace('description="What a phone has"', 'description="What a phone knows"')
        apply(project(built))
        assert f"  path: http://127.0.0.1:{port}\n" in file.read_text()
    (built.root / "isthmus.toml").write_text(
        (built.root / "isthmus.toml").read_text() + f"\n[server]\nhost = '0.0.0.0'\nport = {port + 1}\n"
    )
    apply(project(built))
    assert f"  path: http://127.0.0.1:{port + 1}\n" in file.read_text()


@pytest.mark.accept
def test_apply_of_what_is_registered_does_not_load_feast(built: Shop, project: Open) -> None:
    apply(project(built))
    code = (
        "import sys; from pathlib import Path\n"
        "from isthmus.orchestration.apply.apply import apply\n"
        "from isthmus.orchestration.project import Project\n"
        f"print(len(apply(Project(Path({str(built.root)!r}))).registered), 'feast' in sys.modules)\n"
        "import isthmus.features.feast.registry\n"
        "from feast.online_response import get_torch\n"
        "print('torch' in sys.modules, get_torch().__name__)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["False", "False", "torch"], done.stderr


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
    (built.state / "feast" / "registry.pb").write_bytes(b"this is no registry" * 100)
    with pytest.raises(DependencyError, match=r"apply: Feast's registry in .*feast is damaged \(.*pars"):
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
            ContractMismatch, match=r"have changed since the last apply \(view shelf_demand: its code changed"
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


def test_a_project_of_one_view_is_no_choice(tmp_path: Path) -> None:
    init(tmp_path / "one")
    with pytest.raises(
        RequestError, match=r"view 'habit': is not declared \(did you mean habits\?\); expected habits$"
    ):
        view_names(Project(tmp_path / "one"), ["habit"])


def test_one_view_alone(built: Shop, project: Open) -> None:
    assert list(build(project(built), ["shelf_demand"])) == ["shelf_demand"]
    with pytest.raises(
        RequestError,
        match=r"view 'demand': is not declared .*; expected one of customer_facts, customer_orders, s",
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
        ('path="data/customers.csv"', 'path="data/none.csv"', "source customers: .*none.csv not found"),
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


@pytest.mark.accept
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


def test_a_damaged_table_is_found_before_another_one_is_written(built: Shop, project: Open) -> None:
    pq.write_table(order_rows(1200), built.orders)
    cut(data_file(built, "customer_facts"))
    before = files(built.state / "offline")
    with pytest.raises(DataError, match=r"offline table of customer_facts: .* cannot be read"):
        build(project(built))
    assert files(built.state / "offline") == before


def test_a_commit_that_was_never_finished(built: Shop, project: Open) -> None:
    """A killed writer leaves a data file that no commit names: nobody reads it."""
    file = data_file(built, "shelf_demand")
    shutil.copy(file, file.with_name("part-00000-left-behind.snappy.parquet"))
    assert not build(project(built))["shelf_demand"].changed
    require_passed(verify(project(built), all_keys=True))


@pytest.mark.accept
def test_a_table_of_another_contract(built: Shop, project: Open) -> None:
    built.replace("SLOW = 60", "SLOW = 61")
    apply(project(built))
    for step in (materialize, training_set, verify):
        with pytest.raises(ContractMismatch, match=r"offline table of shelf_demand: built under .*Run `isthmus build`"):
            step(project(built))
    build(project(built))
    materialize(project(built))
    assert verify(project(built), all_keys=True).passed


# --- materialize


def test_a_second_materialization_writes_nothing(built: Shop, project: Open) -> None:
    again = materialize(project(built))
    assert {name: (m.changed, m.written) for name, m in again.items()} == dict.fromkeys(VIEWS, (0, 0))
    assert {name: m.compared for name, m in again.items()} == {
        "customer_orders": 60, "shelf_demand": 60, "customer_facts": 50,
    }  # fmt: skip


@pytest.mark.accept
def test_a_cluster_holds_what_one_redis_holds(
    built: Shop, project: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_cluster(tmp_path / "cluster") as ports:
        monkeypatch.setenv("ISTHMUS_STORES__ONLINE", f"redis+cluster://127.0.0.1:{ports[1]}")
        first, second = materialize(project(built)), materialize(project(built))
        assert {name: m.written for name, m in first.items()} == {name: m.compared for name, m in second.items()}
        assert {m.written for m in second.values()} == {0}
        require_passed(verify(project(built), all_keys=True))
        without_customer(built, order_rows()["customer"][5].as_py())
        build(project(built))
        assert materialize(project(built))["customer_orders"].removed == 1


def test_a_redis_that_is_started_again_in_the_middle_is_noticed(
    built: Shop, project: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("ISTHMUS_STORES__ONLINE", f"redis://:hunter2@127.0.0.1:{port}")

    def server() -> AbstractContextManager[Any]:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", "hunter2"]
        return redis_server(tmp_path / "own", *arguments, client=redis.Redis(port=port, password="hunter2"))  # noqa: S106

    with ExitStack() as second:
        first = ExitStack()
        first.enter_context(server())

        def restart(step: str, share: float) -> None:
            if 0 < share < 0.5:
                first.close()
                second.enter_context(server())

        with pytest.raises(DependencyError, match="was restarted") as caught:
            materialize(project(built), progress=restart)
        assert "hunter2" not in str(caught.value)
        materialize(project(built))
        require_passed(verify(project(built), all_keys=True))


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
    require_passed(verify(project(built), all_keys=True))


def without_customer(shop: Shop, number: int) -> None:
    """One customer's orders are gone from the source."""
    orders = pq.read_table(shop.orders)
    pq.write_table(orders.filter(pa.compute.not_equal(orders["customer"], number)), shop.orders)


@pytest.mark.accept
@pytest.mark.parametrize("which", ["any", pytest.param("last", marks=pytest.mark.accept)])
def test_a_key_that_is_gone_is_not_served(built: Shop, project: Open, which: str) -> None:
    orders = order_rows()
    # Of the customer with the latest arrival, no row of the table is newer than what Redis has.
    row = 5 if which == "any" else pa.compute.index(orders["delivered_at"], pa.compute.max(orders["delivered_at"]))
    without_customer(built, orders["customer"][int(str(row))].as_py())
    build(project(built))
    assert failed(built, project)["customer_orders.status"] == 1
    counts = materialize(project(built))
    assert {name: m.removed for name, m in counts.items()} == {**dict.fromkeys(VIEWS, 0), "customer_orders": 1}
    require_passed(verify(project(built), all_keys=True))
    assert {m.removed for m in materialize(project(built)).values()} == {0}


@pytest.mark.accept
def test_a_key_that_is_gone_under_a_new_contract_is_not_served(built: Shop, project: Open) -> None:
    without_customer(built, order_rows()["customer"][5].as_py())
    built.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=8)")
    apply(project(built))
    build(project(built))
    counts = materialize(project(built))["customer_orders"]
    assert (counts.written, counts.removed) == (59, 0), "in a place of its own"
    require_passed(verify(project(built), all_keys=True))


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
