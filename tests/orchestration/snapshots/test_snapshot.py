"""`snapshot`: the rows that devices keep are those of the online store, and no others."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from isthmus.features.errors import ConfigurationError, DataError, GateFailed, RequestError
from isthmus.features.online.plan import LookupPlan
from isthmus.features.progress import silent
from isthmus.features.redis.connection import connect
from isthmus.features.values.entitykey import decode_values
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.cli.cli import app
from isthmus.orchestration.graph.outline import compile_outline
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.create import copy, newly_disclosed_features, signer, snapshot, snapshot_folder
from isthmus.orchestration.steps.step import NodeMaterialization, StepRequest
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.package.snapshot.delta import apply_delta
from isthmus.package.snapshot.file import read_snapshot, to_online_row
from isthmus.package.snapshot.owners import open_owners
from isthmus.package.snapshot.selection import device_manifest as device_of
from isthmus.package.snapshot.selection import kept_views
from isthmus.package.snapshot.signature import require_sealed
from isthmus.package.snapshot.store import LATEST
from tests.orchestration.shop import Shop, with_device, with_moment, with_owner, write

SERVICE = "late_order_device"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept") / "shop"
    with_device(with_moment(write(root)))
    for step in (apply, build, materialize):
        step(Project(root))
    return root


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Project:
    """The shop, built and materialized, with a service that devices keep."""
    return Project(shutil.copytree(made, tmp_path / "kept"))


@pytest.fixture(scope="module")
def made_of_owners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("owned") / "shop"
    with_owner(with_device(with_moment(write(root))))
    for step in (apply, build, materialize):
        step(Project(root))
    return root


@pytest.fixture
def owned(made_of_owners: Path, tmp_path: Path) -> Project:
    """The same with a service of which each customer's device keeps that customer's orders."""
    return Project(shutil.copytree(made_of_owners, tmp_path / "owned"))


def _rows(project: Project, data: bytes) -> dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]:
    """View to key to times and values, as a snapshot has them."""
    views = kept_views(project.applied(), SERVICE)
    file = read_snapshot(data, views)
    require_sealed(file, signer(project).public_key)
    found: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = {}
    for view in views:
        rows = file.rows[view.name]
        block = RowCodec(view).decode([to_online_row(row, view) for row in rows.values()])
        columns = [block.columns[column.name].tolist(column.dtype) for column in view.fields]
        values = zip(block.event.tolist(), block.known.tolist(), *columns, strict=True)
        found[view.name] = dict(zip(map(decode_values, rows), values, strict=True))
    return found


def _online(project: Project, keys: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The same from Redis."""
    plan = LookupPlan(project.applied(), ["shelf_demand"])
    asked = {"product": [key[0] for key in keys], "store": [key[1] for key in keys]}
    with project.redis() as url, connect(url) as client:
        answer = plan.read(client, asked, project.now())["shelf_demand"]
    columns = [answer.columns[column.name].tolist(column.dtype) for column in plan.views[0].fields]
    return dict(zip(keys, zip(answer.event.tolist(), answer.known.tolist(), *columns, strict=True), strict=True))


def test_its_rows_are_those_of_the_online_store(kept: Project) -> None:
    written = snapshot(kept)
    rows = _rows(kept, written.path.read_bytes())
    assert list(rows) == ["shelf_demand"]
    assert written.rows == {"shelf_demand": len(rows["shelf_demand"])}
    assert len(rows["shelf_demand"]) == 60
    expired = kept.now() - np.array([row[0] for row in rows["shelf_demand"].values()]) > 3 * 86_400_000_000
    # A row that has expired is in the file: the device has the rule, too.
    fresh = [key for key, late in zip(rows["shelf_demand"], expired, strict=True) if not late]
    assert {key: rows["shelf_demand"][key] for key in fresh} == _online(kept, fresh)
    assert fresh


def test_the_next_one_is_a_small_difference(kept: Project) -> None:
    first, second = snapshot(kept), snapshot(kept)
    assert first.difference_bytes is None
    assert second.difference_bytes is not None
    assert second.difference_bytes < second.bytes / 4
    place = snapshot_folder(kept, SERVICE)
    latest = place.latest()
    assert latest is not None
    assert apply_delta(first.path.read_bytes(), place.delta(first.snapshot, latest)) == second.path.read_bytes()
    assert read_snapshot(second.path.read_bytes(), kept_views(kept.applied(), SERVICE)).header.number > 0


