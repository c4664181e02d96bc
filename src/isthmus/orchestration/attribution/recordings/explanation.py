"""The explanation of a recorded prediction, shown on the terminal and as an HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Heading,
    Paragraph,
    TableBlock,
    cell,
    code,
    decimal,
    strong,
)
from isthmus.features.document.html import to_html
from isthmus.orchestration.attribution.page import parts_table, waterfall
from isthmus.orchestration.attribution.report import Measure

# Rows of an answer on the terminal, and on the page.
SHOWN, ON_PAGE = 10, 100
_FORMS = ("ideal", "served", "fed")


class ExplainedRow(msgspec.Struct, frozen=True):
    """A row of a prediction.

    Attributes:
        keys: join keys that were sent.
        score: ideal and actual score, and the parts of their difference.
        features: ideal, served and fed value of each model input.
        label: label of the row, or None if it is not known.
    """

    keys: dict[str, Any]
    score: Measure
    features: dict[str, dict[str, Any]]
    label: float | None

    @property
    def differing(self) -> list[str]:
        """Inputs whose ideal, served and fed values are not all the same."""
        return [name for name, values in self.features.items() if len({repr(values[form]) for form in _FORMS}) > 1]


@dataclass(frozen=True)
class Explanation:
    """Explanation of a recorded prediction.

    Attributes:
        at: moment of the answer, ISO 8601.
        name: name of the distillation.
        package: digest of the package that answered in `precision`.
        left_out: number of skipped rows by reason.
        unknown: stages without a part, with the reason.
    """

    id: str
    at: str
    name: str
    package: str
    precision: str
    rows: Sequence[ExplainedRow]
    left_out: Mapping[str, int]
    unknown: Mapping[str, str]
    folder: Path = field(default=Path())

    def as_dict(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name != "folder"]
        plain: dict[str, Any] = msgspec.to_builtins({name: getattr(self, name) for name in names}, enc_hook=str)
        for built, row in zip(plain["rows"], self.rows, strict=True):
            built["score"]["difference"] = row.score.difference
        return {**plain, "page": str(page_file(self))}


def page_file(result: Explanation) -> Path:
    return result.folder / f"{result.id}.html"


def page(result: Explanation) -> str:
    blocks: list[Block] = [Heading(f"{result.name}: answer {result.id}", 1), Paragraph(_origin(result))]
    blocks += [*_notes(result)]
    for number, row in enumerate(result.rows[:ON_PAGE]):
        blocks += [*_row(number, row, result), BlockGroup("plots", [waterfall("score of the row", row.score)])]
    blocks += [*_further(result, ON_PAGE)]
    return to_html(f"Answer {result.id}", blocks)


def explanation_blocks(result: Explanation) -> Iterator[Block]:
    """Return what the terminal shows."""
    yield Paragraph(_origin(result))
    for number, row in enumerate(result.rows[:SHOWN]):
        yield from _row(number, row, result)
    yield from _further(result, SHOWN)
    yield from _notes(result)
    yield Paragraph(f"Page: {page_file(result)}")


def _origin(result: Explanation) -> tuple[Any, ...]:
    return (f"{result.name}, {result.at}, package ", code(result.package[:12]), f" in {result.precision}")


def _further(result: Explanation, shown: int) -> Iterator[Block]:
    if len(result.rows) > shown:
        yield Paragraph(f"{len(result.rows) - shown:,} more rows: use --json.")


def _row(number: int, row: ExplainedRow, result: Explanation) -> Iterator[Block]:
    keys = ", ".join(f"{name} {value}" for name, value in row.keys.items())
    score = row.score
    moved = f"{cell(score.ideal)} to {cell(score.answer)}, {decimal(score.difference, sign='+')}"
    yield Heading(f"Row {number + 1}{f', {keys}' if keys else ''}: {moved}", 2)
    yield parts_table(score)
    if row.differing:
        rows = [[name, *(cell(row.features[name][form]) for form in _FORMS)] for name in row.differing]
        yield TableBlock(["input", *_FORMS], rows, numbers=_FORMS)
    same = len(row.features) - len(row.differing)
    label = "" if row.label is None else f" The label is {row.label:g}."
    known = ", as far as known" if result.unknown else ""
    yield Paragraph(f"{same} of {len(row.features)} inputs were ideal{known}.{label}")


def _notes(result: Explanation) -> Iterator[Block]:
    for stage, why in result.unknown.items():
        yield Paragraph((strong(stage), f" has no part: {why}."))
    for why, count in result.left_out.items():
        yield Paragraph(f"{count:,} rows were left out: {why}.")
