"""The stages between an ideal answer and the one that was given, and the scores of each row with any of them swapped.

A coalition is a set of stages that are as they were; the others are ideal. Four forms of the features and five models
are all that coalitions need, and only rows whose features differ are asked again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from isthmus.distill.declaration import STAGES
from isthmus.features.values.columns import Mask, Values
from isthmus.orchestration.attribution.shapley import Numbers

STALENESS, SKEW, DISTILLATION, PRECISION, RUNTIME = STAGES
MEANINGS: Mapping[str, str] = {
    STALENESS: "from the features that could be known to those that were served",
    SKEW: "from the features that were served to those that the model was fed",
    DISTILLATION: "from the teacher to the student, in torch",
    PRECISION: "from the student in floats to the precision of its file",
    RUNTIME: "from the runtime in which that was measured to the one that answered",
}
TEACHER, STUDENT, IN_PRECISION, IN_RUNTIME, AS_ANSWERED = range(5)
"""The models: a teacher; its student in torch; in the precision alone; in the runtime alone; in both."""

Columns = Mapping[str, Values]
Index = np.ndarray[Any, np.dtype[np.int64]]


class Models(Protocol):
    """What answers rows: each model that `cells` needs. `rows` are the places of the rows among all."""

    def teacher(self, rows: Index, features: Columns | None) -> Numbers:
        """Scores (n,) of the teacher; of the ideal features if there are none."""

    def students(self, features: Sequence[Columns]) -> Sequence[Mapping[int, Numbers]]:
        """Scores (n,) of the student and its files by model, for several tables of features."""


NEEDS: Mapping[int, int] = dict.fromkeys(map(STAGES.index, (PRECISION, RUNTIME)), 1 << STAGES.index(DISTILLATION))
"""No file has the teacher: it has no other precision, and no other runtime."""


class Cell(NamedTuple):
    """What a coalition comes down to: a form of the features, as a number of two bits, and a model."""

    features: int
    model: int


def cell(coalition: int) -> Cell:
    """That of a coalition, in which bit i is stage i of `STAGES`."""
    swapped = {stage for place, stage in enumerate(STAGES) if coalition >> place & 1}
    features = (STALENESS in swapped) | (SKEW in swapped) << 1
    if DISTILLATION not in swapped:
        return Cell(features, TEACHER)
    return Cell(features, STUDENT + (PRECISION in swapped) + 2 * (RUNTIME in swapped))


CELLS = tuple(map(cell, range(1 << len(STAGES))))
"""Of each coalition."""


class Features(NamedTuple):
    """The inputs of a model of n rows in four forms, and the rows of each form that differ from the ideal.

    In the order of `Cell.features`: ideal; as served; as served where that was fed, and as fed where not; the ideal
    but for what was fed differently than served.
    """

    forms: tuple[Columns, Columns, Columns, Columns]
    differing: tuple[Mask, Mask, Mask, Mask]

    @classmethod
    def of(cls, ideal: Columns, served: Columns, fed: Columns) -> "Features":
        """From the three that are known; each has the same columns."""
        skewed = {}
        for name, values in ideal.items():
            other = ~same(served[name], fed[name])
            skewed[name] = Values(
                np.where(other, fed[name].data, values.data), np.where(other, fed[name].valid, values.valid)
            )
        forms = (ideal, served, skewed, fed)
        # Bit 0 is staleness, bit 1 skew.
        return cls(forms, tuple(_differing(ideal, form) for form in forms))  # type: ignore[arg-type]


def same(left: Values, right: Values) -> Mask:
    """The rows in which two columns hold the same; a null is the same as another, and so is a NaN."""
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
    """Of arrays, of which a null is none."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    return bool(left == right) if type(left) is type(right) else False


def _differing(ideal: Columns, form: Columns) -> Mask:
    masks = [~same(values, form[name]) for name, values in ideal.items()]
    result: Mask = np.logical_or.reduce(masks)
    return result


def scored(features: Features, models: Models, note: Callable[[str], None]) -> Numbers:
    """The scores of each cell, float64 (4, 5, n): forms of the features by models."""
    count = len(features.differing[0])
    scores = np.empty((4, 5, count))
    every = np.arange(count)
    note("the teacher")
    scores[:, TEACHER] = models.teacher(every, None)
    places = [every, *(np.flatnonzero(mask) for mask in features.differing[1:])]
    for form, rows in enumerate(places):
        if form and len(rows):
            scores[form, TEACHER, rows] = models.teacher(rows, _take(features.forms[form], rows))
    note("the student and its files")
    asked = [form for form, rows in enumerate(places) if form == 0 or len(rows)]
    tables = [_take(features.forms[form], places[form]) for form in asked]
    for form, answers in zip(asked, models.students(tables), strict=True):
        for model, answer in answers.items():
            if form == 0:
                scores[:, model] = answer
            else:
                scores[form, model, places[form]] = answer
    return scores


def _take(columns: Columns, rows: Index) -> dict[str, Values]:
    return {name: values.take(rows) for name, values in columns.items()}


def coalitions(cells: Numbers) -> Numbers:
    """The values of all coalitions, (32, ...), from those of the cells, (4, 5, ...); for `shapley` with `NEEDS`."""
    forms, models = zip(*CELLS, strict=True)
    values: Numbers = cells[list(forms), list(models)]
    return values
