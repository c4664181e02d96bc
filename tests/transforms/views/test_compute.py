"""What a transform returns, held against what it declares: every way in which it can be wrong."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Array,
    Bool,
    Bytes,
    ConfigurationError,
    DataError,
    Entity,
    FeatureView,
    Field,
    Float32,
    Float64,
    Int32,
    Int64,
    Source,
    Spine,
    String,
    UnixTimestamp,
    spine,
    transform,
)
from isthmus.features.contract.schema import Column
from isthmus.features.definition.compile import compile_contract
from isthmus.features.types import DataType
from isthmus.features.values.arrow import ARROW
from isthmus.transforms import sources
from isthmus.transforms.views.compute import compute_spine, stream_view

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = Source("events", path="events.parquet", timestamp="at", known="seen")
PLAIN = Source("events", path="events.parquet", timestamp="at")
THING = Entity("thing", join_keys={"k": Int64})
UTC_TIME = pa.timestamp("us", tz="UTC")
HOUR = 3_600_000_000


def rows(n: int = 400) -> pa.Table:
    chance = np.random.default_rng(1)
    at = 1_704_067_200_000_000 + np.arange(n) * HOUR + chance.integers(0, HOUR, n)
    return pa.table(
        {
            "k": pa.array(chance.integers(0, 9, n), pa.int64()),
            "at": pa.array(at, pa.int64()).cast(UTC_TIME),
            "seen": pa.array(at + 7 * HOUR, pa.int64()).cast(UTC_TIME),
            "x": pa.array(chance.integers(0, 100, n), pa.int64()),
        }
    )


@pytest.fixture(scope="module")
def events(sail: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> "Mapping[str, DataFrame]":
    root = tmp_path_factory.mktemp("events")
    pq.write_table(rows(), root / "events.parquet")
    return {"events": sources.read(sail, EVENTS, root, root)}


def view(
    function: Callable[..., Any],
    schema: Mapping[str, DataType] | None = None,
    source: Source = EVENTS,
    delay: timedelta = timedelta(0),
) -> FeatureView:
    fields = [Field(name, dtype) for name, dtype in (schema or {"x": Int64}).items()]
    return transform(entities=[THING], sources=[source], schema=fields, ttl=None, delay=delay)(function)


def compute(declared: FeatureView, events: "Mapping[str, DataFrame]") -> pa.Table:
    contract = compile_contract("p", [declared]).views[declared.name]
    return pa.concat_tables(stream_view(declared, contract, events))


def as_it_is(events: DataFrame) -> DataFrame:
    return events


def line_of(function: Callable[..., Any]) -> str:
    return f"view {function.__name__} (test_compute.py:{function.__code__.co_firstlineno})"


def test_known_comes_from_the_source(events: "Mapping[str, DataFrame]") -> None:
    table = compute(view(as_it_is), events)
    assert set(table.column_names) == {"k", "x", "event_timestamp", "known_at"}
    gap = table["known_at"].cast(pa.int64()).to_numpy() - table["event_timestamp"].cast(pa.int64()).to_numpy()
    assert set(gap.tolist()) == {7 * HOUR}
    assert sorted(table["event_timestamp"].to_pylist()) == rows()["at"].to_pylist()


def test_known_comes_from_the_delay(events: "Mapping[str, DataFrame]") -> None:
    table = compute(view(as_it_is, source=PLAIN, delay=timedelta(minutes=90, microseconds=1)), events)
    gap = table["known_at"].cast(pa.int64()).to_numpy() - table["event_timestamp"].cast(pa.int64()).to_numpy()
    assert set(gap.tolist()) == {HOUR * 3 // 2 + 1}


def test_the_transforms_own_times_win(events: "Mapping[str, DataFrame]") -> None:
    def hourly(events: DataFrame) -> DataFrame:
        hour = F.date_trunc("hour", "at")
        return events.select("k", "x", "at", hour.alias("event_timestamp"), F.col("at").alias("known_at"))

    table = compute(view(hourly), events)
    assert sorted(table["known_at"].to_pylist()) == rows()["at"].to_pylist()
    assert all(moment.minute == 0 for moment in table["event_timestamp"].to_pylist())


def test_types_are_those_of_the_contract(events: "Mapping[str, DataFrame]") -> None:
    schema = {"b": Bool, "i": Int32, "f": Float32, "d": Float64, "t": UnixTimestamp, "s": String}

    def typed(events: DataFrame) -> DataFrame:
        x = F.col("x")
        return events.select(
            "k", "at", (x > 50).alias("b"), x.cast("int").alias("i"), (x / 3).cast("float").alias("f"),
            (x / 3).alias("d"), F.col("seen").alias("t"), x.cast("string").alias("s"),
        )  # fmt: skip

    table = compute(view(typed, schema, PLAIN), events)
    assert {name: str(table.schema.field(name).type) for name in schema} == {
        "b": "bool", "i": "int32", "f": "float", "d": "double", "t": "timestamp[us, tz=UTC]", "s": "string",
    }  # fmt: skip


def test_arrays_come_from_the_engine(events: "Mapping[str, DataFrame]") -> None:
    made = {
        "b": (Bool, F.array(F.col("x") > 50)),
        "i": (Int32, F.array(F.col("x").cast("int"))),
        "l": (Int64, F.array("x", "k")),
        "f": (Float32, F.array((F.col("x") / 3).cast("float"))),
        "d": (Float64, F.when(F.col("x") > 50, F.array(F.col("x") / 3, F.lit(float("nan"))))),
        "t": (UnixTimestamp, F.array("seen")),
        "s": (String, F.array(F.col("x").cast("string"), F.lit(""))),
        "y": (Bytes, F.array(F.col("x").cast("string").cast("binary"))),
    }

    def lists(events: DataFrame) -> DataFrame:
        return events.select("k", "at", *(column.alias(name) for name, (_, column) in made.items()))

    declared = view(lists, {name: Array(dtype) for name, (dtype, _) in made.items()}, PLAIN)
    table = compute(declared, events)
    assert {name: table.schema.field(name).type for name in made} == {
        name: ARROW[Array(dtype).name] for name, (dtype, _) in made.items()
    }
    first = table.sort_by("event_timestamp").to_pylist()[0]
    x = rows()["x"][0].as_py()
    assert (first["i"], first["s"], first["y"]) == ([x], [str(x), ""], [str(x).encode()])
    assert (first["d"] is None) == (x <= 50)


def test_a_null_within_an_array_is_refused(events: "Mapping[str, DataFrame]") -> None:
    def holed(events: DataFrame) -> DataFrame:
        return events.select("k", "at", F.array("x", F.when(F.col("x") > 50, F.col("x"))).alias("a"))

    holes = sum(x <= 50 for x in rows()["x"].to_pylist())
    message = rf"view holed .*: the arrays of column a hold {holes} nulls.*array_compact"
    with pytest.raises(DataError, match=message):
        compute(view(holed, {"a": Array(Int64)}, PLAIN), events)

    def compact(events: DataFrame) -> DataFrame:
        return holed(events).withColumn("a", F.array_compact("a"))

    assert len(compute(view(compact, {"a": Array(Int64)}, PLAIN), events)) == len(rows())


def test_keys_of_every_type(events: "Mapping[str, DataFrame]") -> None:
    entity = Entity("all", {"b": Bool, "t": UnixTimestamp, "y": Bytes})

    def keyed(events: DataFrame) -> DataFrame:
        token = F.col("k").cast("string").cast("binary")
        return events.select("at", "x", (F.col("x") > 50).alias("b"), F.col("seen").alias("t"), token.alias("y"))

    declared = transform(entities=[entity], sources=[PLAIN], schema=[Field("x", Int64)], ttl=None)(keyed)
    table = compute(declared, events)
    assert [table.schema.field(name).type for name in "bty"] == [pa.bool_(), UTC_TIME, pa.binary()]


CAST = "Cast it, or declare its type"


def test_every_problem_of_a_schema_is_in_one_error(events: "Mapping[str, DataFrame]") -> None:
    def wrong(events: DataFrame) -> DataFrame:
        return events.select(
            F.col("k").cast("string").alias("k"),
            F.to_timestamp_ntz(F.lit("2024-01-01 00:00:00")).alias("event_timestamp"),
            F.lit("soon").alias("known_at"),
            F.col("x").cast("int").alias("x"),
        )

    declared = view(wrong, {"x": Int64, "y": Float32})
    with pytest.raises(ConfigurationError) as caught:
        compute(declared, events)
    place = line_of(wrong)
    assert [str(problem) for problem in caught.value.problems] == [
        f"{place}: its column 'k' has type string; expected bigint, because it is declared as Int64. {CAST}",
        f"{place}: its column 'x' has type int; expected bigint, because it is declared as Int64. {CAST}",
        (
            f"{place}: its result has no column 'y'; expected one of type float beside k, event_timestamp, known_at, "
            "x. Return it, or correct the declaration"
        ),
        (
            f"{place}: its column 'event_timestamp' has no time zone (timestamp_ntz); expected timestamp. Convert it "
            "with to_utc_timestamp, a number with timestamp_seconds, _millis or _micros"
        ),
        (
            f"{place}: its column 'known_at' has type string; expected timestamp. Convert it with to_utc_timestamp, "
            "a number with timestamp_seconds, _millis or _micros"
        ),
    ]


def test_a_missing_column_is_not_taken_for_one_that_is_declared(events: "Mapping[str, DataFrame]") -> None:
    def short(events: DataFrame) -> DataFrame:
        return events.select("k", "at", F.col("x").alias("visits_7d"), F.col("x").alias("spent"))

    with pytest.raises(ConfigurationError) as caught:
        compute(view(short, {"visits_7d": Int64, "visits_70d": Int64, "spend": Int64}), events)
    for name, meant in (("visits_70d", ""), ("spend", " (did you mean spent?)")):
        assert f"its result has no column '{name}'{meant};" in str(caught.value)


def test_no_event_time(events: "Mapping[str, DataFrame]") -> None:
    def timeless(events: DataFrame) -> DataFrame:
        return events.select("k", "x")

    missing = "has no column 'event_timestamp'; expected one of type timestamp. Return it, or "
    with pytest.raises(ConfigurationError, match=f"{missing}the column that the source names by timestamp=: at"):
        compute(view(timeless), events)


@pytest.mark.parametrize("column", ["k", "at", "seen"])
def test_null_key_or_time(events: "Mapping[str, DataFrame]", column: str) -> None:
    def holey(events: DataFrame) -> DataFrame:
        return events.withColumn(column, F.when(F.col("x") != 50, F.col(column)))

    name = {"k": "k", "at": "event_timestamp", "seen": "known_at"}[column]
    nulls = rows()["x"].to_pylist().count(50)
    assert nulls > 0
    message = rf"view holey.*column {name} is null in {nulls} of 400 rows.*expected no nulls in keys and times.*Filter"
    with pytest.raises(DataError, match=message):
        compute(view(holey), events)


def test_no_rows(events: "Mapping[str, DataFrame]") -> None:
    def nothing(events: DataFrame) -> DataFrame:
        return events.where("x > 1000")

    with pytest.raises(DataError, match=r"returned no rows; expected at least one\. Check its sources and filters"):
        compute(view(nothing), events)


@pytest.mark.parametrize(("result", "type_name"), [(None, "NoneType"), (7, "int"), (pa.table({"k": [1]}), "Table")])
def test_not_a_frame(events: "Mapping[str, DataFrame]", result: object, type_name: str) -> None:
    def other(events: DataFrame) -> object:
        return result

    with pytest.raises(ConfigurationError, match=rf"view other.*returned {type_name}; expected a PySpark DataFrame"):
        compute(view(other), events)


def test_a_function_that_raises(events: "Mapping[str, DataFrame]") -> None:
    def broken(events: DataFrame) -> DataFrame:
        divisor = 0
        return events.limit(1 // divisor)

    line = broken.__code__.co_firstlineno + 2
    with pytest.raises(
        DataError, match=rf"{line_of(broken)[:11]}.*failed in line {line} with ZeroDivisionError: integer"
    ):
        compute(view(broken), events)


@pytest.mark.parametrize("expression", ["no_such_column", "x / (x - x)", "cast('seven' as bigint)", "no_function(x)"])
def test_a_result_that_the_engine_refuses(events: "Mapping[str, DataFrame]", expression: str) -> None:
    def refused(events: DataFrame) -> DataFrame:
        return events.withColumn("x", F.expr(expression).cast("bigint"))

    with pytest.raises(DataError, match=r"view refused \(test_compute.py:\d+\): the engine refused it: ") as caught:
        compute(view(refused), events)
    assert "\n" not in str(caught.value)


def test_a_column_that_no_source_has_is_named_with_those_that_there_are(events: "Mapping[str, DataFrame]") -> None:
    def lacking(events: DataFrame) -> DataFrame:
        return events.select("k", "no_such_column")

    there = ", ".join(events["events"].columns)
    with pytest.raises(DataError, match=rf"`no_such_column`.*; expected an existing column: events has {there}\. "):
        compute(view(lacking), events)


def test_two_columns_of_one_name(events: "Mapping[str, DataFrame]") -> None:
    def twice(events: DataFrame) -> DataFrame:
        return events.select("*", F.col("k").alias("x"))

    with pytest.raises(ConfigurationError, match="its result has 2 columns named 'x'; expected one"):
        compute(view(twice), events)


def test_a_python_function_that_raises_in_the_engine(events: "Mapping[str, DataFrame]") -> None:
    def pythonic(events: DataFrame) -> DataFrame:
        fails = F.udf(lambda value: 1 // (value - value), "bigint")
        return events.withColumn("x", fails("x"))

    with pytest.raises(DataError, match=r"view pythonic .*ZeroDivisionError") as caught:
        compute(view(pythonic), events)
    assert "\n" not in str(caught.value)


def asked(function: Callable[..., Any]) -> Spine:
    return spine(entities=[THING], sources=[EVENTS], label=Field("y", Int64))(function)


COLUMNS = [Column("k", Int64), Column("y", Int64)]


def test_a_spine_is_in_order_whatever_the_order_of_its_source(events: "Mapping[str, DataFrame]") -> None:
    def moments(events: DataFrame) -> DataFrame:
        return events.select("k", "at", "seen", (F.col("x") % 2).alias("y"))

    def shuffled(events: DataFrame) -> DataFrame:
        return moments(events.orderBy(F.xxhash64("x", "at")).repartition(7))

    first = compute_spine(asked(moments), COLUMNS, events)
    assert first.equals(compute_spine(asked(shuffled), COLUMNS, events))
    assert first["event_timestamp"].to_pylist() == rows()["at"].to_pylist()
    assert first["y"].to_pylist() == [x % 2 for x in rows()["x"].to_pylist()]


def test_a_spine_may_have_sets_of_classes_as_labels(events: "Mapping[str, DataFrame]") -> None:
    def sets(events: DataFrame) -> DataFrame:
        names = F.slice(F.array(F.lit("b"), F.lit("a")), 1, (F.col("x") % 3).cast("int"))
        moment = F.lit("2026-01-01").cast("timestamp")
        return events.select(
            F.lit(1).cast("bigint").alias("k"), moment.alias("at"), moment.alias("seen"), names.alias("y")
        )

    labels = compute_spine(asked(sets), [COLUMNS[0], Column("y", Array(String))], events)["y"].to_pylist()
    assert [labels[0], labels[-1]] == [["b", "a"], []]
    assert labels == sorted(labels, key=len, reverse=True)


def test_a_spine_keeps_its_duplicates(events: "Mapping[str, DataFrame]") -> None:
    def moments(events: DataFrame) -> DataFrame:
        chosen = events.select("k", "at", "seen", F.lit(1).cast("bigint").alias("y"))
        return chosen.union(chosen)

    table = compute_spine(asked(moments), COLUMNS, events)
    assert len(table) == 800
    assert table["event_timestamp"].to_pylist()[::2] == rows()["at"].to_pylist()


def test_a_spine_says_when_its_label_was_known(events: "Mapping[str, DataFrame]") -> None:
    def hasty(events: DataFrame) -> DataFrame:
        return events.select("k", "at", F.col("x").alias("y"))

    with pytest.raises(
        ConfigurationError, match=r"spine hasty .*has no column 'known_at'; expected one of type timest"
    ):
        compute_spine(asked(hasty), COLUMNS, events)


def test_a_label_that_was_known_before_the_question_leaks(events: "Mapping[str, DataFrame]") -> None:
    def early(events: DataFrame) -> DataFrame:
        known = F.when(F.col("x") == 7, F.col("at") - F.expr("INTERVAL 1 SECOND")).otherwise(F.col("at"))
        return events.select("k", "at", known.alias("seen"), F.lit(1).cast("bigint").alias("y"))

    with pytest.raises(DataError, match=r"spine early: \d+ labels were known before event_timestamp.*may be among"):
        compute_spine(asked(early), COLUMNS, events)


def test_a_window_gives_the_same_rows_every_time(events: "Mapping[str, DataFrame]") -> None:
    def rolling(events: DataFrame) -> DataFrame:
        day = Window.partitionBy("k").orderBy(F.unix_seconds("at")).rangeBetween(1 - 86400, 0)
        return events.select("k", "at", F.sum("x").over(day).alias("x"))

    first, second = (compute(view(rolling, source=PLAIN), events) for _ in range(2))
    order = [("k", "ascending"), ("event_timestamp", "ascending")]
    assert first.sort_by(order).equals(second.sort_by(order))
    table = rows().to_pylist()
    for row in first.to_pylist()[::17]:
        moment = row["event_timestamp"].replace(microsecond=0)
        begin = moment - timedelta(seconds=86399)
        window = [r["x"] for r in table if r["k"] == row["k"] and begin <= r["at"].replace(microsecond=0) <= moment]
        assert row["x"] == sum(window)


def test_microseconds_survive(sail: "SparkSession", tmp_path: Path) -> None:
    moment = datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC)
    one = pa.table(
        {"k": [1], "at": pa.array([moment], UTC_TIME), "seen": pa.array([moment], UTC_TIME), "x": [2**53 + 1]}
    )
    pq.write_table(one, tmp_path / "events.parquet")
    frame = sources.read(sail, EVENTS, tmp_path, tmp_path)
    (row,) = compute(view(as_it_is), {"events": frame}).to_pylist()
    assert row == {"k": 1, "x": 2**53 + 1, "event_timestamp": moment, "known_at": moment}
