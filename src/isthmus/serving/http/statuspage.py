"""`/status` as JSON and as an HTML page without scripts or further requests, and the models of `/models`."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from isthmus.features.contract.schema import Contract
from isthmus.features.document.blocks import Block, Heading, Paragraph, TableBlock, Text, bad, code, good
from isthmus.features.document.html import to_html
from isthmus.features.errors import ContractMismatch, DataError, DependencyError
from isthmus.features.online.loss import Losses, refusal
from isthmus.features.online.record import NEVER
from isthmus.features.projectstatus import ProjectStatus, minute, short
from isthmus.serving.deployment.history import Event
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.redis.store import Store, ViewRows
from isthmus.serving.rollout.releases import full_history
from isthmus.serving.rollout.trial import CandidateRun, Counts, ProbationRun
from isthmus.serving.settings import ServerSettings
from isthmus.serving.state import State
from isthmus.serving.wire import messages
from isthmus.serving.wire.inference import DATATYPES
from isthmus.serving.wire.messages import HistoryState, LatencyState, ModelState, PublishedState, StatusAnswer

HISTORY = 20
"""Number of latest events in the answer."""

_HASHES = ("package", "contract")


async def status(settings: ServerSettings, state: State, store: Store, metrics: Metrics, now: int) -> StatusAnswer:
    """Collect the status of the server and the project for `/status`.

    `now` is in microseconds since 1970 UTC. If a part cannot be read, for example because Redis is slow, the reason is
    listed under `problems`. Also checks whether Redis has lost rows, and updates `store.losses`. Raises NotReadyError
    while the server has no contract.
    """
    contract, problems = state.contract, []
    rows: dict[str, ViewRows] = {}
    try:
        rows = await store.view_rows(contract.project, contract.views.values(), now)
        await store.check_losses(contract.project, state.stored)
    except DependencyError as error:
        problems.append(str(error))
    if store.losses.policy:
        problems.append(store.losses.policy)
    file = Path(settings.deployment)
    events, project = await asyncio.to_thread(_read, file, problems)
    return StatusAnswer(
        name=contract.project,
        contract=contract.hash,
        now=now,
        views={name: _published(contract, name, view, store.losses, settings, now) for name, view in rows.items()},
        models=deployed_models(state),
        refused=state.refused,
        latency=metrics.latency(),
        latency_objective_ms=settings.latency_objective_ms,
        history=[HistoryState(**event.as_dict()) for event in reversed(events[-HISTORY:])],
        project=UNSET if project is None else project,
        problems=problems,
    )


def _read(deployment: Path, problems: list[str]) -> tuple[list[Event], ProjectStatus | None]:
    events: list[Event] = []
    project = None
    try:
        events = full_history(deployment)
    except DataError as error:
        problems.append(str(error))
    try:
        project = ProjectStatus.read(deployment.parent)
    except DataError as error:
        problems.append(str(error))
    return events, project


def _published(
    contract: Contract, name: str, rows: ViewRows, losses: Losses, settings: ServerSettings, now: int
) -> PublishedState:
    view, record = contract.views[name], rows.record
    why = losses.views.get(view.online_name)
    lost = None if why is None else str(refusal(name, why))
    ttl = None if view.ttl is None else view.ttl / 1e6
    objective = settings.freshness_objective_seconds.get(name)
    if record is None:
        return PublishedState(
            ttl_seconds=ttl, freshness_objective_seconds=objective, refused=lost or "nothing has been materialized"
        )
    mismatch = ContractMismatch(f"view {name}", "was materialized under another contract",
                                remedy="run `isthmus materialize`")  # fmt: skip
    # No row of the table was known yet.
    known = None if record.complete_until == NEVER else record.complete_until
    newest = None if lost else rows.newest(view)
    return PublishedState(
        materialized_at=record.at,
        known_until=known,
        age_seconds=None if known is None else (now - known) / 1e6,
        ttl_seconds=ttl,
        freshness_seconds=None if newest is None else (now - newest) / 1e6,
        freshness_objective_seconds=objective,
        pending=record.pending,
        refused=lost if record.contract == view.hash else str(mismatch),
    )


def deployed_models(state: State) -> list[ModelState]:
    model = state.model
    if model is None:
        return []
    deployment, outdated, undone = model.deployment, state.outdated, model.deployment.undone
    return [
        ModelState(
            model=deployment.model,
            package=deployment.digest,
            contract=deployment.contract,
            service=deployment.service,
            precision=deployment.precision,
            threads=deployment.threads,
            device=deployment.device,
            deployed_at=deployment.deployed_at,
            current=outdated is None,
            # An input that both the model and a request transform read is listed once.
            inputs=list(dict.fromkeys(messages.ModelInput(item.name, item.dtype.name) for item in model.inputs)),
            outdated=None if outdated is None else str(outdated),
            candidate=msgspec.UNSET if state.candidate_run is None else _candidate(state.candidate_run),
            probation=msgspec.UNSET if state.probation is None else _probation(state.probation),
            undone=msgspec.UNSET if undone is None else messages.UndoneState(undone.digest, undone.why),
            **_tensors(model),
        )
    ]


def _tensors(model: DeployedModel) -> dict[str, Any]:
    if model.inputs:
        return {}
    return {
        name: [messages.ModelTensor(item.name, DATATYPES[item.element], list(item.shape)) for item in tensors]
        for name, tensors in (("tensors", model.manifest.tensors), ("outputs", model.manifest.outputs))
    } | {"max_sizes": model.manifest.variant(model.deployment.precision).most}


def _candidate(run: CandidateRun) -> messages.CandidateState:
    deployment = run.candidate.deployment
    return messages.CandidateState(
        package=deployment.digest,
        contract=deployment.contract,
        precision=deployment.precision,
        role=run.role,
        share=run.candidate.share,
        deployed_at=deployment.deployed_at,
        deployed=_role_counts(run.standby),
        tried=_role_counts(run.counts),
        compared=run.compared,
        differing=run.differing,
        worst=run.worst if math.isfinite(run.worst) else "Infinity",
        tolerance=run.tolerance,
        dropped=run.dropped,
        refused=run.refused,
    )


def _probation(run: ProbationRun) -> messages.ProbationState:
    return messages.ProbationState(
        before=run.probation.before.digest,
        until=run.probation.until,
        deployed=_role_counts(run.counts),
        former=_role_counts(run.standby),
        refused=run.refused,
        problem=run.problem,
    )


def _role_counts(counts: Counts) -> messages.RoleCounts:
    return messages.RoleCounts(counts.requests, counts.failures, counts.p99_ms)


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
            model.precision if model.device == "cpu" else f"{model.precision} on {model.device}",
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
    if seconds is None:
        return "-"
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
