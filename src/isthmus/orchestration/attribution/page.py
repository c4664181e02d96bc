"""Shows an attribution, which splits a prediction error among stages: as terminal output, HTML page or images."""

from collections.abc import Iterator, Sequence

from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Bullets,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    bad,
    cell,
    code,
    decimal,
    good,
    strong,
)
from isthmus.features.document.charts import ChartRow, Color, rows_chart
from isthmus.features.document.html import image, to_html
from isthmus.orchestration.attribution.report import SCORE, Attribution, Measure, page_file, rows_file, skipped
from isthmus.orchestration.attribution.stages import MEANINGS

# Parts with a wider range interact with other parts.
MIXED = 1e-9
# Sign of an improvement; a mean score has none.
_BETTER = {"auc": 1, "log_loss": -1, "rmse": -1, "mae": -1}
NUMBERS = ("part", "lowest", "highest", "of the difference")
# Relative size below which a part is a rounding error.
_NONE = 1e-6
_READING = """\
Ideal is the teacher's answer to the features that could be known at the moment of a row. Each part is a Shapley value:
the effect of a stage, averaged over all orders of swapping the stages. Lowest and highest are its effects in a single
order."""


def page(result: Attribution) -> str:
    blocks: list[Block] = [
        Heading(f"{result.name}: from the ideal answer to the actual answer", 1),
        Paragraph(_origin(result)),
        Paragraph(_READING),
        *_bounds(result),
        *_notes(result),
        BlockGroup("plots", [waterfall(name, measure) for name, measure in result.measures.items()]),
    ]
    for name, measure in result.measures.items():
        blocks += [Heading(_title(name, measure), 2), parts_table(measure)]
    blocks += [Heading("Rows"), _each(result), Heading("Rows farthest from the ideal", 3), _largest(result)]
    blocks += [Heading("Stages"), Bullets([(strong(stage), f": {MEANINGS[stage]}") for stage in MEANINGS])]
    return to_html(f"Attribution of {result.name}", blocks)


def _origin(result: Attribution) -> Text:
    package, examples = code(result.package[:12]), code(result.training_set)
    answered = f" in {result.precision} and {result.runtime}, training set "
    rows = f"{result.rows:,} {'rows' if result.matched is None else 'recorded rows'}, package "
    return (rows, package, answered, examples)


def screen(result: Attribution) -> Iterator[Block]:
    for name, measure in result.measures.items():
        yield Heading(_title(name, measure))
        yield parts_table(measure)
    yield _each(result)
    yield from _bounds(result)
    yield from _notes(result)
    yield Paragraph(f"{result.rows:,} rows, with their parts: {rows_file(result.folder)}")
    yield Paragraph(f"Page: {page_file(result.folder)}")


def images(result: Attribution) -> dict[str, str]:
    return {measure_name(name): image(waterfall(name, measure)) for name, measure in result.measures.items()}


def waterfall(name: str, measure: Measure, names: tuple[str, str] = ("ideal", "answer")) -> Figure:
    at, rows = measure.ideal, [ChartRow(names[0], bars=[(None, measure.ideal, "gray")], text=cell(measure.ideal))]
    for stage, part in measure.parts.items():
        gain = part.value * _BETTER.get(name, 0)
        color: Color = "green" if gain > 0 else "red" if gain < 0 else "soft"
        span = (at + part.low, at + part.high) if part.high - part.low > MIXED else None
        rows.append(ChartRow(stage, bars=[(at, at + part.value, color)], span=span, text=_change(part.value, measure)))
        at += part.value
    rows.append(ChartRow(names[1], bars=[(None, measure.answer, "gray")], text=cell(measure.answer)))
    return rows_chart(rows, f"waterfall of {measure_name(name)}", measure_name(name))


def _change(value: float, measure: Measure) -> str:
    scale = max(abs(measure.ideal), abs(measure.answer))
    return "~0" if 0 < abs(value) < _NONE * scale else decimal(value, sign="+") if value else "0"


def measure_name(measure: str) -> str:
    return "mean score" if measure == SCORE else measure.replace("_", " ")


def _title(name: str, measure: Measure) -> str:
    moved = f"{cell(measure.ideal)} to {cell(measure.answer)}"
    return f"{measure_name(name)}: {moved}, {_change(measure.difference, measure)}"


def parts_table(measure: Measure, kind: str = "stage") -> TableBlock:
    rows: list[Sequence[Text]] = []
    for stage, part in measure.parts.items():
        mixed = part.high - part.low > MIXED
        share = f"{part.value / measure.difference:z.1%}" if abs(measure.difference) > MIXED else ""
        ends = (_change(part.low, measure), _change(part.high, measure)) if mixed else ("", "")
        rows.append([stage, _change(part.value, measure), *ends, share])
    return TableBlock([kind, *NUMBERS], rows, numbers=NUMBERS, layout="records")


def _each(result: Attribution) -> TableBlock:
    rows = [[stage, _near(value)] for stage, value in result.each.items()]
    column = "moves the score of a row by"
    return TableBlock(["stage", column], rows, numbers=[column])


def _largest(result: Attribution) -> TableBlock:
    columns = list(result.largest[0]) if result.largest else []
    rows = [
        [_near(value) if isinstance(value, float) else cell(value) for value in row.values()] for row in result.largest
    ]
    return TableBlock(columns, rows, layout="records")


def _near(value: float) -> str:
    return "~0" if 0 < abs(value) < _NONE else cell(value)


def _bounds(result: Attribution) -> Iterator[Block]:
    if result.bounds:
        rows: list[Sequence[Text]] = []
        for bound in result.bounds:
            outcome = good("holds") if bound.holds else bad("broken")
            rows.append([bound.metric, outcome, cell(bound.found), bound.expected])
        yield TableBlock(["bound", "", "found", "expected"], rows, numbers=["found"])


def _notes(result: Attribution) -> Iterator[Block]:
    for stage, why in result.unknown.items():
        yield Paragraph((strong(stage), f" has no part: {why}."))
    for why, count in result.left_out.items():
        yield Paragraph(f"{skipped(count, why)}.")
    if result.matched is not None:
        yield Paragraph(f"Labels and skew are known for {result.matched:,} rows, which the training set also has.")
