"""A training set as a device sees it, and a student that learns from it."""

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from isthmus.features.definition.spec import Snapshot
from isthmus.features.errors import ConfigurationError, ContractMismatch
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.staleness import fixed_ages, random_ages
from isthmus.features.values.arrow import ARROW, micros
from isthmus.features.values.columns import Ints
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts, TrainingSet
from isthmus.orchestration.models import cards
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.training.staleness import device_rows_file, with_stale_inputs
from isthmus.package.manifest import open_package
from tests.features.support import join_naively
from tests.orchestration.shop import HOUR, Shop, with_device

HOURS = 6


@pytest.fixture
def project(on_device: Shop) -> Project:
    """The shop with a service that devices keep, and its training set."""
    return Project(on_device.root)


def _examples(project: Project) -> tuple[TrainingSet, Snapshot]:
    declared = project.distillation()
    assert declared.student.device is not None
    return Artifacts(project, declared).current_training_set(), declared.student.device


def _by_hand(project: Project, table: pa.Table, ages: Ints) -> list[tuple[object, ...]]:
    """The oracle: the newest row at the moment of the snapshot, unless it has expired by the moment of the question."""
    view = project.applied().views["shelf_demand"]
    history = OfflineStore(project.offline).history(view)
    at = micros(table["event_timestamp"])
    then = table.select(["store", "product"]).append_column(
        "event_timestamp", pa.array(at - ages).cast(ARROW["UnixTimestamp"])
    )
    lasting = replace(history, view=replace(view, ttl=None))
    joined = join_naively(then, lasting)
    rows = history.table()
    events: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    columns = [rows["store"].to_pylist(), rows["product"].to_pylist()]
    columns += [micros(rows[name]).tolist() for name in ("event_timestamp", "known_at")]
    for store, product, event, known in zip(*columns, strict=True):
        events.setdefault((store, product), []).append((event, known))
    found: list[tuple[object, ...]] = []
    for n, row in enumerate(joined.to_pylist()):
        moment = int(at[n] - ages[n])
        seen_then = [e for e, k in events.get((row["store"], row["product"]), []) if e <= moment and k <= moment]
        late = not seen_then or (view.ttl is not None and int(at[n]) - max(seen_then) > view.ttl)
        found.append((None, None) if late else (row["shelf_demand__sold_1d"], row["shelf_demand__distance"]))
    return found


def test_another_service_of_the_student_has_a_file_of_its_own(on_device: Shop) -> None:
    kept = "device=Snapshot(age=timedelta(hours=6), every=timedelta(hours=1), keep=3)"
    service = f'small = FeatureService("small", features=[shelf_demand[["distance"]]], {kept})'
    on_device.replace("on_server = ", f"{service}\non_server = ")
    project = Project(on_device.root)
    apply(project)
    training_set(project)
    examples, _ = _examples(project)
    before = device_rows_file(project, project.distillation(), examples)
    on_device.replace("student=on_device", "student=small")
    changed = Project(on_device.root)
    again, _ = _examples(changed)
    assert again.path == examples.path
    file = device_rows_file(changed, changed.distillation(), again)
    assert "shelf_demand__sold_1d" in pq.read_schema(before).names
    assert "shelf_demand__sold_1d" not in pq.read_schema(file).names


def test_its_rows_are_those_of_the_snapshot_of_then(project: Project) -> None:
    examples, device = _examples(project)
    declared, table = project.distillation(), examples.table()
    for ages in (fixed_ages(0), fixed_ages(HOURS * HOUR), random_ages(device)):
        rows = with_stale_inputs(project, declared, examples, table, ages)
        found = list(
            zip(rows["shelf_demand__sold_1d"].to_pylist(), rows["shelf_demand__distance"].to_pylist(), strict=True)
        )
        assert found == _by_hand(project, table, ages(micros(table["event_timestamp"]), 0))
        # What a request brings is not old, and what only the teacher reads is not there.
        for name in ("store", "product", "hour", "weight", "late", "event_timestamp", "moment__store_code"):
            assert rows[name].equals(table[name])
        assert not [name for name in rows.column_names if name.startswith("customer_")]
    assert with_stale_inputs(project, declared, examples, table, fixed_ages(0))["moment__per_sold"].equals(
        table["moment__per_sold"]
    )
    # Request transforms read what the device has.
    per_sold = with_stale_inputs(project, declared, examples, table, fixed_ages(HOURS * HOUR))["moment__per_sold"]
    assert not per_sold.equals(table["moment__per_sold"])


