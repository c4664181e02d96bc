"""Arrays of a declared size from the definitions to the API: the same values everywhere, and no other size anywhere."""

import math
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from isthmus.features.contract.diff import differences
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.types import Float64
from isthmus.features.values.arrow import from_arrow
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.apply.contracts import LocatedContract
from isthmus.orchestration.cli.screens.contract import contract_blocks
from isthmus.orchestration.cli.screens.writer import show
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.data import training_data
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import require_passed, verify
from tests.orchestration.shop import Open, Shop, learnable
from tests.serving.support import free_port, wait

TASTE = '''
@transform(
    entities=[customer],
    sources=[customers],
    schema=[Field("embedding", Array(Float32), size=4), Field("words", Array(String), size=2)],
    ttl=None,
)
def taste(customers: DataFrame) -> DataFrame:
    """What a customer likes; of some nothing is known."""
    return customers.select(
        "customer",
        "joined_at",
        F.when(F.col("born") % 3 > 0, F.array(*(F.sin(F.col("born") * n).cast("float") for n in (1, 2, 3, 4)))).alias(
            "embedding"
        ),
        F.when(F.col("city").isNotNull(), F.array("city", F.lit("x"))).alias("words"),
    )


asked = RequestSource(
    "asked",
    schema=[
        Field("store", String),
        Field("product", Int32),
        Field("hour", Int64),
        Field("weight", Float64),
        Field("query", Array(Float32), size=4),
    ],
)


def dot(one: Column, other: Column) -> Column:
    products = F.array(*(one[n].cast("double") * other[n] for n in range(4)))
    return F.aggregate(products, F.lit(0.0), lambda total, x: total + x)


@request_transform(
    inputs=[asked, taste],
    schema=[
        Field("dot", Float64),
        Field("cosine", Float64),
        Field("second", Float32),
        Field("likes", Bool),
        Field("share", Float64),
    ],
)
def likeness(query: Column, taste__embedding: Column, taste__words: Column) -> dict[str, Column]:
    """How much a customer likes what is asked for."""
    sizes = F.sqrt(dot(query, query)) * F.sqrt(dot(taste__embedding, taste__embedding))
    shares = F.transform(query, lambda x: x.cast("double") / F.get(taste__embedding, 0))
    return {
        "dot": dot(query, taste__embedding),
        "cosine": dot(query, taste__embedding) / F.nullif(sizes, F.lit(0.0)),
        "second": taste__embedding[1],
        "likes": F.array_contains(taste__words, "x"),
        "share": F.aggregate(shares, F.lit(0.0), lambda total, x: total + x),
    }

'''

QUERY = """        F.when(
            F.hour("ordered_at") % 5 > 0, F.array(*(F.cos(F.col("weight") * n).cast("float") for n in (1, 2, 3, 4)))
        ).alias("query"),
"""


def with_taste(shop: Shop) -> Shop:
    """The shop with an embedding of each customer, one in each request, and how alike they are, for the teacher."""
    shop.replace("from pyspark.sql import DataFrame, Window", "from pyspark.sql import Column, DataFrame, Window")
    shop.replace("    UnixTimestamp,\n    spine,", "    UnixTimestamp,\n    request_transform,\n    spine,")
    shop.replace("\n\n@spine(entities=[customer, shelf]", TASTE + "\n\n@spine(entities=[customer, shelf]")
    shop.replace("request=basket, label", "request=asked, label")
    shop.replace('        "weight",\n        "late",', '        "weight",\n' + QUERY + '        "late",')
    shop.replace('[["member", "born"]], basket],', '[["member", "born"]], basket, likeness],')
    return learnable(shop)


def _built(shop: Shop, project: Open) -> None:
    apply(project(shop))
    build(project(shop))
    materialize(project(shop))


FIELDS = ("dot", "cosine", "second", "likes", "share")


