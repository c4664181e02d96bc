"""What is wrong in a request: the same answer from the engine, a graph, the API, and the files of a package."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.tabular.student import read_record
from isthmus.features.contract.schema import Contract, FieldRule
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.arrow import ARROW, to_arrow
from isthmus.features.values.columns import from_python
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.data import training_data
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.inputs import feeds
from isthmus.package.manifest import read_package
from isthmus.transforms import engine
from isthmus.transforms.request.compute import append_fields
from tests.commandline import run
from tests.orchestration import shop as shops
from tests.orchestration.cli.test_cli import strictly
from tests.orchestration.shop import Open, Shop, learnable, with_moment
from tests.serving.support import free_port, wait

FIELDS = """schema=[
        Field("store", String), Field("product", Int32), Field("hour", Int64), Field("weight", Float64),
        Field("speed", Float32), Field("wished", UnixTimestamp), Field("gift", Bool), Field("channel", String),
        Field("note", String), Field("code", String),
    ],
    expectations=[
        Expect.one_of("store", ["s0", "s1", "s2", "s3"]),
        Expect.present("product"),
        Expect.between("product", 1, 15),
        Expect.between("hour", 0, 23),
        Expect.between("weight", 0.0, 50.0),
        Expect.present("speed"),
        Expect.one_of("speed", [0.1, 0.5]),
        Expect.between("wished", datetime(2020, 1, 1, tzinfo=UTC)),
        Expect.present("gift"),
        Expect.one_of("channel", ["web", "shop"]),
        Expect.length("note", 1, 5),
        Expect.length("code", 3, 3),
    ],
    defaults={"hour": 12, "channel": "web", "code": "???", "wished": datetime(2024, 1, 1, tzinfo=UTC)},
"""
SPINE = """"weight",
        F.lit(0.5).cast("float").alias("speed"),
        F.col("ordered_at").alias("wished"),
        (F.col("product") > 7).alias("gift"),
        F.when(F.col("product") > 5, "web").otherwise("shop").alias("channel"),
        F.lit("soon").alias("note"),
        F.concat("store", F.lit("x")).alias("code"),
"""
GOOD: dict[str, Any] = {
    "store": "s1", "product": 9, "hour": 8, "weight": 2.5, "speed": 0.5, "wished": 1_709_251_199_999_999, "gift": True,
    "channel": "shop", "note": "soon", "code": "s1x",
}  # fmt: skip
REFUSED, MISSING, AS_IT_IS = "refused", "missing", "as it is"
NEW_YEAR = 1_704_067_200_000_000

CASES: list[tuple[str, Any, Any, str]] = [
    ("store", "s9", REFUSED, "is 's9' in row 1; expected one of 's0', 's1', 's2', 's3'"),
    ("product", None, REFUSED, "is null in row 1; expected always present, from 1 to 15"),
    ("product", 0, REFUSED, "is 0 in row 1; expected always present, from 1 to 15"),
    ("product", 16, REFUSED, "is 16 in row 1"),
    ("product", 15, AS_IT_IS, ""),
    ("product", MISSING, REFUSED, "is missing"),
    ("hour", 5000, 12, ""),
    ("hour", -(2**63), 12, ""),
    ("hour", 23, AS_IT_IS, ""),
    ("hour", None, 12, ""),
    ("hour", MISSING, 12, ""),
    ("weight", -0.0, AS_IT_IS, ""),
    ("weight", -5e-324, REFUSED, "is -5e-324 in row 1; expected from 0.0 to 50.0"),
    ("weight", math.nan, REFUSED, "is nan in row 1"),
    ("weight", math.inf, REFUSED, "is inf in row 1"),
    ("weight", None, AS_IT_IS, ""),
    ("weight", MISSING, REFUSED, "is missing"),
    ("speed", 0.1, AS_IT_IS, ""),
    ("speed", 0.2, REFUSED, "is 0.2 in row 1; expected always present, one of 0.1, 0.5"),
    ("speed", None, REFUSED, "is null in row 1"),
    ("wished", 0, NEW_YEAR, ""),
    ("wished", -62_135_596_800_000_000, NEW_YEAR, ""),
    ("wished", MISSING, NEW_YEAR, ""),
    ("gift", None, REFUSED, "is null in row 1; expected always present"),
    ("gift", False, AS_IT_IS, ""),
    ("channel", "fax", "web", ""),
    ("channel", "", "web", ""),
    ("channel", None, "web", ""),
    ("note", "", REFUSED, "is '' in row 1; expected a length from 1 to 5"),
    ("note", "é😀\n%_", AS_IT_IS, ""),
    ("note", "sooner", REFUSED, "is 'sooner' in row 1"),
    ("note", "x" * 5000, REFUSED, f"is '{'x' * 40}' and 4,960 more in row 1"),
    ("note", None, AS_IT_IS, ""),
    ("code", "s1", "???", ""),
    ("code", "s1xx", "???", ""),
    ("code", MISSING, "???", ""),
]
"""A field, what is wrong with its value, what the model sees then, and what the API says of it."""

WRONG_TYPES = [
    ("product", "9", "whole numbers of 32 bits (Int32)"),
    ("product", 2**31, "Int32"),
    ("product", 9.5, "Int32"),
    ("hour", True, "Int64"),
    ("hour", 2**63, "Int64"),
    ("weight", "heavy", "Float64"),
    ("speed", 1e39, "is too large"),
    ("wished", 1.5, "whole microseconds since 1970 UTC"),
    ("wished", "2024-01-01T00:00:00", "whole microseconds since 1970 UTC"),
    ("gift", 1, "true or false"),
    ("note", 5, "strings"),
    ("note", ["soon"], "strings"),
]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The shop with rules for its basket, from the definitions to a deployed model."""
    shop = learnable(with_moment(shops.write(tmp_path_factory.mktemp("rules") / "shop")))
    ruled(shop)
    project = Project(shop.root)
    apply(project)
    build(project)
    materialize(project)
    training_set(project)
    distill(project)
    export(project)
    verdict = require_passed(verify(project, all_keys=True))
    assert set(verdict.views["basket"]) == set(GOOD)
    deploy(project)
    return project


