"""The project in Dagster: what a run gives, what is stale after which change, what is selected, and what is refused."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import PipesEnvContextInjector, open_pipes_session
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.definitions.reconstruct import ReconstructableJob
from dagster._core.loader import LoadingContextForTest
from dagster_pipes import PipesContext

from isthmus import ConfigurationError
from isthmus.dagster import AssetNode, IsthmusTranslator, build_definitions
from isthmus.orchestration.dev import dev
from isthmus.orchestration.graph import child
from isthmus.orchestration.graph.assets import record_source_versions
from isthmus.orchestration.graph.outline import outline
from isthmus.orchestration.graph.resource import CHILD, Context, IsthmusResource, Messages, Results, StepRunner
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality.steps import DRIFT
from tests.orchestration import shop as shops
from tests.orchestration.shop import VIEWS, Shop

MODEL = "late_order"
RELAXED = "\n[profiles.serving]\nlatency_objective_ms = 1000\nmemory_mb = 1000\n"
LEARNED = ("training_set", "teacher", "teacher_outputs", "student", "control", "package", "deployment")
CHAIN = {f"{MODEL}/{kind}" for kind in LEARNED}
TABLES = {f"{kind}/{view}" for kind in ("offline", "online") for view in VIEWS}


class Dagster:
    """A project with the runs that there were of it."""

    def __init__(self, root: Path, instance: dg.DagsterInstance, resource: StepRunner | None = None) -> None:
        self.root, self.instance, self.resource = root, instance, resource

    def run(self, *nodes: str, days: tuple[str, str] | None = None) -> dg.ExecuteInProcessResult:
        """A run of some nodes and of their checks, or of all."""
        definitions = build_definitions(self.root, resource=self.resource)
        chosen = dg.AssetSelection.assets(*(dg.AssetKey(node.split("/")) for node in nodes))
        job = dg.define_asset_job("chosen", chosen if nodes else dg.AssetSelection.all())
        merged = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("chosen")
        tags = {} if days is None else {
            "dagster/asset_partition_range_start": days[0], "dagster/asset_partition_range_end": days[1],
        }  # fmt: skip
        return merged.execute_in_process(instance=self.instance, tags=tags, raise_on_error=False)

    def stale(self) -> set[str]:
        """The nodes that Dagster shows as stale."""
        graph = build_definitions(self.root).resolve_asset_graph()
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        return {
            "/".join(key.path) for key in graph.materializable_asset_keys
            if resolver.get_status(key) is StaleStatus.STALE
        }  # fmt: skip


class _Here(IsthmusResource):
    """Each step in this process, over the same pipes: elsewhere, loading libraries and an engine takes most of it."""

    def launch(self, context: Context, extras: dict[str, Any]) -> dg.PipesClientCompletedInvocation:
        with (
            open_pipes_session(context.op_execution_context, PipesEnvContextInjector(), Messages(), extras) as session,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name, value in session.get_bootstrap_env_vars().items():
                patch.setenv(name, value)
            patch.setattr(PipesContext, "_instance", None)
            assert child.main() == 0
        return dg.PipesClientCompletedInvocation(session)


def failures(result: dg.ExecuteInProcessResult | dg.JobExecutionResult) -> list[str]:
    """Why each step that failed did."""
    return [
        f"{event.step_key}: {event.step_failure_data.error}" for event in result.all_events if event.is_step_failure
    ]


@pytest.fixture(scope="module")
def _ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything once."""
    folder = tmp_path_factory.mktemp("ran")
    root = shops.write(folder / "shop", rows=6000).root
    settings = root / "isthmus.toml"
    settings.write_text(settings.read_text().replace("epochs = 2", "epochs = 12") + RELAXED)
    (folder / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(folder / "home")) as instance:
        record_source_versions(instance, root)
        result = Dagster(root, instance, _Here(project=str(root))).run()
        assert result.success, failures(result)
    return folder


@pytest.fixture
def ran(_ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dagster]:
    """The same, to be changed: at the place where it ran, for paths are part of it."""
    kept = shutil.copytree(_ran, tmp_path / "kept")
    with dg.DagsterInstance.local_temp(str(_ran / "home")) as instance:
        yield Dagster(_ran / "shop", instance)
    shutil.rmtree(_ran)
    shutil.copytree(kept, _ran)


