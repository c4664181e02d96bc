"""Production quality of a project: labels late and early, answers again, a package that is gone, a clock gone back."""

import json
import shutil
from pathlib import Path
from threading import Event, Timer
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest

from isthmus.dagster import build_definitions
from isthmus.distill.evaluation import metrics
from isthmus.features import clock
from isthmus.features.errors import GateFailed
from isthmus.features.production import Production, production_file
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.monitoring.bounds import KEEPS, LIKE, require_bounds
from isthmus.orchestration.monitoring.labels import Without
from isthmus.orchestration.monitoring.monitor import follow, monitor
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.table import FOLDER
from isthmus.orchestration.steps.step import NodeCheck, StepRequest
from isthmus.orchestration.verification.verify import verify
from tests import commandline
from tests.orchestration.monitoring.recordings import DAY, HOUR, digest, orders, record
from tests.orchestration.server.served import served
from tests.orchestration.shop import NOW, Open, Shop

MINUTE = HOUR // 60


def scored(rows: pa.Table, seed: int = 0) -> np.ndarray[Any, Any]:
    """Scores that know something of the label."""
    noise = np.random.default_rng(seed).normal(0, 1, len(rows))
    scores: np.ndarray[Any, Any] = 1 / (1 + np.exp(-(2 * rows["late"].to_numpy() - 1.2 + noise)))
    return scores


def known(project: Project) -> pa.Table:
    """The orders whose labels are known by now."""
    rows = orders(project)
    return rows.filter(pa.array(rows["known"].to_numpy() <= project.now()))


def test_labels_meet_the_answers_that_they_are_of(exported: Shop, project: Open) -> None:
    opened = project(exported)
    rows = orders(opened).slice(1000)
    scores = scored(rows)
    # A minute later than the moment of the spine, as a shop asks.
    record(opened, rows, scores, rows["event"].to_numpy() + MINUTE)
    result = monitor(opened)
    (package,) = result.packages
    late = rows["known"].to_numpy() > opened.now()
    assert 0 < late.sum() == result.left_out[Without.LATE]
    assert sum(result.left_out.values()) == late.sum()
    assert (package.package, package.precision) == (digest(opened), "fp32")
    assert (package.answers, package.rows) == (len(rows), len(rows) - late.sum())
    labels, said = rows["late"].to_numpy()[~late], scores[~late].astype(np.float32)
    for name, value in metrics.metrics(labels, said).items():
        assert package.measures[name].value == pytest.approx(value, rel=1e-6)
    area = package.measures["auc"]
    assert area.value - 0.05 < (area.low or 0) < area.value < (area.high or 0) < area.value + 0.05
    assert package.measures["label"].value == pytest.approx(labels.mean())
    moments = [clock.moment(int(at)) for at in rows["event"].to_numpy() + MINUTE]
    assert [week.week for week in package.weeks] == sorted({f"{at:%G-W%V}" for at in moments})
    assert sum(week.rows for week in package.weeks) == package.rows
    last = [f"{at:%G-W%V}" == package.weeks[-1].week for at in moments]
    own = np.array(last) & ~late
    assert package.weeks[-1].measures["log_loss"].value == pytest.approx(
        metrics.log_loss(rows["late"].to_numpy()[own], scores[own].astype(np.float32)), rel=1e-6
    )
    worst = package.slices[0]
    assert worst.measures["auc"].value <= package.slices[-1].measures["auc"].value
    assert {part.column for part in package.slices} <= {"store", "product", "hour", "weight"}
    # What was served is what it learned from; its scores are not those of the model.
    found = {part.name: part for part in package.drift}
    assert found.keys() == {
        "shelf_demand__sold_1d",
        "shelf_demand__distance",
        "store",
        "product",
        "hour",
        "weight",
        "score",
    }
    assert [name for name, part in found.items() if part.exceeded] == ["score"]
    assert package.unknown == ()
    file = production_file(opened.state, "late_order")
    assert Production.loads(file.read_bytes()) == result
    assert "auc by week" in file.with_suffix(".html").read_text()


