"""The Open Inference Protocol: what a model of tensors answers, and what it refuses."""

import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openapi_schema_validator import OAS31Validator

from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.package.golden import read_golden
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import TensorInfo, open_package, package_digest
from isthmus.serving.http.inference import _described
from isthmus.serving.limits import Limits
from isthmus.serving.rollout.releases import deploy
from isthmus.serving.wire.inference import HEADER
from tests.serving.http.test_openapi import resolved
from tests.serving.support import (
    CARRIER,
    CONTRACT,
    EVERYTHING,
    LISTS,
    NOW,
    PUNCTUALITY,
    ROUTE,
    TABLES,
    Server,
    contract_of,
    serving,
    verdict_of,
    wait,
)
from tests.serving.tensors import (
    answered,
    as_binary,
    as_json,
    everything,
    frames,
    make_counting_package,
    make_drawing_package,
    make_echo_package,
    make_listing_package,
    session,
)

INFER = "/v2/models/draws/infer"
Make = Callable[[Path], Path]


def put(server: Server, package: Path) -> None:
    """Deploys a package, and waits until it answers."""
    server.deploy(package)
    path = f"/v2/models/draws/versions/{package_digest(package)}/ready"
    wait(lambda: server.http.get(path).status_code == 200, "the model")


@contextmanager
def tensor_server(
    folder: Path,
    redis_url: str,
    make: Make,
    limits: Limits = Limits(),  # noqa: B008 - it never changes
) -> Iterator[tuple[Server, Path]]:
    folder.mkdir(parents=True)
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    package = make(folder / "package")
    with serving(folder, redis_url, limits=limits) as running:
        put(running, package)
        yield running, package


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[tuple[Server, Path]]:
    with tensor_server(tmp_path_factory.mktemp("drawing") / "server", redis_url, make_drawing_package) as running:
        yield running


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[tuple[Server, Path]]:
    limits = Limits(rows=4, values=24, body_bytes=4000)
    with tensor_server(tmp_path_factory.mktemp("echo") / "server", redis_url, make_echo_package, limits) as running:
        yield running


