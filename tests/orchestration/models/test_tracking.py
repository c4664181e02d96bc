"""Trained students in a real store of MLflow, and what happens without one."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.models.tracking import PACKAGE, STUDENT, track
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.package.manifest import package_digest
from tests.orchestration.conftest import once
from tests.orchestration.shop import learnable, write


@pytest.fixture
def shop(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A shop whose student has been trained and exported, without MLflow."""

    def make(folder: Path) -> None:
        project = Project(learnable(write(folder)).root)
        for step in (apply, build, training_set, distill, export):
            step(project)

    return Project(Path(shutil.copytree(once(tmp_path_factory, "tracked-shop", make), tmp_path / "shop")))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(uri)


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.filterwarnings("ignore")  # MLflow's libraries
def test_a_student_its_trainings_and_its_package_are_tracked_once(shop: Project, store: Any) -> None:
    artifacts = Artifacts.of(shop)
    report = artifacts.last_report()
    digest = package_digest(artifacts.last_package())
    for _ in range(2):
        assert not distill(shop).trained
        export(shop)
    experiment = store.get_experiment_by_name("shop/late_order").experiment_id
    (run,) = store.search_runs([experiment], f"tags.`{STUDENT}` = '{report['id']}'")
    assert run.info.status == "FINISHED"
    assert run.data.tags[PACKAGE] == digest
    assert run.data.params["batch"] == "256"
    metrics = run.data.metrics
    assert metrics["student.auc"] == report["models"]["student"]["quality"]["auc"]
    assert metrics["taught"] == report["taught"]["value"]
    children = store.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'")
    assert {child.info.run_name for child in children} == {"student-0", "control-0"}
    for child in children:
        (training,) = [part for part in report["runs"] if child.info.run_name == f"{part['model']}-{part['seed']}"]
        for name in ("loss", "validation_auc"):
            found = [(point.step, point.value) for point in store.get_metric_history(child.info.run_id, name)]
            assert found == [(entry["step"], entry[name]) for entry in training["history"]]
        assert "step" not in child.data.metrics


@pytest.mark.filterwarnings("ignore")
def test_the_runs_of_a_student_that_mlflow_refuses_have_failed(
    shop: Project, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Artifacts.of(shop).last_report()
    too_long = {**report, "measures": {"m" * 300: 1.0}}
    monkeypatch.setattr(Artifacts, "last_report", lambda _artifacts: too_long)
    told: list[str] = []
    track(Artifacts.of(shop), progress=lambda text, _done: told.append(text))
    assert "not tracked in MLflow" in told[0]
    experiment = store.get_experiment_by_name("shop/late_order").experiment_id
    assert {run.info.status for run in store.search_runs([experiment])} == {"FAILED"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "nowhere://x", "file:///proc/nothing"])
def test_a_store_that_does_not_work_is_one_warning(shop: Project, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    told: list[str] = []
    found = distill(shop, progress=lambda text, _done: told.append(text))
    assert found.id == Artifacts.of(shop).last_report()["id"]
    (warning,) = [text for text in told if "MLflow" in text]
    assert warning.startswith("not tracked in MLflow: ")
    assert warning.endswith("; the same command tries again")
    assert "\n" not in warning


def test_without_the_library_the_warning_says_what_to_install(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    told: list[str] = []
    track(Artifacts.of(shop), progress=lambda text, _done: told.append(text))
    assert told[0].endswith("; install isthmus[mlflow]")


def test_without_an_address_mlflow_is_not_imported(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    told: list[str] = []
    track(Artifacts.of(shop), progress=lambda text, _done: told.append(text))
    assert told == []