def ruled(shop: Shop) -> Shop:
    old = 'schema=[Field("store", String), Field("product", Int32), Field("hour", Int64), Field("weight", Float64)],\n'
    shop.replace(old, FIELDS)
    shop.replace('"weight",\n', SPINE)
    shop.replace("from datetime import timedelta", "from datetime import UTC, datetime, timedelta")
    shop.replace("    Entity,\n", "    Entity,\n    Expect,\n")
    return shop


def _row(name: str, value: Any) -> dict[str, Any]:
    return {other: one for other, one in {**GOOD, name: value}.items() if one != MISSING or other != name}


def _seen(name: str, value: Any, outcome: Any) -> dict[str, Any]:
    """The row as the model sees it."""
    found = {**GOOD, name: value if outcome is AS_IT_IS else outcome}
    return found | {"speed": float(np.float32(found["speed"]))}


def _types(contract: Contract) -> dict[str, Any]:
    return {column.name: column.dtype for column in contract.transforms["basket"].request}


@pytest.mark.accept
@pytest.mark.parametrize("name", ["sail", pytest.param("spark", marks=pytest.mark.accept)])
def test_the_engine(released: Project, name: str) -> None:
    contract = released.definitions.contract
    types = _types(contract)
    pair = (released.definitions.transforms["basket"], contract.transforms["basket"])

    def compute(*rows: Mapping[str, Any]) -> list[dict[str, Any]]:
        given = {
            field: to_arrow(from_python([row[field] for row in rows], types[field]), types[field])
            for field in types if all(field in row for row in rows)
        }  # fmt: skip
        (answer,) = append_fields(spark, [pair], [pa.RecordBatch.from_pydict(given)])
        columns = {field: answer[f"basket__{field}"] for field in types}
        columns["wished"] = columns["wished"].cast(pa.int64())
        found: list[dict[str, Any]] = pa.table(columns).to_pylist()
        return found

    with engine.session(name) as spark:
        for field, value, outcome, _ in CASES:
            if outcome is REFUSED:
                with pytest.raises(DataError, match=f"field {field} of|no column {field}"):
                    compute(_row(field, value))
        able = [(field, value, outcome) for field, value, outcome, _ in CASES if outcome is not REFUSED]
        whole = [case for case in able if case[1] != MISSING]
        assert compute(*(_row(field, value) for field, value, _ in whole)) == [_seen(*case) for case in whole]
        for field, value, outcome in able:
            if value == MISSING:
                assert compute(_row(field, value)) == [_seen(field, value, outcome)]


