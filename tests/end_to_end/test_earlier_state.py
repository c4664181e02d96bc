"""A project that an earlier version has left is opened, and answers as it did: see tests/fixtures/v0_1/README.md."""

import base64
import hashlib
import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from feast.infra.offline_stores.offline_utils import get_offline_store_from_config
from feast.repo_config import RepoConfig

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.features.contract.schema import RESERVED, Contract
from isthmus.features.redis.connection import connect
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.release import history, rollback
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.web import NAME as WEB
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.status import status
from isthmus.orchestration.training.record import reproduce
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.inspect import inspect
from isthmus.package.manifest import package_digest
from tests.servers import free_port
from tests.serving.support import wait

EARLIER = Path(__file__).parents[1] / "fixtures" / "v0_1"
RECORD = json.loads((EARLIER / "record.json").read_text(encoding="utf-8"))
FORMER, LATTER = RECORD["deployments"]

PATHS = {
    "from isthmus.distill.task import": "from isthmus.tasks import",
    "isthmus.features.feast_offline.": "isthmus.feast.",
}
"""Private paths of version 0.1 and the public ones that the error messages name."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The project in a folder of its own, with the rows of its online store."""
    root = tmp_path / "shop"
    shutil.copytree(EARLIER / "shop", root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(EARLIER / "state", root / ".isthmus")
    for file in (root / "own.py", root / ".isthmus/feast/feature_store.yaml"):
        for private, public in PATHS.items():
            file.write_text(file.read_text().replace(private, public))
    for file in (root / ".isthmus").rglob("*"):
        if file.is_file() and b"{project}" in (content := file.read_bytes()):
            file.write_bytes(content.replace(b"{project}", str(root).encode()))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ISTHMUS_SERVER__PORT", str(free_port()))
        shop = Project(root)
    with shop.redis() as url, connect(url) as client:
        for line in (EARLIER / "online.jsonl").read_text().splitlines():
            row = json.loads(line)
            key = base64.b64decode(row["key"])
            if "hash" in row:
                fields = {base64.b64decode(name): base64.b64decode(value) for name, value in row["hash"].items()}
                client.hset(key, mapping=fields)
            else:
                client.set(key, base64.b64decode(row["string"]))
    return shop


def test_the_contract_is_still_the_same(project: Project) -> None:
    contract = project.definitions.contract
    assert contract.hash == RECORD["contract"]
    assert contract.dumps() == project.contract_file.read_bytes()
    assert Contract.loads(project.contract_file.read_bytes()).hash == RECORD["contract"]
    assert project.applied().hash == RECORD["contract"]


def test_status_tells_where_it_stands(project: Project) -> None:
    report = status(project)
    assert report.applied
    assert {name: (view.rows, view.served, view.broken, view.problem) for name, view in report.views.items()} == {
        "customer_orders": (160, True, (), ""), "customer_facts": (7, True, (), ""),
    }  # fmt: skip
    model = report.models["late_order"]
    assert (model.training_set, model.student) == (RECORD["training_set"]["id"], RECORD["student"])
    assert (model.package, model.deployed, model.verdict, model.stale) == (LATTER, LATTER, True, ())


def test_the_training_set_is_what_its_record_says(project: Project, tmp_path: Path) -> None:
    training_set = Artifacts(project, project.distillation()).current_training_set()
    assert (training_set.id, training_set.rows_out) == (RECORD["training_set"]["id"], RECORD["training_set"]["rows"])
    assert (
        hashlib.sha256((training_set.path / "data.parquet").read_bytes()).hexdigest()
        == RECORD["training_set"]["sha256"]
    )
    again = reproduce(project, training_set.id, tmp_path / "again")
    assert again.id == training_set.id
    assert again.table().equals(training_set.table())


def test_its_packages_are_whole_and_answer_their_golden_cases(project: Project) -> None:
    latter = Artifacts(project, project.distillation()).last_package()
    cache = [project.deployment_file.parent / "deployments" / digest for digest in (FORMER, LATTER)]
    for package, digest in zip([*cache, latter], [FORMER, LATTER, LATTER], strict=True):
        inspect(package).require()
        assert package_digest(package) == digest


def test_a_verdict_finds_no_difference(project: Project) -> None:
    verdict = require_passed(verify(project, all_keys=True))
    # Known times and content hashes have been compared since, and rows that are asked for alone.
    more = sum(
        features[name].compared for features in verdict.views.values() for name in features.keys() & set(RESERVED[1:])
    )
    more += sum(part.compared for part in verdict.singly.values())
    # Where it is installed, what a browser answers, too.
    more += sum(part.compared for name, part in verdict.files.items() if name.endswith(WEB))
    assert (verdict.compared - more, verdict.package) == (RECORD["verdict_values"], LATTER)


def test_the_server_answers_as_it_did_and_goes_back_to_the_former_model(project: Project) -> None:
    url = f"http://127.0.0.1:{project.settings.server.port}"
    lookup, prediction = RECORD["lookup"], RECORD["prediction"]
    former, latter = prediction["answers"]
    with serving(project, private=True):
        wait(lambda: _ready(url), "the server")
        assert _post(f"{url}/get-online-features", lookup["request"]) == lookup["answer"]
        _require_same(_post(f"{url}/predict", prediction["request"]), latter)
        back = rollback(project)
        assert (back.deployment.digest, back.server) == (FORMER, "has switched")
        _require_same(_post(f"{url}/predict", prediction["request"]), former)
    assert [event["action"] for event in reversed(history(project))] == ["deploy", "deploy", "rollback"]


def test_a_student_of_a_task_of_ones_own_is_still_of_that_task(project: Project) -> None:
    """The report of such a student holds this digest; with another one, the student is not opened any more."""
    with project.importing():
        assert fingerprint(importlib.import_module("own").Own) == RECORD["own_task"]


def test_feast_opens_the_store_that_was_registered(project: Project) -> None:
    folder = project.state / "feast"
    config = RepoConfig(repo_path=folder, **yaml.safe_load((folder / "feature_store.yaml").read_text()))
    assert type(get_offline_store_from_config(config.offline_store)).__name__ == "IsthmusOfflineStore"


@pytest.mark.parametrize("name", RECORD["names"])
def test_a_name_in_users_files_is_there_or_the_error_names_the_public_module(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        public = re.search(r"Import from (\S+) instead", str(error))
        assert public
        found = importlib.import_module(public[1])
    assert hasattr(found, attribute)


def _ready(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/readyz").json()["model"])
    except httpx.TransportError:
        return False


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def _require_same(answer: dict[str, Any], former: dict[str, Any]) -> None:
    """Fails unless the answers are the same, but for the last digits of predictions, which are those of the machine."""
    assert answer == {**former, "predictions": pytest.approx(former["predictions"], abs=1e-5)}
