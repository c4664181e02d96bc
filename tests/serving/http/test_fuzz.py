"""Schemathesis against a real server: nothing breaks it, and its answers are what its OpenAPI document says."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.package.manifest import package_digest
from isthmus.serving.wire.formats import Format
from tests.serving.support import CONTRACT, EVERYTHING, Server, fill, make_package, serving, wait
from tests.serving.tensors import make_drawing_package

EXAMPLES = 25
TYPES: dict[str, dict[str, Any]] = {
    "Bool": {"type": "boolean"},
    "Float32": {"type": "number", "minimum": -1e6, "maximum": 1e6},
    "Float64": {"type": "number"},
    "String": {"type": "string"},
    "Bytes": {"type": "string", "enum": ["", "AP8="]},
}
# Listed: to JSON Schema 1.0 is an integer, too, and to the server it is a float.
WHOLE: dict[str, Any] = {"type": "integer", "enum": [-(2**31), -1813, -1, 0, 1, 2, 3, 216887, 2**31 - 1]}
CARRIER = {"type": "string", "enum": ["UA", "AA", "B6", "OO", "ZZ", "??", ""]}
TIME = {"type": "string", "enum": ["2027-01-15T07:59:59Z", "2027-01-15T07:59:59.5+00:00"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over a Redis of its own, which pushes change."""
    folder = tmp_path_factory.mktemp("fuzzed")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(folder / "package")
    with EmbeddedRedis(folder / "redis") as embedded, serving(folder, embedded.url) as running:
        fill(embedded.url)
        running.deploy(package)
        wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
        yield running


def fuzz(server: Server, document: Path, *more: str) -> Counter[tuple[str, int]]:
    """Runs Schemathesis, which must find nothing; how often each path answered with each status."""
    before = len(server.lines())
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", str(document), "--url", str(server.http.base_url),
        "--generation-deterministic", "--suppress-health-check", "all", "--max-examples", str(EXAMPLES),
        "--exclude-checks", "positive_data_acceptance", "--warnings", "off", "--continue-on-failure", "--no-color",
        *more,
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=document.parent, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout
    answered = [line for line in server.lines()[before:] if line["event"] == "request"]
    assert all(line["status"] < 500 and "exception" not in line for line in answered)
    return Counter((line["path"], line["status"]) for line in answered)


def column(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 2, "maxItems": 2, "items": schema}


def columns(**schemas: dict[str, Any]) -> dict[str, Any]:
    members = {name: column(schema) for name, schema in schemas.items()}
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the names and types of the contract, so that most requests are answered."""
    schemas = document["components"]["schemas"]
    views = [view for view in CONTRACT.views.values() if {key.name for key in view.keys} <= {"carrier", "flight"}]
    references = [f"{view.name}:{field.name}" for view in views for field in view.fields]
    lookup = schemas["LookupRequest"]["properties"]
    lookup["entities"] = columns(carrier=CARRIER, flight=WHOLE)
    lookup["features"] = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"enum": references}}
    lookup["full_feature_names"] = {"enum": [True]}
    del lookup["feature_service"]
    push = schemas["PushRequest"]["properties"]
    push["push_source_name"] = {"enum": ["everything"]}
    features = {field.name: nullable(TYPES.get(field.dtype.name, WHOLE)) for field in EVERYTHING.fields}
    push["df"] = columns(flight=WHOLE, event_timestamp=TIME, **features)
    push["to"] = {"enum": ["online", "offline", "online_and_offline"]}
    predict = schemas["PredictRequest"]["properties"]
    predict["model"] = {"enum": ["late", None]}
    predict["entities"] = columns(carrier=CARRIER)
    predict["request"] = columns(distance=nullable({"type": "number"}))
    schemas["LookupRequest"]["required"].append("features")
    schemas["LookupRequest"]["required"].append("full_feature_names")
    schemas["PredictRequest"]["required"] = ["entities", "request"]
    return document


@pytest.mark.accept
def test_nothing_that_the_document_allows_or_forbids_breaks_the_server(server: Server, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    document.write_bytes(server.http.get("/openapi.json").content)
    answers = fuzz(server, document, "--phases", "examples,coverage,fuzzing")
    for path in ("/get-online-features", "/push", "/predict"):
        assert answers[path, 422] > 10


@pytest.mark.accept
def test_no_tensors_that_the_document_allows_or_forbids_break_the_server(tmp_path: Path, redis_url: str) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_drawing_package(folder / "package")
    with serving(folder, redis_url) as running:
        running.deploy(package)
        wait(lambda: running.http.get("/v2/models/draws/ready").status_code == 200, "the model")
        written = running.http.get("/openapi.json").json()
        names = {"model": "draws", "version": package_digest(package)}
        for path in written["paths"].values():
            for operation in path.values():
                for parameter in operation.get("parameters", []):
                    if parameter["name"] in names:
                        parameter["schema"]["enum"] = [names[parameter["name"]]]
        tensor = written["components"]["schemas"]["RequestInput"]["properties"]
        tensor["name"]["enum"] = ["frame", "ids"]
        tensor["datatype"]["enum"] = ["FP32", "INT64"]
        document = tmp_path / "openapi.json"
        document.write_text(json.dumps(written))
        answers = fuzz(running, document, "--phases", "examples,coverage,fuzzing", "--include-path-regex", "^/v2")
    # The log has the template of a path that was refused.
    assert answers["/v2/models/{model}/infer", 422] > 10
    assert answers["/v2/models/draws", 200] > 0


@pytest.mark.accept
@pytest.mark.parametrize(
    "form", [Format.JSON, *(pytest.param(form, marks=pytest.mark.accept) for form in (Format.VALUES, Format.ARROW))]
)
def test_what_the_contract_allows_is_answered_as_the_document_says(
    server: Server, tmp_path: Path, form: Format
) -> None:
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(narrowed(server.http.get("/openapi.json").json())))
    answers = fuzz(server, document, "--phases", "fuzzing", "--mode", "positive", "-H", f"Accept: {form.value}")
    for path in ("/get-online-features", "/push", "/predict"):
        assert answers[path, 200] > EXAMPLES / 2, answers
