"""A project is maintained: what is needed stays, what is not goes, and nothing else notices."""

import json
import os
import threading
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import isthmus
from isthmus.features import clock
from isthmus.features.days import DAY
from isthmus.features.errors import DataError
from isthmus.features.offline.delta import VersionGoneError
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.cli.screens.writer import show
from isthmus.orchestration.graph.assets import AssetGraph
from isthmus.orchestration.graph.outline import outline
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.graph.translator import condition
from isthmus.orchestration.maintenance.maintain import FILE, maintain, require_done
from isthmus.orchestration.project import Project
from isthmus.orchestration.status import status
from isthmus.orchestration.steps.step import NodeMaterialization, StepRequest
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.record import reproduce
from tests.commandline import run
from tests.features.support import same_bits
from tests.orchestration.shop import VIEWS, Open, Shop, files, order_rows

VIEW = "customer_orders"
FEATURES = "customer_orders:orders_7d,customer_orders:late_rate_7d,customer_facts:city"


def spine(rows: int = 300) -> pa.Table:
    table = order_rows(rows).select(["customer", "ordered_at", "late"])
    return table.rename_columns({"ordered_at": "event_timestamp"})


def later_orders(shop: Shop, project: Open, seed: int) -> None:
    more = order_rows(2500, seed=seed).slice(2_400, 30)
    pq.write_table(pa.concat_tables([pq.read_table(shop.orders), more]), shop.orders)
    assert build(project(shop), [VIEW])[VIEW].changed


def aged(project: Project, days: float = 100) -> None:
    for file in Path(project.offline).rglob("*"):
        if file.is_file():
            os.utime(file, (time.time() - days * 86_400,) * 2)


def rows(project: Project, version: int | None = None) -> pa.Table:
    return OfflineStore(project.offline).history(project.applied().views[VIEW], version).table()