def test_the_graph(released: Project) -> None:
    contract = released.definitions.contract
    types = _types(contract)
    graph = RowGraph(contract.transforms["basket"])
    for field, value, outcome, _ in CASES:
        row = {**GOOD, field: None if value == MISSING else value}
        if value == MISSING and outcome is REFUSED:
            continue  # a graph has no say in what is not there
        found = graph.run({name: from_python([row[name]], dtype) for name, dtype in types.items()})
        if outcome is REFUSED:
            assert list(found.refused) == [field]
        else:
            assert not found.refused
            assert {n: found.values[n].tolist(t)[0] for n, t in types.items()} == _seen(field, value, outcome)


def test_the_package(released: Project) -> None:
    (package,) = (released.state / "packages").glob("late_order-*")
    manifest = read_package(package)
    types = {item.name: item.dtype for item in manifest.model_inputs}
    files = sorted(file for file in package.iterdir() if file.name.startswith("model."))
    assert [file.suffix for file in files] == [".onnx", ".ort"] * 2
    for file in files:
        opened = session(file.read_bytes(), 1)

        def answer(row: Mapping[str, Any], opened: Any = opened) -> float:
            given = {"shelf_demand__sold_1d": 3, "shelf_demand__distance": 10.0, **row}
            columns = {name: from_python([given[name]], dtype) for name, dtype in types.items()}
            return float(predict(opened, feeds(manifest.model_inputs, columns))[0])

        for field, value, outcome, _ in CASES:
            if value == MISSING and outcome is REFUSED:
                continue
            row = {**GOOD, field: None if value == MISSING else value}
            if outcome is REFUSED:
                assert math.isnan(answer(row)), (file.name, field, value)
            else:
                assert answer(row) == answer(_seen(field, value, outcome)), (file.name, field, value)