def _edit(ran: Dagster, before: str, after: str, file: str = "definitions.py") -> None:
    text = (ran.root / file).read_text()
    assert before in text
    (ran.root / file).write_text(text.replace(before, after))


def versions(ran: Dagster) -> dict[str, str]:
    """Every asset and the version of its content."""
    made = {}
    for node in TABLES | CHAIN | {"contract"}:
        event = ran.instance.get_latest_materialization_event(dg.AssetKey(node.split("/")))
        assert event is not None, node
        assert event.asset_materialization is not None
        made[node] = (event.asset_materialization.tags or {})["dagster/data_version"]
    return made


@pytest.mark.accept
@pytest.mark.timeout(600)
def test_everything_is_made_and_has_the_version_of_its_content(ran: Dagster) -> None:
    made = versions(ran)
    assert made["offline/customer_orders"] == made["online/customer_orders"] != made["offline/shelf_demand"]
    deployed = json.loads((ran.root / ".isthmus" / "deployment.json").read_bytes())
    assert deployed["digest"] == made[f"{MODEL}/package"] == made[f"{MODEL}/deployment"]
    assert ran.stale() == set()


@pytest.mark.accept
def test_what_was_made_is_shown_with_its_rows_and_plots(ran: Dagster) -> None:
    def shown(node: str) -> Mapping[str, dg.MetadataValue[Any]]:
        event = ran.instance.get_latest_materialization_event(dg.AssetKey(node.split("/")))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization.metadata

    for node in [*TABLES, f"{MODEL}/training_set", f"{MODEL}/teacher_outputs"]:
        rows = shown(node)["dagster/row_count"].value
        assert isinstance(rows, int)
        assert rows > 0, node
    assert {"compared", "changed", "written", "removed"} <= set(shown("online/shelf_demand"))
    # Only what is a series is a number, which Dagster plots.
    numbers = {name for name, value in shown("online/shelf_demand").items() if isinstance(value.value, int | float)}
    assert numbers == {"dagster/row_count", "written", "seconds"}
    assert len(str(shown("contract")["contract"].value)) == 12
    student = shown(f"{MODEL}/student")
    assert [*student][:4] == ["taught", "gap_closed", "lift_kept", "auc"], "headline figures come first"
    auc = student["auc"].value
    assert isinstance(auc, float)
    assert auc == float(f"{auc:.4g}")
    assert "e+0" not in str(student["models"].value)
    assert "**auc**: area under the ROC curve" in str(student["models"].value), "figures are explained"
    for plotted in ("loss", "quality", "latency"):
        assert "data:image/" in str(shown(f"{MODEL}/student")[plotted].value), plotted
    assert {"p50_us", "p99_us", "bytes int8", "worst model.int8.ort"} <= set(shown(f"{MODEL}/package"))


def test_what_is_written_otherwise_makes_nothing_stale(ran: Dagster) -> None:
    _edit(ran, '"customer",\n        "ordered_at",', '"customer", "ordered_at",  # both\n')
    assert outline(ran.root).views[0].place is not None
    assert ran.stale() == set()


def test_a_changed_transform_makes_stale_what_depends_on_it(ran: Dagster) -> None:
    _edit(ran, 'F.avg("cents")', 'F.max("cents")')
    assert ran.stale() == {"contract", "offline/customer_orders", "online/customer_orders", *CHAIN}


def test_a_gate_makes_nothing_stale_and_a_setting_what_is_trained(ran: Dagster) -> None:
    _edit(ran, "at_least=", "at_least=0.0001 * ")
    assert ran.stale() == set()
    _edit(ran, "epochs = 12", "epochs = 13", "isthmus.toml")
    assert ran.stale() == CHAIN - {f"{MODEL}/training_set"}


