from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.tasks.split import binary_labels, split, split_table
from isthmus.distill.types import Index
from isthmus.features.days import DAY
from isthmus.features.errors import DataError
from tests.distill.support import training_set

SHARES = (0.7, 0.1, 0.2)


def naive(rows: list[tuple[int, int]], shares: tuple[float, float, float]) -> tuple[list[int], list[int], list[int]]:
    """The rule as it reads: (event, known) rows, one after the other."""
    ordered = sorted(event for event, _ in rows)
    first = ordered[int(shares[0] * len(rows))]
    second = ordered[min(int((shares[0] + shares[1]) * len(rows)), len(rows) - 1)]
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for number, (event, known) in enumerate(rows):
        if event >= second:
            parts[2].append(number)
        elif event >= first:
            if known <= second:
                parts[1].append(number)
        elif known <= first:
            parts[0].append(number)
    return parts


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=80),
    st.sampled_from([SHARES, (0.5, 0.25, 0.25), (0.2, 0.2, 0.6)]),
)
def test_the_split_is_the_naive_one(rows: list[tuple[int, int]], shares: tuple[float, float, float]) -> None:
    moments = [(event, event + delay) for event, delay in rows]
    expected = naive(moments, shares)
    event, known = np.array(moments, np.int64).T
    if not all(expected):
        with pytest.raises(DataError, match="part: no rows"):
            split(event, known, shares)
        return
    parts = split(event, known, shares)
    assert (parts.train.tolist(), parts.validation.tolist(), parts.test.tolist()) == expected
    assert known[parts.train].max() <= event[parts.validation].min()
    assert event[parts.validation].max() < event[parts.test].min()


def test_labels_that_are_known_too_late_are_the_cause() -> None:
    event = np.arange(84, dtype=np.int64) * DAY
    with pytest.raises(DataError, match=r"validation part: no rows: labels take 14 days .* spans 9\..*`split`"):
        split(event, event + 14 * DAY, SHARES)
    with pytest.raises(DataError, match=r"train part: no rows: labels take 60 days .* spans 58"):
        split(event, event + 60 * DAY, SHARES)


def test_no_rows() -> None:
    with pytest.raises(DataError, match="no rows"):
        split(np.array([], np.int64), np.array([], np.int64), SHARES)


def split_and_labels(table: pa.Table, label: str) -> Index:
    return binary_labels(table, label, split_table(table, SHARES))


def changed(name: str, values: "pa.Array[Any] | pa.ChunkedArray[Any]", table: pa.Table | None = None) -> pa.Table:
    table = table or training_set(300)
    return table.set_column(table.column_names.index(name), name, values)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("late", pa.array([None, *[1] * 299], pa.int64()), "label late|column late: 1 nulls"),
        ("late", pa.array([2, *[1] * 299], pa.int64()), "label late: 1 values such as 2; expected 0 or 1"),
        ("late", pa.array([0.5, *[1.0] * 299]), "column late"),
        ("late", pa.array([[0]] * 300), "column late"),
        ("late", pa.array([0] * 300), "label late: only 0 in the train part"),
        ("known_at", pa.nulls(300, pa.timestamp("us", tz="UTC")), "column known_at: 300 nulls"),
        ("event_timestamp", pa.array([0] * 300, pa.timestamp("us", tz="UTC")), "train part: no rows"),
    ],
)
def test_what_cannot_be_split_is_refused(column: str, values: "pa.Array[Any]", message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_and_labels(changed(column, values), "late")


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match="no column delayed"):
        split_and_labels(training_set(300), "delayed")


def test_an_int32_label_is_read() -> None:
    table = training_set(300)
    labels = split_and_labels(changed("late", table["late"].cast(pa.int32()), table), "late")
    assert labels.tolist() == table["late"].to_pylist()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80), st.sampled_from([SHARES, (0.4, 0.3, 0.3)]))
def test_rows_of_one_value_are_in_one_part(values: list[int], shares: tuple[float, float, float]) -> None:
    table = pa.table({"value": pa.array(values, pa.int64())})
    # What is enough of every part.
    table = pa.concat_tables([table, pa.table({"value": pa.array(range(100, 300), pa.int64())})])
    values = table["value"].to_pylist()
    parts = split_table(table, shares, "value")
    assert parts.boundaries is None
    found = [{values[row] for row in rows} for rows in (parts.train, parts.validation, parts.test)]
    assert sum(map(len, found)) == len(set(values))
    assert sorted([*parts.train, *parts.validation, *parts.test]) == list(range(len(values)))
    # The part of a value does not depend on the rows around it.
    more = split_table(pa.table({"value": pa.array([*range(300, 310), *values], pa.int64())}), shares, "value")
    assert [row - 10 for row in more.test if row >= 10] == parts.test.tolist()
    assert [row - 10 for row in more.train if row >= 10] == parts.train.tolist()


def test_the_shares_are_those_of_the_values() -> None:
    table = pa.table({"word": [f"word {number}" for number in range(20_000)], "late": [None] * 20_000})
    parts = split_table(table, SHARES, "word")
    found = [len(rows) / 20_000 for rows in (parts.train, parts.validation, parts.test)]
    assert found == pytest.approx(SHARES, abs=0.015)
    with pytest.raises(DataError, match="column late: 20000 nulls"):
        split_table(table, SHARES, "late")
    with pytest.raises(DataError, match="no column wort; expected the values to split by"):
        split_table(table, SHARES, "wort")
    with pytest.raises(DataError, match="no rows among 3 with 1 values"):
        split_table(pa.table({"same": [1, 1, 1]}), SHARES, "same")
    with pytest.raises(DataError, match="no rows among 0"):
        split_table(table.slice(0, 0), SHARES, "word")


@pytest.mark.parametrize("dtype", [pa.list_(pa.string()), pa.dictionary(pa.int32(), pa.string())])
def test_arrays_and_dictionaries_are_values_to_split_by(dtype: pa.DataType) -> None:
    words = [f"word {number}" for number in range(200)]
    values = pa.array([[word] for word in words], dtype) if pa.types.is_list(dtype) else pa.array(words).cast(dtype)
    parts = split_table(pa.table({"value": values}), SHARES, "value")
    assert sorted([*parts.train, *parts.validation, *parts.test]) == list(range(200))