def test_the_rows_of_drawn_ages_are_written_once(project: Project) -> None:
    examples, device = _examples(project)
    declared = project.distillation()
    file = device_rows_file(project, declared, examples)
    table = pq.read_table(file)
    assert table.equals(with_stale_inputs(project, declared, examples, examples.table(), random_ages(device)))
    assert device_rows_file(project, declared, examples) == file
    later = replace(declared, student=replace(declared.student, device=replace(device, age=timedelta(hours=12))))
    assert not pq.read_table(device_rows_file(project, later, examples)).equals(table)


def test_of_a_key_that_devices_do_not_keep_there_is_no_row(project: Project) -> None:
    examples, device = _examples(project)
    declared, table = project.distillation(), pq.read_table(device_rows_file(project, project.distillation(), examples))
    stores = sorted({*table["store"].to_pylist()})[:2]
    some = replace(declared, student=replace(declared.student, device=replace(device, keys={"store": stores})))
    rows = pq.read_table(device_rows_file(project, some, examples))
    feature, kept = "shelf_demand__distance", pc.is_in(table["store"], pa.array(stores))
    assert 0 < pc.sum(kept).as_py() < len(kept)
    assert rows[feature].equals(pc.if_else(kept, table[feature], None))


@pytest.mark.accept
@pytest.mark.slowest
def test_a_student_learns_from_what_a_device_has_and_says_what_its_age_costs(project: Project, tmp_path: Path) -> None:
    report = distill(project).data
    ages = report["ages"]
    assert report["age"] == HOURS * 3600
    assert [point["seconds"] for point in ages] == [HOURS * 3600 * share for share in (0, 0.25, 0.5, 1, 3, 6, 24, 168)]
    at_age = next(point for point in ages if point["seconds"] == report["age"])
    # What the report and its gates are about is the student at the greatest age.
    assert at_age["found"]["value"] == pytest.approx(report["models"]["student"]["quality"]["auc"], abs=1e-12)
    cost = ages[0]["found"]["value"] - at_age["found"]["value"]
    assert report["measures"]["age_cost"] == pytest.approx(cost, abs=1e-12)
    folder = Artifacts(project, project.distillation()).last_model()
    for file in (cards.PAGE, cards.BOUNDARY_CARD):
        assert "may be up to 6 hours old" in (folder / file).read_text()
    assert "fresh" in (folder / cards.PAGE).read_text()
    exported = export(project)
    device = open_package(exported.path).manifest.device
    assert device is not None
    assert (device.project, device.service, device.age) == ("shop", "late_order_device", HOURS * HOUR)
    assert device.hash == project.applied().service("late_order_device").hash
    (view,) = device.views
    assert (view.keys, view.ttl) == ((("product", "Int32"), ("store", "String")), 72 * HOUR)
    assert view.fields == (("sold_1d", "Int64"), ("distance", "Float32"))
    # Of another age it would be another student.
    shutil.copytree(project.root, tmp_path / "older")
    Shop(tmp_path / "older").replace("age=timedelta(hours=6)", "age=timedelta(hours=48)")
    with pytest.raises(ContractMismatch, match="isthmus distill"):
        export(Project(tmp_path / "older"))


def test_a_task_of_ones_own_cannot_learn_from_ages(shop: Shop) -> None:
    with_device(shop).replace("task=Tabular(teacher_rounds=8, hidden=(16,))", 'task="own:Task"')
    with pytest.raises(ConfigurationError, match="expected a service without `device`"):
        apply(Project(shop.root))