def test_new_data_are_seen_and_what_depends_on_them_is_asked_for(ran: Dagster) -> None:
    assert _seen(ran) == set(), "nothing has changed since they were looked at"
    first = _due(ran, None)
    assert first.total_requested == 0
    (ran.root / "data" / "orders.parquet").touch()
    assert _seen(ran) == {"source/orders"}
    assert _seen(ran) == set()
    of_orders = {f"{kind}/{view}" for kind in ("offline", "online") for view in ("customer_orders", "shelf_demand")}
    assert ran.stale() == {"offline/customer_orders", "offline/shelf_demand", f"{MODEL}/training_set"}, "who reads them"
    second = _due(ran, first)
    assert _asked(second) == of_orders, (
        "models are trained when it is time, or something drifted; what is deployed goes on"
    )


def test_models_are_trained_again_when_what_they_are_fed_has_drifted(ran: Dagster) -> None:
    first = _due(ran, None)
    _check(ran, "offline/customer_orders", DRIFT, passed=False)
    second = _due(ran, first)
    assert _asked(second) == CHAIN, "and what follows from that, up to what is deployed"
    third = _due(ran, second)
    assert third.total_requested == 0, "once"
    for passed in (False, True):
        _check(ran, "offline/shelf_demand", "holds_its_contract", passed=passed)
        third = _due(ran, third)
        assert third.total_requested == 0, "and not again because of another view"


def test_a_broken_promise_trains_nothing_also_when_it_is_kept_again(ran: Dagster) -> None:
    before = _due(ran, None)
    for passed in (False, True):
        _check(ran, "offline/customer_orders", "meets_its_expectations", passed=passed)
        before = _due(ran, before)
        assert before.total_requested == 0


def test_models_are_trained_again_when_it_is_time(ran: Dagster) -> None:
    with (ran.root / "isthmus.toml").open("a") as file:
        file.write('\n[orchestration]\nretrain = "@daily"\n')
    noon = datetime(2024, 6, 1, 12, tzinfo=UTC)
    first = _due(ran, None, noon)
    second = _due(ran, first, noon + timedelta(hours=6))
    assert second.total_requested == 0
    assert _asked(_due(ran, second, noon + timedelta(hours=13))) == CHAIN


def test_a_new_package_is_deployed_once_its_verdict_has_passed(ran: Dagster) -> None:
    before = _due(ran, None)
    ran.instance.report_runless_asset_event(dg.AssetMaterialization(dg.AssetKey([MODEL, "package"])))
    for passed in (False, True):
        _check(ran, f"{MODEL}/package", "verdict", passed=passed)
        before = _due(ran, before)
        assert _asked(before) == ({f"{MODEL}/deployment"} if passed else set())


def _check(ran: Dagster, node: str, check: str, *, passed: bool) -> None:
    found = dg.AssetCheckEvaluation(asset_key=dg.AssetKey(node.split("/")), check_name=check, passed=passed)
    ran.instance.report_runless_asset_event(found)


def _asked(due: dg.EvaluateAutomationConditionsResult) -> set[str]:
    return {node for node in TABLES | CHAIN if due.get_num_requested(dg.AssetKey(node.split("/")))}


def _due(
    ran: Dagster, before: dg.EvaluateAutomationConditionsResult | None, at: datetime | None = None
) -> dg.EvaluateAutomationConditionsResult:
    cursor, every = None if before is None else before.cursor, dg.AssetSelection.all()
    return dg.evaluate_automation_conditions(
        build_definitions(ran.root), ran.instance, every, evaluation_time=at, cursor=cursor
    )


def _seen(ran: Dagster) -> set[str]:
    """The sources that the sensor says are new."""
    sensor = next(one for one in build_definitions(ran.root).sensors or () if one.name == "sources")
    assert isinstance(sensor, dg.SensorDefinition)
    with dg.build_sensor_context(instance=ran.instance) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    for event in result.asset_events:
        ran.instance.report_runless_asset_event(event)
    return {"/".join(event.asset_key.path) for event in result.asset_events}


