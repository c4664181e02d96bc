"""The OpenAPI document, generated from the request and answer types, and `/docs`, which shows it in Swagger UI."""

import gzip
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from os import stat_result
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from isthmus.serving.wire import inference, messages
from isthmus.serving.wire.formats import Format
from isthmus.serving.wire.inference import HEADER, MODEL, VERSION

_ERRORS = {
    400: "The body is not valid UTF-8 JSON.",
    401: "The server requires an API key, and the request has no valid one.",
    403: "The API key lacks the scope for this request.",
    404: "A view, feature, service or model does not exist.",
    406: "No available format is acceptable.",
    408: "The body did not arrive in time.",
    409: "Rows or the model belong to another contract.",
    413: "The body is too long, or asks for too many rows or values.",
    422: "The request lacks a part, or a part has the wrong type.",
    429: "The API key exceeds its request rate.",
    503: "No contract or model is loaded yet, Redis does not answer, or too many requests are in progress.",
}

_ANY = (401, 429, 503)
"""Errors of any request except `/healthz`."""

_SENT = (400, 401, 403, 404, 408, 413, 422, 429, 503)
"""Errors of a request with a body."""

_READ = (*_SENT, 409)
"""Errors of a request that reads rows."""

_STREAM = {
    "contentMediaType": Format.ARROW.value,
    "description": "An Arrow IPC stream of one record batch: the join keys and the features in their Arrow types, then "
    "per view `<view>__status` and `<view>__event_timestamp`. The schema's metadata names the contract.",
}

_ENDS = ("", "/ready", "/config", "/infer")
_BINARY = {
    "contentMediaType": "application/octet-stream",
    "description": f"JSON whose length is in the header {HEADER}, then the bytes of each tensor with "
    "`binary_data_size`, in order. Little-endian; each string follows its length, an unsigned integer of 4 bytes.",
}

_GROUPS = {
    "lookups": ("The latest features of keys, by Feast's online API.", ("/get-online-features",)),
    "predictions": ("Predictions and texts of the deployed models.", ("/predict", "/generate", "/models")),
    "inference": (
        "The Open Inference Protocol, version 2, for models of tensors.",
        (
            "/v2",
            "/v2/health/live",
            "/v2/health/ready",
            inference.INDEX,
            *inference.CHANGES,
            *inference.STATISTICS,
            *(path + end for path in (MODEL, VERSION) for end in _ENDS),
        ),
    ),
    "snapshots": ("Stored features for devices.", ("/snapshots/{service}", "/snapshots/{service}/{value}")),
    "pushes": ("Write rows to the online store at once.", ("/push", "/write-to-online-store")),
    "health": ("For load balancers and orchestrators.", ("/healthz", "/readyz")),
    "operations": ("The state of the server and its project, and the metrics.", ("/status", "/metrics")),
}
"""Paths by tag, with the description of each tag."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Isthmus API</title>
<link rel="stylesheet" href="docs/assets/swagger-ui.css">
<link rel="icon" type="image/png" href="docs/assets/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/assets/swagger-ui-bundle.js"></script>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();
SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null, deepLinking: true, defaultModelsExpandDepth: 0,
});
</script>
</body>
</html>
"""


async def _page(_request: object) -> HTMLResponse:
    return HTMLResponse(_PAGE)


def docs_routes() -> list[BaseRoute]:
    return [Route("/docs", _page), Mount("/docs/assets", _Compressed(directory=Path(__file__).parents[1] / "web"))]


