"""`isthmus status`: the state of a project, read from files, tables and a running Redis. `write_status` saves it."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from isthmus.distill.declaration import Distillation
from isthmus.features import clock
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.days import DAY, day_name, day_of
from isthmus.features.errors import DataError, IsthmusError, LostRowsError
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import loss
from isthmus.features.online.pushes import Backlog
from isthmus.features.online.store import OnlineStore
from isthmus.features.progress import Progress, silent
from isthmus.features.projectstatus import ModelStatus, ProjectStatus, RunStatus, SpoolStatus, StreamStatus, ViewStatus
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.orchestration.apply.diff import applied_contract
from isthmus.orchestration.artifacts import Artifacts, contract_changes, verdict_file
from isthmus.orchestration.maintenance.maintain import spaces
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality.measure import quality
from isthmus.orchestration.tables.build import outdated_views
from isthmus.package.manifest import package_digest
from isthmus.package.verdict import Verdict
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.recorder.spool import waiting

RUNS = 5  # number of Dagster runs to report


def status(project: Project, *, measure: bool = True, progress: Progress = silent) -> ProjectStatus:
    """Return the state of a project: views, models, and runs. With `measure`, also measure expectations and drift.

    Measuring reads all tables, and is skipped if the definitions are not applied. If a view cannot be read, `problem`
    of its status has the error. Leaves out training sets, models and packages that are missing or cannot be read.
    Reports pushed rows that wait in Redis, and rows that Redis lost, only while Redis runs. Raises a ConfigurationError
    if the definitions have errors.
    """
    contract, before = project.definitions.contract, applied_contract(project)
    current = project.generations().current if before else None
    applied = before is not None and before.hash == contract.hash
    views = {}
    backlogs, losses = _online(project, contract, current or contract)
    for n, name in enumerate(project.definitions.views):
        progress(f"checking {name}", n / len(contract.views))
        try:
            view = _view(project, contract, name, measure=measure and applied, applied=applied)
        except IsthmusError as error:
            view = ViewStatus(problem=str(error))
        if (backlog := backlogs.get(name)) is not None:
            view = msgspec.structs.replace(view, waiting=backlog.rows, waiting_since=backlog.since)
        served = (current or contract).views.get(name)
        if served is not None and (why := losses.views.get(served.online_name)):
            refusal = loss.refusal(name, why)
            view = msgspec.structs.replace(view, lost=f"{refusal.found}: {refusal.remedy}")
        views[name] = view
    return ProjectStatus(
        project=project.name,
        contract=contract.hash,
        applied=applied,
        now=project.now(),
        views=views,
        models={name: _model(project, declared) for name, declared in project.definitions.distillations.items()},
        runs=_runs(project.state / "dagster"),
        measured=measure and applied,
        found_at=clock.now(),
        current=current.hash if current else None,
        spool=_spool(project),
        online=losses.policy,
        streams=StreamStatus.read_all(project.state),
        spaces=spaces(project) if measure else {},
    )


def require_rows(status: ProjectStatus) -> None:
    for name, view in status.views.items():
        if view.lost:
            raise LostRowsError(f"view {name}", view.lost)


def write_status(project: Project) -> None:
    """Write the status of a project to a file in its state folder, for the server. Does not measure the tables.

    Keeps the results of expectations and drift in the previous file if tables, training sets and definitions have not
    changed.
    """
    current, before = status(project, measure=False), None
    with suppress(DataError):
        before = ProjectStatus.read(project.state)
    if before is not None and before.measured and _measured_of(before) == _measured_of(current):
        views = {
            name: msgspec.structs.replace(view, broken=before.views[name].broken, drifted=before.views[name].drifted)
            for name, view in current.views.items()
        }
        current = msgspec.structs.replace(current, views=views, measured=True, spaces=before.spaces)
    current.write(project.state)


def _measured_of(status: ProjectStatus) -> tuple[object, ...]:
    tables = {name: view.built_at for name, view in status.views.items()}
    return status.contract, tables, {name: model.training_set for name, model in status.models.items()}


def _view(project: Project, contract: Contract, name: str, *, measure: bool, applied: bool) -> ViewStatus:
    view, store = contract.views[name], project.offline_store()
    commit = store.commit(view)
    if commit is None:
        return ViewStatus()
    begun = [day for day in commit.days or () if day * DAY <= project.now()]
    written = MaterializationLog(project.offline, project.storage_options).runs(view)
    age = None if not begun else day_of(project.now()) - max(begun)
    # The newest row may have any time in the last day, so count from the end of that day.
    expired = view.ttl is not None and bool(begun) and project.now() - (max(begun) + 1) * DAY > view.ttl
    report = quality(project, [name]) if measure and commit.contract == view.hash else None
    return ViewStatus(
        rows=commit.rows,
        last_day=day_name(max(begun)) if begun else None,
        age_days=age,
        expired=expired,
        built_at=commit.written * 1000,
        current=applied and not outdated_views(project, [name]),
        served_at=written[-1].readable if written else None,
        served=bool(written) and _base(store, view, written[-1]) == commit.base,
        broken=tuple(map(str, report.broken())) if report else (),
        drifted=tuple(report.drifted()) if report else (),
    )


def _online(project: Project, contract: Contract, served: Contract) -> tuple[dict[str, Backlog], loss.Losses]:
    with suppress(IsthmusError):
        url = project.running_redis()
        if url is not None:
            with translate_errors(url), connect(url) as client:
                store = OnlineStore(client, contract)
                losses = OnlineStore(client, served).losses(loss.read(project.state / loss.FILE))
                return {name: store.backlog(view.table) for name, view in contract.views.items()}, losses
    return {}, loss.Losses()


def _spool(project: Project) -> SpoolStatus | None:
    if project.settings.server.record is None:
        return None
    try:
        spool = waiting(project.spool)
    except OSError:  # no folder yet, or only the servers may read it
        return None
    return SpoolStatus(bytes=spool.size, since=None if spool.since is None else int(spool.since * 1e6))


def _base(store: OfflineStore, view: ViewContract, run: Materialization) -> str:
    """Return the fingerprint of the table that a materialization wrote to Redis, apart from pushed rows."""
    with suppress(IsthmusError):
        commit = store.commit(view, run.version)
        if commit is not None and commit.fingerprint == run.fingerprint:
            return commit.base
    return run.fingerprint


def _model(project: Project, declared: Distillation) -> ModelStatus:
    fields: dict[str, Any] = {}
    stale: list[str] = []
    # Leave out what is missing or cannot be read.
    with suppress(IsthmusError):
        examples = Artifacts(project, declared).latest_training_set()
        if examples is not None:
            fields["training_set"] = examples.id
            if examples.contract != project.definitions.contract.hash:
                stale.append("training set: the definitions have changed")
    with suppress(IsthmusError):
        fields["student"] = Artifacts(project, declared).last_model().name
    with suppress(IsthmusError):
        package = Artifacts(project, declared).last_package()
        fields["package"] = package_digest(package)
        stale += [f"package: {change}" for change in contract_changes(package, project.definitions.contract)]
        file = verdict_file(project, declared)
        verdict = Verdict.loads(file.read_bytes(), str(file)) if file.exists() else None
        if verdict is not None and verdict.package == fields["package"]:
            fields |= {"verdict": verdict.passed, "compared": verdict.compared, "verified_at": verdict.at}
    with suppress(IsthmusError, OSError):
        deployed = Deployment.loads(project.deployment_file.read_bytes(), str(project.deployment_file))
        if deployed.model == declared.name:
            fields |= {
                "deployed": deployed.digest, "contract": deployed.contract, "deployed_at": deployed.deployed_at,
                "undone": deployed.undone and deployed.undone.why,
            }  # fmt: skip
    return ModelStatus(**fields, stale=tuple(stale))


def _runs(home: Path) -> list[RunStatus]:
    if not (home / "dagster.yaml").exists():
        return []
    try:
        import dagster as dg
    except ImportError:
        return []
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return [
            RunStatus(
                id=record.dagster_run.run_id,
                made=_assets(record.dagster_run.asset_selection),
                status=record.dagster_run.status.value.lower(),
                at=None if record.start_time is None else int(record.start_time * 1e6),
            )
            for record in instance.get_run_records(limit=RUNS)
        ]


def _assets(keys: Iterable[Any] | None) -> str:
    names = sorted("/".join(key.path) for key in keys or ())
    return "everything" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
