"""Tables and sources in object storage: the same rows, and what a storage does to a build."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

import isthmus
from isthmus import DataError, DependencyError, Source
from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.offline.delta import VersionGoneError
from isthmus.features.offline.log import MaterializationLog
from isthmus.features.offline.pushes import PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.publishing.collect import CollectedPushes
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.attribution.attribute import attribute
from isthmus.orchestration.maintenance import upkeep
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect as collect_answers
from isthmus.orchestration.recording.replay import replay
from isthmus.orchestration.server.collect import collect
from isthmus.orchestration.status import status
from isthmus.orchestration.tables.build import build, build_range, outdated_views
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.transforms.tables.iceberg import open_table
from tests.features.offline.test_ranges import VIEW as TRAFFIC
from tests.features.offline.test_ranges import put, rows_of
from tests.features.support import DAY, same_bits
from tests.objectstore import ACCESS, SECRET, UNLISTED, Lossy, ObjectStore, lossy, object_store
from tests.orchestration.server.served import served
from tests.orchestration.shop import START, Open, Shop
from tests.orchestration.tables.test_tables import Place, configure, iceberg, in_storage

pytestmark = pytest.mark.accept
FIRST = START // DAY
VIEW = "customer_orders"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("objects") / "store") as store:
        yield store


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def way(storage: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lossy]:
    with lossy(storage.port, tmp_path_factory.mktemp("way")) as way:
        yield way


def remote(shop: Shop, name: str, port: int) -> dict[str, str]:
    """Puts the tables of a shop into the storage; returns the options with which it is reached."""
    options = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    lines = "".join(f'{name} = "{value}"\n' for name, value in options.items())
    lines += 'max_retries = "3"\ntimeout = "5s"\n'
    lines = f'\n[stores]\noffline = "s3://shop/{name}"\n\n[stores.storage_options]\n{lines}'
    shop.append(lines, "isthmus.toml")
    return options


def stored(shop: Shop, project: Open, view: str = VIEW) -> tuple[pa.Table, str]:
    opened = project(shop)
    history = OfflineStore(opened.offline, opened.storage_options).history(opened.definitions.contract.views[view])
    return history.table(), history.fingerprint


def test_tables_and_sources_in_object_storage(built: Shop, project: Open, storage: ObjectStore, tmp_path: Path) -> None:
    before = stored(built, project)
    options = remote(built, "whole", storage.port)
    write_deltalake("s3://shop/raw/orders", pq.read_table(built.orders), storage_options=options)
    built.replace('path="data/orders.parquet"', 'delta="s3://shop/raw/orders"')
    apply(project(built))
    written = build(project(built))
    assert written[VIEW].changed
    after = stored(built, project)
    assert same_bits(after[0], before[0])
    assert after[1] == before[1]
    assert outdated_views(project(built)) == []
    assert not build(project(built))[VIEW].changed
    assert materialize(project(built))[VIEW]
    assert training_set(project(built)).id
    # The secret is in no file of the project, Feast's registry and Dagster's outline among them.
    for file in built.root.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    # The same from Parquet files there.
    with storage.files().open_output_stream("shop/files/orders/part.parquet") as file:
        pq.write_table(pq.read_table(built.orders), file)
    built.replace('delta="s3://shop/raw/orders"', 'path="s3://shop/files/orders"')
    apply(project(built))
    assert not build(project(built))[VIEW].changed
    assert outdated_views(project(built)) == []
    with storage.files().open_output_stream("shop/files/orders/more.parquet") as file:
        pq.write_table(pq.read_table(built.orders).slice(0, 1), file)
    assert outdated_views(project(built)) == [VIEW, "shelf_demand"]


def test_a_table_in_object_storage_is_maintained(storage: ObjectStore) -> None:
    options = {"AWS_ENDPOINT_URL": storage.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    store = OfflineStore("s3://shop/upkeep", options)
    put(store, rows_of(range(4)))
    for n in range(9):
        put(store, rows_of(range(4), n + 2.0), Days(n % 3 + 1, n % 3 + 2))
    past = {version: store.history(TRAFFIC, version).table() for version in (2, 9)}
    later = time.time() + 100 * 86_400
    done = upkeep.maintain(store.stored(TRAFFIC.table), 90, {2}, now=later)
    assert done is not None
    assert (done.deleted, done.entries, done.space.versions) == (6, 8, 2)
    for version, expected in past.items():
        assert same_bits(store.history(TRAFFIC, version).table(), expected)
    with pytest.raises(VersionGoneError, match="version 5 was removed"):
        store.history(TRAFFIC, 5)
    assert put(store, rows_of(range(4), 99.0), Days(1, 2)).version == 10


def test_recorded_answers_and_attribution_in_object_storage(
    exported: Shop, project: Open, storage: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = attribute(project(exported))
    tables = Path(project(exported).offline)
    remote(exported, "answers", storage.port)
    fs.copy_files(str(tables), "shop/answers", destination_filesystem=storage.files())
    shutil.rmtree(tables)
    exported.append("\n[server.record]\nkeep_days = 1\n", "isthmus.toml")
    opened = project(exported)
    with served(opened) as http:
        asked = {"features": [f"{VIEW}:orders_7d"], "entities": {"customer": [1, 2]}}
        identity = http.post("/get-online-features", json=asked).headers["isthmus-answer"]
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame")
        with pytest.raises(DependencyError, match=r"recorded answers: .* is not available \(SignatureDoesNotMatch"):
            collect_answers(opened)
    assert collect_answers(opened).answers == 1
    assert replay(opened, identity).same == 1
    after = attribute(opened)
    assert after.measures == before.measures
    assert after.unknown == before.unknown


def test_a_commit_whose_answer_is_lost_is_made_once(
    built: Shop, project: Open, storage: ObjectStore, way: Lossy
) -> None:
    before = stored(built, project)
    remote(built, "lost", way.port)
    apply(project(built))
    for version in range(2):
        # Of a new table, and of one that is there: in both, a second try meets the first.
        way.lose("/lost/customer_orders/_delta_log/")
        if version:
            orders = pq.read_table(built.orders)
            pq.write_table(orders.slice(0, len(orders) - 100), built.orders)
        written = build(project(built))
        assert way.lost.exists()
        assert written[VIEW].changed
        rows, fingerprint = stored(built, project)
        assert len(rows) == len(before[0]) - 100 * version
        assert (fingerprint == before[1]) == (version == 0)
        assert not build(project(built))[VIEW].changed
    table = DeltaTable("s3://shop/lost/customer_orders", storage_options=project(built).storage_options)
    assert [commit["version"] for commit in table.history()] == [1, 0]
    days = Days(FIRST, FIRST + 3)
    way.lose("/lost/customer_orders/_delta_log/")
    orders = pq.read_table(built.orders)
    pq.write_table(orders.slice(1), built.orders)
    assert build_range(project(built), [VIEW], within=days)[VIEW].rows == len(rows) - 1
    assert way.lost.exists()


def test_credentials_that_are_wrong_and_a_bucket_that_is_gone(
    built: Shop, project: Open, storage: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(built, "refused", storage.port)
    apply(project(built))
    build(project(built))
    before = stored(built, project)
    pq.write_table(pq.read_table(built.orders).slice(1), built.orders)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame")
        for step in (build, materialize, outdated_views, training_set):
            with pytest.raises(
                DependencyError, match=r"not available \(SignatureDoesNotMatch: .*AWS_ACCESS_KEY_ID"
            ) as no:
                step(project(built))
            assert "sesame" not in str(no.value)
            # Never told to remove what is whole.
            assert "remove" not in str(no.value)
            assert "\n" not in str(no.value)
    assert stored(built, project)[1] == before[1]
    built.replace('offline = "s3://shop/refused"', 'offline = "s3://nobody/refused"', "isthmus.toml")
    for step in (build, materialize, outdated_views):
        with pytest.raises(DependencyError, match=r"not available \(NoSuchBucket: "):
            step(project(built))
    built.replace('offline = "s3://nobody/refused"', 'offline = "s3://shop/refused"', "isthmus.toml")
    built.replace(f":{storage.port}", ":1", "isthmus.toml")
    with pytest.raises(DependencyError, match=r"not available \(.*Connection refused"):
        build(project(built))


def test_a_bucket_that_denies_listing(
    built: Shop, project: Open, storage: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(built, "unlisted", storage.port)
    apply(project(built))
    build(project(built))
    before = stored(built, project)
    pq.write_table(pq.read_table(built.orders).slice(1), built.orders)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", UNLISTED)
        for step in (build, materialize, training_set):
            with pytest.raises(DependencyError, match=r"s3://shop/unlisted\S* is not available \(.*AccessDenied"):
                step(project(built))
    assert stored(built, project) == before


def test_a_source_in_a_storage_that_refuses(
    built: Shop, project: Open, storage: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(built, project)
    options = remote(built, "unused", storage.port)
    write_deltalake("s3://shop/raw/again", pq.read_table(built.orders), storage_options=options)
    built.replace('offline = "s3://shop/unused"\n', "", "isthmus.toml")
    places = {
        'delta="s3://shop/raw/again"': "no Delta table at s3://shop/raw/nothing",
        'path="s3://shop/raw/again"': "shop/raw/nothing not found",
    }
    for place, missing in places.items():
        shutil.copy(built.definitions, built.root / "kept")
        built.replace('path="data/orders.parquet"', place)
        apply(project(built))
        with monkeypatch.context() as patch:
            patch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame")
            with pytest.raises(DependencyError, match=r"source orders: s3://shop/raw/again is not available \(Sig"):
                build(project(built))
        built.replace("raw/again", "raw/nothing")
        with pytest.raises(DataError, match=rf"source orders: .*{missing}"):
            build(project(built))
        shutil.copy(built.root / "kept", built.definitions)
    assert stored(built, project)[1] == before[1]


@pytest.fixture
def place(storage: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A table of an Iceberg catalog whose files are in the bucket `lake`."""
    storage.files().create_dir("lake")
    in_storage(monkeypatch, storage.endpoint)
    yield from iceberg(tmp_path, monkeypatch, "s3://lake/warehouse")


