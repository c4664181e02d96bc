"""The stages between an ideal and an actual answer, and scores of rows with any set of stages swapped.

A coalition is the set of stages that are actual; the other stages are ideal. Each coalition is scored with one of four
forms of the features and one of five models. Such a pair is a `Cell`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from isthmus.distill.gates import STAGES
from isthmus.features.values.columns import Mask, Values
from isthmus.orchestration.attribution.shapley import Numbers

STALENESS, SKEW, DISTILLATION, PRECISION, RUNTIME = STAGES
MEANINGS: Mapping[str, str] = {
    STALENESS: "from the features that could be known to the served features",
    SKEW: "from the served features to the features that the model was fed",
    DISTILLATION: "from the teacher to the student, in torch",
    PRECISION: "from the student in fp32 to the precision of its file",
    RUNTIME: "from the runtime of that measurement to the runtime that answered",
}
# Models: teacher, student in torch, with the file's precision only, with its runtime only, with both.
TEACHER, STUDENT, IN_PRECISION, IN_RUNTIME, AS_ANSWERED = range(5)

Columns = Mapping[str, Values]
Index = np.ndarray[Any, np.dtype[np.int64]]


# Returns the teacher's scores, (n,), for the indices of n rows and their features; without features, the ideal ones.
TeacherScores = Callable[[Index, Columns | None], Numbers]
# Returns scores (n,) of the student and its files by model, for each table of features.
StudentScores = Callable[[Sequence[Columns]], Sequence[Mapping[int, Numbers]]]

# The teacher has no model file, so precision and runtime need the student.
NEEDS: Mapping[int, int] = dict.fromkeys(map(STAGES.index, (PRECISION, RUNTIME)), 1 << STAGES.index(DISTILLATION))


class Cell(NamedTuple):
    """The form of the features and the model that give the score of a coalition (a set of stages that are actual).

    `features` is 1 if only staleness is actual, 2 if only skew is, 3 for both, 0 for neither. `model` is TEACHER,
    STUDENT or a later number.
    """

    features: int
    model: int


def cell(coalition: int) -> Cell:
    swapped = {stage for place, stage in enumerate(STAGES) if coalition >> place & 1}
    features = (STALENESS in swapped) | (SKEW in swapped) << 1
    if DISTILLATION not in swapped:
        return Cell(features, TEACHER)
    return Cell(features, STUDENT + (PRECISION in swapped) + 2 * (RUNTIME in swapped))


# The cell of each coalition.
CELLS = tuple(map(cell, range(1 << len(STAGES))))


class Features(NamedTuple):
    """Model inputs of n rows in four forms, and masks of rows that differ from the ideal form.

    Forms by `Cell.features`: ideal; served; ideal, but fed values where these differ from the served ones; fed.
    """

    forms: tuple[Columns, Columns, Columns, Columns]
    differing: tuple[Mask, Mask, Mask, Mask]

    @classmethod
    def of(cls, ideal: Columns, served: Columns, fed: Columns) -> "Features":
        skewed = {}
        for name, values in ideal.items():
            other = ~rows_equal(served[name], fed[name])
            skewed[name] = Values(
                np.where(other, fed[name].data, values.data), np.where(other, fed[name].valid, values.valid)
            )
        forms = (ideal, served, skewed, fed)
        # Bit 0 is staleness, bit 1 skew.
        return cls(forms, tuple(_differing(ideal, form) for form in forms))  # type: ignore[arg-type]

    def take(self, rows: Index) -> "Features":
        forms = tuple(_take(form, rows) for form in self.forms)
        return Features(forms, tuple(mask[rows] for mask in self.differing))  # type: ignore[arg-type]


def rows_equal(left: Values, right: Values) -> Mask:
    if left is right:
        return np.ones(len(left.data), bool)
    both: Mask = left.valid & right.valid
    first = next(iter(left.data[both]), None) if left.data.dtype.kind == "O" else None
    if isinstance(first, np.ndarray | list):
        # NumPy would compare them by their elements.
        pairs = zip(left.data, right.data, strict=True)
        equal = np.fromiter((_equal(*pair) for pair in pairs), bool, len(left.data))
    else:
        equal = np.asarray(left.data == right.data, bool)
    if left.data.dtype.kind == "f":
        equal |= np.isnan(left.data) & np.isnan(right.data)
    mask: Mask = np.where(both, equal, left.valid == right.valid)
    return mask


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    return bool(left == right) if type(left) is type(right) else False


def _differing(ideal: Columns, form: Columns) -> Mask:
    masks = [~rows_equal(values, form[name]) for name, values in ideal.items()]
    result: Mask = np.logical_or.reduce(masks)
    return result


def score_cells(
    features: Features, teacher: TeacherScores, students: StudentScores, note: Callable[[str], None]
) -> Numbers:
    count = len(features.differing[0])
    scores = np.empty((4, 5, count))
    every = np.arange(count)
    note("the teacher")
    scores[:, TEACHER] = teacher(every, None)
    places = [every, *(np.flatnonzero(mask) for mask in features.differing[1:])]
    for form, rows in enumerate(places):
        if form and len(rows):
            scores[form, TEACHER, rows] = teacher(rows, _take(features.forms[form], rows))
    note("the student and its files")
    forms_scored = [form for form, rows in enumerate(places) if form == 0 or len(rows)]
    tables = [_take(features.forms[form], places[form]) for form in forms_scored]
    for form, answers in zip(forms_scored, students(tables), strict=True):
        for model, answer in answers.items():
            if form == 0:
                scores[:, model] = answer
            else:
                scores[form, model, places[form]] = answer
    return scores


def _take(columns: Columns, rows: Index) -> dict[str, Values]:
    return {name: values.take(rows) for name, values in columns.items()}


def coalitions(cells: Numbers) -> Numbers:
    forms, models = zip(*CELLS, strict=True)
    values: Numbers = cells[list(forms), list(models)]
    return values