def test_bad_input_is_left_out_and_counted(exported: Shop, project: Open) -> None:
    exported.replace("task=Tabular(", "monitor=Monitor(within=timedelta(days=2)), task=Tabular(")
    exported.replace("    Int64,\n", "    Int64,\n    Monitor,\n")
    opened = project(exported)
    rows = known(opened).slice(1500, 60)
    event, label = rows["event"].to_numpy(), rows["known"].to_numpy()
    scores = np.full(len(rows), 0.5)
    scores[5], scores[20] = np.nan, np.inf
    record(opened, rows, scores, event + MINUTE)
    unread = rows.set_column(rows.column_names.index("hour"), "hour", pa.array(["x"] * len(rows)))
    # Of servers of their own: a clock of one goes on.
    for n, (row, at, of) in enumerate(
        [
            (6, label[6] + MINUTE, rows),  # within the tolerance, but the label was known by then
            (7, event[7], rows),  # nearer than before
            (8, event[8] + 3 * MINUTE, rows),  # farther
            (9, opened.now() + DAY, rows),
            (10, event[10] + 3 * DAY, rows),  # no row is near
            (11, event[11], unread),
        ]
    ):
        record(opened, of.slice(row, 1), [0.25], [at], run=f"{n:012}")
    result = monitor(opened)
    assert result.left_out == {
        Without.FUTURE: 1, Without.SCORE: 2, Without.UNREAD: 1, Without.UNMATCHED: 1, Without.EARLY: 1, Without.AGAIN: 2
    }  # fmt: skip
    (package,) = result.packages
    assert (package.answers, package.rows) == (66, 58)
    # The nearer answer is the one that counts.
    labels, said = np.delete(rows["late"].to_numpy(), [5, 20]), np.full(58, 0.5)
    said[6] = 0.25
    assert package.measures["brier"].value == pytest.approx(metrics.brier(labels, said))


