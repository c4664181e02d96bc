"""`isthmus apply --diff`: predict the effects of changed definitions without applying them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from isthmus.features.contract.diff import changed_parts, differences, rebuild_reasons
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, IsthmusError
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.apply.apply import build_problems
from isthmus.orchestration.artifacts import Artifacts, contract_changes
from isthmus.orchestration.project import Project
from isthmus.package.inputs import ModelInput
from isthmus.serving.deployment.record import Deployment


@dataclass(frozen=True)
class TableChange:
    """Predicted effect of the next `isthmus build` on one offline table, which has `rows` rows of `days` days now.

    `action` is "build" a new table, "rebuild" all rows, "record" the new contract for the same rows, "keep" the table
    unchanged, "leave" a table that is no longer used, or "refuse" the change. A change is refused if the table is
    damaged or a feature has another type. `why` has the reasons; it is empty for "keep".
    """

    action: str
    why: list[str]
    days: int = 0
    rows: int = 0


@dataclass(frozen=True)
class ApplyDiff:
    """Effects that applying the current definitions would have, as `apply_diff` predicts them.

    Attributes:
        before: hash of the applied contract; empty if nothing was applied.
        after: hash of the contract of the current definitions.
        changes: one sentence for each changed declaration; empty if nothing was applied.
        tables: effect on each offline table, by table name.
        stale: names of distillations by what becomes unusable: "training set", "package", "deployment" or "student". An
            entry of "student" also has the command to run, because the code of its task has changed.
    """

    before: str
    after: str
    changes: list[str]
    tables: dict[str, TableChange]
    stale: dict[str, list[str]]

    def lines(self) -> list[str]:
        lines = list(self.changes or ["nothing has been applied yet"])
        if self.before == self.after:
            lines = ["the definitions match the applied contract"]
        for table, change in self.tables.items():
            size = f", which has {change.rows:,} rows of {change.days:,} days" if change.rows else ""
            why = f" ({', '.join(change.why)})" if change.why else ""
            lines.append(f"{change.action} {table}{size}{why}")
        return lines + [f"stale: {kind} {name}" for kind, names in self.stale.items() for name in names]


def apply_diff(project: Project) -> ApplyDiff:
    """Predict what applying the current definitions would change: tables to rebuild, and models that become stale.

    This applies nothing. It writes converted copies of local sources to the state folder. Functions are checked only
    with the engine Sail. Raise ConfigurationError for problems of definitions, sources or functions, as `apply` does. A
    feature whose type differs from its table raises no error: its table gets the action "refuse".
    """
    contract = project.definitions.contract
    project.require_objectives_of(contract.views)
    if problems := build_problems(project)[0]:
        raise ConfigurationError(f"{project.settings.project.definitions}.py", problems)
    before = applied_contract(project)
    store = project.offline_store()
    views_before = before.views if before else {}
    known = project.generations().views() if before else {}
    tables = {
        view.table: _table_change(store, view, views_before.get(view.name), known) for view in contract.views.values()
    }
    for view in views_before.values():
        with suppress(DataError):
            if view.table not in tables and (commit := store.commit(view)):
                why = "the view has another version" if view.name in contract.views else "the view was removed"
                tables[view.table] = TableChange("leave", [why], len(commit.days or {}), commit.rows)
    changes = differences(before, contract) if before else []
    return ApplyDiff(before.hash if before else "", contract.hash, changes, tables, _stale_artifacts(project, contract))


def applied_contract(project: Project) -> Contract | None:
    try:
        return project.last_applied()
    except ContractMismatch:
        return None


def _table_change(
    store: OfflineStore, view: ViewContract, before: ViewContract | None, known: Mapping[str, ViewContract]
) -> TableChange:
    try:
        commit = store.commit(view)
        retyped = store.type_problems(view)
    except DataError as error:
        return TableChange("refuse", [error.found])
    if commit is None:
        return TableChange("build", ["version" if before and before.version != view.version else "no table yet"])
    size = len(commit.days or {}), commit.rows
    if retyped:
        return TableChange("refuse", [str(problem) for problem in retyped], *size)
    if commit.contract == view.hash:
        return TableChange("keep", [], *size)
    if (built := known.get(commit.contract)) is None:
        return TableChange("rebuild", [f"built under {commit.contract[:12]}"], *size)
    parts = changed_parts(built.as_dict(), view.as_dict())
    return TableChange("rebuild" if rebuild_reasons(built, view) else "record", parts, *size)


def _student_remedy(project: Project, contract: Contract, artifacts: Artifacts) -> str:
    declared, made_of = artifacts.declared, artifacts.last_report()["made_of"]
    if not isinstance(declared.task, str) or "training" not in made_of:
        return ""
    from isthmus.distill.restore import origins_of, task_class

    columns = contract.inputs(declared.student.name)
    inputs = [ModelInput(column.name, column.dtype, size=column.size) for column in columns]
    about = SimpleNamespace(
        declaration=declared, label=declared.spine.label.name, student_inputs=inputs,
        training_set=made_of["training_set"],
    )  # fmt: skip
    with project.importing():
        now = origins_of(task_class(declared), about)
    if now["training"] != made_of["training"]:
        return "its training has changed: run `isthmus distill`"
    if now["report"] != made_of["report"]:
        return "only its evaluation has changed: `isthmus distill` evaluates it again without training"
    return "" if now["kind"] == made_of["kind"] else "only its package has changed: run `isthmus model export`"


def _stale_artifacts(project: Project, contract: Contract) -> dict[str, list[str]]:
    """Return stale distillations by kind of artifact.

    A training set needs this exact contract, a model only its inputs.
    """
    stale: dict[str, list[str]] = {"training set": [], "package": [], "deployment": []}
    for declared in project.definitions.distillations.values():
        artifacts = Artifacts(project, declared)
        # Missing and unreadable artifacts are not reported as stale.
        with suppress(IsthmusError):
            examples = artifacts.latest_training_set()
            if examples is not None and examples.contract != contract.hash:
                stale["training set"].append(declared.name)
        with suppress(IsthmusError):
            if contract_changes(artifacts.last_package(), contract):
                stale["package"].append(declared.name)
        # The task is user code and may need libraries that are not installed here.
        with suppress(Exception):
            if needed := _student_remedy(project, contract, artifacts):
                stale.setdefault("student", []).append(f"{declared.name}: {needed}")
    if project.deployment_file.exists():
        deployed = Deployment.loads(project.deployment_file.read_bytes(), str(project.deployment_file))
        try:
            usable = not contract_changes(Path(deployed.package), contract)
        except IsthmusError:
            usable = False
        if not usable:
            stale["deployment"].append(deployed.model)
    return stale
