"""A label of each kind, from a spine to answers: trained, exported, verified, deployed, served, and run by a page."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from isthmus.distill.reports.boundarycard import boundary_card
from isthmus.distill.reports.modelcard import model_card
from isthmus.distill.reports.page import page
from isthmus.features.errors import RequestError
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export, ladder
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.snapshots.create import snapshot
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.client import Client
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.inspect import OnnxRuntime, inspect
from isthmus.package.manifest import open_package
from tests.end_to_end.files import served
from tests.orchestration.conftest import once
from tests.orchestration.shop import Shop, learnable, with_device, with_moment, write
from tests.orchestration.training.test_arrays import QUERY

pytestmark = [pytest.mark.browser, pytest.mark.accept]

CLASSES = 'F.when(F.col("late") == 1, "late").when(F.col("cents") > 4500, "early").otherwise("on time").alias("late")'
SETS = (
    'F.when((F.col("late") == 1) & (F.col("cents") > 4500), F.array(F.lit("late"), F.lit("early")))'
    '.when(F.col("late") == 1, F.array(F.lit("late"))).when(F.col("cents") > 4500, F.array(F.lit("early")))'
    '.otherwise(F.array().cast("array<string>")).alias("late")'
)
DAY = 'F.date_trunc("day", "ordered_at")'
GRADES = '(F.col("late") + (F.col("cents") > 4500).cast("bigint")).alias("late")'
KINDS: dict[str, tuple[str, str, str, str, str]] = {
    # The task's label and calibration, its type, its column, the metric, and what is answered.
    "binary": ("calibration=Isotonic()", "Int64", '"late"', "auc", "probability"),
    "classes": ("label=Classes(), calibration=Temperature()", "String", CLASSES, "log_loss", "probabilities"),
    "several": (
        "label=Classes(several=True), calibration=Temperature()",
        "Array(String)",
        SETS,
        "log_loss",
        "probabilities",
    ),
    "number": (
        "label=Number()",
        "Float64",
        '(60 * F.col("late") + F.col("cents") / 200).alias("late")',
        "rmse",
        "value",
    ),
    "vectors": ("hidden=(16,)", "Int64", '"late"', "auc", "probability"),
    "rank": ('label=Rank(within="event_timestamp", at=5)', "Int64", GRADES, "ndcg", "score"),
}


SHAPE = 'F.when(F.col("cents") % 9 > 0, F.array(*(F.sin(F.col("cents") * n).cast("float") for n in (1, 2, 3))))'


def with_vectors(shop: Shop) -> Shop:
    """The shop with arrays as inputs of both models: of stored features and of the request, some of them null."""
    distance = 'Field("distance", Float32, "device")'
    shop.replace(distance, f'{distance}, Field("shape", Array(Float32), "device", size=3)')
    distance = 'F.col("distance").cast("float")).alias("distance"),\n'
    shop.replace(distance, f'{distance}        {SHAPE}.alias("shape"),\n')
    shop.replace('Field("weight", Float64)],', 'Field("weight", Float64), Field("query", Array(Float32), size=4)],')
    shop.replace('        "weight",\n        "late",\n', f'        "weight",\n{QUERY}        "late",\n')
    return shop


def shop_of(root: Path, kind: str) -> Shop:
    """The shop whose label is of a kind. Of a rank, all orders of a day are asked at once.

    A feature of the request is not defined in the 25th hour.
    """
    shop = with_device(learnable(with_moment(write(root))))
    shop.replace("F.coalesce(shelf_demand__sold_1d, F.lit(1))", "(hour - 25)")
    task, dtype, column, *_ = KINDS[kind]
    if kind == "vectors":
        return with_vectors(shop)
    shop.replace(
        "    Tabular,\n", "    Tabular,\n    Classes,\n    Isotonic,\n    Number,\n    Rank,\n    Temperature,\n"
    )
    shop.replace("task=Tabular(", f"task=Tabular({task}, ")
    shop.replace('label=Field("late", Int64)', f'label=Field("late", {dtype})')
    shop.replace('        "weight",\n        "late",\n', f'        "weight",\n        {column},\n')
    if kind == "rank":
        before, moment = '        "product",\n', 'F.col("ordered_at").alias("event_timestamp"),\n        F.col('
        shop.replace(f"{before}        {moment}", f"{before}        {moment}".replace('F.col("ordered_at")', DAY))
    return shop


def exported_shop(factory: pytest.TempPathFactory, kind: str) -> Path:
    """The shop from its sources to a package, made once for all workers. Copy it before you change it."""

    def make(folder: Path) -> None:
        project = Project(shop_of(folder, kind).root)
        for step in (apply, build, materialize, snapshot, training_set, distill, export):
            step(project)

    return once(factory, f"label-{kind}", make)


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slowest] if kind != "classes" else []) for kind in KINDS
])  # fmt: skip
def test_a_label_of_each_kind_is_learned_verified_and_served(
    kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, phone: Callable[[str], Page]
) -> None:
    project = Project(Path(shutil.copytree(exported_shop(tmp_path_factory, kind), tmp_path / "shop")))
    artifacts, metric, output = Artifacts.of(project, None), *KINDS[kind][3:]
    report = artifacts.last_report()
    assert report["metric"] == metric
    assert report["measures"]["lift_kept"] is not None
    # The student was taught for the age of its features, and measured at each.
    ages = [part["found"]["value"] for part in report["ages"]]
    lost = ages[0] - report["models"]["student"]["quality"][metric]
    assert report["measures"]["age_cost"] == pytest.approx(lost if metric in ("auc", "ndcg") else -lost, abs=1e-9)
    assert len(ages) > 3
    assert np.isfinite(ages).all()
    assert {"teacher", "reference", "student", "control"} == report["models"].keys()
    if kind in ("binary", "classes", "several"):
        assert {"ece", "ece_uncalibrated"} <= report["models"]["student"]["quality"].keys()
        assert "ece_uncalibrated" in page(artifacts.packaged_report())
    for paper in (page, model_card, boundary_card):
        assert metric in paper(artifacts.packaged_report()) or paper is boundary_card

    package = open_package(artifacts.last_package())
    (described,) = package.manifest.outputs
    assert (described.name, described.element) == (output, "float")
    classes = {"classes": ("early", "late", "on time"), "several": ("early", "late")}.get(kind, ())
    assert package.manifest.classes == classes
    assert package.manifest.several == (kind == "several")
    assert not [check.error for check in inspect(artifacts.last_package(), runtime=OnnxRuntime()).checks if check.error]
    ladder(project, runtimes={"onnxruntime": OnnxRuntime}).require()

    verdict = require_passed(verify(project))
    assert verdict.compared > 0
    deploy(project)
    row = {"hour": [17], "weight": [4.5], "store": ["s1"], "product": [3]}
    if kind == "vectors":
        row["query"] = [[0.5, -1.0, 2.0, 0.0]]
        with pytest.raises(RequestError, match="an array of 3 elements"):
            predicted(project, {**row, "query": [[0.5, -1.0, 2.0]]})
    answer = predicted(project, row)
    if kind == "classes":
        assert answer["predictions"][0] in answer["classes"] == ["early", "late", "on time"]
        assert np.sum(answer["probabilities"][0]) == pytest.approx(1)
    elif kind == "several":
        likely = [name for name, share in zip(classes, answer["probabilities"][0], strict=True) if share > 0.5]
        assert answer["predictions"] == [likely]
    else:
        assert np.isfinite(answer["predictions"][0])
        assert "classes" not in answer
    with pytest.raises(RequestError, match="per_sold"):
        predicted(project, {**row, "hour": [25]})

    with served(site(project, None, tmp_path / "page")) as address:
        page_of_package = phone(address)
        page_of_package.get_by_role("button", name="Predict").click()
        line = page_of_package.locator("#answer")
        expect(line).to_contain_text("in this browser")
        expect(line).to_contain_text("early 0." if classes else output)
        shown = line.get_attribute("data-value") or ""
        if kind == "several":
            assert {*shown.split(",")} <= {*classes, ""}
        else:
            assert shown in classes if classes else np.isfinite(float(shown))


def predicted(project: Project, row: dict[str, Any]) -> dict[str, Any]:
    log = project.state / "server.log"
    with (
        log.open("wb") as file,
        serving(project, port=0, log=file, private=True) as server,
        closing(Client(project.applied(), server, log)) as client,
    ):
        return client.answer("/predict", {"model": "late_order", "request": row})
