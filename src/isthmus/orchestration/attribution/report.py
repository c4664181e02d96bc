"""The result of an attribution: the parts of each measure and of each row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from isthmus.distill.gates import GateResult, require_passed
from isthmus.orchestration.attribution.shapley import Shares

_OMITTED = ("table", "folder", "bounds")
# The mean of all scores.
SCORE = "score"


class Part(msgspec.Struct, frozen=True):
    """Effect of a stage on a measure: its Shapley value, and its smallest and largest effect in any order."""

    value: float
    low: float
    high: float


def parts_of(shares: Shares, players: Sequence[str], known: Sequence[str]) -> dict[str, Part]:
    return {name: Part(*(float(share[players.index(name)]) for share in shares)) for name in known}


class Measure(msgspec.Struct, frozen=True):
    """Value of a measure for the ideal and for the actual answers, and each known stage's part in the difference."""

    ideal: float
    answer: float
    parts: dict[str, Part]

    @property
    def difference(self) -> float:
        return self.answer - self.ideal


@dataclass(frozen=True)
class Attribution:
    """Result of `isthmus model attribute`: the effect of each stage on the scores of a distillation.

    Attributes:
        package: digest of the package that answers.
        matched: number of recorded rows that the training set has as well; None for rows of a training set.
        left_out: number of skipped rows by reason.
        unknown: stages without a part, with the reason.
        each: mean absolute effect on a row's score, by stage.
        largest: rows whose answer is farthest from the ideal.
        table: one line per row: keys, time, ideal, answer and the part of each stage.
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
        return all(bound.holds for bound in self.bounds)

    def as_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _OMITTED}
        built: dict[str, Any] = msgspec.to_builtins(plain, enc_hook=str)
        for name, measure in self.measures.items():
            built["measures"][name]["difference"] = measure.difference
        bounds = [
            {"metric": bound.metric, "at_least": bound.at_least, "at_most": bound.at_most, "value": bound.found,
             "holds": bound.holds}
            for bound in self.bounds
        ]  # fmt: skip
        files = {"page": str(page_file(self.folder)), "table": str(rows_file(self.folder))}
        return {**built, "bounds": bounds, "passed": self.passed, **files}


def require_bounds(result: Attribution) -> None:
    """Enforce the bounds that a distillation declares on the effects of stages: raise GateFailed if a bound is broken.

    An effect that is not known breaks its bound.
    """
    remedy = f"open {page_file(result.folder)}, or change the bounds in the definitions"
    require_passed(f"attribution of {result.name}", result.bounds, remedy)


def page_file(folder: Path) -> Path:
    return folder / "attribution.html"


def rows_file(folder: Path) -> Path:
    return folder / "rows.parquet"


def skipped(rows: int, why: str) -> str:
    return f"{rows:,} {'row was' if rows == 1 else 'rows were'} skipped: {why}"
