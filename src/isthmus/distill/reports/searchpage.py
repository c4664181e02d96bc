"""Render the result of a search, as an HTML page and as a part of the report's page."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from isthmus.distill.reports.comparison import explained
from isthmus.distill.reports.words import duration, measure, number, scaled
from isthmus.distill.search.trials import FORMAT, SearchTrial
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Code,
    Heading,
    Legend,
    Paragraph,
    TableBlock,
    Text,
    code,
    strong,
)
from isthmus.features.document.charts import Color, Dot, Line, plot
from isthmus.features.document.html import to_html
from isthmus.features.errors import DataError

_COLORS: Mapping[str, Color] = {"fp32": "blue", "int8": "orange"}
"""Colors by precision."""
_HINT = (
    "Dots in full color are on the Pareto front: no other student is at least as good in quality, p50 and size, and "
    "better in one of them. Dashed lines show the budget. Hover over a dot to see its name."
)


class BudgetRecord(msgspec.Struct, frozen=True):
    p99_ms: float
    memory_mb: float
    words: str
    bytes: int | None = None


class SearchResult(msgspec.Struct, frozen=True):
    format: int
    id: str
    name: str
    metric: str
    more: bool
    rows: int
    budget: BudgetRecord
    trials: list[SearchTrial] = msgspec.field(name="tried")
    front: list[int]
    threads: int
    runtime: str
    host: str
    recommended: int | None = None
    lines: dict[str, str] = {}


def read_search(data: Mapping[str, Any]) -> SearchResult:
    where, remedy = "search of students", "run `isthmus model search` again"
    if data.get("format") != FORMAT:
        raise DataError(where, f"format {data.get('format')}", expected=f"format {FORMAT}", remedy=remedy)
    try:
        return msgspec.convert(data, SearchResult)
    except msgspec.ValidationError as error:
        raise DataError(where, str(error), expected="a valid search.json", remedy=remedy) from error


def search_page(data: Mapping[str, Any]) -> str:
    read = read_search(data)
    blocks = [Heading(f"{read.name}: students of the search", 1), *search_blocks(read)]
    return to_html(f"Search of {read.name}", blocks)


def search_blocks(read: SearchResult) -> list[Block]:
    return [
        _summary(read),
        BlockGroup("card", advice(read)),
        Legend([(color, precision, "") for precision, color in _COLORS.items()]),
        *explained([read.metric, "p50", "p99"]),
        Paragraph(_HINT),
        BlockGroup("plots", _plots(read)),
        front(read),
        BlockGroup("details", [_trials(read)], "all students of the search"),
    ]


def advice(read: SearchResult) -> list[Block]:
    if read.recommended is None:
        return [Paragraph(strong("No student fits the budget."))]
    best = read.trials[read.recommended]
    why = f", the best {read.metric} within the budget, {measure(best.score)}."
    lines = [Code(text, file) for file, text in read.lines.items()]
    return [Paragraph((strong(f"Recommended: {best.name}"), why)), *lines]


def front(read: SearchResult) -> TableBlock:
    trials = sorted((read.trials[n] for n in read.front), key=lambda trial: trial.p50_us or 0.0)
    names = list(trials[0].shape) if trials else []
    figures = [read.metric, "p50", "p99", "size", "memory", "parameters"]
    rows: list[list[Text]] = [
        [
            strong(f"{trial.number}, recommended") if trial.number == read.recommended else f"{trial.number}",
            *map(str, trial.shape.values()),
            trial.precision,
            *_costs(trial),
            f"{number(trial.memory_mb)} MiB",
            number(trial.parameters),
        ]
        for trial in trials
    ]
    return TableBlock(["student", *names, "precision", *figures], rows, numbers=figures)


def _summary(read: SearchResult) -> Block:
    counts = {word: sum(trial.status == word for trial in read.trials) for word in ("trained", "over budget", "failed")}
    untrained = sum(trial.status == "over budget" and trial.score is None for trial in read.trials)
    text = (
        f"Of {len(read.trials)} students, {counts['trained']} fit the budget: {read.budget.words}. "
        f"{counts['over budget']} do not; {untrained} of these were not trained, as training does not change the cost. "
        f"{counts['failed']} failed. Measured in {read.runtime} with {read.threads} "
        f"thread{'' if read.threads == 1 else 's'} on this host ({read.host}); {read.metric} of the "
        f"exported graph on the {read.rows:,} rows of the validation part. "
    )
    return Paragraph((text, code(read.id)))


def _plots(read: SearchResult) -> list[Block]:
    plots: list[Block] = []
    trained = [trial for trial in read.trials if trial.score is not None and trial.p50_us and trial.bytes]
    axes = (("p50_us", "p50 of one prediction in µs", None), ("bytes", "bytes of the file", read.budget.bytes))
    for figure, words, limit in axes:
        dots = [
            _dot(trial, float(getattr(trial, figure)), trial.score or 0.0, measure(trial.score),
                 faint=trial.number not in read.front)
            for trial in trained
        ]  # fmt: skip
        if dots:
            fitting = [dot for dot, trial in zip(dots, trained, strict=True) if not trial.over]
            caption = f"{read.metric} (up) over {words} (right, logarithmic)"
            lines, limits = _stairs(fitting, more=read.more), _near(limit, [dot.x for dot in dots])
            plots.append(
                plot(f"{read.metric} over {figure}", caption, dots=dots, lines=lines, log=True, x_limits=limits)
            )
    costs = [
        _dot(trial, trial.p99_us, float(trial.bytes), trial.why or "in budget", faint=bool(trial.over))
        for trial in read.trials
        if trial.p99_us and trial.bytes
    ]
    if costs:
        caption = "bytes (up) over p99 in µs (right, logarithmic) of all measured students; faint: over budget"
        slowest = _near(read.budget.p99_ms * 1000, [dot.x for dot in costs])
        largest = _near(read.budget.bytes, [dot.y for dot in costs])
        plots.append(plot("bytes over p99", caption, dots=costs, log=True, x_limits=slowest, y_limits=largest))
    return plots


def _dot(trial: SearchTrial, x: float, y: float, words: str, *, faint: bool) -> Dot:
    return Dot(x, y, _COLORS.get(trial.precision, "ink"), title=f"{trial.name}: {words}", faint=faint)


def _near(limit: float | None, values: Sequence[float]) -> list[float]:
    return [limit] if limit is not None and max(values) / 3 <= limit <= max(values) * 3 else []


def _stairs(dots: Sequence[Dot], *, more: bool) -> list[Line]:
    best = max if more else min
    ordered = sorted(dots, key=lambda dot: (dot.x, -dot.y if more else dot.y))
    reached = [*accumulate((dot.y for dot in ordered), best)]
    corners: list[tuple[float, float]] = []
    for n, dot in enumerate(ordered):
        if n == 0 or (reached[n] == dot.y and reached[n - 1] != dot.y):
            corners += [(dot.x, corners[-1][1])] if corners else []
            corners.append((dot.x, dot.y))
    return [Line(corners, "ink", faint=True)] if len(corners) > 1 else []


def _trials(read: SearchResult) -> TableBlock:
    columns = ["student", "state", read.metric, "p50", "p99", "size", "seconds", "why"]
    rows = [
        [f"{trial.number}: {trial.name}", trial.status, *_costs(trial), number(trial.seconds), trial.why]
        for trial in read.trials
    ]
    return TableBlock(columns, rows, numbers=columns[2:7])


def _costs(trial: SearchTrial) -> list[str]:
    return [measure(trial.score), duration(trial.p50_us), duration(trial.p99_us), scaled(trial.bytes, "B")]