def test_what_a_failing_check_stops_and_how_long_rows_stay_fresh(shop: Shop) -> None:
    graph = build_definitions(shop.root).resolve_asset_graph()
    blocking = {
        f"{'/'.join(key.asset_key.path)}: {key.name}": graph.get(key).blocking for key in graph.asset_check_keys
    }
    assert {check for check, blocks in blocking.items() if not blocks} == {f"offline/{view}: {DRIFT}" for view in VIEWS}
    assert {check for check, blocks in blocking.items() if blocks} == {
        *(f"offline/{view}: {told}" for view in VIEWS for told in ("holds_its_contract", "meets_its_expectations")),
        f"{MODEL}/training_set: loses_no_row", f"{MODEL}/student: keeps_its_quality", f"{MODEL}/package: verdict",
    }  # fmt: skip
    groups = {kind: graph.get(dg.AssetKey([MODEL, kind])).group_name for kind in ("student", "package", "deployment")}
    assert groups == {"student": MODEL, "package": f"{MODEL}_release", "deployment": f"{MODEL}_release"}
    window = dg.FreshnessPolicy.time_window
    policies = {"/".join(key.path): graph.get(key).freshness_policy for key in graph.materializable_asset_keys}
    expiring = {f"online/{one.name}": window(timedelta(seconds=one.ttl)) for one in outline(shop.root).views if one.ttl}
    assert {node: policy for node, policy in policies.items() if policy is not None} == expiring != {}


def test_automation_is_off_by_one_switch(shop: Shop) -> None:
    assert {sensor.default_status for sensor in build_definitions(shop.root).sensors or ()} == {
        dg.DefaultSensorStatus.RUNNING
    }
    with (shop.root / "isthmus.toml").open("a") as file:
        file.write("\n[orchestration]\nautomation = false\n")
    assert {sensor.default_status for sensor in build_definitions(shop.root).sensors or ()} == {
        dg.DefaultSensorStatus.STOPPED
    }


JOB = """
import dagster as dg
from isthmus.dagster import build_definitions

def job():
    models = [dg.AssetKey(["late_order", kind]) for kind in ("teacher", "teacher_outputs", "student", "control")]
    chosen = dg.define_asset_job("chosen", dg.AssetSelection.assets(*models))
    return dg.Definitions.merge(build_definitions({root!r}), dg.Definitions(jobs=[chosen])).resolve_job_def("chosen")
"""


@pytest.mark.accept
def test_parts_of_a_training_run_side_by_side_and_give_the_same_student(ran: Dagster, tmp_path: Path) -> None:
    def content() -> dict[str, Any]:
        (model,) = (ran.root / ".isthmus" / "models").glob(f"{MODEL}/*/report.json")
        report = json.loads(model.read_bytes())
        weights = [(model.parent / f"{name}.safetensors").read_bytes() for name in ("student", "control")]
        return {"weights": weights, **{part: report[part] for part in ("id", "gap_closed", "measures", "slices")}}

    before, made = content(), versions(ran)
    _edit(ran, "[profiles.training]\n", "[profiles.training]\nparallel = 2\n", "isthmus.toml")
    assert ran.stale() == set()
    for folder in ("models", "runs"):
        shutil.rmtree(ran.root / ".isthmus" / folder)
    file = tmp_path / "job.py"
    file.write_text(JOB.format(root=str(ran.root)))
    with dg.execute_job(ReconstructableJob.for_file(str(file), "job"), instance=ran.instance) as result:
        assert result.success, failures(result)
        events = [
            event for event in result.all_events
            if (event.is_step_start or event.is_step_success) and "_distill_" in str(event.step_key)
        ]  # fmt: skip
    assert (content(), versions(ran)) == (before, made)
    order = [(event.event_type_value, str(event.step_key).rpartition(".")[2]) for event in events]
    assert order[-1] == ("STEP_SUCCESS", f"{MODEL}_distill_report")
    assert {kind for kind, _ in order[:2]} == {"STEP_START"}  # both parts, before one of them has ended


@pytest.mark.accept
def test_a_run_makes_what_it_has_selected(ran: Dagster) -> None:
    result = ran.run("offline/shelf_demand", "online/shelf_demand")
    assert result.success
    made = {"/".join(event.asset_key.path) for event in result.get_asset_materialization_events() if event.asset_key}
    assert made == {"offline/shelf_demand", "online/shelf_demand"}
    checked = {"/".join(event.asset_key.path) for event in result.get_asset_check_evaluations()}
    assert checked == {"offline/shelf_demand"}
    assert ran.stale() == set(), "the same rows are the same version"


