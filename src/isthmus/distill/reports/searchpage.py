"""What a search found, as an HTML page and as a part of one."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

import msgspec

from isthmus.distill.reports.plots import STYLE, Dot, scatter
from isthmus.distill.reports.words import duration, measure, number, scaled
from isthmus.distill.search.trials import Tried
from isthmus.features.errors import DataError
from isthmus.features.html import document, table

FORMAT = 1
_KINDS = {"fp32": "student", "int8": "control"}
"""The color of each precision."""
_KEY = """\
<p class="student"><i class="dot"></i> fp32</p>
<p class="control"><i class="dot"></i> int8</p>
<p>Strong dots are on the front: nothing that was tried is at least as good in quality, p50 and size, and better in one.
Dashed lines are the budget, where it is near. A dot has its name where the mouse rests on it.</p>"""


class Budget(msgspec.Struct, frozen=True):
    """What a student may take, also in words."""

    p99_ms: float
    memory_mb: float
    words: str
    bytes: int | None = None


class Found(msgspec.Struct, frozen=True):
    """`search.json`; docs/search.md says what each part means."""

    format: int
    id: str
    name: str
    metric: str
    more: bool
    rows: int
    budget: Budget
    tried: list[Tried]
    front: list[int]
    threads: int
    runtime: str
    host: str
    recommended: int | None = None
    lines: dict[str, str] = {}


def read_search(data: Mapping[str, Any]) -> Found:
    """What a search found, from its plain data.

    Raises:
        DataError: it is no such thing of this format.
    """
    where, remedy = "search of students", "run `isthmus search` again"
    if data.get("format") != FORMAT:
        raise DataError(where, f"format {data.get('format')}", expected=f"format {FORMAT}", remedy=remedy)
    try:
        return msgspec.convert(data, Found)
    except msgspec.ValidationError as error:
        raise DataError(where, str(error), expected="the search.json of a search", remedy=remedy) from error


def search_page(data: Mapping[str, Any]) -> str:
    """The page.

    Args:
        data: plain data of `search.json`.

    Raises:
        DataError: it is no such thing.
    """
    read = read_search(data)
    parts = [f"<h1>{escape(read.name)}: students that were tried</h1>", *search_parts(read)]
    return document(f"Search of {read.name}", parts, STYLE)


def search_parts(read: Found) -> list[str]:
    """What there is to say of it."""
    return [
        _summary(read),
        _advice(read),
        _KEY,
        f'<div class="plots">{"".join(_plots(read))}</div>',
        _table(read, [read.tried[place] for place in read.front]),
        "<details><summary>all students that were tried</summary>" + _all(read) + "</details>",
    ]


def _summary(read: Found) -> str:
    counts = {word: sum(one.status == word for one in read.tried) for word in ("trained", "over budget", "failed")}
    untrained = sum(one.status == "over budget" and one.score is None for one in read.tried)
    return (
        f"<p>Of {len(read.tried)} students {counts['trained']} keep to the budget: {escape(read.budget.words)}. "
        f"{counts['over budget']} do not, {untrained} of which were not trained: a graph costs the same before. "
        f"{counts['failed']} failed. Measured in {escape(read.runtime)} with {read.threads} "
        f"thread{'' if read.threads == 1 else 's'} on this host ({escape(read.host)}); {escape(read.metric)} by the "
        f"exported graph on the {read.rows:,} rows of the validation part, never the test part. "
        f"<code>{escape(read.id)}</code></p>"
    )


def _advice(read: Found) -> str:
    if read.recommended is None:
        return "<p><b>No student keeps to the budget.</b></p>"
    best = read.tried[read.recommended]
    lines = "".join(f"<p>{escape(file)}</p><pre>{escape(line)}</pre>" for file, line in read.lines.items())
    return (
        f'<div class="card"><p><b>Recommended: {escape(best.name)}</b>, the best {escape(read.metric)} within the '
        f"budget, {measure(best.score)}.</p>{lines}</div>"
    )


def _plots(read: Found) -> list[str]:
    shown, plots = set(read.front), []
    trained = [one for one in read.tried if one.score is not None and one.p50_us and one.bytes]
    limits = {"p50_us": None, "bytes": read.budget.bytes}
    for figure, words in (("p50_us", "p50 of one answer in µs"), ("bytes", "bytes of the file")):
        dots = [
            Dot(
                _KINDS.get(one.precision, "other"), float(getattr(one, figure)), one.score or 0.0,
                f"{one.name}: {measure(one.score)}", faint=one.number not in shown,
            )
            for one in trained
        ]  # fmt: skip
        if dots:
            stairs = _stairs([dot for dot, one in zip(dots, trained, strict=True) if not one.over], more=read.more)
            told = f"{escape(read.metric)} (up) over {words} (right, logarithmic)"
            plots.append(
                scatter(dots, f"{read.metric} over {figure}", told, stairs=stairs, limits=(limits[figure], None))
            )
    costs = [
        Dot(
            _KINDS.get(one.precision, "other"), one.p99_us, float(one.bytes), f"{one.name}: {one.why or 'in budget'}",
            faint=bool(one.over),
        )
        for one in read.tried
        if one.p99_us and one.bytes
    ]  # fmt: skip
    if costs:
        told = "bytes (up) over p99 in µs (right, logarithmic) of all that were measured; faint: over budget"
        plots.append(scatter(costs, "bytes over p99", told, limits=(read.budget.p99_ms * 1000, read.budget.bytes)))
    return plots


def _stairs(dots: Sequence[Dot], *, more: bool) -> list[tuple[float, float]]:
    """From left to right the dots that are better than all to their left."""
    best = max if more else min
    ordered = sorted(dots, key=lambda dot: (dot.x, -dot.y if more else dot.y))
    reached = [*accumulate((dot.y for dot in ordered), best)]
    return [
        (dot.x, dot.y) for n, dot in enumerate(ordered) if n == 0 or (reached[n] == dot.y and reached[n - 1] != dot.y)
    ]


def _table(read: Found, rows: Sequence[Tried]) -> str:
    names = list(rows[0].shape) if rows else []
    columns = ["student", *map(escape, names), "precision", escape(read.metric), "p50", "p99", "size", "memory"]
    columns += ["parameters"]
    cells = [
        [
            f"<b>{one.number}, recommended</b>" if one.number == read.recommended else f"{one.number}",
            *(escape(str(value)) for value in one.shape.values()),
            escape(one.precision),
            measure(one.score),
            duration(one.p50_us),
            duration(one.p99_us),
            scaled(one.bytes, "B"),
            f"{number(one.memory_mb)} MiB",
            number(one.parameters),
        ]
        for one in sorted(rows, key=lambda one: one.p50_us or 0.0)
    ]
    return table(columns, cells, numbers=columns[len(names) + 2 :]) if cells else ""


def _all(read: Found) -> str:
    columns = ["student", "", escape(read.metric), "p50", "p99", "size", "seconds", "why"]
    rows = [
        [
            f"{one.number}: {escape(one.name)}",
            escape(one.status),
            measure(one.score),
            duration(one.p50_us),
            duration(one.p99_us),
            scaled(one.bytes, "B"),
            number(one.seconds),
            escape(one.why),
        ]
        for one in read.tried
    ]
    return table(columns, rows, numbers=columns[2:7])
