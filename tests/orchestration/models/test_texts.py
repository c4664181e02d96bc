"""A student of a text, stored features and request fields: verified, deployed, and asked with the text itself."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.client import Client
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.inspect import OnnxRuntime, inspect
from isthmus.package.manifest import open_package
from tests.orchestration.conftest import once
from tests.orchestration.shop import Shop, learnable, write

NOTE = (
    'F.concat_ws(" ", F.lit("please"), F.when(F.col("late") == 1, "hurry").otherwise("relax"), '
    'F.col("cents").cast("string")).alias("note"),\n'
)
TEACHER = '''\
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline


class Notes:
    """A linear model of the words of a note."""

    def __init__(self, features, labels):
        self.model = make_pipeline(CountVectorizer(), LogisticRegression()).fit(features["note"], labels)

    def predict_proba(self, features):
        return self.model.predict_proba(features["note"])
'''


def with_text(shop: Shop) -> Shop:
    """The shop whose student also reads a note that comes with an order."""
    shop.replace('Field("weight", Float64)],', 'Field("weight", Float64), Field("note", String)],')
    shop.replace('        "weight",\n        "late",\n', f'        "weight",\n        {NOTE}        "late",\n')
    shop.replace("    Tabular,\n", "    Bag,\n    Binary,\n    Settings,\n    Text,\n")
    shop.replace(
        "task=Tabular(teacher_rounds=8, hidden=(16,))",
        'task=Text(column="note", predicts=Binary(), teacher="notes:Notes", student=Bag(vocabulary=200, width=8))',
    )
    shop.replace("seeds=1,", "seeds=1, settings=Settings(steps=100, batch=64, learning_rate=2e-2),")
    (shop.root / "notes.py").write_text(TEACHER)
    return shop


@pytest.fixture
def shop(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    def make(folder: Path) -> None:
        project = Project(with_text(learnable(write(folder))).root)
        for step in (apply, build, materialize, training_set, distill, export):
            step(project)

    return Project(Path(shutil.copytree(once(tmp_path_factory, "text-shop", make), tmp_path / "shop")))


@pytest.mark.accept
def test_the_server_reads_texts_as_the_student_does(shop: Project) -> None:
    package = open_package(Artifacts.of(shop).last_package())
    places = {item.name: item.tensor for item in package.manifest.inputs}
    assert places["note"] == "input_ids"
    assert {"numeric"} <= {*places.values()}
    assert not [check.error for check in inspect(package.files.folder, runtime=OnnxRuntime()).checks if check.error]
    verdict = require_passed(verify(shop))
    assert verdict.inputs["note"].compared > 0
    assert verdict.files["/predict"].compared > 0
    deploy(shop)
    long = "please relax " * 3000
    row: dict[str, list[Any]] = {
        "hour": [17, 17, 17, 17], "weight": [4.5] * 4, "store": ["s1"] * 4, "product": [3] * 4,
        "note": ["please relax", "please hurry", None, long],
    }  # fmt: skip
    log = shop.state / "server.log"
    with (
        log.open("wb") as file,
        serving(shop, port=0, log=file, private=True) as server,
        closing(Client(shop.applied(), server, log)) as client,
    ):
        singly = [{name: of[place : place + 1] for name, of in row.items()} for place in range(4)]
        many = {name: of[:3] * 100 for name, of in row.items()}  # more rows than the model reads at once
        often, together, *alone = (
            client.answer("/predict", {"model": "late_order", "request": request})["predictions"]
            for request in (many, row, *singly)
        )
    np.testing.assert_allclose(together, np.ravel(alone), atol=1e-6)
    np.testing.assert_allclose(often, together[:3] * 100, atol=1e-6)
    assert together[1] > together[0]
