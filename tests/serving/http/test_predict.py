import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.features.errors import PackageError
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Float64, Int64, String
from isthmus.package.manifest import package_digest
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.rollout.releases import deploy
from tests.serving.support import CONTRACT, NOW, TABLES, Server, make_package, serving, verdict_of, wait


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_prediction_reads_stored_and_requested_values(server: Server) -> None:
    answer = server.predict(
        model="late",
        entities={"carrier": ["B6", "UA", "AA", "??", "OO"]},
        request={"distance": [-7.5, -1.0, 0.5, None, 2]},
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == "late"
    assert body["contract"] == answer.headers["isthmus-contract"] == CONTRACT.hash
    assert body["package"] == server.http.get("/models").json()["models"][0]["package"]
    assert body["statuses"] == {"punctuality": ["PRESENT", "PRESENT", "NULL_VALUE", "NOT_FOUND", "OUTSIDE_MAX_AGE"]}
    expected = [sigmoid(7 - 7.5), 1.0, sigmoid(0.5), 0.5, sigmoid(2)]
    assert body["predictions"] == pytest.approx(expected, abs=1e-6)


def test_request_fields_take_the_numbers_that_json_lacks(server: Server) -> None:
    """As lookups answer with them, and pushes take them."""
    asked = {"carrier": ["OO"] * 4, "distance": ["Infinity", "-Infinity", "NaN", None]}
    answer = server.predict(request=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"] == [1.0, 0.0, 0.5, 0.5]  # the model takes NaN and null for zero


def test_a_value_that_is_a_key_and_a_request_field_may_be_given_as_either(server: Server) -> None:
    asked = {"distance": [-7.5]}
    as_key = server.predict(entities={"carrier": ["B6"]}, request=asked).json()
    as_field = server.predict(request={**asked, "carrier": ["B6"]}).json()
    as_both = server.predict(entities={"carrier": ["B6"]}, request={**asked, "carrier": ["B6"]}).json()
    assert as_key == as_field == as_both


B6 = {"carrier": ["B6"]}


@pytest.mark.parametrize(
    ("asked", "status", "where", "word"),
    [
        ({"model": "early", "request": {"distance": [1.0], "carrier": ["B6"]}}, 404, "model", "late"),
        ({"request": {"distance": [1.0]}}, 422, "entities.carrier", "missing"),
        ({"entities": {"carrier": ["B6"]}}, 422, "request.distance", "missing"),
        ({"entities": {**B6, "distance": [1.0]}}, 422, "entities.distance", "put it into `request`"),
        ({"entities": B6, "request": {"distance": ["one"]}}, 422, "request.distance", r"row 0 is \"one\""),
        ({"entities": B6, "request": {"distance": ["1"]}}, 422, "request.distance", "Float64"),
        ({"entities": {"carrier": ["B6"]}, "request": {"distance": [True]}}, 422, "request.distance", "Float64"),
        ({"entities": {"carrier": ["B6"]}, "request": {"distance": [1.0, 2.0]}}, 422, "entities", "length"),
        ({"entities": {"carrier": []}, "request": {"distance": []}}, 422, "entities", "no row"),
        ({"request": {"carrier": [None], "distance": [1]}}, 422, "entities.carrier", "String"),
        ({"entities": B6, "request": {"distance": [1], "speed": [1]}}, 422, "request.speed", "distance"),
        ({"entities": B6, "request": {"distance": [1], "carrier": ["UA"]}}, 422, "request.carrier", "differs"),
        ({"entities": {"plane": [""]}, "request": {"distance": [1], "carrier": ["UA"]}}, 422, "entities.plane", "key"),
        ({"features": ["a:b"]}, 422, "body", "features"),
    ],
)
def test_what_cannot_be_predicted_is_refused(server: Server, asked: object, status: int, where: str, word: str) -> None:
    answer = server.http.post("/predict", json=asked)
    assert answer.status_code == status, answer.text
    assert where in answer.json()["where"]
    assert word in answer.text
    example = answer.json()["example"]
    assert example == {"entities": {"carrier": ["UA"]}, "request": {"distance": [0.25]}}
    assert server.http.post("/predict", json=example).status_code == 200


def test_models_are_listed(server: Server) -> None:
    (model,) = server.http.get("/models").json()["models"]
    assert model.pop("package")
    assert model == {
        "model": "late",
        "contract": CONTRACT.hash,
        "service": "late",
        "precision": "int8",
        "threads": 1,
        "device": "cpu",
        "deployed_at": NOW,
        "current": True,
        "inputs": [
            {"name": "punctuality__late_rate", "dtype": "Float32"},
            {"name": "punctuality__flights", "dtype": "Int64"},
            {"name": "distance", "dtype": "Float64"},
            {"name": "carrier", "dtype": "String"},
        ],
        "outdated": None,
    }


def test_a_model_may_read_request_fields_alone(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(tmp_path / "package", inputs=[("distance", Float64), ("carrier", String)])
    # Nothing listens there: no view is read, so Redis is not asked.
    with serving(tmp_path, "redis://127.0.0.1:1") as server:
        assert server.predict(request={"distance": [1], "carrier": ["UA"]}).status_code == 503
        server.deploy(package)
        wait(lambda: server.http.get("/models").json()["models"], "the model")
        body = server.predict(request={"distance": [1, 2], "carrier": ["UA", None]}).json()
        assert body["predictions"] == pytest.approx([sigmoid(2), sigmoid(2)], abs=1e-6)
        assert body["statuses"] == {}


def deployment_of(package: Path, digest: str | None = None) -> Deployment:
    return Deployment.loads(
        b'{"model":"late","package":"%s","digest":"%s","contract":"c","service":"late","precision":"int8","threads":1,'
        b'"deployed_at":0,"verdict":{"at":0,"compared":1}}'
        % (str(package).encode(), (digest or package_digest(package)).encode())
    )


def test_a_model_that_does_not_reproduce_its_golden_rows_is_refused(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", shift=0.001)
    with pytest.raises(PackageError, match="does not reproduce"):
        DeployedModel(deployment_of(package))


def test_a_model_with_another_digest_is_refused(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", inputs=[("punctuality__flights", Int64)])
    with pytest.raises(PackageError, match="as deployed"):
        DeployedModel(deployment_of(package, "0" * 64))


def test_a_damaged_package_is_refused(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package")
    deployment = deployment_of(package)
    (package / "golden.json").write_text("{}")
    with pytest.raises(PackageError, match="SHA-256"):
        DeployedModel(deployment)


def test_threads_come_from_the_deployment(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package")
    file = tmp_path / "deployment.json"
    deploy(package, verdict_of(package), CONTRACT, ServingProfile(threads=2), file, tables=TABLES, at=NOW)
    model = DeployedModel(Deployment.loads(file.read_bytes(), str(file)))
    assert model.threads == 2
    # They wait as they did when the latency was measured.
    assert model._session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_a_program_of_another_runtime_is_never_opened(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", program=b"no program at all")
    assert DeployedModel(deployment_of(package)).threads == 1


def test_several_classes_of_a_row_are_those_above_one_half(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", classes=("on time", "late"), several=True)
    predictor = Predictor(CONTRACT, DeployedModel(deployment_of(package)), lambda _: pytest.fail("has no transform"))
    output = np.array([[0.2, 0.9], [0.6, 0.7], [0.1, 0.5], [np.nan, 0.9]], np.float32)
    answer = json.loads(predictor.encode(output, {}))
    assert answer["predictions"] == [["late"], ["on time", "late"], [], None]
    assert answer["classes"] == ["on time", "late"]


def test_a_model_of_classes_names_the_likeliest_and_the_probabilities_of_all(tmp_path: Path) -> None:
    inputs = [("distance", Float64), ("carrier", String)]
    package = make_package(tmp_path / "package", inputs=inputs, classes=("on time", "late"), blank=True)
    shared = {"contract": CONTRACT, "profile": ServingProfile(), "file": tmp_path / "deployment.json", "tables": TABLES}
    deploy(package, verdict_of(package), at=NOW, **shared)  # type: ignore[arg-type]
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, "redis://127.0.0.1:1") as server:
        asked = {"carrier": ["OO"] * 4, "distance": [-2.0, 3.0, 0.0, "Infinity"]}
        answer = server.predict(request=asked)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["predictions"] == ["on time", "late", "on time", None]
        assert body["classes"] == ["on time", "late"]
        expected = [[1 - sigmoid(x), sigmoid(x)] for x in (-2, 3, 0)]
        assert np.array(body["probabilities"][:3]) == pytest.approx(np.array(expected), abs=1e-6)
        assert body["probabilities"][3] == ["NaN", "NaN"]
        # A candidate that answers with a number differs in every row.
        other = make_package(tmp_path / "other", inputs=inputs)
        deploy(other, verdict_of(other), at=NOW + 1, share=0.0, **shared)  # type: ignore[arg-type]

        def candidate() -> dict[str, Any]:
            found: dict[str, Any] = server.http.get("/models").json()["models"][0].get("candidate", {})
            return found

        wait(candidate, "the server to have taken it up")
        server.predict(request={"carrier": ["OO"], "distance": [1.0]})
        wait(lambda: candidate()["compared"] == 1, "the shadow to be compared")
        assert (candidate()["differing"], candidate()["worst"]) == (1, "Infinity")
