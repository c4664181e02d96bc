"""What an attribution found: the parts of each measure and of each row."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from isthmus.distill.gates import GateResult
from isthmus.features.errors import GateFailed

_APART = ("table", "folder", "bounds")
SCORE = "score"
"""The measure that is the mean of all scores."""


class Part(msgspec.Struct, frozen=True):
    """What a stage did to a measure: its Shapley value, and the least and the most that it does in any order."""

    value: float
    low: float
    high: float


class Measure(msgspec.Struct, frozen=True):
    """A measure of the ideal answers and of those that were given, and the part of each stage in the difference.

    A stage of which nothing is known has no part.
    """

    ideal: float
    answer: float
    parts: dict[str, Part]

    @property
    def difference(self) -> float:
        """What the parts sum to."""
        return self.answer - self.ideal


@dataclass(frozen=True)
class Attribution:
    """An attribution of the rows of a distillation.

    Attributes:
        package: the digest of the package that answers.
        precision: of its file, likewise `runtime`.
        rows: how many were compared.
        matched: of recorded answers, the rows that the training set has, too; None for rows of a training set.
        left_out: why rows were left out, and how many.
        unknown: stages of which nothing is known, and why.
        measures: the mean score, and what is measured by labels.
        each: of a stage, the mean over the rows of how far it moves the score of a row.
        largest: the rows whose answer is farthest from the ideal.
        bounds: those of the distillation.
        table: a line for each row: keys, time, ideal, answer, and the part of each stage.
    """

    name: str
    package: str
    precision: str
    runtime: str
    training_set: str
    rows: int
    matched: int | None
    left_out: Mapping[str, int]
    unknown: Mapping[str, str]
    measures: Mapping[str, Measure]
    each: Mapping[str, float]
    largest: list[dict[str, Any]]
    bounds: Sequence[GateResult]
    table: pa.Table = field(repr=False)
    folder: Path = field(default=Path())

    @property
    def passed(self) -> bool:
        """Whether all bounds hold."""
        return all(bound.holds for bound in self.bounds)

    def as_dict(self) -> dict[str, Any]:
        """As plain data, without the table of all rows, which is in a file."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _APART}
        built: dict[str, Any] = msgspec.to_builtins(plain, enc_hook=str)
        for name, measure in self.measures.items():
            built["measures"][name]["difference"] = measure.difference
        bounds = [asdict(bound.gate) | {"value": bound.value, "holds": bound.holds} for bound in self.bounds]
        files = {"page": str(page_file(self.folder)), "table": str(rows_file(self.folder))}
        return {**built, "bounds": bounds, "passed": self.passed, **files}


def require_bounds(result: Attribution) -> None:
    """Raises a GateFailed with every bound that does not hold; a stage of which nothing is known keeps none."""
    if failed := [bound for bound in result.bounds if not bound.holds]:
        raise GateFailed(
            f"attribution of {result.name}", "; ".join(map(str, failed)),
            expected="; ".join(bound.expected for bound in failed),
            remedy=f"look at {page_file(result.folder)}, or change the bounds in the definitions",
        )  # fmt: skip


def page_file(folder: Path) -> Path:
    """The page of an attribution."""
    return folder / "attribution.html"


def rows_file(folder: Path) -> Path:
    """The parts of each row."""
    return folder / "rows.parquet"