@pytest.mark.accept
def test_a_month_is_built_in_one_run_by_one_process(tmp_path: Path) -> None:
    root = shops.write(tmp_path / "shop").root
    with (root / "isthmus.toml").open("a") as file:
        file.write("\n[orchestration]\ndays_from = 2023-12-25\n")
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        ran = Dagster(root, instance)
        assert ran.run("offline/customer_orders").success
        result = ran.run(*(f"build/{view}" for view in VIEWS), days=("2024-01-02", "2024-02-01"))
        assert result.success
        events = result.get_asset_materialization_events()
        assert len({event.partition for event in events}) == 31
        assert {"/".join(event.asset_key.path) for event in events if event.asset_key} == {f"build/{v}" for v in VIEWS}
        assert sum(event.is_step_success for event in result.all_events) == 1
        definitions = build_definitions(root)
        days = definitions.resolve_asset_graph().get(dg.AssetKey(["build", "customer_orders"])).partitions_def
        assert days is not None
        assert (days.get_first_partition_key(), days.get_last_partition_key()) == ("2023-12-25", "2024-03-01")


@pytest.mark.accept
def test_what_fails_is_one_sentence_and_is_not_tried_again(shop: Shop, tmp_path: Path) -> None:
    (shop.root / "data" / "orders.parquet").unlink()
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = Dagster(shop.root, instance).run("offline/customer_orders")
    (failure,) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    assert failure.user_failure_data is not None
    assert "orders.parquet not found" in str(failure.user_failure_data.description)
    assert "Traceback" not in str(failure.user_failure_data.description)
    assert not any(event.is_step_restarted or event.is_step_up_for_retry for event in result.all_events)