@pytest.mark.accept
def test_arrays_give_the_same_values_to_training_the_api_and_the_verdict(shop: Shop, project: Open) -> None:
    with_taste(shop)
    _built(shop, project)
    table = training_set(project(shop)).table()
    found = _numpy(table)
    assert found["cosine"].count(None) not in (0, len(table))
    for name, values in found.items():
        ours = table[f"likeness__{name}"].to_pylist()
        assert [value is None for value in ours] == [value is None for value in values]
        there = [pair for pair in zip(ours, values, strict=True) if pair[1] is not None]
        assert [one for one, _ in there] == pytest.approx([other for _, other in there], rel=1e-13, abs=1e-13)
    distill(project(shop))
    export(project(shop))
    verdict = require_passed(verify(project(shop), all_keys=True))
    assert {name: one.compared for name, one in verdict.views["likeness"].items()} == dict.fromkeys(FIELDS, len(table))
    assert "embedding" in verdict.views["taste"]

    rows = table.slice(len(table) - 40).to_pylist()
    port = free_port()
    with (
        (shop.root / "log").open("wb") as log,
        serving(project(shop), port=port, log=log, private=True),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        wait(lambda: _ready(http), "the server")
        keys, queries = [row["customer"] for row in rows], [row["query"] for row in rows]
        answer = _ask(http, {"customer": keys, "query": queries}).json()
        columns = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
        for name in FIELDS:
            assert columns[name]["values"] == [row[f"likeness__{name}"] for row in rows]

        for wrong, words in (
            ([1.0, 2.0, 3.0], "an array of 3 elements at `list[1]`"),
            ([], "an array of 0 elements at `list[1]`"),
            ([1.0, None, 3.0, 4.0], "row 1 is [1.0,null,3.0,4.0]"),
            (1.0, "row 1 is 1.0"),
        ):
            refused = _ask(http, {"customer": keys[:2], "query": [None, wrong]})
            told = refused.json()
            assert (refused.status_code, told["where"]) == (422, "entities.query"), told
            assert words in told["found"], told
        assert _ask(http, {"customer": keys}).json()["where"] == "entities.query"

        df = {
            "customer": [keys[0]] * 3, "event_timestamp": ["2024-02-29T00:00:00Z"] * 3,
            "embedding": [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5]], "words": [None] * 3,
        }  # fmt: skip
        refused = http.post("/push", json={"push_source_name": "taste", "df": df})
        assert refused.status_code == 422
        assert refused.json()["problems"] == [
            {"where": "df.embedding", "found": "an array of 3 elements at `list[1]`, and 1 more rows are wrong",
             "expected": "arrays of 4 elements"},
        ]  # fmt: skip
        pushed = {name: values[:1] for name, values in df.items()}
        assert http.post("/push", json={"push_source_name": "taste", "df": pushed}).json() == {"rows": 1, "written": 1}
        answer = _ask(http, {"customer": [keys[0]], "query": [[1, 1, 1, 0.5]]}).json()
        assert [result["values"] for result in answer["results"][-5:]] == [
            [8.0], [pytest.approx(8 / math.sqrt(30 * 3.25))], [2.0], [None], [3.5],
        ]  # fmt: skip


def _ask(http: httpx.Client, entities: dict[str, Any]) -> httpx.Response:
    return http.post("/get-online-features", json={"features": [f"likeness:{n}" for n in FIELDS], "entities": entities})


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _numpy(table: pa.Table) -> dict[str, list[Any]]:
    """What the request transform gives, by NumPy and a row at a time."""
    found: dict[str, list[Any]] = {name: [] for name in FIELDS}
    columns = zip(*(table[name].to_pylist() for name in ("query", "taste__embedding", "taste__words")), strict=True)
    for query, embedding, words in columns:
        row: dict[str, Any] = dict.fromkeys(FIELDS)
        if query is not None and embedding is not None:
            one, other = np.array(query, np.float64), np.array(embedding, np.float64)
            product = float(one @ other)
            row |= {"dot": product, "cosine": product / float(np.linalg.norm(one) * np.linalg.norm(other))}
            row["share"] = float((one / other[0]).sum())
        row["second"] = embedding and embedding[1]
        row["likes"] = words and "x" in words
        for name, value in row.items():
            found[name].append(value)
    return found


