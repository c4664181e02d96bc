"""Request transforms from the definitions to the API and the device: one function, the same values everywhere."""

import json
import math
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from isthmus.distill.onnx.runtime import predict, session
from isthmus.features.contract.diff import differences, service_changes
from isthmus.features.errors import ConfigurationError, DataError, RequestError
from isthmus.features.files import read_pointer
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import from_python
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.runtimes.web import installed
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.data import JOINS, training_data
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.inputs import feeds
from isthmus.package.manifest import read_package
from isthmus.serving.lookup.lookup import Lookup
from tests.orchestration.shop import Open, Shop, learnable, with_moment
from tests.serving.support import free_port, wait


def test_one_definition_gives_the_same_values_to_training_the_api_and_the_package(
    exported: Shop, project: Open
) -> None:
    shop = exported
    table = training_set(project(shop)).table()
    package = read_pointer(shop.state / "packages" / "late_order.latest")
    verdict = require_passed(verify(project(shop), all_keys=True))
    assert {name: one.compared for name, one in verdict.views["moment"].items()} == dict.fromkeys(FIELDS, len(table))
    assert {name: one.compared for name, one in verdict.views["API moment"].items()} == dict.fromkeys(FIELDS, 2000)
    deploy(project(shop))

    manifest = read_package(package)
    assert [item.name for item in manifest.inputs if item.tensor.startswith("given_")] == [
        "shelf_demand__sold_1d", "hour", "weight", "store",
    ]  # fmt: skip
    assert not [item.name for item in manifest.inputs if item.name.startswith("moment__")]
    programs = {
        language: re.findall(rf"```{language}\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
        for language in ("python", "javascript")
    }
    web = f"file://{installed()}/node_modules/onnxruntime-web/dist/ort.node.min.mjs"
    (shop.root / "predictor.py").write_text(programs["python"][0])
    (shop.root / "predictor.mjs").write_text(programs["javascript"][0].replace("onnxruntime-node", web))
    for command in ([sys.executable, "-W", "error", "predictor.py"], ["node", "predictor.mjs"]):
        done = subprocess.run([*command, package], cwd=shop.root, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "golden rows, largest difference" in done.stdout

    now = table.slice(len(table) - 3).to_pylist()
    port = free_port()
    with (
        (shop.root / "log").open("wb") as log,
        serving(project(shop), port=port, log=log, private=True),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        wait(lambda: _ready(http), "the model")
        keys = {name: [row[name] for row in now] for name in ("store", "product")}
        request = {name: [row[name] for row in now] for name in ("hour", "weight")}
        asked = {"feature_service": "late_order_device", "entities": keys | request, "full_feature_names": True}
        answer = http.post("/get-online-features", json=asked).json()
        columns = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
        for name in ("hour_sin", "store_code", "heavy"):
            assert columns[f"moment__{name}"]["values"] == [row[f"moment__{name}"] for row in now]
        sold = columns["shelf_demand__sold_1d"]["values"]
        expected = [math.log1p(row["weight"]) / (n or 1) for row, n in zip(now, sold, strict=True)]
        assert columns["moment__per_sold"]["values"] == pytest.approx(expected, rel=1e-15)
        answer = http.post("/predict", json={"entities": keys, "request": request}).json()
        assert len(answer["predictions"]) == 3
        # The examples of the README look the stored features up, here for the keys and the request of the first row.
        row = {name: column["values"][0] for name, column in columns.items()}
        row |= {name: values[0] for name, values in (keys | request).items()}
        smallest = min((each for each in manifest.variants if each.format == "ort"), key=lambda each: each.bytes)
        fed = {item.name: from_python([row[item.name]], item.dtype) for item in manifest.model_inputs}
        opened = session((package / smallest.file).read_bytes(), 1)
        (expected_answer,) = predict(opened, feeds(manifest.model_inputs, fed))
        for language, command in {"python": [sys.executable, "-W", "error"], "javascript": ["node"]}.items():
            example = programs[language][1].replace("PACKAGE", str(package)).replace("6570", str(port))
            for name, values in (keys | request).items():
                given = rf"""(['"]{name}['"]: )('[^']*'|"[^"]*"|[^,}}]+)"""
                example = re.sub(given, rf"\g<1>{json.dumps(values[0])}", example)
            file = shop.root / ("example.py" if language == "python" else "example.mjs")
            file.write_text(example)
            done = subprocess.run([*command, file], cwd=shop.root, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), example
            assert float(done.stdout) == pytest.approx(float(expected_answer), abs=1e-6)
        (model,) = http.get("/models").json()["models"]
        assert [item["name"] for item in model["inputs"]] == list(
            dict.fromkeys(item.name for item in manifest.inputs)
        )  # one that the model reads and a request transform takes is named once
        wrong = http.post("/get-online-features", json=asked | {"entities": keys | request | {"hours": [1, 2, 3]}})
        assert (wrong.status_code, wrong.json()["where"]) == (422, "entities.hours")
        assert wrong.json()["expected"] == "one of customer, hour, product, store, weight"
        missing = http.post("/predict", json={"entities": keys, "request": {"hour": request["hour"]}})
        assert (missing.status_code, missing.json()["where"]) == (422, "request.weight")


FIELDS = ("hour_sin", "per_sold", "store_code", "heavy")


def _ready(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/readyz").json().get("model"))
    except httpx.TransportError:
        return False


def test_a_row_that_spark_would_refuse_is_refused_by_name(shop: Shop, project: Open) -> None:
    learnable(with_moment(shop))
    shop.replace('"heavy": weight > 3', '"heavy": F.floor(weight * 10) % hour > 3')
    apply(project(shop))
    build(project(shop))
    where = r"request transform moment \(definitions.py:\d+\), field heavy: cannot be computed at event_timestamp=.*, "
    given = r"customer=\d+, store=s\d, product=\d+, where .*, hour is 0, .* \(the engine refused it: .* by zero"
    with pytest.raises(DataError, match=where + given):
        training_set(project(shop))


FOREIGN = (
    r"field store_code: cannot be computed at event_timestamp={}.*, store=ß, .*where store is 'ß'; expected only ASCII"
)


def test_what_the_api_refuses_is_in_no_training_set(built: Shop, project: Open, tmp_path: Path) -> None:
    with_moment(built)
    foreign = 'F.when(F.hour("ordered_at") > 22, "ß").otherwise(F.col("store")).alias("store")'
    built.replace('        "customer",\n        "store",\n', f'        "customer",\n        {foreign},\n')
    apply(project(built))
    for join in JOINS:
        with pytest.raises(DataError, match=FOREIGN.format("2024-01-01 23")):
            training_set(project(built), join=join)
    spine: dict[str, list[Any]] = {
        "event_timestamp": [datetime(2024, 2, day, tzinfo=UTC) for day in (1, 2, 3)],
        "store": ["s1", "ß", "s2"], "product": [1, 2, 3], "hour": [8, 9, 10], "weight": [1.0, 2.0, 3.0],
    }  # fmt: skip
    for join in JOINS:
        data = training_data(project(built), "moment:store_code", pa.table(spine), join=join)
        with pytest.raises(DataError, match=FOREIGN.format("2024-02-02")):
            data.write(tmp_path / "made")
        with pytest.raises(DataError, match=FOREIGN.format("2024-02-02")):
            list(data.torch())
    assert not (tmp_path / "made").exists()
    able = pa.table({name: [values[0], values[2]] for name, values in spine.items()})
    made = training_data(project(built), "moment:store_code", able)
    assert made.table()["moment__store_code"].to_pylist() == ["S1-AM", "S2-AM"]


REFUSED = {
    "a window": ("weight > 3", "F.rank().over(Window.partitionBy(store).orderBy(hour)) > 3", "reads other rows"),
    "a function of the user's": ("weight > 3", 'F.udf(lambda x: x > 3, "boolean")(weight)', "asks for a Spark session"),
    "a question of Python's": ("weight > 3", "F.lit(True) if weight > 3 else F.lit(False)", r"expected F\.when\("),
    "SQL text": ("weight > 3", 'F.expr("weight > 3")', "is SQL text"),
    "another type": ("weight > 3", "weight", "is of type double; expected boolean"),
    "a column of another view": ("weight > 3", 'F.col("age") > 3', "age: is not an input"),
    "no column": ("weight > 3", "True", "returned bool; expected a Column"),
    "a field too few": ('"heavy": weight > 3,\n', "", "returned no heavy"),
    "a field too many": ("weight > 3,", 'weight > 3, "more": weight,', "'more', which its schema lacks"),
    "an unknown parameter": ("store: Column, shelf", "stores: Column, shelf", "takes 'stores' .did you mean store"),
    "no such function": ("weight > 3", 'F.soundex(store) == "S"', "graphs have no soundex"),
    "a sum of very many": ("weight > 3", "sum([weight] * 49, F.lit(0.0)) > 3", "field heavy: .* nested too deeply"),
    "casts of casts": (
        "weight > 3", "reduce(lambda x, n: x.cast(('float', 'double')[n % 2]), range(99), weight) > 3", "too deeply"
    ),
    "what doubles": (
        "weight > 3", "reduce(lambda x, _: x + x, range(25), weight) > 3",
        r"moment \(definitions.py:\d+\): field heavy: it has 65,535 expressions up to here.* expected at most 50,000",
    ),
    "a long expression": (
        "weight > 3", "F.soundex(F.concat(*[F.lit('a' * 50)] * 100)) == 'S'",
        "soundex.concat.{100,300} … .{100,200}: graphs have no soundex",
    ),
    "endless depth": ("weight > 3", "sum([weight] * 5000, F.lit(0.0)) > 3", "field heavy: .* nested too deeply"),
    "code that fails": ("weight > 3", "weight > 1 // 0", r"failed in line \d+ with ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_place(shop: Shop, project: Open, case: str) -> None:
    old, new, message = REFUSED[case]
    with_moment(shop).replace(old, new)
    with pytest.raises(ConfigurationError, match=message) as raised:
        apply(project(shop))
    assert re.search(r"definitions\.py:\d+|parameter|definitions.py\)", str(raised.value))


def test_what_is_computed_from_what_only_the_server_has_is_no_input_of_a_student(shop: Shop, project: Open) -> None:
    with_moment(shop).replace('Field("sold_1d", Int64, "device")', 'Field("sold_1d", Int64)')
    told = "uses shelf_demand__sold_1d, moment__.*, where request transform moment takes shelf_demand__sold_1d; "
    with pytest.raises(ConfigurationError, match=told):
        apply(project(shop))


def test_a_function_of_the_users_that_was_made_before_is_refused_where_it_is_called(
    shop: Shop, project: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)
    with_moment(shop).replace("weight > 3", "above(weight)")
    made = "@F.udf(BooleanType())\ndef above(x):\n    return x > 3"
    shop.replace(
        "@request_transform(", f"from pyspark.sql.types import BooleanType\n\n\n{made}\n\n\n@request_transform("
    )
    with pytest.raises(ConfigurationError, match=r"py:\d+\): .* is a Python function; expected built-in functions"):
        apply(project(shop))


@pytest.mark.parametrize(
    ("called", "instead"),
    [
        ("F.initcap(store)", "startswith, .*, or a lookup in create_map"),
        ("F.date_format(F.timestamp_seconds(hour), 'E')", "year, month, day, "),
        ("F.from_utc_timestamp(F.timestamp_seconds(hour), 'CET')", "a request field with the local time"),
        ("F.max(store)", "a transform of a view"),
        ("store.cast('binary')", r"CAST\(store AS binary\): graphs have no type binary"),
        ("F.lpad(store, 3, ' ')", "one of the functions of docs/row-functions.md"),
    ],
)
def test_a_function_that_graphs_lack_is_refused_with_its_line_and_what_there_is(
    shop: Shop, project: Open, called: str, instead: str
) -> None:
    with_moment(shop).replace('F.upper(F.concat(store, F.lit("-"), F.when(hour < 12, "am").otherwise("pm")))', called)
    lines = shop.definitions.read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if called in text)
    with pytest.raises(ConfigurationError, match=rf"moment \(definitions.py:{line}\): .*{instead}"):
        apply(project(shop))


def test_a_student_may_not_compute_of_what_a_device_cannot_have(shop: Shop, project: Open) -> None:
    with_moment(shop)
    shop.replace("inputs=[basket, shelf_demand]", "inputs=[basket, shelf_demand, customer_orders]")
    shop.replace("store: Column, shelf", "store: Column, customer_orders__orders_7d: Column, shelf")
    with pytest.raises(
        ConfigurationError, match=r"student: uses moment__hour_sin, .*; expected fields with available="
    ):
        apply(project(shop))


EXTRA = """

extra = RequestSource("extra", schema=[Field("promo", Bool)], defaults={"promo": False})


@request_transform(inputs=[extra, basket], schema=[Field("deal", Bool)])
def offer(promo: Column, weight: Column) -> dict[str, Column]:
    return {"deal": promo | (weight > 1)}
"""


@pytest.mark.accept
@pytest.mark.slowest
def test_a_spine_may_leave_out_what_has_a_default(shop: Shop, project: Open) -> None:
    """From the training set to a deployed model, as one that is asked without it."""
    learnable(with_moment(shop))
    shop.replace("\n\n@spine(entities=[customer, shelf]", EXTRA + "\n\n@spine(entities=[customer, shelf]")
    shop.replace("shelf_demand, basket, moment], description", "shelf_demand, basket, moment, offer], description")
    shop.replace("seeds=1", "seeds=1, seed=2")
    apply(project(shop))
    build(project(shop))
    materialize(project(shop))
    table = training_set(project(shop)).table()
    assert table["offer__deal"].to_pylist() == [row > 1 for row in table["weight"].to_pylist()]
    distill(project(shop))
    export(project(shop))
    verdict = require_passed(verify(project(shop), all_keys=True))
    assert verdict.views["offer"]["deal"].compared == len(table)
    deploy(project(shop))


@pytest.mark.accept
def test_what_no_training_set_has_is_said_not_to_be_compared(shop: Shop, project: Open) -> None:
    with_moment(shop).replace("\n\n@spine(entities=[customer, shelf]", EXTRA + "\n\n@spine(entities=[customer, shelf]")
    apply(project(shop))
    build(project(shop))
    materialize(project(shop))
    skipped = verify(project(shop)).skipped
    assert skipped["offer"].startswith("no service of late_order uses it, so no training set has")
    assert skipped["moment"] == "no training set has its values yet"
    text = shop.definitions.read_text()
    shop.definitions.write_text(text[: text.index("late_order = Distillation(")])
    apply(project(shop))
    skipped = verify(project(shop)).skipped
    assert set(skipped) == {"offer", "extra", "moment"}
    assert skipped["moment"].startswith("no distillation uses it")


def test_functions_may_import_what_lies_beside_the_definitions(shop: Shop, project: Open) -> None:
    """Where they are called: for tables, spines and training sets. What they import is in the hash."""
    with_moment(shop)
    helper = shop.root / "weights.py"
    helper.write_text("def heavy(weight):\n    return weight > 3\n\n\ndef same(column):\n    return column\n")
    imported = "from weights import heavy, same"
    shop.replace('    """What the basket and', f'    {imported}\n    """What the basket and')
    shop.replace('"heavy": weight > 3', '"heavy": heavy(weight)')
    shop.replace('    """Who a customer is."""\n', f"    {imported}\n\n    customers = same(customers)\n")
    shop.replace('    """Every order, when it was placed."""\n', f"    {imported}\n\n    orders = same(orders)\n")
    apply(project(shop))
    before = project(shop).applied()
    build(project(shop))
    table = training_set(project(shop)).table()
    assert table["moment__heavy"].to_pylist() == [row > 3 for row in table["weight"].to_pylist()]
    helper.write_text(helper.read_text().replace("> 3", "> 4").replace("return column", "return column.limit(9)"))
    after = project(shop).definitions.contract
    assert differences(before, after) == [
        "view customer_facts: its code changed", "spine placed: its code changed",
        "transform moment: its computation changed",
    ]  # fmt: skip


OTHER = """

other = RequestSource("other", schema=[Field("hour", Float64)])


@request_transform(inputs=[other], schema=[Field("late", Bool)])
def evening(hour: Column) -> dict[str, Column]:
    return {"late": hour > 17.5}
"""


def test_one_request_field_has_one_type_in_a_service_and_in_a_lookup(shop: Shop, project: Open) -> None:
    with_moment(shop)
    shop.append(OTHER + '\nnight = FeatureService("night", features=[evening])\n')
    contract = project(shop).definitions.contract
    with pytest.raises(RequestError, match="features: request field hour is Int64 to moment and Float64 to evening"):
        Lookup(contract, [("moment", "heavy"), ("evening", "late")], full_names=True,
               graphs=lambda name: RowGraph(contract.transforms[name]))  # fmt: skip
    shop.append('both = FeatureService("both", features=[evening, moment[["heavy"]]])\n')
    shop.append('mixed = FeatureService("mixed", features=[evening, basket])\n')
    with pytest.raises(ConfigurationError) as raised:
        apply(project(shop))
    assert re.findall(r"service (\w+): request field hour is of type (\w+) and of type (\w+)", str(raised.value)) == [
        ("both", "Float64", "Int64"), ("mixed", "Int64", "Float64"),
    ]  # fmt: skip


def test_names_that_differ_in_case_only_are_refused(shop: Shop, project: Open) -> None:
    """Engines do not tell their columns apart."""
    with_moment(shop)
    shop.append(OTHER.replace("def evening", "def Moment"))
    for name in ("terms", "Terms"):
        source = f'RequestSource("{name}", schema=[Field("{name}_n", Int64)], defaults={{"{name}_n": 1}})'
        shop.append(f'\n{name} = {source}\nof_{name} = FeatureService("of_{name}", features=[{name}])\n')
    with pytest.raises(ConfigurationError) as raised:
        apply(project(shop))
    assert [(problem.where, problem.found) for problem in raised.value.problems] == [
        ("request source Terms", "differs from 'terms' only in case"),
        ("request transform 'Moment'", "differs from 'moment' only in case"),
    ]


def test_a_request_field_named_like_a_join_key_is_of_its_type(shop: Shop, project: Open) -> None:
    shop.replace('Field("product", Int32), Field("hour"', 'Field("product", Int64), Field("hour"')
    with pytest.raises(
        ConfigurationError, match="request source basket, field 'product': type Int64; expected Int32, as the join key"
    ):
        apply(project(shop))


def test_formatting_changes_no_hash_and_a_helper_does(shop: Shop, project: Open) -> None:
    with_moment(shop)
    shop.replace('"heavy": weight > 3', '"heavy": heavy(weight)')
    shop.replace("@request_transform(", "def heavy(weight):\n    return weight > 3\n\n\n@request_transform(")
    before = project(shop).definitions.contract
    shop.replace("    return weight > 3\n", "    # Who carries it?\n    return weight  >  3\n")
    assert project(shop).definitions.contract.hash == before.hash
    shop.replace("return weight  >  3", "return weight > 4")
    after = project(shop).definitions.contract
    assert after.transforms["moment"].hash != before.transforms["moment"].hash
    assert differences(before, after) == ["transform moment: its computation changed"]
    assert service_changes(before, after)[0].outcome == "changed"
