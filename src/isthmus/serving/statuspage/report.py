"""`/status`: the current state of the server, and the state of its project as last recorded."""

import asyncio
from pathlib import Path

from msgspec import UNSET

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, DataError, DependencyError
from isthmus.features.online.loss import Losses, refusal
from isthmus.features.online.record import NEVER
from isthmus.features.projectstatus import ProjectStatus
from isthmus.serving.deployment.history import Event
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.redis.store import Store, ViewRows
from isthmus.serving.rollout.releases import happened
from isthmus.serving.settings import ServerSettings
from isthmus.serving.state import State
from isthmus.serving.wire.messages import HistoryState, ModelState, PublishedState, StatusAnswer

HISTORY = 20
"""Number of latest events in the answer."""


async def status(
    settings: ServerSettings, state: State, store: Store, metrics: Metrics, models: list[ModelState], now: int
) -> StatusAnswer:
    """Build the complete status. Parts that cannot be read are listed in `problems`."""
    contract, problems = state.contract, []
    rows: dict[str, ViewRows] = {}
    try:
        rows = await store.rows(contract.project, contract.views.values(), now)
        await store.look(contract.project, state.stored)
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
        models=models,
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
        events = happened(deployment)
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
