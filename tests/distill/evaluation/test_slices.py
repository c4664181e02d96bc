"""Slices beside an oracle that goes through the rows one by one."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import DataError
from isthmus.distill.evaluation.metrics import auc
from isthmus.distill.evaluation.slices import Measure, Slice, worst_slices
from isthmus.distill.types import Index

Rows = list[dict[str, Any]]
TYPES = {"text": pa.string(), "flag": pa.bool_(), "number": pa.float64(), "whole": pa.int32()}
COLUMNS = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["a", "b", "", "ä", None]),
        "flag": st.sampled_from([True, False, None]),
        "number": st.one_of(st.none(), st.sampled_from([0.0, -0.0, math.nan, math.inf]), st.floats(-9, 9)),
        "whole": st.one_of(st.none(), st.integers(-3, 3)),
        "right": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    }
)


def measured(rows: Rows) -> Measure:
    """The share of rows on which each model is right; none of the control's where the student is always right."""

    def measure(index: Index) -> Mapping[str, float]:
        assert index.tolist() == sorted(set(index.tolist()))
        shares = np.array([rows[n]["right"] for n in index]).mean(0).tolist()
        teacher, student, control = shares
        return {"teacher": teacher, "student": student, "control": math.nan if student == 1 else control}

    return measure


def naively(rows: Rows, measure: Measure, least: int) -> list[Slice]:
    found = []
    for column in TYPES:
        values = [None if row[column] != row[column] else row[column] for row in rows]
        groups: dict[Any, list[int]] = {}
        known = sorted(value for value in values if value is not None)
        for n, value in enumerate(values):
            if value is None or column in ("text", "flag"):
                place = value
            else:
                # The first quarter whose end, one of the values, is not below it.
                ends = [known[math.ceil(len(known) * part / 4) - 1] for part in (1, 2, 3, 4)]
                place = min(end for end in ends if value <= end)
            groups.setdefault(place, []).append(n)
        found += [(column, groups[place]) for place in sorted(key for key in groups if key is not None)]
        if None in groups:
            found.append((column, groups[None]))
    slices = []
    for number, (column, group) in enumerate(found):
        first = group not in [other for _, other in found[:number]]
        if first and least <= len(group) < len(rows):
            worth = measure(np.array(group))
            control = None if math.isnan(worth["control"]) else worth["control"]
            slices.append(Slice(column, None, len(group), worth["teacher"], worth["student"], control))
    return sorted(slices, key=lambda one: one.student - one.teacher)


def table_of(rows: Rows) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in TYPES.items()})


@given(st.lists(COLUMNS, min_size=1, max_size=40), st.integers(0, 5))
def test_slices_are_those_of_going_through_the_rows(rows: Rows, least: int) -> None:
    measure = measured(rows)
    fast = worst_slices(table_of(rows), measure, least=least, count=100)
    plain = [Slice(one.column, None, one.rows, one.teacher, one.student, one.control) for one in fast]
    assert plain == naively(rows, measure, least)
    assert worst_slices(table_of(rows), measure, least=least, count=2) == fast[:2]


def rows_by_value(table: pa.Table) -> dict[tuple[str, str | None], int]:
    """Value and rows of every slice."""
    found = worst_slices(table, lambda _rows: {"teacher": 0.0, "student": 0.0}, least=1, count=100)
    return {(one.column, one.value): one.rows for one in found}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pa.array(range(1, 101)), {"1 to 25": 25, "over 25 to 50": 25, "over 50 to 75": 25, "over 75 to 100": 25}),
        (pa.array([0] * 80 + [7] * 20), {"0": 80, "over 0 to 7": 20}),
        (pa.array([0.1, 0.2, 0.3, 0.4, None], pa.float32()), {"0.1": 1, "over 0.1 to 0.2": 1, "over 0.2 to 0.3": 1,
                                                             "over 0.3 to 0.4": 1, None: 1}),
        (pa.array([1e9, 1e9 + 1]), {"1000000000.0": 1, "over 1000000000.0 to 1000000001.0": 1}),
        (pa.array([(1 << 62), (1 << 62) + 1]), {f"{1 << 62}": 1, f"over {1 << 62} to {(1 << 62) + 1}": 1}),
        (pa.array([2**64 - 1, 0], pa.uint64()), {"0": 1, f"over 0 to {2**64 - 1}": 1}),
        (pa.array([True, False, None, True]), {"true": 2, "false": 1, None: 1}),
        (pa.array(["x", "null", None, "x"]).dictionary_encode(), {"x": 2, "null": 1, None: 1}),
        (pa.array(["x", "y", "y"], pa.string_view()), {"x": 1, "y": 2}),
        (pa.array([math.inf, -math.inf, math.nan]), {"-inf": 1, "over -inf to inf": 1, None: 1}),
        (pa.array([5, 5, 5]), {}),
        (pa.array([None, None], pa.string()), {}),
        (pa.array([], pa.float64()), {}),
    ],
)  # fmt: skip
def test_slices_in_words(values: pa.Array, words: dict[str | None, int]) -> None:
    assert rows_by_value(pa.table({"c": values})) == {("c", word): rows for word, rows in words.items()}


def test_a_slice_on_which_the_metric_has_no_value_is_left_out() -> None:
    labels = np.array([0, 1, 0, 1, 1, 1])
    scores = np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.4])

    def measure(rows: Index) -> dict[str, float]:
        if len(set(labels[rows].tolist())) < 2:
            return {"teacher": math.nan, "student": math.nan, "control": math.nan}
        return {"teacher": auc(labels[rows], scores[rows]), "student": auc(labels[rows], -scores[rows])}

    found = worst_slices(pa.table({"c": ["a", "a", "b", "b", "one class", "one class"]}), measure, least=1)
    assert found == [Slice("c", "a", 2, 1.0, 0.0, None), Slice("c", "b", 2, 1.0, 0.0, None)]


@pytest.mark.parametrize("model", ["teacher", "student"])
def test_a_slice_without_a_loss_is_left_out(model: str) -> None:
    worth = {"teacher": 0.5, "student": 0.5, "control": 0.5}
    table = pa.table({"c": ["a", "b"]})
    found = worst_slices(table, lambda rows: {**worth, model: math.nan} if rows[0] else worth, least=1)
    assert [one.value for one in found] == ["a"]


def test_of_a_metric_that_is_best_low_the_student_loses_upwards() -> None:
    table = pa.table({"c": ["a", "a", "b"]})

    def measure(rows: Index) -> dict[str, float]:
        return {"teacher": 0.5, "student": 0.4 if len(rows) == 2 else 0.6}

    assert [one.value for one in worst_slices(table, measure, least=1)] == ["a", "b"]
    assert [one.value for one in worst_slices(table, measure, least=1, higher_is_better=False)] == ["b", "a"]


def test_columns_of_other_types_are_refused() -> None:
    with pytest.raises(DataError, match=r"slices by c: a column of type list<.*>; expected text, booleans or numbers"):
        worst_slices(pa.table({"c": [[1], [2]]}), lambda _rows: {"teacher": 0, "student": 0}, least=1)