class _Compressed(StaticFiles):
    """Serve files `NAME.gz` as `NAME`: compressed, or decompressed for clients that do not accept gzip."""

    def lookup_path(self, path: str) -> tuple[str, stat_result | None]:
        return super().lookup_path(f"{path}.gz")

    def file_response(self, full_path: Any, stat_result: stat_result, scope: Scope, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        if response.status_code == 200 and "gzip" not in Headers(scope=scope).get("accept-encoding", ""):
            return Response(gzip.decompress(Path(full_path).read_bytes()), media_type=response.media_type)
        response.headers["Content-Encoding"] = "gzip"
        return response


def document() -> dict[str, Any]:
    # It names no project, view or model, since reading it needs no API key.
    types = [
        messages.LookupRequest, messages.LookupAnswer, messages.ValuesAnswer, messages.PushRequest,
        messages.WriteRequest, messages.PushAnswer, messages.PredictRequest, messages.PredictAnswer, messages.Models,
        messages.GenerateRequest, messages.EventText, messages.EventEnd,
        messages.StatusAnswer, messages.Health, messages.Ready, messages.ErrorAnswer, inference.InferRequest,
        inference.InferAnswer, inference.ModelMetadata, inference.ModelReady, inference.ServerMetadata,
        inference.ServerLive, inference.ServerReady, inference.ModelConfiguration, inference.RepositoryIndexRequest,
        inference.RepositoryEntry, inference.Statistics,
    ]  # fmt: skip
    # This is one long table: an entry per route.
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    written: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Isthmus",
            "version": version("isthmus"),
            "description": "Features by Feast's online API, and predictions from the same values.",
        },
        "tags": [{"name": tag, "description": description} for tag, (description, _) in _GROUPS.items()],
        "paths": {
            "/get-online-features": {
                "post": _operation(
                    "lookUp", "Looks up the latest features of keys", messages.LookupAnswer,
                    errors=(*_READ, 406), body=messages.LookupRequest, contract=True,
                    forms={Format.VALUES.value: _reference(messages.ValuesAnswer), Format.ARROW.value: _STREAM},
                )
            },
            "/push": {
                "post": _operation(
                    "push", "Writes rows to the online store", messages.PushAnswer,
                    errors=_SENT, body=messages.PushRequest, contract=True,
                )
            },
            "/write-to-online-store": {
                "post": _operation(
                    "writeToOnlineStore", "Writes rows as Feast's remote online store does", messages.PushAnswer,
                    errors=_SENT, body=messages.WriteRequest, contract=True,
                )
            },
            "/predict": {
                "post": _operation(
                    "predict", "Predicts from join keys and request fields", messages.PredictAnswer,
                    errors=_READ, body=messages.PredictRequest, contract=True,
                )
            },
            "/generate": {"post": _generate()},
            **_inference(),
            "/snapshots/{service}": {"get": _snapshot("readSnapshot", "for a device", 401, 403, 404, 429, 503)},
            "/snapshots/{service}/{value}": {
                "get": _snapshot(
                    "readOwnSnapshot", "for one owner's device", 401, 403, 404, 422, 429, 503,
                    value="The owner's value of the join key that `owner` of the Snapshot names, as in JSON but "
                    "without quotes; bytes in Base64.",
                )
            },
            "/models": {
                "get": _operation("listModels", "Lists the deployed models", messages.Models, errors=_ANY)
            },
            "/status": {
                "get": _operation(
                    "readStatus", "Reads the state of the server and its project", messages.StatusAnswer, errors=_ANY,
                    contract=True, forms={"text/html": {"type": "string", "description": "The same as a page."}},
                )
            },
            "/healthz": {"get": _operation("isUp", "Checks that the process is up", messages.Health, key=False)},
            "/readyz": {
                "get": _operation(
                    "isReady", "Checks that lookups can be answered", messages.Ready, errors=_ANY, contract=True
                )
            },
            "/metrics": {"get": _metrics()},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key: see `isthmus keys --help`."}
            },
        },
        # A key is optional here because a server may run without keys.
        "security": [{}, {"key": []}],
    }  # fmt: skip
    for tag, (_, paths) in _GROUPS.items():
        for path in paths:
            for operation in written["paths"][path].values():
                operation["tags"] = [tag]
    return written


def _operation(  # noqa: PLR0913 - the parts of an operation, by name
    name: str,
    summary: str,
    answer: type[msgspec.Struct],
    *,
    errors: tuple[int, ...] = (),
    body: type[msgspec.Struct] | None = None,
    contract: bool = False,
    forms: Mapping[str, Any] | None = None,
    key: bool = True,
) -> dict[str, Any]:
    headers = {"X-Request-Id": {"description": "The caller's id, or a new one.", "schema": {"type": "string"}}}
    if contract:
        headers["Isthmus-Contract"] = {"description": "Hash of the contract.", "schema": {"type": "string"}}
    content = {**_json(answer), **{form: {"schema": schema} for form, schema in (forms or {}).items()}}
    responses = {"200": {"description": (answer.__doc__ or "").split("\n")[0], "headers": headers, "content": content}}
    operation: dict[str, Any] = {
        "operationId": name, "summary": summary, "responses": {**responses, **_error_responses(errors)}
    }  # fmt: skip
    if not key:
        operation["security"] = []
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _generate() -> dict[str, Any]:
    operation = _operation(
        "generate", "Generates text after a prompt", messages.EventEnd,
        errors=_READ, body=messages.GenerateRequest, contract=True,
    )  # fmt: skip
    events = {
        "type": "string",
        "contentMediaType": "text/event-stream",
        "description": "Events `text` with an EventText each, then an event `end` with an EventEnd, or `error` with an "
        "ErrorAnswer.",
    }
    operation["responses"]["200"] |= {
        "description": "The text as it is generated, as server-sent events.",
        "content": {"text/event-stream": {"schema": events}},
    }
    return operation


