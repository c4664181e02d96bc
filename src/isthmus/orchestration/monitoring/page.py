"""Production quality on the terminal and as an HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from isthmus.distill.gates import limits_text, value_text
from isthmus.features import clock
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Code,
    Figure,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    aside,
    bad,
    cell,
    code,
    good,
    plain,
    strong,
)
from isthmus.features.document.charts import Dot, plot
from isthmus.features.document.html import image, to_html
from isthmus.features.production import MeasuredValue, PackageQuality, Production, Quality
from isthmus.orchestration.monitoring.deploymentloss import describe_loss

_READING = """\
Each figure has its 95 % interval, which assumes independent rows. Each answer is matched with the label of its moment,
as known by now. Each label counts once per package."""


def page_file(file: Path) -> Path:
    return file.with_suffix(".html")


def page(result: Production) -> str:
    blocks: list[Block] = [
        Heading(f"{result.model}: production quality", 1),
        Paragraph(f"Labels known by {_moment(result.at)}."),
        Paragraph(_READING),
        *_blocks(result),
        BlockGroup("plots", list(plots(result).values())),
    ]
    for package in result.packages:
        blocks += [Heading(("Package ", code(package.package[:12]), f" in {package.precision}"))]
        blocks += [Paragraph(f"Answers from {_moment(package.first)} to {_moment(package.last)}.")]
        blocks += [Heading("Weeks", 3), _table("week", [(week.week, week) for week in package.weeks])]
        if package.slices:
            named = [(part.name, part) for part in package.slices]
            blocks += [Heading("Worst slices", 3), _table("slice", named)]
        blocks += _drift(package)
        blocks += [Paragraph((strong("Not known: "), f"{why}.")) for why in package.unknown]
    return to_html(f"Production quality of {result.model}", blocks)


def screen(result: Production, file: Path) -> Iterator[Block]:
    yield from _blocks(result, narrow=True)
    if result.packages:
        newest = result.packages[0]
        yield _table("week", [(week.week, week) for week in newest.weeks], only=result.metric)
        yield from _drift(newest)
        yield from (Paragraph(f"Not known: {why}") for why in newest.unknown)
    yield Paragraph(f"Page: {page_file(file)}")


def headline(result: Production) -> dict[str, str]:
    measures = result.packages[0].measures if result.packages else {}
    return {name: " ".join(map(plain, _parts(found, True))) for name, found in measures.items()}


def slice_table(result: Production) -> TableBlock:
    return _table("slice", [(part.name, part) for part in result.packages[0].slices], only=result.metric)


def images(result: Production) -> dict[str, str]:
    return {name: image(figure) for name, figure in plots(result).items()}


def plots(result: Production) -> Mapping[str, Figure]:
    names = dict.fromkeys(name for package in result.packages for week in package.weeks for name in week.measures)
    return {name: _plot(result, name) for name in names}


def _plot(result: Production, name: str) -> Figure:
    points = [
        (week, n == 0) for n, package in enumerate(result.packages) for week in package.weeks if name in week.measures
    ]
    limits = [
        end
        for bound in result.bounds
        if bound.measure == name
        for end in (bound.at_least, bound.at_most)
        if end is not None
    ]
    weeks = sorted({week.week for week, _ in points})
    dots = []
    for week, newest in points:
        found = week.measures[name]
        interval = None if found.low is None or found.high is None else (found.low, found.high)
        # Packages that answered in the same week are drawn side by side.
        x = weeks.index(week.week) + (0.15 if newest else -0.15)
        dots.append(Dot(x, found.value, "green" if newest else "gray", interval=interval))
    title = "mean score" if name == "score" else "mean label" if name == "label" else name.replace("_", " ")
    return plot(f"{title} by week", f"{title} by week", dots=dots, x_names=weeks, y_limits=limits)


def _blocks(result: Production, *, narrow: bool = False) -> Iterator[Block]:
    if not result.packages:
        yield Paragraph("The table of recorded answers has no answer of this model. To record answers, add")
        yield Code("[server.record]", "isthmus.toml")
        yield Paragraph("and restart the server. Then run `isthmus answers collect` to collect the answers.")
    else:
        named: list[tuple[Text, Quality]] = [
            ((code(package.package[:12]), f" {package.precision}"), package) for package in result.packages
        ]
        yield _table("package", named, only=result.metric if narrow else None)
    if result.bounds:
        rows: list[Sequence[Text]] = []
        for bound in result.bounds:
            known = bound.found is not None
            rows.append(
                [
                    limits_text(bound),
                    bad("broken") if bound.broken else good("holds") if known else "",
                    value_text(bound),
                ]
            )
        yield TableBlock(["bound", "", "found"], rows)
    found = [loss for package in result.packages for loss in package.lost]
    if found:
        yield TableBlock(["allowed loss", "", "found"], [
            [
                f"{loss.measure}: at most {loss.at_most:g}",
                bad("beyond") if loss.beyond else "" if loss.value is None else good("holds"),
                describe_loss(loss),
            ]
            for loss in found
        ])  # fmt: skip
    if result.undone:
        yield Paragraph(result.undone)
    for why, count in result.left_out.items():
        yield Paragraph(f"{count:,} rows are not counted: {why}.")


def _table(first: str, named: Sequence[tuple[Text, Quality]], only: str | None = None) -> TableBlock:
    measures = list(dict.fromkeys(name for _, part in named for name in part.measures))
    rows = [
        [
            name,
            f"{part.answers:,}",
            f"{part.rows:,}",
            *(_parts(part.measures.get(each), only in (None, each)) for each in measures),
        ]
        for name, part in named
    ]
    titles = [name.replace("_", " ") for name in measures]
    numbers = ["answers", "labeled", *titles]
    return TableBlock([first, *numbers], rows, numbers=numbers)


def _parts(found: MeasuredValue | None, interval: bool) -> tuple[Text, ...]:
    if found is None:
        return (cell(None),)
    if not interval or found.low is None or found.high is None:
        return (cell(found.value),)
    return (cell(found.value), aside(f"{cell(found.low)} to {cell(found.high)}"))


def _drift(package: PackageQuality) -> Iterator[Block]:
    if not package.drift:
        return
    yield Heading(f"Drift from the training set since {_moment(package.drift_since or package.first)}", 3)
    rows: list[Sequence[Text]] = []
    for found in sorted(package.drift, key=lambda each: -each.psi):
        drifted = bad(", ".join(found.exceeded)) if found.exceeded else ""
        rows.append([found.name, f"{found.rows:,}", *map(cell, (found.psi, found.ks, found.wasserstein)), drifted])
    numbers = ["rows", "psi", "ks", "wasserstein"]
    yield TableBlock(["input", *numbers, "drifted"], rows, numbers=numbers)


def _moment(at: int) -> str:
    return clock.moment(at).isoformat(timespec="minutes").replace("+00:00", "Z")