@pytest.mark.accept
@pytest.mark.spark
def test_apache_spark_computes_what_sail_does(shop: Shop, project: Open) -> None:
    with_taste(shop)
    _built(shop, project)
    sail = training_set(project(shop)).table().select([f"likeness__{name}" for name in FIELDS])
    # Sail has no `zip_with`.
    by_hand = 'F.array(*(one[n].cast("double") * other[n] for n in range(4)))'
    shop.replace(by_hand, 'F.zip_with(one, other, lambda x, y: x.cast("double") * y)')
    shop.replace("[project]\n", 'engine = "spark"\n\n[project]\n', "isthmus.toml")
    apply(project(shop))
    spark = training_set(project(shop), join="engine").table().select(sail.column_names)
    for name in sail.column_names:
        if pa.types.is_boolean(spark[name].type):
            assert spark[name].equals(sail[name])
        else:
            one, other = (from_arrow(side[name].cast(pa.float64()), Float64) for side in (sail, spark))
            assert one.valid.tolist() == other.valid.tolist()
            assert one.data.tobytes() == other.data.tobytes()


def test_a_build_with_an_array_of_another_size_is_refused(shop: Shop, project: Open) -> None:
    with_taste(shop)
    _built(shop, project)
    before = {file.name for file in (shop.state / "offline" / "taste").rglob("*.parquet")}
    short = 'F.when(F.col("born") == 1951, F.array(F.lit(1.0).cast("float")))'
    shop.replace('"joined_at",\n        F.when(F.col("born") %', f'"joined_at",\n        {short}.when(F.col("born") %')
    apply(project(shop))
    with pytest.raises(DataError, match=r"view taste \(definitions.py:\d+\): column embedding has 1 elements at "
                       r"customer=1000003, event_timestamp=2023-02-01 00:00:00\+00:00; "
                       r"expected 4 elements, as declared"):  # fmt: skip
        build(project(shop))
    assert {file.name for file in (shop.state / "offline" / "taste").rglob("*.parquet")} == before


def test_a_spine_with_an_array_of_another_size_is_refused(shop: Shop, project: Open) -> None:
    with_taste(shop)
    shop.replace('* n).cast("float") for n in (1, 2, 3, 4)))\n        ).alias("query")',
                 '* n).cast("float") for n in (1, 2, 3)))\n        ).alias("query")')  # fmt: skip
    _built(shop, project)
    with pytest.raises(DataError, match=r"spine placed .*column query has 3 elements at event_timestamp=.*, and "
                       r"another size in [\d,]+ more rows; expected 4 elements"):  # fmt: skip
        training_set(project(shop))


def test_a_spine_of_ones_own_has_arrays_in_any_form(shop: Shop, project: Open) -> None:
    with_taste(shop)
    _built(shop, project)
    moment = pa.array([1_709_000_000_000_000] * 3, pa.timestamp("us", tz="UTC"))

    def rows(query: pa.Array) -> pa.Table:
        return pa.table({"customer": pa.array([1_000_003] * 3), "event_timestamp": moment, "query": query})

    queries = [[1.0, 0.5, 0.25, 2.0], None, [0.0, 1.0, 2.0, 3.0]]
    found = [
        training_data(project(shop), "likeness", rows(pa.array(queries, kind))).table()["likeness__dot"].to_pylist()
        for kind in (pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float64(), 4))
    ]
    assert found[0] == found[1] == found[2]
    assert [value is None for value in found[0]] == [False, True, False]
    nothing = training_data(project(shop), "likeness", rows(pa.nulls(3))).table()
    assert nothing["likeness__dot"].to_pylist() == [None] * 3
    for wrong, message in (
        (
            pa.array([queries[0], None, [1.0]]),
            r"column query: an array of 1 elements in row 2; expected 4, as declared",
        ),
        (pa.array([queries[0], None, [1.0, None, 2.0, 3.0]]), "its arrays hold 1 nulls"),
        (pa.array([queries[0], None, [1.0, 1e39, 2.0, 3.0]]), "a number is too large"),
        (pa.array([["1"] * 4] * 3), r"has type list<item: string>; expected values of type Array\(Float32\)"),
        (pa.array([1.0] * 3), "has type double"),
    ):
        with pytest.raises(DataError, match=message):
            training_data(project(shop), "likeness", rows(wrong)).table()