def require_same(found: Feeds, expected: Feeds) -> None:
    """Fails unless tensors are the same to the bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        same = (
            found[name].tolist() == array.tolist()
            if array.dtype == object
            else found[name].tobytes() == array.tobytes()
        )
        assert same, name


@pytest.mark.parametrize("kind", ["drawing", "echo"])
def test_the_golden_cases_are_answered_as_onnx_runtime_answers_them(kind: str, request: pytest.FixtureRequest) -> None:
    server, package = request.getfixturevalue(kind)
    opened, model = open_package(package), session(package)
    names = [tensor.name for tensor in opened.manifest.outputs]
    version = f"/v2/models/draws/versions/{package_digest(package)}/infer"
    for case in read_golden(opened).cases:
        fed = case.feeds
        expected = dict(zip(names, model.run(names, fed), strict=True))
        require_same(answered(server.http.post(INFER, json=as_json(fed))), expected)
        for path in (INFER, version):
            content, headers = as_binary(fed, parameters={"binary_data_output": True})
            answer = server.http.post(path, content=content, headers=headers)
            require_same(answered(answer), expected)
            assert answer.headers["isthmus-contract"] == CONTRACT.hash


def test_what_json_lacks_comes_and_goes_as_words(echo: tuple[Server, Path]) -> None:
    fed = everything(math.nan)
    text = json.dumps(as_json(fed))
    assert '"NaN"' in text
    answer = echo[0].http.post(INFER, content=text)
    found = {f"a{name[1:]}": array for name, array in answered(answer).items()}
    require_same(found, fed)
    assert '"-Infinity"' in answer.text


def test_outputs_are_those_asked_for_in_the_form_asked_for(drawing: tuple[Server, Path]) -> None:
    server, package = drawing
    fed = frames(2)
    image, vector = session(package).run(["image", "vector"], fed)
    some = server.http.post(INFER, json=as_json(fed, id="of mine", outputs=[{"name": "vector"}]))
    require_same(answered(some), {"vector": vector})
    assert (some.json()["id"], some.json()["model_name"]) == ("of mine", "draws")
    assert some.json()["model_version"] == package_digest(package)
    outputs = [{"name": "vector", "parameters": {"binary_data": False}}, {"name": "image"}]
    content, headers = as_binary(fed, outputs=outputs, parameters={"binary_data_output": True})
    mixed = server.http.post(INFER, content=content, headers=headers)
    require_same(answered(mixed), {"vector": vector, "image": image})
    head = json.loads(mixed.content[: int(mixed.headers[HEADER])])
    assert [("data" in output) for output in head["outputs"]] == [True, False]
    assert "id" not in head


def test_elements_may_be_flat_and_inputs_in_any_order_and_form(drawing: tuple[Server, Path]) -> None:
    server, package = drawing
    fed = frames(2)
    expected = dict(zip(["image", "vector"], session(package).run(["image", "vector"], fed), strict=True))
    message = as_json(fed, model_name="draws")
    for item in message["inputs"]:
        item["data"] = fed[item["name"]].ravel().tolist()
    message["inputs"].reverse()
    require_same(answered(server.http.post(INFER, json=message)), expected)
    # The first of the two in JSON, the other as bytes at an odd address.
    message["inputs"][1] = {**message["inputs"][1], "parameters": {"binary_data_size": 384}}
    del message["inputs"][1]["data"]
    for spaces in range(4):
        text = json.dumps(message).encode() + b" " * spaces
        answer = server.http.post(INFER, content=text + fed["frame"].tobytes(), headers={HEADER: str(len(text))})
        require_same(answered(answer), expected)


def test_the_server_and_the_model_say_what_they_are(drawing: tuple[Server, Path], server: Server) -> None:
    http, package = drawing[0].http, drawing[1]
    digest = package_digest(package)
    extensions = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
    assert http.get("/v2").json()["extensions"] == extensions
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"live": True, "ready": True}
    assert http.get("/v2/models/draws/ready").json() == {"name": "draws", "ready": True}
    metadata = http.get("/v2/models/draws").json()
    assert metadata == http.get(f"/v2/models/draws/versions/{digest}").json()
    assert metadata == {
        "name": "draws", "versions": [digest], "platform": "onnx_onnxv1",
        "inputs": [
            {"name": "frame", "datatype": "FP32", "shape": [-1, 3, 4, 4]},
            {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
        ],
        "outputs": [
            {"name": "image", "datatype": "FP32", "shape": [-1, 3, 4, 4]},
            {"name": "vector", "datatype": "FP32", "shape": [-1, 2]},
        ],
    }  # fmt: skip
    (model,) = http.get("/models").json()["models"]
    assert (model["inputs"], model["max_sizes"]) == ([], {"P": 5})
    assert model["tensors"][1] == {"name": "ids", "datatype": "INT64", "shape": ["N", "P"]}
    page = http.get("/status", headers={"accept": "text/html"})
    assert (page.status_code, "draws" in page.text) == (200, True)
    for path in ("/v2/models/other", "/v2/models/draws/versions/1", "/v2/models/draws/versions/1/ready"):
        refused = http.get(path)
        assert (refused.status_code, refused.json()["kind"]) == (404, "NotFoundError")
        assert refused.json()["error"].endswith(f"expected {'draws' if 'other' in path else digest}")
    # A model of rows, and one of tensors, each asked as the other.
    assert server.http.get("/v2/models/late/ready").status_code == 200
    for refused in (server.http.get("/v2/models/late"), server.http.post("/v2/models/late/infer", json=as_json({}))):
        assert (refused.status_code, refused.json()["found"]) == (404, "takes rows of features, not tensors")
    rows = drawing[0].predict(entities={"carrier": ["UA"]})
    assert (rows.status_code, rows.json()["remedy"]) == (422, "use /v2/models/draws/infer")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("get", "/v2", None, 200),
        ("get", "/v2/health/live", None, 200),
        ("get", "/v2/health/ready", None, 200),
        ("get", "/v2/models/{model}", None, 200),
        ("get", "/v2/models/{model}/ready", None, 200),
        ("get", "/v2/models/{model}/versions/{version}", None, 404),
        ("get", "/models", None, 200),
        ("get", "/v2/models/{model}/config", None, 200),
        ("get", "/v2/models/{model}/versions/{version}/config", None, 404),
        ("get", "/v2/models/{model}/stats", None, 200),
        ("get", "/v2/models/stats", None, 200),
        ("post", "/v2/repository/index", {"ready": True}, 200),
        ("post", "/v2/repository/models/{model}/load", None, 422),
        ("post", "/v2/repository/models/{model}/unload", None, 422),
        ("post", "/v2/models/{model}/infer", as_json(frames(2), id="7", outputs=[{"name": "image"}]), 200),
        ("post", "/v2/models/{model}/infer", as_json({}), 422),
    ],
)
def test_answers_are_what_the_document_says(
    drawing: tuple[Server, Path], method: str, path: str, body: object, status: int
) -> None:
    http = drawing[0].http
    document = http.get("/openapi.json").json()
    operation = document["paths"][path][method]
    answer = http.request(method, path.format(model="draws", version="1"), json=body)
    assert answer.status_code == status, answer.text
    described = operation["responses"][str(status)]
    schema = resolved(document, described["content"]["application/json"]["schema"])
    OAS31Validator(schema).validate(answer.json())
    assert {name.lower() for name in described["headers"]} <= set(answer.headers)
    if body is not None:
        asked = operation["requestBody"]["content"]["application/json"]["schema"]
        OAS31Validator(resolved(document, asked)).validate(body)


def test_a_configuration_has_the_shapes_the_file_and_the_device(drawing: tuple[Server, Path]) -> None:
    server, package = drawing
    configuration = server.http.get("/v2/models/draws/config").json()
    assert configuration == server.http.get(f"/v2/models/draws/versions/{package_digest(package)}/config").json()
    assert configuration == {
        "name": "draws", "platform": "onnxruntime_onnx", "backend": "onnxruntime", "max_batch_size": 0,
        "default_model_filename": open_package(package).manifest.variants[0].file,
        "input": [
            {"name": "frame", "data_type": "TYPE_FP32", "dims": [-1, 3, 4, 4]},
            {"name": "ids", "data_type": "TYPE_INT64", "dims": [-1, -1]},
        ],
        "output": [
            {"name": "image", "data_type": "TYPE_FP32", "dims": [-1, 3, 4, 4]},
            {"name": "vector", "data_type": "TYPE_FP32", "dims": [-1, 2]},
        ],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {"intra_op_thread_count": {"string_value": "1"}},
    }  # fmt: skip


def test_statistics_count_rows_runs_and_runs_without_outputs(tmp_path: Path, redis_url: str) -> None:
    with tensor_server(tmp_path / "server", redis_url, make_drawing_package) as (server, _):
        (before,) = server.http.get("/v2/models/stats").json()["model_stats"]
        assert (before["name"], before["inference_count"], before["last_inference"]) == ("draws", 0, 0)
        start = time.time()
        for rows in (2, 3):
            assert server.http.post(INFER, json=as_json(frames(rows))).status_code == 200
        wrong = as_json(frames(2))
        wrong["inputs"][1]["data"] = [10] * 6
        assert server.http.post(INFER, json=wrong).status_code == 422
        (found,) = server.http.get("/v2/models/draws/stats").json()["model_stats"]
        assert (found["inference_count"], found["execution_count"]) == (5, 2)
        success, fail = found["inference_stats"]["success"], found["inference_stats"]["fail"]
        assert (success["count"], fail["count"]) == (2, 1)
        assert 0 < success["ns"] < 1e9 * (time.time() - start)
        assert fail["ns"] > 0
        assert 1000 * start - 1 <= found["last_inference"] <= 1000 * time.time()
        assert server.http.get("/v2/models/other/stats").status_code == 404


def test_the_repository_lists_what_is_deployed_and_deploys_nothing(tmp_path: Path, redis_url: str) -> None:
    with tensor_server(tmp_path / "server", redis_url, make_drawing_package) as (server, package):
        entry = {"name": "draws", "version": package_digest(package), "state": "READY", "reason": ""}
        assert server.http.post("/v2/repository/index").json() == [entry]
        # The same package with another profile: the former deployment, still watched, has the same version.
        profile = ServingProfile(threads=2, probation_seconds=600)
        deploy(package, verdict_of(package), CONTRACT, profile, server.deployment, tables=TABLES, at=NOW + 1)
        wait(lambda: server.http.get("/models").json()["models"][0].get("probation"), "the probation")
        assert server.http.post("/v2/repository/index").json() == [entry]
        for action in ("load", "unload"):
            refused = server.http.post(f"/v2/repository/models/draws/{action}")
            assert (refused.status_code, "`isthmus deploy`" in refused.json()["error"]) == (422, True)
        other = contract_of(PUNCTUALITY, EVERYTHING, ROUTE, LISTS, request=[CARRIER])
        write_atomically(server.contract, other.dumps())
        wait(lambda: server.http.get("/v2/models/draws/ready").status_code == 409, "the other contract")
        (entry,) = server.http.post("/v2/repository/index", json={}).json()
        assert (entry["version"], entry["state"]) == (package_digest(package), "UNAVAILABLE")
        assert entry["reason"] == server.http.get("/v2/models/draws/ready").json()["error"]
        assert server.http.post("/v2/repository/index", json={"ready": True}).json() == []
        keys = server.grant(other="predict:other", own="predict:draws", all="status:*")
        for path in ("/v2/repository/index", "/v2/models/draws/stats"):
            method = "POST" if path.endswith("index") else "GET"
            codes = [
                server.http.request(method, path, headers={"authorization": keys[name]}).status_code
                for name in ("other", "own", "all")
            ]
            assert codes == [403, 200, 200], path


def changed(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """A change of an input: None removes a field."""

    def change(message: dict[str, Any]) -> None:
        message["inputs"][place] = {
            name: value for name, value in {**message["inputs"][place], **fields}.items() if value is not None
        }

    return change


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], object], int, str, str]] = {
    "missing": (lambda m: m["inputs"].pop(), 422, "inputs.ids", "is missing; expected ids: INT64 [N, P]"),
    "additional": (lambda m: m["inputs"].append({**m["inputs"][0], "name": "x"}), 422, "inputs.x", "frame: FP32 [N, 3"),
    "twice": (lambda m: m["inputs"].append(m["inputs"][0]), 422, "inputs.frame", "appears twice"),
    "datatype": (changed(1, datatype="INT32"), 422, "inputs.ids", "'INT32'; expected INT64"),
    "unknown datatype": (changed(0, datatype="FP16"), 422, "inputs.frame", "'FP16'; expected FP32"),
    "rank": (changed(1, shape=[6]), 422, "inputs.ids", "shape [6]; expected ids: INT64 [N, P]"),
    "fixed size": (changed(0, shape=[2, 3, 4, 5]), 422, "inputs.frame", "expected frame: FP32 [N, 3, 4, 4]"),
    "named size": (changed(1, shape=[3, 2]), 422, "inputs.ids", "N is 3; expected 2, as in frame"),
    "no rows": (changed(0, shape=[0, 3, 4, 4]), 422, "inputs.frame", "N is 0; expected 1 or more"),
    "beyond the manifest": (changed(1, shape=[2, 6]), 413, "inputs.ids", "P is 6; expected 5 at most"),
    "too many rows": (lambda m: [changed(n, shape=[10**6, *m["inputs"][n]["shape"][1:]])(m) for n in (0, 1)], 413,
                      "inputs", "1,000,000 rows; expected 10,000 at most"),
    "too many elements": (
        lambda m: [changed(n, shape=[10**4 - 1, *m["inputs"][n]["shape"][1:]])(m) for n in (0, 1)] and
        changed(0, shape=[2, 3, 4, 4])(m), 422, "inputs.ids", "N is 9,999; expected 2, as in frame"
    ),
    "huge size": (changed(0, shape=[2**60, 3, 4, 4]), 422, "body", "inputs"),
    "negative size": (changed(0, shape=[-1, 3, 4, 4]), 422, "body", "inputs"),
    "fewer elements": (changed(1, data=[1] * 5), 422, "inputs.ids", "has 5 elements; expected 6 whole numbers"),
    "more elements": (changed(1, data=[1] * 7), 422, "inputs.ids", "has 7 elements"),
    "none": (changed(1, data=[]), 422, "inputs.ids", "has 1 elements"),
    "other nesting": (changed(1, data=[[1, 2], [3, 4], [5, 6]]), 422, "inputs.ids", "another nesting"),
    "ragged": (changed(1, data=[[1, 2, 3, 4], [5, 6]]), 422, "inputs.ids", "another nesting"),
    "too deep": (changed(1, data=[[[1], [2], [3]], [[4], [5], [6]]]), 422, "inputs.ids", "another nesting"),
    "a number": (changed(1, data=7), 422, "inputs.ids", "has 1 elements"),
    "an object": (changed(1, data={str(n): n for n in range(6)}), 422, "inputs.ids", "another nesting"),
    "objects": (changed(1, data=[1, 2, 3, 4, 5, {}]), 422, "inputs.ids", "got `object` - at `data[5]`"),
    "a text": (changed(1, data=["1", 2, 3, 4, 5, 6]), 422, "inputs.ids", "Expected `int`, got `str` - at `data[0]`"),
    "a fraction": (changed(1, data=[1.5, 2, 3, 4, 5, 6]), 422, "inputs.ids", "Expected `int`, got `float`"),
    "a truth value": (changed(1, data=[True, 2, 3, 4, 5, 6]), 422, "inputs.ids", "Expected `int`, got `bool`"),
    "null": (changed(1, data=[None, 2, 3, 4, 5, 6]), 422, "inputs.ids", "got `null`"),
    "beyond 64 bits": (changed(1, data=[2**63, 2, 3, 4, 5, 6]), 422, "inputs.ids", "data[0]"),
    "beyond 32 bits": (changed(0, data=[1e39, *[0.0] * 95]), 422, "inputs.frame", "1e+39 is too large"),
    "beyond a double": (changed(0, data=[10**400, *[0.0] * 95]), 422, "inputs.frame", "out of range"),
    "a word": (changed(0, data=["nan", *[0.0] * 95]), 422, "inputs.frame", "Expected a number, got 'nan'"),
    "beyond the vocabulary": (changed(1, data=[10] * 6), 422, "inputs", "idx=10 must be within"),
    "no data": (changed(1, data=None), 422, "inputs.ids", "has no data"),
    "data and bytes": (changed(1, parameters={"binary_data_size": 48}), 422, "inputs.ids", "and `binary_data_size`"),
    "bytes elsewhere": (changed(1, data=None, parameters={"binary_data_size": 48}), 422, "inputs.ids",
                        "has 0 bytes after the JSON; expected 48"),
    "unknown output": (lambda m: m.update(outputs=[{"name": "y"}]), 422, "outputs.y", "one of image, vector"),
    "output twice": (lambda m: m.update(outputs=[{"name": "image"}] * 2), 422, "outputs.image", "requested twice"),
    "other model": (lambda m: m.update(model_name="late"), 422, "model_name", "draws, as in the path"),
    "unknown field": (lambda m: m.update(priority=1), 422, "body", "priority"),
    "unknown parameter": (changed(1, parameters={"shared_memory_region": "x"}), 422, "body", "shared_memory_region"),
    "sequence": (lambda m: m.update(parameters={"sequence_id": 1}), 422, "body", "sequence_id"),
    "no inputs": (lambda m: m.pop("inputs"), 422, "body", "inputs"),
}  # fmt: skip


@pytest.mark.parametrize("spoiled", SPOILED)
def test_what_cannot_be_run_is_refused_by_name(drawing: tuple[Server, Path], spoiled: str) -> None:
    change, status, where, word = SPOILED[spoiled]
    message = as_json(frames(2))
    change(message)
    answer = drawing[0].http.post(INFER, json=message)
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["where"] == where
    assert word in body["error"]
    assert body["kind"] in ("RequestError", "TooLargeError")


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        (b"[]", 422, "object"),
        (
            b'{"inputs": [{"name": "frame", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
            400,
            "NaN is not valid JSON",
        ),
        (b'{"inputs": [], "inputs": []}', 422, "appears twice"),
        (b'{"inputs": [{"name": "\xff"}]}', 400, "UTF-8"),
        (b"[" * 5000, 422, "object"),
    ],
)
def test_what_is_no_message_is_refused(drawing: tuple[Server, Path], content: bytes, status: int, word: str) -> None:
    answer = drawing[0].http.post(INFER, content=content)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]


@pytest.mark.parametrize(
    ("header", "cut", "added", "where", "word"),
    [
        ("-1", 0, b"", HEADER, "'-1'; expected a number of bytes up to the body's"),
        ("1e3", 0, b"", HEADER, "is '1e3'"),
        ("9" * 30, 0, b"", HEADER, "expected a number of bytes"),
        ("100000", 0, b"", HEADER, "expected a number of bytes"),
        (None, 1, b"", "inputs.ids", "has 47 bytes after the JSON; expected 48"),
        (None, 0, b"x", "body", "has 1 bytes after its tensors; expected none"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(
    drawing: tuple[Server, Path], header: str | None, cut: int, added: bytes, where: str, word: str
) -> None:
    content, headers = as_binary(frames(2))
    content = content[: len(content) - cut] + added
    answer = drawing[0].http.post(INFER, content=content, headers={HEADER: header} if header else headers)
    assert answer.status_code == 422, answer.text
    assert answer.json()["where"] == where
    assert word in answer.json()["error"]


def test_a_body_whose_form_is_another_or_ambiguous_is_refused(drawing: tuple[Server, Path]) -> None:
    content, headers = as_binary(frames(2))
    http, twice = drawing[0].http, [(HEADER, headers[HEADER]), (HEADER, "3")]
    packed = http.post(INFER, content=gzip.compress(content), headers={**headers, "content-encoding": "gzip"})
    assert (packed.status_code, packed.json()["where"], packed.json()["found"]) == (
        422, "Content-Encoding", "is 'gzip'",
    )  # fmt: skip
    ambiguous = http.post(INFER, content=content, headers=twice)
    assert (ambiguous.status_code, ambiguous.json()["found"]) == (422, f"is '{headers[HEADER]}, 3'")
    (first, second) = (json.dumps(item) for item in as_json(frames(2))["inputs"])
    repeated = http.post(INFER, content=f'{{"inputs": [{first}, {second[:-1]}, "data": [0, 0, 0, 0, 0, 0]}}]}}')
    assert (repeated.status_code, repeated.json()["error"]) == (
        422, "body, 'data': appears twice; expected each name once",
    )  # fmt: skip
    # The path of the route itself.
    assert http.post("/v2/models/{model}/infer", json=as_json(frames(2))).status_code == 404


def test_bytes_of_another_length_or_kind_are_refused(echo: tuple[Server, Path]) -> None:
    def refused(name: str, raw: bytes) -> str:
        fed = everything()
        parts = {other: as_binary({other: array})[0] for other, array in fed.items()}
        message: dict[str, Any] = {"inputs": []}
        tail = b""
        for other, array in fed.items():
            head = int(as_binary({other: array})[1][HEADER])
            (item,) = json.loads(parts[other][:head])["inputs"]
            data = raw if other == name else parts[other][head:]
            message["inputs"].append({**item, "parameters": {"binary_data_size": len(data)}})
            tail += data
        text = json.dumps(message).encode()
        answer = echo[0].http.post(INFER, content=text + tail, headers={HEADER: str(len(text))})
        assert answer.status_code == 422, answer.text
        assert answer.json()["where"] == f"inputs.{name}"
        return str(answer.json()["error"])

    assert "has 11 bytes; expected 12: [3] INT32" in refused("a_int32", bytes(11))
    assert "neither 0 nor 1" in refused("a_bool", b"\x00\x02\x01")
    assert "string 1 is not UTF-8" in refused("a_string", bytes(4) + b"\x01\x00\x00\x00\xff" + bytes(4))
    assert "ends within string 1" in refused("a_string", bytes(4) + b"\xff\xff\xff\xff" + bytes(4))
    assert "has 3 bytes after its strings" in refused("a_string", bytes(15))
    assert "has 4 bytes; expected 3 strings" in refused("a_string", bytes(4))


def test_limits_are_named_before_anything_is_decoded(echo: tuple[Server, Path]) -> None:
    def refused(rows: int, **more: Any) -> tuple[int, str]:
        message = as_json(everything())
        for item in message["inputs"]:
            # Data that nobody looks at.
            item.update(shape=[rows], data="?")
        answer = echo[0].http.post(INFER, json={**message, **more})
        return answer.status_code, answer.json()["error"]

    assert refused(5) == (
        413,
        "inputs: 5 rows; expected 4 at most. Split it into several requests, or raise [server.limits]",
    )
    assert refused(4)[1].startswith("inputs: 28 elements; expected 24 at most")
    assert refused(1, id="x" * 5000)[1].startswith("body: has ")
    assert refused(1, id="x" * 5000)[0] == 413


def test_a_run_that_is_late_ends_and_nothing_waits_for_it(tmp_path: Path, redis_url: str) -> None:
    limits = Limits(deadline_seconds=1.0, values=1000)
    with tensor_server(tmp_path / "server", redis_url, make_counting_package, limits) as (server, _):

        def count(steps: int) -> Any:
            return server.http.post(INFER, json=as_json({"steps": np.array([steps], np.int64)}))

        assert answered(count(1000))["counted"].tolist() == [1000]
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(count, 2**62)
            time.sleep(0.3)
            # Lookups go on beside it.
            assert server.lookup(features=["punctuality:flights"], entities={"carrier": ["B6"]}).status_code == 200
            assert not late.done()
            assert late.result().status_code == 503
        assert "could not answer within 1 seconds" in late.result().json()["error"]
        # With the longer one still running, this would be late, too.
        assert answered(count(5))["counted"].tolist() == [5]

        # How large this answer is stands in no shape.
        put(server, make_listing_package(tmp_path / "listing"))
        assert answered(count(1000))["listed"].tolist() == list(range(1000))
        assert (count(1001).status_code, count(1001).json()["where"]) == (413, "outputs")


def test_keys_and_metrics_are_as_for_predictions(tmp_path: Path, redis_url: str) -> None:
    with tensor_server(tmp_path / "server", redis_url, make_drawing_package) as (server, _):
        keys = server.grant(other="predict:other read:*", own="predict:draws", all="predict:*")
        fed = as_json(frames(2))
        assert server.http.get("/v2/health/live").status_code == 200
        unknown = server.http.get("/v2/models/draws")
        assert (unknown.status_code, unknown.json()["kind"]) == (401, "UnauthenticatedError")
        for name, status in (("other", 403), ("own", 200), ("all", 200)):
            key = {"authorization": keys[name]}
            assert server.http.post(INFER, json=fed, headers=key).status_code == status
            assert server.http.get("/v2/models/draws", headers=key).status_code == 200
        fed["inputs"][1]["data"] = [10] * 6
        assert server.http.post(INFER, json=fed, headers={"authorization": keys["own"]}).status_code == 422
        lines = server.http.get("/metrics", headers={"authorization": keys["other"]}).text.splitlines()
        route = 'route="/v2/models/{model}/infer"'
        # It never came to its route.
        assert 'isthmus_errors_total{error="UnauthenticatedError",route="/v2/models/{model}"} 1.0' in lines
        assert f'isthmus_requests_total{{method="POST",{route},status="200"}} 2.0' in lines
        assert f'isthmus_errors_total{{error="ForbiddenError",{route}}} 1.0' in lines
        assert 'isthmus_model_rows_total{model="draws"} 6.0' in lines
        assert 'isthmus_model_duration_seconds_count{model="draws"} 3.0' in lines
        # The request was wrong, and not the model.
        assert 'isthmus_prediction_failures_total{model="draws"} 0.0' in lines


def test_metadata_has_the_names_of_classes() -> None:
    logits = TensorInfo("logits", "float", ("N", 2))
    named, plain = (msgspec.to_builtins(_described([logits], names)) for names in (("yes", "no"), ()))
    assert plain == [{"name": "logits", "datatype": "FP32", "shape": [-1, 2]}]
    assert named == [{**plain[0], "parameters": {"classes": ["yes", "no"]}}]
    (several,) = msgspec.to_builtins(_described([logits], ("yes", "no"), several=True))
    assert several["parameters"] == {"classes": ["yes", "no"], "several": True}
