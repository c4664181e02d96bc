"""Where a project stands, before and after each step, and after what may happen to it."""

import json
from datetime import timedelta

import msgspec
import pyarrow.parquet as pq
import pytest

from isthmus.features import clock
from isthmus.features.projectstatus import ProjectStatus, ViewStatus
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.cli.screens.writer import show
from isthmus.orchestration.project import Project
from isthmus.orchestration.status import status, write_status
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from tests.commandline import run
from tests.orchestration.shop import VIEWS, Open, Shop, order_rows


def test_a_project_that_nobody_has_touched_says_what_is_to_be_done(
    shop: Shop, project: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status(project(shop))
    assert not found.applied
    assert [view.rows for view in found.views.values()] == [None] * len(VIEWS)
    assert (found.models["late_order"].training_set, found.models["late_order"].deployed, found.runs) == (
        None,
        None,
        [],
    )
    show(found.screen())
    screen = capsys.readouterr().out
    assert "not applied, run `isthmus apply`" in screen
    assert screen.count("to be built") == len(VIEWS)


def test_what_has_no_times_has_no_age(capsys: pytest.CaptureFixture[str]) -> None:
    frames = ViewStatus(rows=7, last_day="1970-01-01", age_days=20_000)
    status = ProjectStatus(project="effects", contract="c", applied=True, now=0, measured=True, found_at=0,
                    views={"frames": frames}, models={}, runs=[])  # fmt: skip
    show(status.screen())
    screen = capsys.readouterr().out
    assert "no times" in screen
    assert "ago" not in screen


def test_what_was_built_and_materialized_is_up_to_date(
    built: Shop, project: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    made = training_set(project(built))
    found = status(project(built))
    assert found.applied
    for view in found.views.values():
        assert (view.current, view.served, view.expired, view.broken, view.problem) == (True, True, False, (), "")
        assert view.rows
        assert view.served_at is not None
    assert found.models["late_order"].training_set == made.id
    late = msgspec.structs.replace(
        found.models["late_order"], student="5" * 64, package="6" * 64, verdict=True, compared=10**6,
        deployed="6" * 64, deployed_at=found.found_at,
    )  # fmt: skip
    show(msgspec.structs.replace(found, models={"late_order": late}).screen())
    screen = capsys.readouterr().out
    assert screen.count("up to date") == len(VIEWS)
    assert "late_order " in screen, "names are whole, whatever stands beside them"
    assert f"{clock.moment(found.found_at):%Y-%m-%d %H:%M}" in screen
    other = msgspec.structs.replace(late, deployed="7" * 64)
    show(msgspec.structs.replace(found, models={"late_order": other}).screen())
    screen = capsys.readouterr().out
    assert "not the last:" in screen
    assert "7" * 12 in screen, "wrapped, not cut"


def test_new_data_a_changed_transform_and_time_are_seen(built: Shop, project: Open) -> None:
    (built.root / "data" / "orders.parquet").touch()
    found = status(project(built), measure=False).views
    assert {name: view.current for name, view in found.items()} == {
        "customer_orders": False, "shelf_demand": False, "customer_facts": True,
    }  # fmt: skip
    built.replace("now = 2024-03-01", "now = 2024-04-01", "isthmus.toml")
    later = status(project(built), measure=False).views
    assert {name: view.expired for name, view in later.items()} == {
        "customer_orders": True, "shelf_demand": True, "customer_facts": False,
    }  # fmt: skip
    age = (later["customer_orders"].age_days or 0) - (found["customer_orders"].age_days or 0)
    assert timedelta(days=age) == timedelta(days=31)
    built.replace("rangeBetween(1 - 7 * 86400, 0)", "rangeBetween(1 - 6 * 86400, 0)")
    changed = status(project(built), measure=False)
    assert not changed.applied
    apply(project(built))
    build(project(built))
    again = status(project(built), measure=False).views
    assert {name: (view.current, view.served) for name, view in again.items()} == {
        "customer_orders": (True, False), "shelf_demand": (True, True), "customer_facts": (True, True),
    }  # fmt: skip


def test_what_was_measured_is_kept_for_the_server_as_long_as_it_is_about_the_same(built: Shop, project: Open) -> None:
    write_status(project(built))
    kept = ProjectStatus.read(built.state)
    assert kept is not None
    assert not kept.measured
    measured = status(project(built))
    found = msgspec.structs.replace(measured.views["shelf_demand"], broken=("distance is above 1",))
    msgspec.structs.replace(measured, views={**measured.views, "shelf_demand": found}).write(built.state)
    write_status(project(built))
    kept = ProjectStatus.read(built.state)
    assert kept is not None
    assert (kept.measured, kept.views["shelf_demand"].broken) == (True, ("distance is above 1",))
    training_set(project(built))
    write_status(project(built))
    kept = ProjectStatus.read(built.state)
    assert kept is not None
    assert not kept.measured, "drift is from what a model learned from"
    status(project(built)).write(built.state)
    pq.write_table(order_rows(seed=1), built.orders)
    build(project(built), ["shelf_demand"])
    write_status(project(built))
    kept = ProjectStatus.read(built.state)
    assert kept is not None
    assert (kept.measured, kept.views["shelf_demand"].broken) == (False, ())


def test_a_damaged_table_is_said_and_hides_no_other(built: Shop, project: Open) -> None:
    table = Project(built.root).definitions.contract.views["shelf_demand"].table
    log = next((built.root / ".isthmus" / "offline" / table / "_delta_log").glob("*.json"))
    log.write_text("nothing")
    found = status(project(built), measure=False).views
    assert "damaged" in found["shelf_demand"].problem or "cannot be read" in found["shelf_demand"].problem
    assert found["customer_facts"].served


def test_the_command_line_says_the_same(built: Shop) -> None:
    done = run("status", "--json", "--no-measure", "--project", str(built.root))
    told = json.loads(done.stdout)
    assert set(told["views"]) == set(VIEWS)
    assert told["models"]["late_order"]["verdict"] is None
    kept = ProjectStatus.read(built.state)
    assert kept is not None
    assert json.loads(msgspec.json.encode(kept)) == told
