"""The join by an engine says what the oracle says: many drawn cases in one job, kept apart by a key of their own."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from isthmus.features.offline.history import ViewHistory
from isthmus.features.pointintime.join import BATCH
from isthmus.features.pointintime.spine import SpineRows
from isthmus.features.types import Bool, Bytes, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.transforms import engine
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import executorset
from isthmus.transforms.views.executorset import JoinedViews, StoredSpine
from tests.features.pointintime.test_join import KEYS, MOMENTS
from tests.features.support import (
    ALL,
    DAY,
    FIRST,
    LAST,
    arrow,
    join_naively,
    make_view,
    same_bits,
    table,
    times,
    values_of,
)
from tests.transforms.connect import connect_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CASE: dict[str, DataType] = {"case": Int64}
MANY: dict[str, DataType] = {"a": Float64, "group": UnixTimestamp, "select": String, "at": Bool}
VIEWS = [
    make_view(ALL, CASE | {"order": Int32, "from": String}, 3, "everything"),
    make_view({"array": ALL["array_float32"], "b": Bytes}, CASE | {"order": Int32, "from": String}, None, "same_keys"),
    make_view(MANY, CASE | {"t": UnixTimestamp, "flag": Bool, "token": Bytes}, 3 * DAY, "other_keys"),
    make_view({"union": Float32}, CASE, 1, "few_keys"),
]
SPREADS = [(1, 0), (DAY, 0), (1, LAST - 8), (1, FIRST + 8)]


POOL = 40
"""Rows of values that the cases choose from: drawing them anew for every case takes longer than the joins."""


def collected(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """That many examples of a strategy, to be used together."""
    found = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def keep(example: Any) -> None:
        found.append(example)

    keep()
    return found


def _spine_keys() -> dict[str, DataType]:
    return {key.name: key.dtype for view in VIEWS for key in view.keys if key.name != "case"}


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, int], list[list[dict[str, Any]]], list[tuple[Any, ...]]]:
    """How far apart the moments are and where; rows for every view; questions."""
    rows = []
    for view in VIEWS:
        row = {key.name: KEYS[key.dtype.name] for key in view.keys if key.name != "case"}
        row |= {"_event": MOMENTS, "_known": MOMENTS, "_values": st.integers(0, POOL - 1)}
        rows.append(draw(st.lists(st.fixed_dictionaries(row), max_size=10)))
    asked = st.tuples(MOMENTS, *(st.none() | KEYS[dtype.name] for dtype in _spine_keys().values()))
    return draw(st.sampled_from(SPREADS)), rows, draw(st.lists(asked, max_size=10))


def drawn(count: int) -> tuple[pa.Table, list[ViewHistory]]:
    """The spine and the histories of that many cases together."""
    values = st.tuples(*(values_of({field.name: field.dtype for field in view.fields}) for view in VIEWS))
    pool = (collected(values, POOL) * POOL)[:POOL]
    rows: list[list[dict[str, Any]]] = [[] for _ in VIEWS]
    questions: list[tuple[int, int, list[Any]]] = []
    for number, ((stretch, shift), offered, asked) in enumerate(collected(_cases(), count)):
        for n, (kept, of_view) in enumerate(zip(rows, offered, strict=True)):
            for row in of_view:
                moments = {name: row[name] * stretch + shift for name in ("_event", "_known")}
                kept.append({**row, **pool[row["_values"]][n], **moments, "case": number})
        questions += [(number, at * stretch + shift, keys) for at, *keys in asked]
    columns = {"case": pa.array([case for case, _, _ in questions], pa.int64())}
    for n, (name, dtype) in enumerate(_spine_keys().items()):
        columns[name] = arrow([keys[n] for _, _, keys in questions], dtype)
    spine = pa.table({**columns, "event_timestamp": times([at for _, at, _ in questions])})
    # Every question twice, and a value of the user's own that has bits to lose.
    spine = pa.concat_tables([spine, spine])
    bits = np.random.default_rng(0).integers(0, 1 << 32, len(spine), np.uint32)
    spine = spine.append_column("weight", pa.array(bits.view(np.float32)))
    return spine, [ViewHistory(view, table(view, kept), 0) for view, kept in zip(VIEWS, rows, strict=True)]


def by_executors(spark: "SparkSession", folder: Path, spine: pa.Table, histories: list[ViewHistory]) -> pa.Table:
    """The join by executors, of tables in two files each."""
    for history in histories:
        rows, half = history.table(), len(history.table()) // 2
        (folder / history.view.table).mkdir()
        pq.write_table(rows[:half], folder / history.view.table / "first.parquet")
        pq.write_table(rows[half:], folder / history.view.table / "more.parquet")
    spine = pa.concat_tables([spine] * (2 * BATCH // len(spine) + 1))
    views = [(view, ["first.parquet", "more.parquet"], [column.name for column in view.fields]) for view in VIEWS]
    store = Store(str(folder), {})
    stored = StoredSpine.write(SpineRows(spine.schema, spine.to_batches), store, BATCH)
    assert stored.parts > 1
    executorset.write_parts(spark, stored, JoinedViews(views, status=True), store)
    return pa.Table.from_batches(stored.joined())


def expected(spine: pa.Table, histories: list[ViewHistory]) -> pa.Table:
    for history in histories:
        spine = join_naively(spine, history)
    return spine


@pytest.fixture(scope="module")
def cases() -> tuple[pa.Table, list[ViewHistory], pa.Table]:
    thorough = settings().max_examples > 50
    spine, histories = drawn(3000 if thorough else 300)
    return spine, histories, expected(spine, histories)


def check(spark: "SparkSession", folder: Path, cases: tuple[pa.Table, list[ViewHistory], pa.Table]) -> None:
    spine, histories, answer = cases
    joined = by_executors(spark, folder, spine, histories)
    for start in range(0, len(joined), len(spine)):
        again = joined.slice(start, len(spine))
        assert same_bits(again, answer.slice(0, len(again)).cast(joined.schema)), start
    assert joined.column_names == answer.column_names
    statuses = {status for view in VIEWS for status in joined[f"{view.name}__status"].to_pylist()}
    assert statuses == {"present", "expired", "not_found", "null"}


@pytest.mark.thorough
@pytest.mark.accept
def test_the_join_is_the_time_rule_on_sail(
    sail: "SparkSession", tmp_path: Path, cases: tuple[pa.Table, list[ViewHistory], pa.Table]
) -> None:
    check(sail, tmp_path, cases)


@pytest.mark.accept
@pytest.mark.spark
@pytest.mark.thorough
def test_the_join_is_the_time_rule_on_apache_spark(
    tmp_path: Path, cases: tuple[pa.Table, list[ViewHistory], pa.Table]
) -> None:
    with engine.session("spark") as spark:
        check(spark, tmp_path, cases)


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.spark
@pytest.mark.thorough
def test_the_join_is_the_time_rule_on_a_spark_connect_server(
    tmp_path: Path, cases: tuple[pa.Table, list[ViewHistory], pa.Table]
) -> None:
    with connect_server(tmp_path / "server.log") as url, engine.session(url) as spark:
        check(spark, tmp_path, cases)
