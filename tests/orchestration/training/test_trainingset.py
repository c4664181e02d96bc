"""The training set of a real project: what it holds, what it records, what it refuses."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus import DataError, RequestError
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from tests.features.support import join_naively
from tests.orchestration.shop import VIEWS, Open, Shop, cut, files


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
    assert Artifacts(opened, opened.definitions.distillations["late_order"]).current_training_set() == first


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
    found = Artifacts(opened, opened.definitions.distillations["late_order"]).current_training_set()
    assert found.path.is_relative_to(moved.root)
    assert len(found.table()) == 2400


def test_a_training_set_that_is_damaged(built: Shop, project: Open) -> None:
    made = training_set(project(built))
    cut(made.path / "data.parquet")
    with pytest.raises(DataError, match=rf"training set {made.id}: .*cannot be read .*Remove {made.path} and run"):
        made.table()
    (made.path / "_record.json").write_text("{}")
    opened = project(built)
    with pytest.raises(
        DataError, match=r"training set of late_order: its record cannot be read .*Run `isthmus features training-set`"
    ):
        Artifacts(opened, opened.definitions.distillations["late_order"]).current_training_set()


def test_unknown_distillation(built: Shop, project: Open) -> None:
    with pytest.raises(RequestError, match="distillation: 'early' is not declared; expected late_order"):
        training_set(project(built), "early")
    text = (built.root / "definitions.py").read_text()
    (built.root / "definitions.py").write_text(text + "\ndel late_order\n")
    apply(project(built))
    with pytest.raises(RequestError, match=r"declare no distillation. Declare a Distillation in definitions.py"):
        training_set(project(built))