def test_answers_count_to_the_callers_that_are_named(exported: Shop, project: Open) -> None:
    exported.replace("task=Tabular(", "monitor=Monitor(within=timedelta(days=2)), task=Tabular(")
    exported.replace("    Int64,\n", "    Int64,\n    Monitor,\n")
    opened = project(exported)
    rows = known(opened).slice(1500, 60)
    at, good = rows["event"].to_numpy() + MINUTE, np.where(rows["late"].to_numpy(), 0.9, 0.1)
    record(opened, rows, good, at, caller="app")
    # Somebody else asks nearer to the moments of the labels, for what the model is bad at.
    record(opened, rows, 1 - good, at - MINUTE // 2, run="f" * 12, caller="stranger")
    record(opened, rows, 1 - good, at - MINUTE // 2, run="e" * 12)
    labels = rows["late"].to_numpy()
    (everyone,) = monitor(opened).packages
    assert everyone.measures["brier"].value == pytest.approx(metrics.brier(labels, 1 - good))
    exported.append('\n[monitor]\ncallers = ["app"]\n', "isthmus.toml")
    (named,) = monitor(project(exported)).packages
    assert named.measures["brier"].value == pytest.approx(metrics.brier(labels, good.astype(np.float32)))
    assert named.answers == 60


def test_who_follows_is_told_what_cannot_be_measured(exported: Shop, project: Open) -> None:
    opened, told, stopped = project(exported), list[str](), Event()
    rows = known(opened).slice(0, 10)
    record(opened, rows, scored(rows), rows["event"].to_numpy())
    (exported.root / "data" / "orders.parquet").unlink()

    def say(text: str) -> None:
        told.append(text)
        stopped.set()

    giving_up = Timer(60, stopped.set)
    giving_up.start()
    follow(opened, None, say, stopped)
    giving_up.cancel()
    assert told[0].startswith("late_order: definitions.py: source orders: ")


def test_a_clock_that_goes_back_leaves_out_what_it_had_twice(exported: Shop, project: Open) -> None:
    opened = project(exported)
    rows = known(opened).slice(1500, 40)
    at = rows["event"].to_numpy().copy()
    # In the middle the clock goes back: the same hours come again.
    at[20:] -= at[20] - at[15]
    record(opened, rows, scored(rows), at)
    result = monitor(opened)
    assert result.left_out[Without.CLOCK] == int(
        ((at[:20] > at[20] + MINUTE).sum()) + (at[20:] < at[19] - MINUTE).sum()
    )
    assert result.packages[0].rows + sum(result.left_out.values()) == 40


def test_a_package_that_is_gone_has_quality_without_drift(exported: Shop, project: Open) -> None:
    opened = project(exported)
    rows = known(opened)
    half = rows.slice(0, 600), rows.slice(600, 600)
    record(opened, half[0], scored(half[0]), half[0]["event"].to_numpy(), package="f" * 64)
    record(opened, half[1], 1 - scored(half[1]), half[1]["event"].to_numpy(), number=2, start=600)
    now, gone = monitor(opened).packages
    assert (gone.package, gone.rows, gone.drift) == ("f" * 64, 600, ())
    assert "gone" in gone.unknown[0]
    assert (now.package, now.rows) == (digest(opened), 600)
    assert gone.measures["auc"].value > 0.8 > 0.2 > now.measures["auc"].value


def test_a_package_of_another_kind_of_label_has_no_measure(exported: Shop, project: Open) -> None:
    opened = project(exported)
    rows = known(opened).slice(0, 200)
    at = rows["event"].to_numpy()
    record(opened, rows, scored(rows), at)
    exported.replace("task=Tabular(", "task=Tabular(label=Classes(), ")
    exported.replace("    Int64,\n", "    Classes,\n    Int64,\n")
    (package,) = monitor(project(exported)).packages
    assert (package.answers, package.rows, dict(package.measures)) == (200, 0, {})
    assert package.unknown[0] == "it predicts no classes, but the label has classes now"


def test_private_keys_are_found_by_their_hashes(exported: Shop, project: Open) -> None:
    opened = project(exported)
    rows = known(opened)
    record(opened, rows, scored(rows), rows["event"].to_numpy())
    plain = monitor(opened)
    shutil.rmtree(Path(opened.offline) / FOLDER)
    record(opened, rows, scored(rows), rows["event"].to_numpy(), hashed=("store", "product"))
    hashed = monitor(opened)
    assert hashed == plain
    assert hashed.packages[0].drift
    assert {"store", "product"} <= {part.column for part in hashed.packages[0].slices}
    # Nor are keys that must not be seen slices, which have them in words.
    exported.append('\n[server.record]\nprivate = ["shelf_demand"]\n', "isthmus.toml")
    assert {part.column for part in monitor(project(exported)).packages[0].slices} == {"hour", "weight"}


def test_a_bound_is_broken_where_chance_does_not_do_it(exported: Shop, project: Open) -> None:
    exported.append(
        "late_order = replace(late_order, bounds=[\n"
        '    Gate("production.auc", at_least=0.95), Gate("production.slices.auc", at_least=0.95)])\n'
    )
    exported.replace(
        "from datetime import timedelta\n", "from dataclasses import replace\nfrom datetime import timedelta\n"
    )
    opened = project(exported)
    rows = known(opened)
    few = rows.slice(0, 24)
    record(opened, few, scored(few), few["event"].to_numpy())
    assert not any(bound.broken for bound in monitor(opened).bounds)
    record(opened, rows.slice(24), scored(rows.slice(24), 1), rows.slice(24)["event"].to_numpy(), number=2, start=100)
    result = monitor(opened)
    bound, slices = result.bounds
    assert (bound.broken, slices.broken) == (True, True)
    assert bound.found == result.packages[0].measures["auc"]
    assert slices.found in [part.measures["auc"] for part in result.packages[0].slices if part.name == slices.slice]
    with pytest.raises(GateFailed, match=r"auc.*slices.auc of .* is 0.*at least 0.95; slices.auc at least 0.95"):
        require_bounds(result, Path("page"))


def test_both_are_checks_of_the_deployment_that_hold_nothing_up(exported: Shop, project: Open) -> None:
    node, clock_of = "deployment/late_order", dg.AutomationCondition.cron_tick_passed("0 * * * *")
    exported.append("\n[server.record]\n", "isthmus.toml")
    for name in (KEEPS, LIKE):
        found = checks(exported)[name]
        assert found.asset_key == dg.AssetKey(["late_order", "deployment"])
        assert (found.blocking, found.automation_condition) == (False, clock_of)
    opened = project(exported)
    request = StepRequest("monitor", checks=((node, KEEPS), (node, LIKE)))
    assert [event.passed for event in run(opened, request)] == [True, True]
    rows = known(opened)
    record(opened, rows, scored(rows), rows["event"].to_numpy())
    keeps, like = run(opened, request)
    assert (keeps.passed, like.passed) == (True, False)
    assert like.message.startswith("score has drifted: psi")
    assert "data:image/svg+xml" in str(keeps.metadata["weeks"])
    lines = keeps.metadata["slices"]["raw_value"].splitlines()
    (package,) = monitor(opened).packages
    assert keeps.metadata["auc"].startswith(f"{package.measures['auc'].value:.4g} ")
    assert lines[0].startswith("| slice | answers | labeled | auc |")
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {part.name}" for part in package.slices]
    json.dumps(keeps.metadata)


def checks(shop: Shop) -> dict[str, dg.AssetCheckSpec]:
    graph = build_definitions(shop.root).resolve_asset_graph()
    return {key.name: graph.get_check_spec(key) for key in graph.asset_check_keys}


def run(project: Project, request: StepRequest) -> list[NodeCheck]:
    events = list(run_step(project, request, lambda _text, _share: None))
    assert all(isinstance(event, NodeCheck) and not event.blocking for event in events)
    return [event for event in events if isinstance(event, NodeCheck)]


def test_without_answers_there_is_nothing_and_no_bound_is_broken(exported: Shop, project: Open) -> None:
    result = monitor(project(exported))
    assert (result.packages, dict(result.left_out)) == ((), {})


@pytest.mark.accept
def test_what_a_server_answered_meets_its_labels_and_is_at_its_metrics(exported: Shop, project: Open) -> None:
    exported.append("\n[server.record]\n", "isthmus.toml")
    exported.replace("task=Tabular(", "monitor=Monitor(within=timedelta(days=20)), task=Tabular(")
    exported.replace("    Int64,\n", "    Int64,\n    Monitor,\n")
    verify(project(exported))
    deploy(project(exported))
    # The clock of the project stands in February, and then moves on.
    exported.replace(NOW, "2024-02-20T00:00:00Z", "isthmus.toml")
    opened = project(exported)
    rows = orders(opened)
    rows = rows.filter(pa.array(np.abs(rows["event"].to_numpy() - opened.now()) < 5 * DAY))
    assert rows["known"].to_numpy().min() < opened.now() < rows["known"].to_numpy().max()
    with served(opened, model=True) as http:
        for row in rows.select(["store", "product", "hour", "weight"]).to_pylist():
            keys = {name: [row[name]] for name in ("store", "product")}
            fields = {name: [row[name]] for name in ("hour", "weight")}
            assert http.post("/predict", json={"entities": keys, "request": fields}).status_code == 200
    exported.replace("2024-02-20T00:00:00Z", NOW, "isthmus.toml")
    done = commandline.run("answers", "collect", cwd=exported.root)
    assert done.returncode == 0, done.stderr
    done = commandline.run("answers", "monitor", "--json", cwd=exported.root)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (package,) = report["packages"]
    early = int((rows["known"].to_numpy() <= opened.now()).sum())
    assert report["left_out"] == {Without.EARLY.value: early}
    assert (package["answers"], package["rows"]) == (len(rows), len(rows) - early)
    assert package["measures"]["auc"]["low"] is not None
    assert not package["unknown"]
    with served(project(exported), model=True) as http:
        text = http.get("/metrics").text
    value = package["measures"]["auc"]["value"]
    assert f'isthmus_production_quality{{metric="auc",model="late_order",period="all"}} {value}' in text
    assert 'isthmus_production_rows{model="late_order",period="week"}' in text