def _inference() -> dict[str, Any]:
    paths: dict[str, Any] = {
        "/v2": {"get": _operation("readServer", "Describes the server", inference.ServerMetadata, errors=_ANY)},
        "/v2/health/live": {"get": _operation("isLive", "Checks the process", inference.ServerLive, key=False)},
        "/v2/health/ready": {
            "get": _operation(
                "areModelsReady", "Checks that every deployed model can answer", inference.ServerReady,
                errors=(*_ANY, 409), contract=True,
            )
        },
    }  # fmt: skip
    for path, suffix in ((MODEL, ""), (VERSION, "OfVersion")):
        named = {
            "": _operation(
                f"readModel{suffix}", "Reads the tensors of a model", inference.ModelMetadata,
                errors=(*_ANY, 404, 409, 422), contract=True,
            ),
            "/ready": _operation(
                f"isModelReady{suffix}", "Checks that a model can answer", inference.ModelReady,
                errors=(*_ANY, 404, 409), contract=True,
            ),
            "/config": _operation(
                f"readConfiguration{suffix}", "Reads the configuration of a model", inference.ModelConfiguration,
                errors=(*_ANY, 404, 409), contract=True,
            ),
            "/infer": _operation(
                f"infer{suffix}", "Runs a model on tensors", inference.InferAnswer,
                errors=_READ, body=inference.InferRequest, contract=True, forms={_BINARY["contentMediaType"]: _BINARY},
            ),
        }  # fmt: skip
        named["/infer"]["requestBody"]["content"][_BINARY["contentMediaType"]] = {"schema": _BINARY}
        parameters = [_parameter("model", "Name of the model.")]
        if path == VERSION:
            parameters.append(_parameter("version", "Digest of a package, one of the model's `versions`."))
        for end, operation in named.items():
            method = "post" if end == "/infer" else "get"
            paths[path + end] = {method: {**operation, "parameters": parameters}}
    return paths | _repository()


def _repository() -> dict[str, Any]:
    every, own = (
        _operation(name, "Reads the counts of runs", inference.Statistics, errors=(*_ANY, 403, 404))
        for name in ("readStatistics", "readStatisticsOfModel")
    )
    index = _operation(
        "listRepository", "Lists the deployed versions", inference.RepositoryEntry,
        errors=_SENT, body=inference.RepositoryIndexRequest,
    )  # fmt: skip
    entry = index["responses"]["200"]["content"][Format.JSON.value]
    entry["schema"] = {"type": "array", "items": entry["schema"]}
    index["requestBody"]["required"] = False
    model = {"parameters": [_parameter("model", "Name of the model.")]}
    paths = {inference.INDEX: {"post": index}, inference.STATISTICS[0]: {"get": every}}
    paths[inference.STATISTICS[1]] = {"get": own | model}
    for path in inference.CHANGES:
        action = path.rpartition("/")[2]
        refused = {"operationId": f"{action}Model", "summary": "Refused: `isthmus deploy` does it"}
        paths[path] = {"post": {**refused, **model, "responses": _error_responses((*_ANY, 422))}}
    return paths


def _parameter(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": description, "schema": {"type": "string"}}


def _metrics() -> dict[str, Any]:
    formats = ("text/plain", "application/openmetrics-text")
    answer = {
        "description": "The metrics of all workers, in the format that `Accept` names.",
        "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
        "content": {kind: {"schema": {"type": "string"}} for kind in formats},
    }
    return {"operationId": "readMetrics", "summary": "Reads the metrics for Prometheus", "responses": {"200": answer}}


def _snapshot(name: str, summary: str, *statuses: int, value: str = "") -> dict[str, Any]:
    since = "SHA-256, in hex, of the snapshot on the device: the answer is a delta from it if one is available."
    headers = {
        "ETag": {"description": "SHA-256 of the newest snapshot, in hex.", "schema": {"type": "string"}},
        "X-Request-Id": {"schema": {"type": "string"}},
    }
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    success = {"description": "A snapshot or a delta: see docs/snapshots.md.", "headers": headers, "content": content}
    unchanged = {"description": "The device has the newest snapshot."}
    return {
        "operationId": name,
        "summary": f"Reads the stored features of a service {summary}",
        "parameters": [
            {"name": "service", "in": "path", "required": True, "schema": {"type": "string"}},
            *([_parameter("value", value)] if value else []),
            {"name": "since", "in": "query", "description": since, "schema": {"type": "string"}},
        ],
        "responses": {"200": success, "304": unchanged, **_error_responses(statuses)},
    }


def _error_responses(statuses: Iterable[int]) -> dict[str, Any]:
    content = _json(messages.ErrorAnswer)
    return {
        str(status): {"description": _ERRORS[status], "headers": _error_headers(status), "content": content}
        for status in statuses
    }


def _error_headers(status: int) -> dict[str, Any]:
    headers: dict[str, Any] = {"X-Request-Id": {"schema": {"type": "string"}}}
    if status == 401:
        headers["WWW-Authenticate"] = {"schema": {"type": "string"}}
    if status in (429, 503):
        headers["Retry-After"] = {
            "description": "Seconds; absent from a 503 that needs an operator.",
            "schema": {"type": "string"},
        }
    return headers


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {Format.JSON.value: {"schema": _reference(kind)}}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