def test_the_api(released: Project) -> None:
    port = free_port()
    with (
        (released.root / "log").open("wb") as log,
        serving(released, port=port, log=log, private=True),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        wait(lambda: _ready(http), "the model")
        for field, value, outcome, message in CASES:
            # The row before it is good: the one that is refused is named.
            rows = {n: [GOOD[n], one] for n, one in _row(field, value).items()}
            looked, predicted = (_ask(http, path, rows) for path in ("/get-online-features", "/predict"))
            if outcome is not REFUSED:
                assert looked.status_code == 200, looked.text
                columns = dict(zip(looked.json()["metadata"]["feature_names"], looked.json()["results"], strict=True))
                seen = {name: columns[f"basket__{name}"]["values"][1] for name in GOOD}
                expected = _seen(field, value, outcome)
                seconds = expected["wished"] / 1e6
                assert seen == {**expected, "wished": seconds}, (field, value)
                assert predicted.status_code == 200, predicted.text
                assert None not in predicted.json()["predictions"]
                continue
            part = "entities" if field in ("store", "product") else "request"
            for answer, where in ((looked, "entities"), (predicted, part)):
                assert answer.status_code == 422, (field, value, answer.text)
                if field == "product" and value in (None, MISSING):
                    assert answer.json()["where"] == "entities.product"  # no key is null
                    continue
                found = answer.json()
                assert f"{found['found']}; expected {found['expected']}".startswith(message), (field, value, found)
                assert found["where"] == f"{where}.{field}"
                assert len(answer.text) < 400
        for field, wrong, message in WRONG_TYPES:
            rows = {n: [GOOD[n], one] for n, one in _row(field, wrong).items()}
            for path in ("/get-online-features", "/predict"):
                answer = _ask(http, path, rows)
                assert answer.status_code == 422, (field, wrong, answer.text)
                assert answer.json()["where"].endswith(f".{field}")
                assert message.replace(" | null", "") in answer.text.replace(" | null", ""), (field, wrong, answer.text)


def test_a_spine_of_ones_own_is_held_to_the_same(released: Project) -> None:
    moment = datetime(2024, 2, 1, tzinfo=UTC)
    spine = {**{name: [one] for name, one in GOOD.items()}, "event_timestamp": [moment], "wished": [moment]}
    types = {name: ARROW[dtype.name] for name, dtype in _types(released.definitions.contract).items()}
    del spine["hour"]  # it has a default

    def table(**changes: Any) -> pa.Table:
        columns = {**spine, **changes}
        return pa.table({n: c if isinstance(c, pa.Array) else pa.array(c, types.get(n)) for n, c in columns.items()})

    (row,) = training_data(released, "late_order_device", table(code=[None])).table().to_pylist()
    assert (row["basket__hour"], row["basket__code"], row["basket__wished"]) == (12, "???", moment)
    assert row["moment__hour_sin"] == np.float32(math.sin(12 * (2 * math.pi / 24)))
    refused = (
        r"request source basket, field gift: is null at event_timestamp=2024-02-01 .*, store=s1, product=9; expected a"
    )
    with pytest.raises(DataError, match=refused):
        training_data(released, "late_order_device", table(gift=[None])).table()
    with pytest.raises(DataError, match=r"column wished: has type timestamp\[us\]; .* with a time zone"):
        training_data(released, "late_order_device", table(wished=pa.array([0], pa.timestamp("us")))).table()
    frame = table().to_pandas().assign(wished=[datetime(2024, 2, 1)])  # noqa: DTZ001 - that is what is wrong with it
    with pytest.raises(DataError, match=r"column wished: has type timestamp\[.s\]; .* with a time zone"):
        training_data(released, "late_order_device", frame).table()


def test_a_spine_function_with_a_time_without_a_zone_is_refused(built: Shop, project: Open) -> None:
    with_moment(built)
    ruled(built)
    built.replace('F.col("ordered_at").alias("wished")', 'F.col("ordered_at").cast("timestamp_ntz").alias("wished")')
    with pytest.raises(ConfigurationError, match="column 'wished' has type timestamp_ntz; expected timestamp"):
        apply(project(built))


def _ask(http: httpx.Client, path: str, rows: Mapping[str, list[Any]]) -> httpx.Response:
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    plain = {
        name: [
            "NaN" if value != value else words.get(value, value) if isinstance(value, float) else value
            for value in values
        ]
        for name, values in rows.items()
    }
    if path == "/predict":
        keys = {name: values for name, values in plain.items() if name in ("store", "product")}
        return http.post(path, json={"entities": keys, "request": {n: v for n, v in plain.items() if n not in keys}})
    return http.post(path, json={"feature_service": "late_order_device", "entities": plain, "full_feature_names": True})


def _ready(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/readyz").json().get("model"))
    except httpx.TransportError:
        return False


def test_the_contract_says_it_in_words(released: Project) -> None:
    package = Artifacts(released, released.definitions.distillations["late_order"]).last_package()
    shown = run("contract", "show", str(package), cwd=released.root).stdout
    part = shown.partition("\nrequest source basket\n")[2].partition("\nrequest transform ")[0]
    for line in ("of hour  from 0 to 23, else 12", "of note  a length from 1 to 5", "of gift  always present",
                 "of wished  at least 2020-01-01 00:00:00+00:00, else 2024-01-01 00:00:00+00:00"):  # fmt: skip
        assert f" {line}\n" in part, part
    assert "takes  shelf_demand: sold_1d\n" in shown
    taught = shown.partition("\nlearned from the training part\n")[2].splitlines()
    learned = read_record(
        Artifacts(released, released.definitions.distillations["late_order"]).last_model()
    ).preparation
    names = [item.name for item in learned.numbers] + [item.name for item in learned.texts]
    assert [line.split()[0] for line in taught] == names
    known = ("Standardize(limit=4.0) by mean ", "Embed(size=254, width=12) with ")
    assert all(any(words in line for words in known) for line in taught)
    document = strictly(run("contract", "show", str(package), "--json", cwd=released.root).stdout)
    assert document["transforms"]["basket"]["hash"] == released.applied().transforms["basket"].hash
    assert len(document["learned"]) == len(taught)

    other = released.root / "other"
    shutil.copytree(package, other)
    file = other / "preparation.json"
    data = json.loads(file.read_text())
    data["numbers"][0]["parameters"][0][0] += 1
    file.write_text(json.dumps(data))
    contract = released.applied()
    basket = contract.transforms["basket"]
    ruled = replace(basket, rules={**basket.rules, "hour": FieldRule("basket", "from 0 to 24", None)})
    changed = replace(contract, transforms={**contract.transforms, "basket": ruled})
    (other / "contract.json").write_bytes(changed.dumps())
    said = run("contract", "diff", str(package), str(other), cwd=released.root).stdout
    assert "the rule for hour was (from 0 to 23, else 12), is (from 0 to 24)" in said
    assert f"training statistics differ for {data['numbers'][0]['name']}\n" in said
    file.write_text("{")
    broken = run("contract", "show", str(other), cwd=released.root)
    assert (broken.returncode, "Traceback" in broken.stderr) == (1, False)
    assert "preparation.json" in broken.stderr
