"""`/status` as one HTML page: no script, nothing fetched, on a desk and on a phone."""

from collections.abc import Iterable
from html import escape

from isthmus.features import clock
from isthmus.features.html import document, table
from isthmus.features.status import ModelStatus, Status, ViewStatus
from isthmus.serving.wire.messages import LatencyState, ModelState, PublishedState, StatusAnswer

_STYLE = """\
.wide { margin-bottom: .8rem } td code { white-space: nowrap }
@media (max-width: 40rem) { tr:has(th) { display: none }
  tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0 }
  td { display: block; position: relative; border: 0; padding: .1rem 0 .1rem 8.5rem; min-height: 1.8em }
  td.n { text-align: left } td::before { content: attr(data-of); color: var(--soft); position: absolute; left: 0 } }
"""


def page(found: StatusAnswer) -> str:
    """The page."""
    parts = [
        f"<h1>{escape(found.name)}</h1>",
        f"<p>{_time(found.now)} by the server's clock, contract {_short(found.contract)}</p>",
        *(f'<p class="bad">{escape(problem)}</p>' for problem in found.problems),
        "<h2>Deployed</h2>",
        _deployed(found),
        "<h2>Online store</h2>",
        _online(found.views),
        "<h2>Latency</h2>",
        _latency(found.latency, found.latency_objective_ms),
        "<h2>History</h2>",
        _history(found),
        "<h2>The project</h2>",
        *(_project(found.project) if found.project else ["<p>Its folder is elsewhere, or nobody has looked yet.</p>"]),
        "<p>The same as JSON: ask for it with <code>Accept: application/json</code>.</p>",
    ]
    return document(f"Status of {found.name}", parts, _STYLE)


def _deployed(found: StatusAnswer) -> str:
    columns = ["model", "package", "contract", "precision", "since", "state"]
    rows = [
        [
            escape(one.model), _short(one.package), _short(one.contract), escape(one.precision),
            _time(one.deployed_at), _served(one),
        ]
        for one in found.models
    ]  # fmt: skip
    refused = f'<p class="bad">{escape(found.refused)}</p>' if found.refused else ""
    return refused + (table(columns, rows) if rows else "<p>No model is deployed.</p>")


def _served(one: ModelState) -> str:
    state = _good("answers") if one.current else _bad(one.outdated or "is outdated")
    if not one.candidate:
        return state
    tried = one.candidate
    told = f"{tried.role} {tried.package[:12]}, {tried.tried.requests:,} requests"
    return f"{state}; {escape(told)}" + (f", {_bad(tried.refused)}" if tried.refused else "")


def _online(views: dict[str, PublishedState]) -> str:
    columns = ["view", "materialized", "rows known until", "age", "holds for", "state"]
    rows = []
    for name, view in views.items():
        expired = None not in (view.age_seconds, view.ttl_seconds) and (view.age_seconds or 0) > (view.ttl_seconds or 0)
        # What has no times holds from the beginning of the clock: its age would alarm for nothing.
        timeless = view.known_until == 0
        word = _bad(view.refused) if view.refused else _bad("expired") if expired else _good("readable")
        rows.append(
            [
                escape(name), _time(view.materialized_at), "no times" if timeless else _time(view.known_until),
                "-" if timeless else _span(view.age_seconds),
                "ever" if view.ttl_seconds is None else _span(view.ttl_seconds),
                word + (", being written" if view.pending else ""),
            ]
        )  # fmt: skip
    return table(columns, rows) if rows else "<p>Nothing is known of it.</p>"


def _latency(found: dict[str, LatencyState], objective: float) -> str:
    columns = ["what", "count", "p50 in ms", "p99 in ms"]
    rows = [
        [escape(name), f"{one.count:,}", f"{one.p50_ms:.3g}", f"{one.p99_ms:.3g}"]
        for name, one in sorted(found.items())
    ]
    told = f"<p>The objective is a p99 of {objective:g} ms.</p>"
    return told + (table(columns, rows, numbers=columns[1:]) if rows else "<p>Nothing was asked yet.</p>")


def _history(found: StatusAnswer) -> str:
    columns = ["when", "what", "model", "package", "contract", "why"]
    rows = [
        [
            _time(one.at), escape(one.action), escape(one.model), _short(one.digest), _short(one.contract),
            escape(one.why),
        ]
        for one in found.history
    ]  # fmt: skip
    return table(columns, rows) if rows else "<p>Nothing was ever deployed.</p>"


def _project(found: Status) -> Iterable[str]:
    """What `isthmus status` found."""
    force = "in force" if found.applied else _bad("not in force: run `isthmus apply`")
    yield f"<p>As it was found on {_time(found.found_at)}; its definitions are {_short(found.contract)}, {force}.</p>"
    if not found.measured:
        yield "<p>Expectations and drift were not measured: run <code>isthmus status</code>.</p>"
    columns = ["view", "rows", "last day", "built", "readable online", "state"]
    rows = [
        [
            escape(name), "-" if view.rows is None else f"{view.rows:,}",
            "no times" if view.timeless else escape(view.last_day or "-"), _time(view.built_at),
            _time(view.served_at), _state(view, found.applied),
        ]
        for name, view in found.views.items()
    ]  # fmt: skip
    yield table(columns, rows, numbers=columns[1:2])
    for name, view in found.views.items():
        yield from _sentences(name, filter(None, (view.problem, *view.broken, *view.drifted)))
    if found.models:
        columns = ["model", "training set", "student", "package", "verdict", "deployed"]
        made = [
            [
                escape(name), _short(one.training_set), _short(one.student), _short(one.package), _verdict(one),
                f"{_short(one.deployed)} {'' if one.deployed is None else _time(one.deployed_at)}",
            ]
            for name, one in found.models.items()
        ]  # fmt: skip
        yield table(columns, made)
        for name, one in found.models.items():
            yield from _sentences(name, one.stale)
    if found.runs:
        columns = ["run", "began", "ended with", "made"]
        words = {"success": _good, "failure": _bad}
        yield table(
            columns,
            [
                [escape(run.id[:8]), _time(run.at), words.get(run.status, escape)(run.status), escape(run.made)]
                for run in found.runs
            ],
        )


def _state(view: ViewStatus, applied: bool) -> str:
    wrong = view.wrong(applied=applied)
    return _bad(", ".join(wrong)) if wrong else _good("up to date")


def _verdict(model: ModelStatus) -> str:
    if model.verdict is None:
        return "none" if model.package else "-"
    return f"{_good('passed') if model.verdict else _bad('failed')}, {model.compared:,} values"


def _sentences(name: str, sentences: Iterable[str]) -> Iterable[str]:
    return (f'<p><span class="bad">{escape(name)}</span>: {escape(sentence)}</p>' for sentence in sentences)


def _good(text: str) -> str:
    return f'<span class="good">{escape(text)}</span>'


def _bad(text: str) -> str:
    return f'<span class="bad">{escape(text)}</span>'


def _short(identity: str | None) -> str:
    return "-" if identity is None else f"<code>{escape(identity[:12])}</code>"


def _time(at: int | None) -> str:
    return "-" if at is None else f"{clock.moment(at):%Y-%m-%d %H:%M}"


def _span(seconds: float | None) -> str:
    """A duration, in the largest unit of which it has two."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
