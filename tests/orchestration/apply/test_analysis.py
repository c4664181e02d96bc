"""Mistakes in data and functions are found by `apply`, all at once; what it cannot see it does not claim."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.orchestration.apply.apply import apply, build_problems, remember
from isthmus.orchestration.cli.screens.report import apply_blocks
from tests.orchestration.shop import Open, Shop

MORE = """
returns = Source("returns", path="data/orders.parquet", timestamp="orderd_at")


@transform(entities=[customer], sources=[returns], schema=[Field("cents", Int64)], ttl=None)
def returned(returns: DataFrame) -> DataFrame:
    return returns


@transform(entities=[customer], sources=[orders], schema=[Field("cents", Int64)], ttl=None)
def spent(orders: DataFrame) -> DataFrame:
    return orders.where(1 / 0)
"""
COUNTED = """

@transform(entities=[customer], sources=[orders], schema=[Field("cents", Int64)], ttl=None)
def spent(orders: DataFrame) -> DataFrame:
    try:
        count = orders.count()
    except{what}:
        raise SystemError from None
    return orders.where(F.col("sents") > count)
"""


def problems(shop: Shop, project: Open) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        apply(project(shop))
    return [re.sub(r"definitions\.py:\d+|line \d+", "there", str(problem)) for problem in caught.value.problems]


def test_all_mistakes_in_data_and_functions_at_once(shop: Shop, project: Open) -> None:
    shop.replace('F.avg("cents")', 'F.avg("cent")')
    shop.replace("data/customers.csv", "data/customer.csv")
    shop.replace('Field("sold_1d", Int64', 'Field("sold_1d", Int32')
    shop.replace('        F.col("delivered_at").alias("known_at"),\n', "")
    shop.append(MORE)
    assert problems(shop, project) == [
        (
            f"source customers: {shop.root}/data/customer.csv not found (did you mean customers.csv?); expected an "
            "existing file or folder. Correct its path, or create the file"
        ),
        (
            "source returns, timestamp: no column 'orderd_at' (did you mean ordered_at?); expected one of cents, "
            "customer, delivered_at, distance, late, ordered_at, product, store, weight. Correct timestamp= of the "
            "source, or leave it out"
        ),
        (
            "view customer_orders (there): the engine refused it: attribute `cent` is missing from the schema: cannot "
            "resolve attribute (did you mean cents?); expected an existing column: orders has customer, store, "
            "product, ordered_at, delivered_at, cents, weight, distance, late. Correct it, or its sources' "
            "data; nothing was written"
        ),
        (
            "view shelf_demand (there): its column 'sold_1d' has type bigint; expected int, because it is declared as "
            "Int32. Cast it, or declare its type"
        ),
        (
            "view spent (there): its function failed in there with ZeroDivisionError: division by zero. Correct it, "
            "or its sources' data; nothing was written"
        ),
        (
            "spine placed (there): its result has no column 'known_at'; expected one of type timestamp. Return it, or "
            "the column that the source names by known=: delivered_at"
        ),
    ]
    assert not (shop.state / "contract.json").exists()


@pytest.mark.parametrize("what", [" Exception", ""])
def test_a_function_that_asks_for_rows_is_not_judged(shop: Shop, project: Open, what: str) -> None:
    shop.append(COUNTED.format(what=what))
    assert build_problems(project(shop))[0] == []


@pytest.mark.parametrize("path", ["s3://nowhere/orders", "data/empty.csv"])
def test_sources_that_cannot_be_seen_are_not_judged(shop: Shop, project: Open, path: str) -> None:
    (shop.root / "data" / "empty.csv").write_text("customer,ordered_at,delivered_at\n")
    shop.replace('F.avg("cents")', 'F.avg("cent")')
    shop.replace("data/orders.parquet", path)
    assert build_problems(project(shop))[0] == []


@pytest.mark.parametrize("engine", ["spark", "sc://127.0.0.1:1"])
def test_other_engines_are_not_started(shop: Shop, project: Open, engine: str) -> None:
    shop.replace("[project]\n", f'engine = "{engine}"\n\n[project]\n', "isthmus.toml")
    shop.replace('F.avg("cents")', 'F.avg("cent")')
    before = shop.definitions.read_text()
    shop.replace('known="delivered_at"', 'known="delivered"')
    shop.replace("data/customers.csv", "data/customer.csv")
    missing, unknown = problems(shop, project)
    assert missing.startswith(f"source customers: {shop.root}/data/customer.csv not found")
    assert unknown.startswith("source orders, known: no column 'delivered' (did you mean delivered_at?); expected one")
    shop.definitions.write_text(before)
    assert build_problems(project(shop))[0] == []


def test_only_what_has_changed_is_analyzed_again(shop: Shop, project: Open, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    shop.replace(
        '    week = Window.partitionBy("customer")',
        f'    with open("{calls}", "a") as file:\n        file.write("x")\n    week = Window.partitionBy("customer")',
    )
    for count in (1, 1):
        wrong, digest = build_problems(project(shop))
        remember(project(shop), digest)
        assert (wrong, len(calls.read_text())) == ([], count)
    shop.append("9,2024-01-01T00:00:00Z,,,,\n", "data/customers.csv")
    assert build_problems(project(shop))[0] == []
    shop.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=8)")
    assert build_problems(project(shop))[0] == []
    assert len(calls.read_text()) == 3


def test_a_column_that_is_text_unless_declared_is_named_with_the_line_to_write(shop: Shop, project: Open) -> None:
    applied = apply(project(shop))
    (shown,) = apply_blocks(asdict(applied))
    assert "customer Int64, joined_at UnixTimestamp, city String, member Bool, born Int64" in str(shown)
    assert applied.sources["customers"] == {
        "customer": "Int64", "joined_at": "UnixTimestamp", "city": "String", "member": "Bool", "born": "Int64",
        "last_call": "UnixTimestamp",
    }  # fmt: skip
    shop.replace('"customer": Int64, "member": Bool, ', "")
    texts = "a column of a CSV file is text unless types= of its source declares it: customer of customers, city of"
    key, member = problems(shop, project)
    assert "type string; expected bigint, because it is declared as Int64. Cast it, or declare its type, like " in key
    assert f"types={{'customer': Int64}} in a source; {texts}" in key
    assert f"types={{'member': Bool}} in a source; {texts}" in member
    shop.replace('"born": Int64, ', "")
    (refused,) = problems(shop, project)
    assert f"; nothing was written. {texts[0].upper()}{texts[1:]}" in refused
