"""A change between two periods (`PeriodChange`), shown on the terminal and as an HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Bullets,
    Heading,
    Paragraph,
    TableBlock,
    code,
    decimal,
    strong,
)
from isthmus.features.document.html import to_html
from isthmus.orchestration.attribution.page import measure_name, parts_table, waterfall
from isthmus.orchestration.attribution.periods.coalitions import MEANINGS
from isthmus.orchestration.attribution.report import Measure, Part

_NUMBERS = ("rows before", "rows", "mean before", "mean", "moves the mean by")
_READING = """\
Each part is a Shapley value: the effect of switching that part to the later period, averaged over all orders of
switching."""


class MeasureChange(msgspec.Struct, frozen=True):
    """Value of a measure in two periods, and the part of each cause in its change."""

    before: float
    after: float
    parts: dict[str, Part]

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def measure(self) -> Measure:
        return Measure(self.before, self.after, self.parts)


class Period(msgspec.Struct, frozen=True):
    """A period from `first` to the day before `end`; `package` is a digest, `contract` the hash of its contract."""

    first: str
    end: str
    rows: int
    package: str
    contract: str
    left_out: Mapping[str, int]


class Segment(msgspec.Struct, frozen=True):
    """A segment: rows and mean score in both periods (None without rows), and its effect `moved` on the whole mean."""

    values: dict[str, str | None]
    rows_before: int
    rows: int
    before: float | None
    after: float | None
    moved: float


@dataclass(frozen=True)
class PeriodChange:
    """Result of comparing the predictions of two periods, the earlier one first.

    `by` names the columns that define the segments. `common` is the share of rows whose segment exists in both periods.
    `largest` has the segments that moved the mean score most. `unknown` has the causes whose part is not known, with
    the reason.
    """

    name: str
    source: str
    periods: Sequence[Period]
    by: Sequence[str]
    segments: int
    common: float
    unknown: Mapping[str, str]
    measures: Mapping[str, MeasureChange]
    largest: Sequence[Segment]
    folder: Path

    def as_dict(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name != "folder"]
        plain: dict[str, Any] = msgspec.to_builtins({name: getattr(self, name) for name in names})
        for name, measure in self.measures.items():
            plain["measures"][name]["difference"] = measure.difference
        return {**plain, "page": str(page_file(self))}


def page_file(result: PeriodChange) -> Path:
    return result.folder / "change.html"


def page(result: PeriodChange) -> str:
    blocks: list[Block] = [
        Heading(f"{result.name}: from one period to another", 1),
        *_origin(result),
        Paragraph(_READING),
        *_notes(result),
        BlockGroup(
            "plots", [waterfall(name, change.measure, ("before", "after")) for name, change in result.measures.items()]
        ),
        *_tables(result),
        Heading("Parts"),
        Bullets([(strong(part), f": {MEANINGS[part]}") for part in MEANINGS]),
    ]
    return to_html(f"Change of {result.name}", blocks)


def change_blocks(result: PeriodChange) -> Iterator[Block]:
    yield from _tables(result)
    yield from _origin(result)
    yield from _notes(result)
    yield Paragraph(f"Page: {page_file(result)}")


def _tables(result: PeriodChange) -> Iterator[Block]:
    for name, change in result.measures.items():
        moved = f"{decimal(change.before)} to {decimal(change.after)}, {decimal(change.difference, sign='+')}"
        yield Heading(f"{measure_name(name)}: {moved}", 2)
        yield parts_table(change.measure, "what changed")
    yield Heading("Segments that moved the mean most", 2)
    rows = [
        [*(value or "" for value in segment.values.values()), f"{segment.rows_before:,}", f"{segment.rows:,}",
         *("" if mean is None else decimal(mean) for mean in (segment.before, segment.after)),
         decimal(segment.moved, sign="+")]
        for segment in result.largest
    ]  # fmt: skip
    yield TableBlock([*result.by, *_NUMBERS], rows, numbers=_NUMBERS)


def _origin(result: PeriodChange) -> Iterator[Block]:
    for period in result.periods:
        yield Paragraph(
            (f"{period.first} to {period.end}: {period.rows:,} rows of {result.source}, package ",
             code(period.package[:12]))
        )  # fmt: skip


def _notes(result: PeriodChange) -> Iterator[Block]:
    by = ", ".join(result.by)
    yield Paragraph(
        f"{result.segments:,} segments by {by}; {result.common:.1%} of the rows are in segments of both periods."
    )
    for part, why in result.unknown.items():
        yield Paragraph((strong(part), f" has no part: {why}."))
    for period in result.periods:
        for why, count in period.left_out.items():
            yield Paragraph(f"{count:,} rows from {period.first} on were skipped: {why}.")