def test_what_is_needed_stays_and_the_rest_goes(built: Shop, project: Open, tmp_path: Path) -> None:
    opened = project(built)
    later_orders(built, project, 1)
    made = isthmus.training_data(built.root, FEATURES, spine()).write(tmp_path / "set")
    later_orders(built, project, 2)
    later_orders(built, project, 3)
    materialize(opened)
    served = isthmus.training_data(built.root, FEATURES, spine(), as_served=True).write(tmp_path / "served")
    later_orders(built, project, 4)
    before, past = [files(each.path) for each in (made, served)], {n: rows(opened, n) for n in (0, 1, 3, 4)}
    aged(opened)
    done = run("maintain", "--project", str(built.root), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["tables"][VIEW]["freed"] > report["tables"][VIEW]["deleted"] > 0
    with pytest.raises(VersionGoneError, match="version 2 was removed"):
        rows(opened, 2)
    for version, expected in past.items():
        assert same_bits(rows(opened, version), expected)
    for each, content in zip((made, served), before, strict=True):
        (each.path / "data.parquet").unlink()
        reproduce(opened, each.id)
        assert files(each.path) == content
    # Redis has the rows of version 3: only the changes since are written.
    written = materialize(opened)[VIEW]
    assert 0 < written.written == written.changed < len(rows(opened)) / 4
    again = maintain(opened)
    assert sum(table.deleted + table.merged + table.entries for table in again.tables.values()) <= 4


def test_a_version_that_another_tool_removed_is_never_a_wrong_answer(
    built: Shop, project: Open, tmp_path: Path
) -> None:
    opened = project(built)
    made = isthmus.training_data(built.root, FEATURES, spine()).write(tmp_path / "set")
    later_orders(built, project, 1)
    now = {str(file) for file in Path(opened.offline, VIEW).glob("*/*.parquet")}
    table = OfflineStore(opened.offline).stored(VIEW).open()
    assert table is not None
    for file in now - {
        f"{opened.offline}/{VIEW}/{path}" for path in pa.table(table.get_add_actions())["path"].to_pylist()
    }:
        Path(file).unlink()
    with pytest.raises(DataError, match=r"version 0 of the offline table of customer_orders is gone .*missing"):
        reproduce(opened, made.id)
    with pytest.raises(DataError, match="version 0 was removed"):
        isthmus.training_data(built.root, FEATURES, spine(), as_served=True).table()
    assert materialize(opened)[VIEW].written, "all rows are compared with Redis"
    done = run("maintain", "--project", str(built.root))
    assert done.returncode == 0, done.stderr


def test_a_record_that_cannot_be_read_keeps_all_versions(built: Shop, project: Open, tmp_path: Path) -> None:
    opened = project(built)
    made = isthmus.training_data(built.root, FEATURES, spine()).write(tmp_path / "set")
    later_orders(built, project, 1)
    past = rows(opened, 0)
    (made.path / "_record.json").write_text("{")
    aged(opened)
    done = run("maintain", "--project", str(built.root), "--json")
    assert done.returncode == 1
    assert "its record cannot be read" in done.stderr
    assert same_bits(rows(opened, 0), past)
    with pytest.raises(DataError, match="Fix this, then run `isthmus maintain` again"):
        require_done(maintain(opened))


def test_a_training_set_whose_rows_are_damaged_keeps_its_versions(built: Shop, project: Open, tmp_path: Path) -> None:
    opened = project(built)
    served = isthmus.training_data(built.root, FEATURES, spine(), as_served=True).write(tmp_path / "served")
    later_orders(built, project, 1)
    materialize(opened)
    later_orders(built, project, 2)
    past = rows(opened, 0)
    (served.path / "data.parquet").write_bytes(b"PAR1")
    aged(opened)
    assert maintain(opened).problems == []
    assert same_bits(rows(opened, 0), past)
    with pytest.raises(DataError):
        served.table()


def test_builds_and_readers_run_meanwhile(built: Shop, project: Open) -> None:
    opened, stop, problems = project(built), threading.Event(), list[str]()
    first, runs = rows(opened, 0), []

    def always() -> None:
        while not stop.is_set():
            result = maintain(project(built))
            problems.extend(result.problems)
            runs.append(result)

    thread = threading.Thread(target=always)
    thread.start()
    try:
        for seed in range(1, 4):
            later_orders(built, project, seed)
            newest = rows(opened)
            materialize(opened)
            read = isthmus.training_data(built.root, FEATURES, spine()).table()
            assert same_bits(rows(opened, 0), first)
            assert len(read) == 300
            assert rows(opened).sort_by("content_hash") == newest.sort_by("content_hash")
    finally:
        stop.set()
        thread.join()
    assert (problems, len(runs) > 3) == ([], True)


def test_a_table_that_is_being_written_is_done_last(built: Shop, project: Open) -> None:
    opened, said, release = project(built), list[str](), threading.Event()
    locked = threading.Event()

    def writer() -> None:
        with opened.building([VIEW]):
            locked.set()
            release.wait(30)

    def note(text: str, _share: float) -> None:
        said.append(text)
        if "after the process" in text:
            release.set()

    thread = threading.Thread(target=writer)
    thread.start()
    locked.wait(30)
    result = maintain(project(built), progress=note)
    thread.join()
    assert set(VIEWS) < set(result.tables)
    assert said[-2:] == [f"maintaining {VIEW}, after the process that writes to it", "all tables are maintained"]


def test_caches_go_when_they_are_not_used(built: Shop, project: Open) -> None:
    opened = project(built)
    teacher = opened.state / "teacher" / "late_order"
    for name in ("old", "new"):
        (teacher / name).mkdir(parents=True)
        (teacher / name / "key.json").write_text("{}")
        (teacher / name / "shard").write_bytes(b"x" * 100)
    os.utime(teacher / "old" / "key.json", (time.time() - 91 * 86_400,) * 2)
    [staged] = (opened.state / "sources").glob("*.parquet")
    os.utime(staged, (time.time() - 2 * 86_400,) * 2)
    size = staged.stat().st_size
    assert maintain(opened).caches == {"sources": size, "teacher": 102}
    assert [folder.name for folder in teacher.iterdir()] == ["new"]
    build(opened)
    os.utime(staged, (time.time() - 2 * 86_400,) * 2)
    build(project(built))
    assert maintain(opened).caches == {"sources": 0, "teacher": 0}, "the build has used it again"


def test_the_status_shows_space_and_the_days_that_are_left(
    built: Shop, project: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = project(built)
    found = status(opened)
    assert found.spaces.keys() == {*VIEWS, "_materializations"}
    space = found.spaces[VIEW]
    assert space.bytes == sum(file.stat().st_size for file in Path(opened.offline, VIEW).rglob("*") if file.is_file())
    assert (space.growth, space.days_left, space.versions) == (None, None, 1)
    maintain(opened)
    samples = json.loads((opened.state / FILE).read_text())
    [(at, size)] = samples[VIEW]
    samples[VIEW] = [(at - 2 * DAY, size - 2_000)]
    samples[VIEWS[1]] = [(at - 2 * DAY, samples[VIEWS[1]][0][1])]
    (opened.state / FILE).write_text(json.dumps(samples))
    found = status(opened)
    grown = found.spaces[VIEW]
    assert grown.growth == pytest.approx(1_000, rel=0.01)
    assert grown.days_left is not None
    assert grown.days_left > 1_000
    assert found.spaces[VIEWS[1]].days_left is None
    show(
        msgspec.structs.replace(
            found, spaces={**found.spaces, VIEW: msgspec.structs.replace(grown, days_left=12.4)}
        ).screen()
    )
    screen = capsys.readouterr().out
    assert "days left" in screen
    assert "12" in screen
    assert "unknown" in screen
    assert clock.now() - at < 60_000_000


def test_the_step_of_dagster_reports_what_it_did(built: Shop, project: Open) -> None:
    request = StepRequest("maintain", nodes=("maintenance",))
    [event] = run_step(project(built), request, lambda _text, _done: None)
    assert isinstance(event, NodeMaterialization)
    assert (event.node, event.metadata["merged files"]) == ("maintenance", 3)
    assert event.metadata["bytes"] > 10_000
    [node] = (node for node in AssetGraph(outline(built.root)).nodes.values() if node.kind == "maintenance")
    made = condition(node)
    assert made is not None
    assert made.get_label() == "every night"
