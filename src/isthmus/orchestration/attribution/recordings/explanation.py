"""What was found of a recorded prediction: its rows with their parts; on the terminal, and as a page."""

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
from isthmus.orchestration.attribution.page import STYLE, parts_table, waterfall
from isthmus.orchestration.attribution.report import Measure

SHOWN, ON_PAGE = 10, 100
"""Rows of an answer on the terminal, and on a page."""
_FORMS = ("ideal", "served", "fed")


class ExplainedRow(msgspec.Struct, frozen=True):
    """A row of a prediction.

    Attributes:
        keys: the join keys, as far as they were sent.
        score: the ideal one, that of the answer, and the parts of their difference.
        features: input of the model to its value that is ideal, that was served, and that the model was fed.
        label: what came of it; None if that is not known.
    """

    keys: dict[str, Any]
    score: Measure
    features: dict[str, dict[str, Any]]
    label: float | None

    @property
    def differing(self) -> list[str]:
        """The inputs that were not what they should have been."""
        return [name for name, values in self.features.items() if len({repr(values[form]) for form in _FORMS}) > 1]


@dataclass(frozen=True)
class Explanation:
    """A recorded prediction.

    Attributes:
        at: its moment.
        name: of the distillation.
        package: the digest of the package that answered, in `precision`.
        left_out: why rows were left out, and how many.
        unknown: stages of which nothing is known, and why.
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
        """As plain data."""
        names = [name for name in self.__dataclass_fields__ if name != "folder"]
        plain: dict[str, Any] = msgspec.to_builtins({name: getattr(self, name) for name in names}, enc_hook=str)
        for built, row in zip(plain["rows"], self.rows, strict=True):
            built["score"]["difference"] = row.score.difference
        return {**plain, "page": str(page_file(self))}


def page_file(result: Explanation) -> Path:
    """The page of an explanation."""
    return result.folder / f"{result.id}.html"


def page(result: Explanation) -> str:
    """A self-contained HTML page."""
    blocks: list[Block] = [Heading(f"{result.name}: answer {result.id}", 1), Paragraph(_origin(result))]
    blocks += [*_notes(result)]
    for number, row in enumerate(result.rows[:ON_PAGE]):
        blocks += [*_row(number, row, result), BlockGroup("plots", [waterfall("score of the row", row.score)])]
    blocks += [*_further(result, ON_PAGE)]
    return to_html(f"Answer {result.id}", blocks, STYLE)


def explanation_blocks(result: Explanation) -> Iterator[Block]:
    """What the terminal shows."""
    yield Paragraph(_origin(result))
    for number, row in enumerate(result.rows[:SHOWN]):
        yield from _row(number, row, result)
    yield from _further(result, SHOWN)
    yield from _notes(result)
    yield Paragraph(f"Page: {page_file(result)}")


def _origin(result: Explanation) -> tuple[Any, ...]:
    return (f"{result.name}, of {result.at}, by package ", code(result.package[:12]), f" in {result.precision}")


def _further(result: Explanation, shown: int) -> Iterator[Block]:
    if len(result.rows) > shown:
        yield Paragraph(f"{len(result.rows) - shown:,} further rows are in --json.")


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
    known = ", as far as is known" if result.unknown else ""
    yield Paragraph(f"{same} of {len(row.features)} inputs were what they should have been{known}.{label}")


def _notes(result: Explanation) -> Iterator[Block]:
    for stage, why in result.unknown.items():
        yield Paragraph((strong(stage), f" has no part: {why}."))
    for why, count in result.left_out.items():
        yield Paragraph(f"{count:,} rows were left out: {why}.")