def test_a_table_that_breaks_a_promise_is_not_written(kept: Project) -> None:
    shop = Shop(kept.root)
    shop.replace("    ttl=timedelta(days=3),", "    ttl=timedelta(days=3),\n    expectations=[Expect.rows(at_most=1)],")
    shop.replace("    Entity,\n", "    Entity,\n    Expect,\n")
    sentence = f"^snapshot of {SERVICE}: view shelf_demand: .* rows; expected .*nothing was written"
    with pytest.raises(GateFailed, match=sentence):
        snapshot(Project(kept.root))
    assert snapshot_folder(kept, SERVICE).latest() is None


def test_only_the_declared_keys_are_in_it(shop: Shop) -> None:
    with_device(shop, '{"store": ["s1", "s3", "nowhere"]}')
    project = Project(shop.root)
    for step in (apply, build):
        step(project)
    assert newly_disclosed_features(project) == (
        "shelf_demand: sold_1d, distance of store s1, s3, nowhere and every product",
    )
    written = snapshot(project)
    assert {key[1] for key in _rows(project, written.path.read_bytes())["shelf_demand"]} == {"s1", "s3"}
    assert newly_disclosed_features(project) == ()


def test_a_filter_that_matches_nothing_writes_nothing(shop: Shop) -> None:
    with_device(shop, '{"store": ["nowhere"]}')
    project = Project(shop.root)
    for step in (apply, build):
        step(project)
    with pytest.raises(DataError, match="no row has a key that devices keep"):
        snapshot(project)
    assert snapshot_folder(project, SERVICE).latest() is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('Field("distance", Float32, "device")', 'Field("distance", Float32)',
         'shelf_demand__distance is available on the server only; expected available="device"'),
        ("age=timedelta(hours=6)", "age=timedelta(0)", "age: .*expected a timedelta of a minute or more"),
        ("every=timedelta(hours=1)", "every=timedelta(seconds=45)", "every: .*a timedelta of a minute or more"),
        ("every=timedelta(hours=1)", "every=timedelta(hours=7)", "every: 7:00:00; expected at most the age, 6:00:00"),
        ("keys={}", 'keys={"stor": ["s1"]}', "no join key 'stor' .did you mean store.*expected one of product, store"),
        ("keys={}", 'keys={"product": ["s1"]}', "keys 'product': .*expected a list of values of type Int32"),
        ("keys={}", 'keys={"store": "s1"}', "expected a list of values of type String"),
        ("keys={}", 'keys={"store": ["\\ud800"]}', "expected a list of values of type String"),
        ("keys={}", 'keys={"product": [2**31]}', "keys 'product': .2147483648.; expected a list of values"),
        ("keys={}", 'keys=["store"]', "keys: .'store'.; expected a mapping of join keys to lists of values"),
        ("age=timedelta(hours=6)", "age=timedelta.max", "age: .*expected a timedelta .*, up to 36500 days"),
        ("keep=3", "keep=-1", "keep: -1; expected 0 to 1000"),
        ("keep=3", 'keep=3, owner="prodct"',
         "owner: no join key 'prodct' .did you mean product.*expected one of product, store: a join key of a view"),
        # One of the entity of a view that the service does not read.
        ("keep=3", 'keep=3, owner="customer"', "owner: no join key 'customer'"),
        ("keep=3", 'keep=3, owner=["store"]', "owner: no join key ..store.. .did you mean store"),
        ("keys={}, keep=3", 'keys={"store": ["s1"]}, owner="store"',
         "owner: 'store' is also in `keys`; expected the key in only one of them"),
        ("features=[shelf_demand, basket]", "features=[basket]", "the service has no stored feature"),
        ("device=Snapshot(", "device=dict(", "device: .*expected a Snapshot or None"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_named(shop: Shop, old: str, new: str, expected: str) -> None:
    with_device(shop).replace(old, new)
    with pytest.raises(ConfigurationError, match=expected):
        apply(Project(shop.root))


def test_all_that_is_wrong_with_a_declaration_is_named(shop: Shop) -> None:
    wrong = 'age=timedelta(0), every=timedelta(0), keys={"product": ["s1"], "shelf": [1]}, keep=-1, owner="product"'
    with_device(shop).replace("age=timedelta(hours=6), every=timedelta(hours=1), keys={}, keep=3", wrong)
    with pytest.raises(ConfigurationError) as caught:
        apply(Project(shop.root))
    places = [problem.where.rpartition(", ")[2] for problem in caught.value.problems]
    assert places == ["age", "every", "keep", "keys 'product'", "owner", "keys"]


def test_a_ttl_that_no_device_can_count_is_none(shop: Shop) -> None:
    with_device(shop).replace("ttl=timedelta(days=3)", "ttl=timedelta.max")
    project = Project(shop.root)
    apply(project)
    device = device_of(project.applied(), project.definitions.services[SERVICE])
    assert device is not None
    assert [view.ttl for view in device.views] == [None]


def test_a_service_that_no_device_keeps_is_named(kept: Project) -> None:
    for name, expected in (
        ("late_order_server", "has no `device`; expected late_order_device"),
        ("late_order_devise", "is not declared .did you mean late_order_device"),
    ):
        with pytest.raises(RequestError, match=expected):
            snapshot(kept, name)


def test_before_anything_is_built_nothing_is_written(shop: Shop) -> None:
    with_device(shop)
    project = Project(shop.root)
    apply(project)
    with pytest.raises(DataError, match="isthmus build"):
        snapshot(project)
    with pytest.raises(DataError, match="Run `isthmus features snapshot`"):
        copy(project, None, shop.root / "out")


def test_a_folder_for_any_host_of_files(kept: Project, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{SERVICE}.html").write_text("somebody else's")
    files = []
    for _ in range(6):
        files.append(snapshot(kept))
        copy(kept, None, out)
    newest = files[-1].path.read_bytes()
    assert (out / SERVICE).read_bytes() == newest
    # Of the last three.
    earlier = {f"{SERVICE}.{file.snapshot[:16]}" for file in files[-4:-1]}
    # Who has the newest asks for the difference from that, too.
    own = f"{SERVICE}.{files[-1].snapshot[:16]}"
    assert apply_delta(newest, (out / own).read_bytes()) == newest
    assert (out / own).stat().st_size < 100
    assert {path.name for path in out.iterdir()} == {SERVICE, f"{SERVICE}.html", own, *earlier}


def test_the_command_says_what_is_disclosed_before_it_writes(kept: Project, tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["features", "snapshot", "--project", str(kept.root), "--to", str(tmp_path / "out")]
    done = runner.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert (
        "anyone who can fetch the snapshot gets shelf_demand: sold_1d, distance of every store and every product"
        in done.stderr
    )
    report = json.loads(done.stdout)
    assert (report["rows"], report["made"]) == ({"shelf_demand": 60}, "2024-03-01T00:00:00+00:00")
    assert (tmp_path / "out" / SERVICE).read_bytes() == Path(report["path"]).read_bytes()
    again = runner.invoke(app, arguments)
    assert "anyone who can fetch" not in again.stderr
    assert str(report["bytes"]) in again.stdout.replace(",", "")


def test_the_key_of_the_settings_signs(kept: Project) -> None:
    own = signer(kept).public_key
    (kept.root / "key.pem").write_bytes((kept.snapshots / "key.pem").read_bytes())
    (kept.snapshots / "key.pem").unlink()
    with (kept.root / "isthmus.toml").open("a") as end:
        end.write('\n[packages]\nsigning_key = "key.pem"\n')
    project = Project(kept.root)
    assert signer(project).public_key == own
    assert _rows(project, snapshot(project).path.read_bytes())
    assert not (project.snapshots / "key.pem").exists()


def test_a_damaged_pointer_is_written_again(kept: Project) -> None:
    before = snapshot(kept)
    (snapshot_folder(kept, SERVICE).folder / LATEST).write_bytes(b"{}")
    with pytest.raises(DataError, match="Run `isthmus features snapshot`"):
        copy(kept, None, kept.root / "out")
    after = snapshot(kept)
    assert after.rows == before.rows
    copy(kept, None, kept.root / "out")


def test_each_owner_has_the_rows_of_the_online_store(owned: Project) -> None:
    written = snapshot(owned)
    assert written.owners == 60
    assert written.rows == {"customer_orders": 60, "shelf_demand": 60}
    plan, sizes, shared = LookupPlan(owned.applied(), ["customer_orders"]), [], []
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    with open_owners(written.path) as owners:
        for _, _, file in owners:
            rows = _rows(owned, file.data)
            assert len(rows["customer_orders"]) == 1
            found |= rows["customer_orders"]
            sizes.append(len(file.data))
            shared.append(rows["shelf_demand"])
    assert all(rows == shared[0] for rows in shared)
    assert (written.bytes, written.median_bytes) == (max(sizes), sorted(sizes)[30])
    with owned.redis() as url, connect(url) as client:
        keys = [key for (key,) in found]
        answer = plan.read(client, {"customer": keys}, owned.now())["customer_orders"]
    online = zip(answer.event.tolist(), answer.known.tolist(), strict=True)
    fresh = {key: times for key, times, status in zip(keys, online, answer.status.tolist(), strict=True) if status < 2}
    assert {key: found[key,][:2] for key in fresh} == fresh
    assert len(fresh) > 30


def test_what_is_disclosed_of_owners_is_said(owned: Project) -> None:
    customer = "customer_orders: orders_7d, mean_amount_7d, late_rate_7d"
    shelves = "shelf_demand: sold_1d, distance of every store and every product"
    assert newly_disclosed_features(owned) == (f"{customer} of their own customer alone", shelves)
    first, second = snapshot(owned), snapshot(owned)
    assert newly_disclosed_features(owned) == ()
    assert first.difference_bytes is None
    assert second.difference_bytes is not None
    assert second.difference_bytes < second.bytes / 4
    # With all customers on every device more is disclosed, and what was for owners is withdrawn.
    Shop(owned.root).replace(', owner="customer"', "")
    apply(Project(owned.root))
    assert snapshot_folder(owned, SERVICE).latest() is None
    assert not [*snapshot_folder(owned, SERVICE).folder.glob("*.owners")]
    assert newly_disclosed_features(Project(owned.root))[0] == f"{customer} of every customer"
    snapshot(Project(owned.root))
    Shop(owned.root).replace("keep=3", 'keep=3, owner="customer"')
    apply(Project(owned.root))
    assert snapshot_folder(owned, SERVICE).latest() is None


@pytest.mark.parametrize("damage", [b"torn", b""])
def test_beside_a_damaged_one_the_next_of_owners_is_written(owned: Project, damage: bytes) -> None:
    before = snapshot(owned)
    before.path.write_bytes(damage)
    after = snapshot(owned)
    assert (after.owners, after.difference_bytes) == (60, None)


def test_a_host_of_files_gets_nothing_of_owners(owned: Project, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["features", "snapshot", "--project", str(owned.root), "--to", str(out)])
    assert isinstance(done.exception, RequestError), done.output
    message = str(done.exception)
    assert "has a file for each customer, and on a file host anyone who guesses the name could read it" in message
    assert "GET /snapshots/late_order_device/CUSTOMER, behind your login" in message
    assert not out.exists()
    assert snapshot_folder(owned, SERVICE).latest() is None
    with pytest.raises(RequestError, match="a file host"):
        copy(owned, None, out)


def test_the_command_says_how_many_owners_there_are(owned: Project) -> None:
    done = CliRunner().invoke(app, ["features", "snapshot", "--project", str(owned.root), "--json"])
    assert done.exit_code == 0, done.output
    customer = "customer_orders: orders_7d, mean_amount_7d, late_rate_7d of their own customer alone"
    assert f"anyone who can fetch the snapshot gets {customer}" in done.stderr
    report = json.loads(done.stdout)
    assert report["owners"] == 60
    assert report["bytes"] >= report["median_bytes"] > 1000
    assert report["path"].endswith(".owners")


def test_the_asset_says_how_many_owners_there_are(owned: Project) -> None:
    node = f"snapshot/{SERVICE}"
    (made,) = run_step(owned, StepRequest("snapshot", (node,)), silent)
    assert isinstance(made, NodeMaterialization)
    assert (made.node, made.metadata["owners"], made.metadata["dagster/row_count"]) == (node, "60", 120)
    # Another owner makes it stale, and the package, which names the owner; no model is trained again for it.
    before = compile_outline(owned)
    Shop(owned.root).replace('owner="customer"', 'owner="store"')
    after = compile_outline(Project(owned.root))
    assert before.snapshots[0].code != after.snapshots[0].code
    assert (before.models[0].training, before.models[0].examples) == (
        after.models[0].training,
        after.models[0].examples,
    )
    assert before.models[0].export != after.models[0].export


def test_the_rows_of_owners_are_of_the_declared_keys_alone(owned: Project) -> None:
    Shop(owned.root).replace("keys={}", 'keys={"store": ["s1"]}')
    Shop(owned.root).replace(
        "features=[customer_orders, shelf_demand, basket, moment]", "features=[shelf_demand, basket]"
    )
    Shop(owned.root).replace('owner="customer"', 'owner="product"')
    project = Project(owned.root)
    apply(project)
    written = snapshot(project)
    assert written.owners == 15
    with open_owners(written.path) as owners:
        assert {row[1] for _, _, file in owners for row in _rows(project, file.data)["shelf_demand"]} == {"s1"}
        assert {len(_rows(project, file.data)["shelf_demand"]) for _, _, file in owners} == {1}
    Shop(owned.root).replace('["s1"]', '["nowhere"]')
    nobody = Project(owned.root)
    apply(nobody)
    with pytest.raises(DataError, match="no row has a key that devices keep"):
        snapshot(nobody)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("features=[shelf_demand, basket, moment]", 'features=[shelf_demand[["sold_1d"]], basket, moment]'),
        ("keys={}", 'keys={"store": ["s1"]}'),
        ("device=Snapshot(", "device=None and Snapshot("),
    ],
)
def test_what_devices_may_keep_no_longer_is_withdrawn(kept: Project, old: str, new: str) -> None:
    snapshot(kept)
    apply(Project(kept.root))
    assert snapshot_folder(kept, SERVICE).latest() is not None
    Shop(kept.root).replace(old, new)
    apply(Project(kept.root))
    assert snapshot_folder(kept, SERVICE).latest() is None
    assert [file.name for file in snapshot_folder(kept, SERVICE).folder.iterdir()] == [".lock"]


def test_a_snapshot_of_the_contract_before_is_withdrawn_if_it_is_written_meanwhile(kept: Project) -> None:
    snapshot(kept)
    place, views = snapshot_folder(kept, SERVICE), kept_views(kept.applied(), SERVICE)
    before = place.latest()
    assert before is not None
    file = read_snapshot(place.snapshot(before.snapshot), views)
    written = kept.contract_file.stat().st_mtime_ns
    Shop(kept.root).replace("keys={}", 'keys={"store": ["s1"]}')
    applying = Thread(target=lambda: apply(Project(kept.root)))
    with place.locked():
        applying.start()
        while kept.contract_file.stat().st_mtime_ns == written:
            time.sleep(0.01)
        applying.join(0.3)
        place.add(file, views, 3, discloses=before.discloses)
    applying.join()
    assert place.latest() is None


def test_how_a_snapshot_is_made_is_no_part_of_the_contract(kept: Project) -> None:
    service = kept.definitions.services[SERVICE]
    assert service.device is not None
    Shop(kept.root).replace("keep=3", "keep=9")
    assert Project(kept.root).definitions.contract.hash == kept.definitions.contract.hash
    assert replace(service.device, keep=9) == Project(kept.root).definitions.services[SERVICE].device
    # Each row of a training set is of its own device: whose rows these are makes no difference to what it sees.
    assert replace(service.device, owner="store").identity() == service.device.identity()
    of = device_of(kept.applied(), replace(service, device=replace(service.device, owner="store")))
    assert of is not None
    assert of.owner == "store"
    assert b"owner" not in msgspec.json.encode(device_of(kept.applied(), service))