def test_an_iceberg_table_in_a_storage_that_refuses(
    built: Shop, project: Open, storage: ObjectStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, before = pq.read_table(built.orders), stored(built, project)
    place.write(orders)
    built.replace('path="data/orders.parquet"', place.source)
    apply(project(built))
    # Without a key of the catalog's own, that of the tables counts.
    with monkeypatch.context() as patch:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.delenv(f"PYICEBERG_CATALOG__WAREHOUSE__S3__{name}")
        configure(patch)
        assert not build(project(built))[VIEW].changed
    place.write(orders.slice(1))
    assert outdated_views(project(built)) == [VIEW, "shelf_demand"]
    for wrong, said in (
        ({"S3__SECRET_ACCESS_KEY": "open-sesame"}, "ACCESS_DENIED"),
        ({"S3__ACCESS_KEY_ID": "nobody"}, "ACCESS_DENIED"),
        ({"S3__ENDPOINT": "http://127.0.0.1:1"}, "NETWORK_CONNECTION"),
    ):
        with monkeypatch.context() as patch:
            configure(patch, **wrong)
            for step in (build, outdated_views, training_set):
                refused = rf"^source orders: the storage of warehouse.shop.orders is not available \(.*{said}.*S3__ENDP"
                with pytest.raises(DependencyError, match=refused) as no:
                    step(project(built))
                assert not [word for word in ("sesame", SECRET, "\n") if word in str(no.value)]
    for each in storage.files().get_file_info(fs.FileSelector("lake", recursive=True)):
        if each.path.endswith(".parquet"):
            storage.files().delete_file(each.path)
    for change in (lambda: None, lambda: storage.files().delete_dir("lake")):
        change()
        with pytest.raises(DataError, match=r"warehouse.shop.orders cannot be read \(.*Path does not exist"):
            build(project(built))
    assert stored(built, project)[1] == before[1]
    storage.files().create_dir("lake")
    place.drop()
    place.write(orders.slice(1))
    assert build(project(built))[VIEW].changed


def test_a_storage_that_goes_while_an_iceberg_table_is_read(
    storage: ObjectStore, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place.write(pa.table({"n": [0]}))
    table = load_catalog("warehouse").load_table("shop.orders")
    for n in range(1, 40):
        table.append(pa.table({"n": [n]}))
    source, seen = Source("orders", iceberg="warehouse.shop.orders"), []
    (tmp_path / "way").mkdir()
    with lossy(storage.port, tmp_path / "way") as way:
        configure(monkeypatch, S3__ENDPOINT=f"http://127.0.0.1:{way.port}")
        with open_table(source) as found:
            rows = found.batches(None, None)
            seen.append(next(rows))
    with pytest.raises(DependencyError, match=r"warehouse.shop.orders is not available \(.*NETWORK_CONNECTION"):
        seen.extend(rows)
    assert 0 < len(seen) < 40


def pushed(project: Project, customer: int) -> None:
    moment = clock.moment(project.now() - 60_000_000)
    rows = {"customer": [customer], "event_timestamp": [moment], "orders_7d": [1], "mean_amount_7d": [0.5],
            "late_rate_7d": [None]}  # fmt: skip
    isthmus.push(project, VIEW, rows, to="offline")


def test_pushed_rows_are_there_once_though_the_answer_to_their_commit_is_lost(
    built: Shop, project: Open, way: Lossy
) -> None:
    remote(built, "pushed", way.port)
    apply(project(built))
    build(project(built))
    before = len(stored(built, project)[0])
    opened = project(built)
    customers = range(900_001, 900_004)
    with opened.redis():
        # Into a log that is not there yet, into one that is, and into the table.
        for customer, table in zip(customers, [f"_pushed/{VIEW}", f"_pushed/{VIEW}", VIEW], strict=True):
            pushed(opened, customer)
            # Of the first one, until deltalake's patience has an end.
            way.lose(f"/pushed/{table}/_delta_log/", silent=customer == customers[0])
            counts = collect(project(built))[VIEW]
            assert way.lost.exists()
            assert (counts.rows, counts.added) == (1, 1)
            assert collect(project(built))[VIEW] == CollectedPushes()
        rows = stored(built, project)[0]
        assert len(rows) == before + 3
        assert {*customers} < set(rows["customer"].to_pylist())
        view = opened.applied().views[VIEW]
        logged = PushLog(opened.offline, VIEW, opened.storage_options).rows(view)
        assert sorted(logged["customer"].to_pylist()) == [*customers]
        assert build(project(built))[VIEW].pushed == 3
        for runs in (1, 2):
            way.lose("/pushed/_materializations/_delta_log/")
            materialize(project(built), [VIEW])
            assert way.lost.exists()
            assert len(MaterializationLog(opened.offline, opened.storage_options).runs(view)) == runs
            pushed(opened, 900_004)


def test_what_was_pushed_waits_while_the_storage_refuses(
    built: Shop, project: Open, storage: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(built, "waiting", storage.port)
    apply(project(built))
    build(project(built))
    before = len(stored(built, project)[0])
    opened = project(built)
    with opened.redis():
        pushed(opened, 900_001)
        with monkeypatch.context() as patch:
            patch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame")
            with pytest.raises(DependencyError, match=r"not available \(SignatureDoesNotMatch: "):
                collect(project(built))
        built.replace('offline = "s3://shop/waiting"', 'offline = "s3://nobody/waiting"', "isthmus.toml")
        with pytest.raises(DependencyError, match=r"not available \(NoSuchBucket: "):
            collect(project(built))
        built.replace('offline = "s3://nobody/waiting"', 'offline = "s3://shop/waiting"', "isthmus.toml")
        assert status(opened, measure=False).views[VIEW].waiting == 1
        assert collect(project(built))[VIEW].added == 1
    assert len(stored(built, project)[0]) == before + 1
