from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.gates import STAGES
from isthmus.features.types import Array, Float64, Int64, String
from isthmus.features.values.columns import Values, from_python
from isthmus.orchestration.attribution.shapley import Numbers
from isthmus.orchestration.attribution.stages import (
    AS_ANSWERED,
    CELLS,
    IN_PRECISION,
    IN_RUNTIME,
    STUDENT,
    TEACHER,
    Columns,
    Features,
    Index,
    coalitions,
    rows_equal,
    score_cells,
)

NAN = float("nan")
TYPES = {"load": Float64, "city": String, "calls": Int64}
ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, 0.0, 1.5, NAN]), st.sampled_from([None, "", "Bern"]), st.sampled_from([None, 0, 7])
    ),
    min_size=4, max_size=4,
)  # fmt: skip


def _columns(rows: Sequence[tuple[object, ...]]) -> dict[str, Values]:
    return {name: from_python([row[n] for row in rows], TYPES[name]) for n, name in enumerate(TYPES)}


def _number(column: Values) -> Numbers:
    return np.array([hash(str(value)) % 1000 if valid else -1 for value, valid in zip(*_sides(column), strict=True)])


def _sides(column: Values) -> tuple[list[object], list[bool]]:
    return column.data.tolist(), column.valid.tolist()


class Sums:
    """Models that answer with a number of all features: each with another."""

    def __init__(self, ideal: Columns) -> None:
        self._ideal = ideal

    def teacher(self, rows: Index, features: Columns | None) -> Numbers:
        if features is None:
            features = {name: values.take(rows) for name, values in self._ideal.items()}
        return self.score(TEACHER, features)

    def students(self, features: Sequence[Columns]) -> list[Mapping[int, Numbers]]:
        models = (STUDENT, IN_PRECISION, IN_RUNTIME, AS_ANSWERED)
        return [{model: self.score(model, table) for model in models} for table in features]

    def score(self, model: int, features: Columns) -> Numbers:
        numbers: Numbers = sum((_number(values) for values in features.values()), np.zeros(len(features["load"].data)))
        return numbers * (model + 1)


@given(ROWS, ROWS, ROWS)
def test_each_coalition_has_the_features_and_the_model_that_are_swapped(
    ideal: list[tuple[object, ...]], served: list[tuple[object, ...]], fed: list[tuple[object, ...]]
) -> None:
    features = Features.of(_columns(ideal), _columns(served), _columns(fed))
    sums = Sums(_columns(ideal))
    values = coalitions(score_cells(features, sums.teacher, sums.students, lambda _: None))
    assert values.shape == (32, 4)
    for coalition, scores in enumerate(values):
        swapped = {stage for place, stage in enumerate(STAGES) if coalition >> place & 1}
        rows = []
        for triple in zip(ideal, served, fed, strict=True):
            row = []
            for best, answer, input_ in zip(*triple, strict=True):
                skewed = repr(answer) != repr(input_)
                usual = answer if "staleness" in swapped else best
                row.append(input_ if "skew" in swapped and skewed else usual)
            rows.append(tuple(row))
        model = TEACHER
        if "distillation" in swapped:
            model = STUDENT + ("precision" in swapped) + 2 * ("runtime" in swapped)
        np.testing.assert_array_equal(scores, Sums({}).score(model, _columns(rows)))


def test_precision_and_runtime_are_nothing_to_a_teacher() -> None:
    assert {CELLS[coalition].model for coalition in range(32) if not coalition & 0b00100} == {TEACHER}
    assert {CELLS[coalition].model for coalition in range(32) if coalition & 0b00100} == {1, 2, 3, 4}
    assert CELLS[0] == (0, TEACHER)
    assert CELLS[31] == (3, AS_ANSWERED)


def test_arrays_are_compared_whole() -> None:
    rows = [None, [1.0, NAN], [1.0], [1.0]]
    left, right = (from_python(side, Array(Float64)) for side in (rows, [None, [1.0, NAN], [2.0], None]))
    assert rows_equal(left, right).tolist() == [True, True, False, False]
    texts = [from_python(side, Array(String)) for side in ([["a"], ["b"]], [["a"], ["b", "c"]])]
    assert rows_equal(*texts).tolist() == [True, False]
