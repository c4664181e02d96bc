"""`/status` as one HTML page without scripts or further requests, for desktops and phones."""

from collections.abc import Iterator, Mapping, Sequence

from isthmus.features.document.blocks import Block, Heading, Paragraph, TableBlock, Text, bad, code, good
from isthmus.features.document.html import to_html
from isthmus.features.projectstatus import ProjectStatus, minute, short
from isthmus.serving.wire.messages import HistoryState, LatencyState, ModelState, PublishedState, StatusAnswer

_HASHES = ("package", "contract")


def page(status: StatusAnswer) -> str:
    blocks = [
        Heading(status.name, 1),
        Paragraph((f"{minute(status.now)} by the server's clock, contract ", code(short(status.contract)))),
        *(Paragraph(bad(problem)) for problem in status.problems),
        Heading("Deployed"),
        *([Paragraph(bad(status.refused))] if status.refused else []),
        _deployed(status.models),
        Heading("Online store"),
        _online(status.views),
        Heading("Latency"),
        Paragraph(f"The objective is a p99 of {status.latency_objective_ms:g} ms: 99 of 100 take no longer."),
        _latency(status.latency),
        Heading("History"),
        _history(status.history),
        Heading("The project"),
        *_project(status.project or None),
        Paragraph(("Also available as JSON: request it with ", code("Accept: application/json"), ".")),
    ]
    return to_html(f"Status of {status.name}", blocks)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], empty: str, numbers: Sequence[str] = (), layout: str = ""
) -> Block:
    """Build a table without its empty columns, or a sentence if it has no rows."""
    if not rows:
        return Paragraph(empty)
    filled = [n for n in range(len(columns)) if any(row[n] not in ("", "-") for row in rows)]
    names, shown = [columns[n] for n in filled], [[row[n] for n in filled] for row in rows]
    return TableBlock(names, shown, [name for name in numbers if name in names], code=_HASHES, layout=layout)


def _deployed(models: Sequence[ModelState]) -> Block:
    rows = [
        [
            model.model,
            short(model.package),
            short(model.contract),
            model.precision,
            minute(model.deployed_at),
            _served(model),
        ]
        for model in models
    ]
    return _table(["model", "package", "contract", "precision", "since", "state"], rows, "No model is deployed.")


def _served(model: ModelState) -> Text:
    state: Text = good("live") if model.current else bad(model.outdated or "is outdated")
    if model.undone:
        state = (state, "; ", bad(model.undone.why))
    if model.probation:
        trouble = model.probation.refused or model.probation.problem
        return (state, "; on probation", *((", ", bad(trouble)) if trouble else ()))
    if not model.candidate:
        return state
    candidate = model.candidate
    share = f"; {candidate.role} {short(candidate.package)}, {candidate.tried.requests:,} requests"
    return (state, share, *((", ", bad(candidate.refused)) if candidate.refused else ()))


def _online(views: Mapping[str, PublishedState]) -> Block:
    columns = ["view", "materialized", "complete until", "age", "objective", "TTL", "state"]
    rows: list[list[Text]] = []
    for name, view in views.items():
        # A view without event times starts at time 0; showing that as an age would look like an alarm.
        timeless = view.known_until == 0
        expired = None not in (view.age_seconds, view.ttl_seconds) and (view.age_seconds or 0) > (view.ttl_seconds or 0)
        state = bad(view.refused) if view.refused else bad("expired") if expired else _freshness(view)
        rows.append([
            name,
            minute(view.materialized_at),
            "no times" if timeless else minute(view.known_until),
            "-" if timeless else _duration(view.age_seconds),
            _duration(view.freshness_objective_seconds),
            "no limit" if view.ttl_seconds is None else _duration(view.ttl_seconds),
            (state, ", being written" if view.pending else ""),
        ])  # fmt: skip
    return _table(columns, rows, "No views could be read.")


def _freshness(view: PublishedState) -> Text:
    age, objective = view.freshness_seconds, view.freshness_objective_seconds
    if age is None or objective is None or age <= objective:
        return good("OK")
    return bad(f"stale: {_duration(age)}, and the objective is {_duration(objective)}")


def _latency(routes: Mapping[str, LatencyState]) -> Block:
    columns = ["what", "count", "p50 in ms", "p99 in ms"]
    rows = [
        [name, f"{route.count:,}", f"{route.p50_ms:.3g}", f"{route.p99_ms:.3g}"]
        for name, route in sorted(routes.items())
    ]
    return _table(columns, rows, "There were no requests yet.", numbers=columns[1:])


def _history(events: Sequence[HistoryState]) -> Block:
    columns = ["when", "what", "model", "package", "contract", "why"]
    rows = [
        [minute(event.at), event.action, event.model, short(event.digest), short(event.contract), event.why]
        for event in events
    ]
    return _table(columns, rows, "Nothing was ever deployed.", layout="records")


def _project(status: ProjectStatus | None) -> Iterator[Block]:
    if status is None:
        yield Paragraph("Not available: the project folder is on another machine, or `isthmus status` was never run.")
        return
    in_force: Text = "in force" if status.applied else bad("not in force: run `isthmus apply`")
    if status.waiting:
        in_force = f"to replace {short(status.current)}, which is served until the new rows are written"
    seen = f"As of {minute(status.found_at)}; its definitions are "
    yield Paragraph((seen, code(short(status.contract)), ", ", in_force, "."))
    if not status.measured:
        yield Paragraph(("Expectations and drift were not measured: run ", code("isthmus status"), "."))
    yield from status.blocks()


def _duration(seconds: float | None) -> str:
    """Format a duration in the largest unit that it has two of."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