@pytest.mark.accept
def test_what_may_pass_is_tried_again(built: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.orchestration.graph.resource.WAIT", 0.01)
    with (built.root / "isthmus.toml").open("a") as file:
        file.write('\n[stores]\nonline = "redis://127.0.0.1:1/0"\n')
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = Dagster(built.root, instance).run("online/shelf_demand")
    assert not result.success
    assert sum(event.is_step_up_for_retry for event in result.all_events) == 3
    (failure,) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    assert "redis://127.0.0.1:1" in str(failure.error)


class _Elsewhere(IsthmusResource):
    """Steps run as a pod runs them: the project is in another folder, and of this environment nothing is there."""

    there: str

    def launch(self, context: Context, extras: dict[str, Any]) -> dg.PipesClientCompletedInvocation:
        with open_pipes_session(
            context.op_execution_context, PipesEnvContextInjector(), Messages(),
            {**extras, "root": self.there},
        ) as session:  # fmt: skip
            told = {**session.get_bootstrap_env_vars(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            subprocess.run([sys.executable, *CHILD], env=told, cwd="/", check=True)
        return dg.PipesClientCompletedInvocation(session)


@pytest.mark.accept
def test_steps_run_elsewhere_with_another_client(shop: Shop, tmp_path: Path) -> None:
    there = shutil.copytree(shop.root, tmp_path / "there")
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        elsewhere = Dagster(shop.root, instance, _Elsewhere(project=str(shop.root), there=str(there)))
        result = elsewhere.run("contract")
        (there / "data" / "orders.parquet").unlink()
        failed = elsewhere.run("offline/customer_orders")
    assert result.success, failures(result)
    (made,) = result.get_asset_materialization_events()
    contract = json.loads((there / ".isthmus" / "contract.json").read_bytes())
    assert (made.materialization.tags or {})["dagster/data_version"] == contract["hash"]
    assert not (shop.root / ".isthmus" / "contract.json").exists()
    (failure,) = [event.step_failure_data for event in failed.all_events if event.is_step_failure]
    assert failure.user_failure_data is not None
    assert "orders.parquet not found" in str(failure.user_failure_data.description)


@pytest.mark.accept
def test_definitions_load_without_what_computes(shop: Shop) -> None:
    outline(shop.root)
    code = (
        "import sys; from isthmus.orchestration.graph import outline; assert 'dagster' not in sys.modules;"
        "from isthmus.orchestration.graph import build_definitions; build_definitions(sys.argv[1]);"
        "heavy = {'feast', 'pyspark', 'torch', 'duckdb', 'pyarrow', 'onnxruntime'}; print(heavy & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(shop.root)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_definitions_that_are_wrong_are_refused_with_every_problem(shop: Shop) -> None:
    shop.replace('Field("sold_1d", Int64, "device")', 'Field("event_timestamp", Int64, "device")')
    shop.replace("\n    ttl=timedelta(days=7),\n)", '\n    ttl=timedelta(days=7),\n    owner="shop",\n)')
    with pytest.raises(ConfigurationError, match="event_timestamp") as caught:
        build_definitions(shop.root)
    assert caught.value.problems
    assert "view customer_orders, owner: 'shop'; expected an email address or \"team:NAME\"" in str(caught.value)


@pytest.mark.accept
def test_an_outline_is_compiled_anew_only_when_something_changed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = outline(shop.root)
    kept = shop.root / ".isthmus" / "outline.json"
    kept.write_bytes(kept.read_bytes().replace(b'"shop"', b'"kept"'))
    assert outline(shop.root).project == "kept"
    monkeypatch.setenv("ISTHMUS_ROOT", str(shop.root))
    assert outline(shop.root).project == "kept", "as `isthmus dev` starts Dagster"
    shop.replace("What a customer bought", "All that a customer bought")
    shop.replace("\n    ttl=timedelta(days=7),\n)", '\n    ttl=timedelta(days=7),\n    owner="team:shop",\n)')
    again = outline(shop.root)
    assert again.views[0].description.startswith("All that")
    assert (again.views[0].code, again.models[0].training) == (first.views[0].code, first.models[0].training)
    asset = build_definitions(again).resolve_asset_graph().get(dg.AssetKey(["offline", "customer_orders"]))
    assert asset.owners == ["team:shop"]
    (key, *_) = asset.metadata["dagster/column_schema"].columns
    assert (key.name, key.description) == ("customer", "Who buys")


class _Ours(IsthmusTranslator):
    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        spec = super().get_asset_spec(node)
        return spec.replace_attributes(key=spec.key.with_prefix("ours"), owners=["team:shop"], group_name="all")


class _Circle(IsthmusTranslator):
    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        deps = [dg.AssetKey([MODEL, "deployment"])] if node.id == "offline/shelf_demand" else []
        return super().get_asset_spec(node).replace_attributes(deps=deps)


class _Same(IsthmusTranslator):
    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        return super().get_asset_spec(node).replace_attributes(key=dg.AssetKey(node.kind))


def test_a_translator_names_what_it_wants_and_dependencies_follow(shop: Shop) -> None:
    graph = build_definitions(shop.root, translator=_Ours()).resolve_asset_graph()
    online = graph.get(dg.AssetKey(["ours", "online", "shelf_demand"]))
    assert online.parent_keys == {dg.AssetKey(["ours", "offline", "shelf_demand"])}
    assert (online.owners, online.group_name) == (["team:shop"], "all")
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=r"offline/customer_orders, .*Give each a unique key"):
        build_definitions(shop.root, translator=_Same())


def test_assets_that_depend_on_themselves_are_refused_with_the_circle(shop: Shop) -> None:
    circle = rf"offline/shelf_demand <- .*{MODEL}/deployment.*\. Remove one of them"
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=circle):
        build_definitions(shop.root, translator=_Circle())


KILLED = """
import os, signal, sys
state, moment, parent = sys.argv[1:]

def look(event, args):
    if event == moment and (event == "socket.connect" or str(args[0]).startswith(state)):
        os.kill(os.getpid(), signal.SIGKILL)

from isthmus.orchestration.graph.child import main
sys.addaudithook(look)
sys.exit(main(int(parent)))
"""
"""A step that is killed when it is about to put the first file into its place, to reach Redis, or to check."""


class _Killed(IsthmusResource):
    """Every step is killed once, as the system does it that lacks memory, and then run again."""

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        # A table is written by Rust, which no hook of Python sees, and a check writes nothing.
        moment = "open" if step.startswith("check-") else "socket.connect" if step == "materialize" else "os.rename"
        child = ("-P", "-c", KILLED, f"{self.project}/.isthmus", moment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("isthmus.orchestration.graph.resource.CHILD", child)
            try:
                results = list(super().run(context, step, nodes))
            except dg.Failure as failure:
                context.log.info(f"{KILLED}{failure.description}")
                patch.undo()
                results = list(super().run(context, step, nodes))
        yield from results


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.timeout(900)
def test_every_step_may_be_killed_and_ends_with_the_same_content(ran: Dagster, tmp_path: Path) -> None:
    root = tmp_path / "shop"
    shops.write(root, rows=6000)
    shutil.copy(ran.root / "isthmus.toml", root)
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        killed = Dagster(root, instance, _Killed(project=str(root)))
        result = killed.run()
        assert result.success, failures(result)
        logs = instance.all_logs(result.run_id)
        found = {entry.step_key: entry.user_message for entry in logs if entry.user_message.startswith(KILLED)}
        steps = ("training_set", "check_examples", "distill", "check_student", "export", "verify", "deploy")
        tables = {"apply", "build", "materialize", "check_tables", "check_drift", "maintain"}
        assert found.keys() == tables | {f"{MODEL}_{step}" for step in steps}
        assert all("failed with code -9" in said and "run it again" in said for said in found.values())
        assert versions(killed) == versions(ran)


@pytest.mark.accept
@pytest.mark.slowest
def test_three_lines_of_yaml_are_the_whole_graph(shop: Shop, tmp_path: Path) -> None:
    place = tmp_path / "place"
    defs = place / "src" / "place" / "defs" / "features"
    defs.mkdir(parents=True)
    for package in (place / "src" / "place", place / "src" / "place" / "defs"):
        (package / "__init__.py").write_text("")
    (place / "src" / "place" / "definitions.py").write_text(
        "from pathlib import Path\nfrom dagster import definitions, load_from_defs_folder\n\n\n"
        "@definitions\ndef defs():\n"
        "    return load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (place / "pyproject.toml").write_text(
        '[project]\nname = "place"\nversion = "0"\n[tool.dg]\ndirectory_type = "project"\n'
        '[tool.dg.project]\nroot_module = "place"\n'
    )
    (defs / "defs.yaml").write_text(
        "type: isthmus.dagster.IsthmusProjectComponent\nattributes:\n"
        f"  project: {shop.root}\n"
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place / "src"), os.environ.get("PYTHONPATH", "")])}
    refreshed = _dg("utils", "refresh-defs-state", folder=place, environment=environment)
    assert refreshed.returncode == 0, refreshed.stderr + refreshed.stdout
    listed = _dg("list", "defs", "--json", folder=place, environment=environment)
    assert listed.returncode == 0, listed.stderr + listed.stdout
    keys = {asset["asset_key"] for asset in json.loads(listed.stdout)["assets"]}
    assert {*TABLES, *CHAIN, "contract", "source/orders"} <= keys
    components = _dg("list", "components", "--json", folder=place, environment=environment)
    assert "isthmus.dagster.IsthmusProjectComponent" in components.stdout


def _dg(*arguments: str, folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("dg")), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("table", "remedy"),
    [
        ("dev", r"Choose another port with --port or \[dev\] port"),
        ("server", r"Choose another port with \[server\] port"),
    ],
)
def test_a_taken_port_of_dev_is_a_sentence(shop: Shop, table: str, remedy: str) -> None:
    # The program there would answer, and pass for the page or the API.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shop.append(f"\n[{table}]\nport = {port}\n", "isthmus.toml")
        problem = rf"127.0.0.1:{port}: cannot be listened on \(Address already in use\); expected a free port. {remedy}"
        with pytest.raises(ConfigurationError, match=problem):
            dev(Project(shop.root))
