"""A project on a standalone Apache Spark cluster that sees nothing of its folder, with its tables in object storage.

No jar reads or writes the storage: Python workers do, with the credentials in their environment.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.fs as fs
import pytest
from deltalake import DeltaTable

from isthmus import DataError, DependencyError, GateFailed, IsthmusError
from isthmus.features.days import Days
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import baseline
from isthmus.orchestration.tables.build import build, build_range
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.data import training_data
from isthmus.orchestration.training.record import reproduce
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import verify
from tests.features.support import DAY, same_bits
from tests.objectstore import ACCESS, SECRET, ObjectStore, object_store
from tests.orchestration import shop as shops
from tests.orchestration.shop import Shop
from tests.servers import redis_cluster
from tests.transforms import faults
from tests.transforms.cluster import standalone

pytestmark = [pytest.mark.accept, pytest.mark.spark, pytest.mark.timeout(900)]
KEYS = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
VIEW = "customer_orders"
FIRST = shops.START // DAY
# A copy of a slow task starts on the other executor.
SPECULATION = {"spark.speculation": "true", "spark.speculation.interval": "100ms", "spark.speculation.quantile": "0.1",
               "spark.speculation.multiplier": "1.1", "spark.speculation.task.duration.threshold": "3s"}  # fmt: skip
_MORE = 'F.count("*").over(week).alias("orders_7d")', '(F.count("*").over(week) + 1).alias("orders_7d")'


@dataclass
class Cluster:
    url: str
    storage: ObjectStore
    redis: str
    folder: Path

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    def use(self, shop: Shop, name: str) -> Project:
        """The project of a shop on this cluster, with its tables in the storage."""
        options = {"AWS_ENDPOINT_URL": self.storage.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                   "max_retries": "2", "timeout": "5s"}  # fmt: skip
        shop.replace("[project]\n", f'engine = "{self.url}"\n\n[project]\n', "isthmus.toml")
        lines = "".join(f'{name} = "{value}"\n' for name, value in options.items())
        stores = f'\n[stores]\nonline = "{self.redis}"\noffline = "s3://shop/{name}"\n'
        shop.append(f"{stores}\n[stores.storage_options]\n{lines}", "isthmus.toml")
        with connect(self.redis) as client:
            client.flushall()
        project = Project(shop.root)
        apply(project)
        return project


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "faults").mkdir()
    (folder / "projects").mkdir()
    path = os.pathsep.join([*faults.__path__, os.environ.get("PYTHONPATH", "")])
    environment = {**KEYS, "TEST_FAULTS": str(folder / "faults"), "PYTHONPATH": path}
    with (
        object_store(folder / "store") as storage,
        redis_cluster(folder / "redis") as ports,
        standalone(folder / "spark", [folder / "projects"], environment, SPECULATION) as url,
    ):
        yield Cluster(url, storage, f"redis+cluster://127.0.0.1:{ports[0]}", folder)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def shop(cluster: Cluster, request: pytest.FixtureRequest) -> Shop:
    """A project that the cluster does not see, except for a source that is not in its folder."""
    name = request.node.name.replace("[", "-").strip("]")
    shop = shops.write(cluster.folder / "projects" / name)
    orders = cluster.folder / f"{name}.parquet"
    shop.orders.rename(orders)
    shop.replace('path="data/orders.parquet"', f'path="{orders}"')
    return shop


def rows(project: Project, view: str) -> tuple[pa.Table, object]:
    store, contract = project.offline_store(), project.applied().views[view]
    history = store.history(contract)
    store.require_unaltered(history)
    return history.table(), (history.commit.days, history.fingerprint, history.commit.done, history.commit.until)


def require_same(project: Project, here: dict[str, tuple[pa.Table, object]]) -> None:
    for view, (table, state) in here.items():
        there = rows(project, view)
        assert same_bits(there[0], table), view
        assert there[1] == state, view


def online(project: Project) -> dict[bytes, dict[bytes, bytes]]:
    """All rows in Redis."""
    contract = project.applied()
    with project.redis() as url, connect(url) as client:
        store = OnlineStore(client, contract)
        names = {name for view in contract.views.values() for names in store.names(view) for name in names}
        return {name: client.hgetall(name) for name in names}


def test_tables_training_sets_and_redis_are_those_of_one_machine(cluster: Cluster, shop: Shop, tmp_path: Path) -> None:
    embedded = Project(shop.root)
    apply(embedded)
    build(embedded)
    here = {view: rows(embedded, view) for view in shops.VIEWS}
    counts = [msgspec.structs.replace(one, seconds=0.0) for one in materialize(embedded).values()]
    served = online(embedded)
    made = training_set(embedded)
    local, statistics = made.table(), baseline._read(made.path)
    (made.path / "_record.json").unlink()
    project = cluster.use(shop, "whole")
    assert all(written.changed for written in build(project).values())
    assert not any(written.changed for written in build(project).values())
    require_same(project, here)
    assert not build_range(project, within=Days(FIRST + 3, FIRST + 20), step=5)[VIEW].changed
    assert [msgspec.structs.replace(one, seconds=0.0) for one in materialize(project).values()] == counts
    assert online(project) == served
    assert all(one.written == 0 for one in materialize(project).values())
    assert verify(project, all_keys=True).passed
    # The executors write the rows, their spine and their statistics.
    again = training_set(project, join="engine")
    assert (again.id, again.rows_in, again.rows_out) == (made.id, len(local), len(local))
    assert str(again.place).startswith("s3://shop/whole/_training/")
    assert again.table().equals(local)
    assert baseline._read(again.path) == statistics
    places: list[tuple[str, Path | str]] = [
        ("engine", "s3://shop/sets/a"),
        ("embedded", "s3://shop/sets/b"),
        ("embedded", tmp_path / "c"),
    ]
    for join, where in places:
        same = reproduce(project, made.id, where, join=join)
        assert same.id == made.id
        assert same.table().equals(local)
    assert reproduce(project, "s3://shop/sets/b").table().equals(local)
    with pytest.raises(DataError, match="training set s3://shop/whole: has other files"):
        reproduce(project, made.id, "s3://shop/whole")
    spine = local.select([name for name in local.column_names if "__" not in name])
    one, other = (training_data(project, shops.VIEWS, spine, join=join) for join in ("embedded", "engine"))
    assert one.table().equals(other.table())
    left = cluster.storage.files().get_file_info(fs.FileSelector("shop/whole", recursive=True))
    assert not [info.path for info in left if info.is_file and "-" in info.path.split("/")[2]]


def test_changed_days_and_broken_rows_are_those_of_one_machine(cluster: Cluster, shop: Shop) -> None:
    """The same messages, too, of what needs all rows: duplicates, nulls, expectations, the lookback."""
    definitions = (shop.root / "definitions.py").read_text()
    expectations = (
        "expectations=[Expect.between('orders_7d', 0, 5), Expect.unique('mean_amount_7d'), Expect.rows(at_least=9999)],"
    )
    null = "F.when(F.lit(False), F.col('ordered_at'))"
    seven = "    ttl=timedelta(days=7),\n"
    edits = {
        "duplicates": [("return orders.select(", "return orders.union(orders).select(")],
        "nulls": [("return orders.select(", f"return orders.withColumn('ordered_at', {null}).select(")],
        "expectation": [
            (seven, f"{seven}    {expectations}\n"),
            ("    Entity,\n", "    Entity,\n    Expect,\n"),
        ],
        "changed": [_MORE],
    }

    def outcome(project: Project) -> object:
        try:
            apply(project)
            build(project, [VIEW])
        except IsthmusError as error:
            return type(error), str(error).partition(", first in row")[0].split("; expected")[0]
        return rows(project, VIEW)[1]

    def edited(edit: str) -> None:
        text = definitions
        for old, new in edits[edit]:
            assert old in text
            text = text.replace(old, new, 1)
        (shop.root / "definitions.py").write_text(text)

    here = {}
    for edit in edits:
        edited(edit)
        here[edit] = outcome(Project(shop.root))
    assert [type(result) is tuple and result[0] for result in here.values()][:3] == [DataError, DataError, GateFailed]
    (shop.root / "definitions.py").write_text(definitions)
    project = cluster.use(shop, "edits")
    build(project, [VIEW])
    before = rows(project, VIEW)
    for edit in edits:
        edited(edit)
        assert outcome(Project(shop.root)) == here[edit], edit
        if edit != "changed":
            assert DeltaTable(f"{project.offline}/{VIEW}", storage_options=project.storage_options).version() == 0
    assert rows(Project(shop.root), VIEW)[1] != before[1]


def test_a_lookback_is_checked_as_on_one_machine(cluster: Cluster, shop: Shop) -> None:
    seven, within = "    ttl=timedelta(days=7),\n", Days(FIRST + 20, FIRST + 24)
    definitions = (shop.root / "definitions.py").read_text()

    def outcomes() -> Iterator[object]:
        for days in (1, 7):
            reach = f"{seven}    lookback=timedelta(days={days}),\n"
            (shop.root / "definitions.py").write_text(definitions.replace(seven, reach, 1))
            project = Project(shop.root)
            apply(project)
            build(project, [VIEW])
            try:
                yield build_range(project, [VIEW], within=within, step=2)[VIEW].changed
            except DataError as error:
                yield str(error)

    here = list(outcomes())
    assert "reads beyond its lookback" in str(here[0])
    assert here[1] is False
    cluster.use(shop, "lookback")
    assert list(outcomes()) == here


@pytest.mark.parametrize("fault", ["kill", "slow"])
def test_an_executor_dies_or_a_task_runs_twice(cluster: Cluster, shop: Shop, fault: str) -> None:
    embedded = Project(shop.root)
    apply(embedded)
    build(embedded)
    here = {VIEW: rows(embedded, VIEW)}
    project = cluster.use(shop, fault)
    (cluster.faults / fault).touch()
    build(project, [VIEW])
    assert (cluster.faults / f"{fault}.done").exists()
    require_same(project, here)
    # What the lost task wrote is no part of the table, and a full vacuum finds it.
    table = DeltaTable(f"{project.offline}/{VIEW}", storage_options=project.storage_options)
    assert len(table.vacuum(retention_hours=0, enforce_retention_duration=False, full=True)) > 0


@pytest.mark.parametrize("fault", ["kill", "slow", "end"])
def test_rows_are_those_of_one_machine_although_a_writer_dies(cluster: Cluster, shop: Shop, fault: str) -> None:
    """An executor dies, one of its tasks runs twice, or the command is killed while its tasks go on."""
    embedded = Project(shop.root)
    apply(embedded)
    build(embedded, [VIEW])
    materialize(embedded, [VIEW])
    served, project = online(embedded), cluster.use(shop, f"{fault}-online")
    build(project, [VIEW])
    name = f"{'slow' if fault == 'end' else fault}-online"
    (cluster.faults / f"{name}.done").unlink(missing_ok=True)
    (cluster.faults / name).touch()
    if fault == "end":
        command = [sys.executable, "-m", "isthmus", "materialize", VIEW]
        with subprocess.Popen(command, cwd=shop.root) as process:
            deadline = time.monotonic() + 120
            while not (cluster.faults / f"{name}.done").exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.kill()
        # Redis says that the rows are incomplete.
        with connect(cluster.redis) as client:
            record = OnlineStore(client, project.applied()).published(project.applied().views[VIEW])
        assert record is not None
        assert record.pending
    materialize(project, [VIEW])
    assert (cluster.faults / f"{name}.done").exists()
    assert online(project) == served
    assert materialize(project, [VIEW])[VIEW].written == 0


def test_a_full_disk_leaves_the_table_as_it_was(cluster: Cluster, shop: Shop) -> None:
    project = cluster.use(shop, "full")
    build(project, [VIEW])
    before = rows(project, VIEW)
    shop.replace(*_MORE)
    changed = Project(shop.root)
    apply(changed)
    (cluster.faults / "full").touch()
    try:
        with pytest.raises(DependencyError, match=r"on executor \S+: cannot be used \(.*No space left on device"):
            build(changed, [VIEW])
    finally:
        (cluster.faults / "full").unlink()
    table = DeltaTable(f"{project.offline}/{VIEW}", storage_options=project.storage_options)
    assert table.version() == 0
    assert build(changed, [VIEW])[VIEW].changed
    assert rows(changed, VIEW)[1] != before[1]


def test_executors_without_credentials_or_the_folder_say_so(cluster: Cluster, shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "offline").mkdir()
    with standalone(tmp_path / "spark", [tmp_path / "offline"]) as url:
        project = cluster.use(shop, "denied")
        shop.replace(cluster.url, url, "isthmus.toml")
        with pytest.raises(DependencyError, match=r"on executor \S+: cannot be used") as caught:
            build(Project(shop.root), [VIEW])
        assert "credentials in their environment" in caught.value.remedy
        shop.replace(project.offline, str(tmp_path / "offline"), "isthmus.toml")
        with pytest.raises(DependencyError, match=r"cannot open .*/_probe-\S+, though this process can. Mount that"):
            build(Project(shop.root), [VIEW])
    assert not (tmp_path / "offline" / VIEW).exists()
    files = cluster.storage.files().get_file_info(fs.FileSelector("shop/denied", allow_not_found=True, recursive=True))
    assert not [info.path for info in files if info.is_file]