REFUSED = {
    "a stored array of any size": (
        'Array(Float32), size=4), Field("words"', 'Array(Float32)), Field("words"',
        'input taste__embedding: its arrays may be of any size; .*declare Field("embedding", Array(Float32), size=n)',
    ),
    "a request's array of any size": (
        'Field("query", Array(Float32), size=4)', 'Field("query", Array(Float32))',
        'field \'query\': type Array(Float32) of any size; expected a declared size: declare Field("query", Array(Fl',
    ),
    "an array for a key": (
        'Field("query", Array(Float32), size=4)', 'Field("customer", Array(Float32), size=4)',
        "field 'customer': is an Array with the name of a join key",
    ),
    "bytes in the arrays of a request": (
        'Field("query", Array(Float32), size=4)', 'Field("query", Array(Bytes), size=4)', "not of Bytes",
    ),
    "arrays that differ in size": (
        'F.array_contains(taste__words, "x")',
        "F.exists(F.zip_with(query, taste__words, lambda x, y: x > 0), lambda found: found)",
        "arrays of 4 and 2 elements; expected the same size",
    ),
    "an array that is given": (
        '"second": taste__embedding[1]', '"second": taste__embedding', "returns array<float>; expected a value",
    ),
    "a rule for an array": (
        'size=4),\n    ],\n)', 'size=4),\n    ],\n    expectations=[Expect.present("query")],\n)',
        "request source asked, Expect.present('query'): the field is an Array; expected neither a rule nor a default",
    ),
    "a default of an array": (
        'size=4),\n    ],\n)', 'size=4),\n    ],\n    defaults={"query": [0.0] * 4},\n)',
        "request source asked, default of 'query': the field is an Array; expected neither a rule nor a default",
    ),
    "an array for a student": (
        "features=[shelf_demand, basket], description", "features=[shelf_demand, basket, likeness], description",
        "distillation late_order, student: reads request transform likeness, which takes query, an Array",
    ),
    "an array of texts for a teacher": (
        "basket, likeness],", "basket, likeness, taste],", "teacher: reads taste__words, of type Array(String)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_or_model_can_take_is_refused_at_apply(shop: Shop, project: Open, case: str) -> None:
    old, new, message = REFUSED[case]
    with_taste(shop)
    shop.replace("    FeatureService,\n", "    Expect,\n    FeatureService,\n")
    shop.replace(old, new)
    with pytest.raises(ConfigurationError) as refused:
        apply(project(shop))
    lines = [str(problem) for problem in refused.value.problems]
    first, _, rest = message.partition(" .*")
    assert any(first in line and rest in line for line in lines), lines


def test_a_size_is_part_of_the_contract(shop: Shop, project: Open, capsys: pytest.CaptureFixture[str]) -> None:
    with_taste(shop)
    before = project(shop).definitions.contract
    assert Contract.loads(before.dumps()) == before
    show(contract_blocks(LocatedContract("here", before)))
    shown = capsys.readouterr().out
    assert "Array(Float32) of 4" in shown
    assert "query Array(Float32) of 4" in shown
    shop.replace('Field("words", Array(String), size=2)', 'Field("words", Array(String), size=3)')
    shop.replace('Field("trips", Array(Float64))', 'Field("trips", Array(Float64), size=2)')
    changed = differences(before, project(shop).definitions.contract)
    assert "view taste: the size of feature words was 2, is 3" in changed
    assert "view customer_facts: the size of feature trips was any, is 2" in changed
