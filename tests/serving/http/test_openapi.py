from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from isthmus.serving.wire.formats import Format
from tests.serving.support import Server

LOOKUP = {"features": ["punctuality:flights", "punctuality:late_rate"], "entities": {"carrier": ["UA", "AA", "??"]}}
PUSH = {"push_source_name": "punctuality", "df": {"carrier": ["UA", None], "event_timestamp": ["2027"]}}
PREDICT = {"entities": {"carrier": ["UA", "AA"]}, "request": {"distance": [1, None]}}


def resolved(document: dict[str, Any], schema: Any) -> Any:
    """A schema with its references replaced by what they name."""
    if isinstance(schema, list):
        return [resolved(document, item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    return {name: resolved(document, value) for name, value in schema.items()}


def test_the_document_is_valid(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    validate(document)
    assert set(document["paths"]) == {
        "/get-online-features", "/push", "/write-to-online-store", "/predict", "/generate", "/models", "/status",
        "/healthz", "/readyz", "/metrics", "/snapshots/{service}", "/snapshots/{service}/{value}", "/v2",
        "/v2/health/live", "/v2/health/ready",
        "/v2/models/{model}", "/v2/models/{model}/ready", "/v2/models/{model}/infer",
        "/v2/models/{model}/versions/{version}", "/v2/models/{model}/versions/{version}/ready",
        "/v2/models/{model}/versions/{version}/infer", "/v2/models/{model}/config", "/v2/models/stats",
        "/v2/models/{model}/versions/{version}/config", "/v2/models/{model}/stats", "/v2/repository/index",
        "/v2/repository/models/{model}/load", "/v2/repository/models/{model}/unload",
    }  # fmt: skip
    groups = [tag["name"] for tag in document["tags"]]
    assert groups == ["lookups", "predictions", "inference", "snapshots", "pushes", "health", "operations"]
    tags = [operation.get("tags", []) for path in document["paths"].values() for operation in path.values()]
    assert sorted({tag for (tag,) in tags}) == sorted(groups)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("post", "/get-online-features", LOOKUP, 200),
        ("post", "/get-online-features", {"features": [f"everything:{c}" for c in "abcdefgh"],
                                          "entities": {"flight": [1, 2, 3]}}, 200),
        ("post", "/get-online-features", {**LOOKUP, "features": ["a:b"]}, 404),
        ("post", "/get-online-features", {**LOOKUP, "entities": {}}, 422),
        ("post", "/push", PUSH, 422),
        ("post", "/push", {**PUSH, "push_source_name": "nothing"}, 404),
        ("post", "/write-to-online-store", {"feature_view_name": "nothing", "df": {}}, 404),
        ("post", "/write-to-online-store", {"feature_view_name": "punctuality", "df": {"created": [1]}}, 422),
        ("post", "/predict", PREDICT, 200),
        ("post", "/predict", {}, 422),
        ("post", "/generate", {"prompt": "a"}, 422),
        ("get", "/models", None, 200),
        ("get", "/status", None, 200),
        ("get", "/healthz", None, 200),
        ("get", "/readyz", None, 200),
    ],
)  # fmt: skip
def test_real_answers_are_what_the_document_says(
    server: Server, method: str, path: str, body: object, status: int
) -> None:
    document = server.http.get("/openapi.json").json()
    operation = document["paths"][path][method]
    answer = server.http.request(method, path, json=body) if body is not None else server.http.request(method, path)
    assert answer.status_code == status
    described = operation["responses"][str(status)]
    OAS31Validator(resolved(document, described["content"]["application/json"]["schema"])).validate(answer.json())
    assert {name.lower() for name in described["headers"]} <= set(answer.headers)
    if status == 200 and body is not None:
        asked = operation["requestBody"]["content"]["application/json"]["schema"]
        OAS31Validator(resolved(document, asked)).validate(body)


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_the_metrics_have_the_formats_of_the_document(server: Server, kind: str) -> None:
    described = server.http.get("/openapi.json").json()["paths"]["/metrics"]["get"]["responses"]["200"]
    assert kind in described["content"]
    answer = server.http.get("/metrics", headers={"accept": kind})
    assert answer.headers["content-type"].startswith(kind + ";")
    assert {name.lower() for name in described["headers"]} <= set(answer.headers)


@pytest.mark.parametrize("form", ["application/json", "application/vnd.isthmus.values+json"])
def test_every_form_of_json_is_what_the_document_says(server: Server, form: str) -> None:
    document = server.http.get("/openapi.json").json()
    content = document["paths"]["/get-online-features"]["post"]["responses"]["200"]["content"]
    assert content.keys() == {form.value for form in Format}
    answer = server.http.post("/get-online-features", json=LOOKUP, headers={"accept": form})
    assert answer.headers["content-type"] == form
    OAS31Validator(resolved(document, content[form]["schema"])).validate(answer.json())


def test_no_form_is_what_the_document_says(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    responses = document["paths"]["/get-online-features"]["post"]["responses"]
    answer = server.http.post("/get-online-features", json=LOOKUP, headers={"accept": "*/*;q=0"})
    assert answer.status_code == 406
    OAS31Validator(resolved(document, responses["406"]["content"]["application/json"]["schema"])).validate(
        answer.json()
    )
