"""`status`: where a project stands. It reads what the steps have left; it starts nothing, and changes nothing."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from isthmus.distill.declaration import Distillation
from isthmus.features.contract import Contract
from isthmus.features.days import DAY, day_name, day_of
from isthmus.features.errors import IsthmusError
from isthmus.features.manifest import package_digest
from isthmus.features.materializations import Log
from isthmus.features.offline import OfflineStore
from isthmus.features.verdict import Verdict
from isthmus.orchestration.difference import in_force
from isthmus.orchestration.models import last_model, last_package, outdated
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import quality
from isthmus.orchestration.tables import Progress, silent
from isthmus.orchestration.tables import outdated as late
from isthmus.orchestration.trainingset import latest_training_set
from isthmus.orchestration.verification import verdict_file
from isthmus.serving.deployment import Deployment

RUNS = 5
"""Runs of Dagster that are told."""


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A view.

    Attributes:
        rows: of its table; None if there is none.
        last_day: the last day with rows up to the project's present.
        age_days: whole days from then to the present.
        expired: whether all that it could serve is older than its ttl.
        built_at: when the table was written, in microseconds since 1970 UTC.
        current: whether the table is made of what sources and definitions are now.
        served_at: when its rows became readable online for the last time, in microseconds since 1970 UTC.
        served: whether Redis was told the table as it is now.
        broken: expectations that do not hold.
        drifted: features that are no longer like what a model learned from.
        problem: why nothing can be said of it; empty if all can.
    """

    rows: int | None = None
    last_day: str | None = None
    age_days: int | None = None
    expired: bool = False
    built_at: int | None = None
    current: bool = False
    served_at: int | None = None
    served: bool = False
    broken: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    problem: str = ""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A distillation.

    Attributes:
        training_set: its identity; None if there is none.
        student: its identity.
        package: digest of the last package.
        stale: what of these was made under definitions that have changed since, a sentence each.
        verdict: whether the last verdict passed; None if there is none, or if it is about another package.
        compared: values that it compared.
        verified_at: when, in microseconds since 1970 UTC, by the project's clock.
        deployed: digest of the package behind the API.
        contract: hash of the contract it was made under.
        deployed_at: since when, in microseconds since 1970 UTC.
    """

    training_set: str | None = None
    student: str | None = None
    package: str | None = None
    stale: tuple[str, ...] = ()
    verdict: bool | None = None
    compared: int = 0
    verified_at: int | None = None
    deployed: str | None = None
    contract: str | None = None
    deployed_at: int | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run of Dagster: what it was to make, how it ended, and when it began, in microseconds since 1970 UTC."""

    id: str
    made: str
    status: str
    at: int | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A project.

    Attributes:
        project: its name.
        contract: hash of the contract of today's definitions.
        applied: whether it is in force.
        now: the project's present, in microseconds since 1970 UTC.
        views: by name.
        models: by name.
        runs: the last ones, the latest first.
    """

    project: str
    contract: str
    applied: bool
    now: int
    views: dict[str, ViewStatus]
    models: dict[str, ModelStatus]
    runs: list[RunStatus]

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def status(project: Project, *, measure: bool = True, progress: Progress = silent) -> Status:
    """Where a project stands.

    Args:
        project: it.
        measure: whether expectations and drift are measured, which reads the tables.
        progress: told the view at hand and the share that is done.

    Raises:
        ConfigurationError: the definitions are wrong.
    """
    contract, before = project.definitions.contract, in_force(project)
    applied = before is not None and before.hash == contract.hash
    views = {}
    for n, name in enumerate(project.definitions.views):
        progress(f"looking at {name}", n / len(contract.views))
        try:
            views[name] = _view(project, contract, name, measure=measure and applied, applied=applied)
        except IsthmusError as error:
            views[name] = ViewStatus(problem=str(error))
    return Status(
        project=project.name,
        contract=contract.hash,
        applied=applied,
        now=project.now(),
        views=views,
        models={name: _model(project, one) for name, one in project.definitions.distillations.items()},
        runs=_runs(project.state / "dagster"),
    )


def _view(project: Project, contract: Contract, name: str, *, measure: bool, applied: bool) -> ViewStatus:
    view, store = contract.views[name], OfflineStore(project.offline)
    commit = store.commit(view)
    if commit is None:
        return ViewStatus()
    begun = [day for day in commit.days or () if day * DAY <= project.now()]
    written = Log(project.offline).of(view)
    age = None if not begun else day_of(project.now()) - max(begun)
    # A row of the last day may be as late as its end.
    expired = view.ttl is not None and bool(begun) and project.now() - (max(begun) + 1) * DAY > view.ttl
    found = quality(project, [name]) if measure and commit.contract == view.hash else None
    return ViewStatus(
        rows=commit.rows,
        last_day=day_name(max(begun)) if begun else None,
        age_days=age,
        expired=expired,
        built_at=commit.written * 1000,
        current=applied and not late(project, [name]),
        served_at=written[-1].readable if written else None,
        served=bool(written) and written[-1].fingerprint == commit.fingerprint,
        broken=tuple(map(str, found.broken())) if found else (),
        drifted=tuple(found.drifted()) if found else (),
    )


def _model(project: Project, declared: Distillation) -> ModelStatus:
    found: dict[str, Any] = {}
    stale: list[str] = []
    # What is not there, or cannot be read, is not told.
    with suppress(IsthmusError):
        made = latest_training_set(project, declared)
        if made is not None:
            found["training_set"] = made.id
            if made.contract != project.definitions.contract.hash:
                stale.append("training set: the definitions have changed since")
    with suppress(IsthmusError):
        found["student"] = last_model(project, declared).name
    with suppress(IsthmusError):
        package = last_package(project, declared)
        found["package"] = package_digest(package)
        stale += [f"package: {change}" for change in outdated(package, project.definitions.contract)]
        file = verdict_file(project, declared)
        verdict = Verdict.loads(file.read_bytes(), str(file)) if file.exists() else None
        if verdict is not None and verdict.package == found["package"]:
            found |= {"verdict": verdict.passed, "compared": verdict.compared, "verified_at": verdict.at}
    with suppress(IsthmusError, OSError):
        deployed = Deployment.loads(project.deployment_file.read_bytes(), str(project.deployment_file))
        if deployed.model == declared.name:
            found |= {
                "deployed": deployed.digest, "contract": deployed.contract, "deployed_at": deployed.deployed_at,
            }  # fmt: skip
    return ModelStatus(**found, stale=tuple(stale))


def _runs(home: Path) -> list[RunStatus]:
    """The last runs of the project's Dagster; none where there was none, or no Dagster."""
    if not (home / "dagster.yaml").exists():
        return []
    try:
        import dagster as dg
    except ImportError:
        return []
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return [
            RunStatus(
                id=one.dagster_run.run_id,
                made=_named(one.dagster_run.asset_selection),
                status=one.dagster_run.status.value.lower(),
                at=None if one.start_time is None else int(one.start_time * 1e6),
            )
            for one in instance.get_run_records(limit=RUNS)
        ]


def _named(chosen: Iterable[Any] | None) -> str:
    names = sorted("/".join(key.path) for key in chosen or ())
    return "everything" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
