"""`distill`, `search` and `export`: from a training set to a student, from a student to a package."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.distill.declaration import Distillation, Plan
from isthmus.distill.gates import check_gates
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.features.contract.contract import Contract
from isthmus.features.errors import (
    DataError,
    DependencyError,
    GateFailed,
    PackageError,
)
from isthmus.features.files import write_atomically
from isthmus.features.latency import LatencyReader
from isthmus.features.package.manifest import ModelInput, read_package
from isthmus.features.package.signature import require_signature
from isthmus.features.progress import Progress, silent
from isthmus.features.types import UnixTimestamp
from isthmus.features.verdict import FeatureVerdict
from isthmus.orchestration.artifacts import DATA, Artifacts, TrainingSet, serving_profile
from isthmus.orchestration.models import cards
from isthmus.orchestration.project import Project
from isthmus.transforms import engine

if TYPE_CHECKING:
    from isthmus.distill.distillation import DistillationReport
    from isthmus.distill.export.export import ExportReport
    from isthmus.distill.export.ladder import Ladder
    from isthmus.distill.search.search import SearchReport
    from isthmus.distill.tasks.task import Material
    from isthmus.features.package.inspect import Runtime
    from isthmus.transforms.preparation.fit import Preparation


def distill(
    project: Project, name: str | None = None, *, again: bool = False, progress: Progress = silent
) -> "DistillationReport":
    """Trains teacher, reference, student and control on the last training set, unless they are there already.

    Args:
        project: the project, with a training set.
        name: the distillation; may be left out where there is only one.
        again: train also a student that is there.
        progress: told what is being done and the share that is done.
    """
    _unspun()
    try:
        from isthmus.distill.distillation import distill as run
    except ImportError as error:
        raise _missing("distill", error) from error
    declared = project.distillation(name)
    examples = Artifacts(project, declared).current_training_set()
    # The task may be written beside the definitions.
    with project.importing():
        report = run(
            _material(project, declared, examples),
            folder=Artifacts(project, declared).models,
            cache=Artifacts(project, declared).outputs,
            runs=project.state / "runs" / declared.name,
            again=again,
            progress=progress,
        )
    # First: a gate about a figure that is not there can be mended without training again.
    write_atomically(Artifacts(project, declared).models / "latest", report.id.encode())
    cards.write(project, declared, report.path, _package_of(project, declared, report.id))
    return report


def search(
    project: Project, name: str | None = None, *, trials: int | None = None, progress: Progress = silent
) -> "SearchReport":
    """Tries the students that a distillation's `search` declares, and writes a page of them.

    Args:
        project: the project, with a training set.
        name: the distillation; may be left out where there is only one.
        trials: how many there shall be, those of earlier calls included; if not as declared.
        progress: told what is being done and the share that is done.
    """
    _unspun()
    try:
        from isthmus.distill.search.search import search as run
    except ImportError as error:
        raise _missing("search", error) from error
    declared = project.distillation(name)
    examples = Artifacts(project, declared).current_training_set()
    folder = Artifacts(project, declared).searches
    with project.importing():
        report = run(
            _material(project, declared, examples),
            folder=folder,
            cache=Artifacts(project, declared).outputs,
            runs=project.state / "runs" / declared.name / "search",
            profile=project.settings.profiles.serving,
            trials=trials,
            progress=progress,
        )
    write_atomically(folder / "latest", report.path.name.encode())
    cards.write_search(report.path, report.data)
    return report


def require_fit(report: "SearchReport") -> None:
    """Refuses what was found if no student keeps to the budget.

    Raises:
        GateFailed: with the nearest miss.
    """
    from isthmus.distill.search.search import require_fit as require

    require(report.data)


def _unspun() -> None:
    """Threads of one computation that wait for each other shall not hold the cores of others (docs/log.md).

    Taken by the OpenMP of torch when that is loaded, and by nothing before.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _material(project: Project, declared: Distillation, examples: TrainingSet) -> "Material":
    """What a student learns from."""
    from isthmus.distill.tasks.task import Material

    contract, profile = project.applied(), project.settings.profiles.training
    inputs = _inputs(contract, declared.student.name)
    return Material(
        declared,
        examples.table(),
        teacher_inputs=_inputs(contract, declared.teacher.name),
        student_inputs=inputs,
        label=declared.spine.label.name,
        training_set=examples.id,
        contract=contract.hash,
        profile=profile,
        request_inputs=RequestInputs.of(contract, declared.student.name),
        learn=lambda plan, before: _learned(project, examples, inputs, plan, before),
        latency=LatencyReader(project.latency_folder) if profile.give_way else None,
    )


def _learned(
    project: Project, examples: TrainingSet, inputs: Sequence[ModelInput], plan: Plan, before: int
) -> "Preparation":
    """What the student's preparation learns, by the project's engine."""
    from isthmus.distill.tabular.preparation import learned

    types = {item.name: item.dtype.spark for item in inputs}
    types |= dict.fromkeys(("event_timestamp", "known_at"), UnixTimestamp.spark)
    # Said and not found out: Sail takes no file in which any column is a dictionary.
    schema = ", ".join(f"`{name}` {kind}" for name, kind in types.items())
    with engine.session(project.settings.engine, project.settings.profiles.training.threads) as spark:
        return learned(spark.read.schema(schema).parquet(str(examples.path / DATA)), plan, before)


def export(project: Project, name: str | None = None, *, progress: Progress = silent) -> "ExportReport":
    """Turns the last student into a package, signed if the project has a key for that.

    Args:
        project: the project, with a student.
        name: the distillation; may be left out where there is only one.
        progress: told what is being done and the share that is done.

    Raises:
        PackageError: the signature that every package must have is not the one that it has.
    """
    try:
        from isthmus.distill.export.export import export as run
    except ImportError as error:
        raise _missing("mobile", error) from error
    declared = project.distillation(name)
    contract = project.applied()
    require_quality(project, declared)
    model, examples = Artifacts(project, declared).last_model(), Artifacts(project, declared).current_training_set()
    # First: a key that cannot be used is said before anything is measured.
    signer, public_key = project.signer, project.public_key
    with project.importing():
        report = run(
            _material(project, declared, examples),
            model,
            project.state / "packages",
            contract=json.loads(contract.dumps()),
            profile=project.settings.profiles.serving,
            cache=Artifacts(project, declared).outputs,
            progress=progress,
        )
    if signer is not None:
        signer.sign(report.path)
    if public_key is not None:
        require_signature(report.path, public_key)
    cards.measured(report)
    cards.write(project, declared, model, report.path)
    write_atomically(Artifacts(project, declared).package_pointer, report.path.name.encode())
    return report


def check_last_package(project: Project, declared: Distillation) -> dict[str, FeatureVerdict]:
    """Model file of the last package to the comparison of its output with the student's.

    They are compared on rows that the student learned from, whatever has been added to the contract since.

    Raises:
        DataError: nothing was exported, or the training set is gone.
    """
    try:
        from isthmus.distill.export.parity import check_package
    except ImportError as error:
        raise _missing("distill", error) from error
    package, model, material = _packaged(project, declared)
    keys = [name for name, _ in project.applied().spines[declared.spine.name]["keys"]]
    with project.importing():
        return check_package(material, package, model, keys)


def ladder(project: Project, name: str | None = None, *, runtimes: "Mapping[str, Callable[[], Runtime]]") -> "Ladder":
    """The last package in each runtime, compared with its student in torch.

    Args:
        project: the project, with a package.
        name: the distillation; may be left out where there is only one.
        runtimes: what runs the model files, in this order.

    Raises:
        DataError: nothing was exported, or the training set is gone.
    """
    try:
        from isthmus.distill.export.ladder import climb
    except ImportError as error:
        raise _missing("distill", error) from error
    package, model, material = _packaged(project, project.distillation(name))
    with project.importing():
        return climb(material, package, model, runtimes)


def _packaged(project: Project, declared: Distillation) -> "tuple[Path, Path, Material]":
    """The last package, the last student, and what the package was made with."""
    artifacts = Artifacts(project, declared)
    package, model = artifacts.last_package(), artifacts.last_model()
    examples = artifacts.training_set(read_package(package).training_set)
    return package, model, _material(project, declared, examples)


def _package_of(project: Project, declared: Distillation, student: str) -> Path | None:
    """The last package, if it is of a student: then what was measured with it holds."""
    try:
        package = Artifacts(project, declared).last_package()
        return package if read_package(package).model == student else None
    except (DataError, PackageError):
        return None


def require_quality(project: Project, declared: Distillation) -> dict[str, float | None]:
    """The figures of the last student that gates are about, if all of them hold.

    Raises:
        ConfigurationError: a gate is about nothing that the report has.
        GateFailed: with every gate that does not hold.
    """
    return _require_gates(declared, Artifacts(project, declared).last_report())


def _require_gates(declared: Distillation, report: Mapping[str, Any]) -> dict[str, float | None]:
    found = check_gates(report, declared.required, declared.where)
    if failed := [one for one in found if not one.holds]:
        raise GateFailed(
            f"student of {declared.name}",
            "; ".join(map(str, failed)),
            expected="; ".join(one.expected for one in failed),
            remedy="train longer or on more data, or change the gates in the definitions",
        )
    return {one.gate.metric: one.value for one in found}


def require_boundary(project: Project, declared: Distillation) -> None:
    """Refuses the last package if a half of what it costs has not been measured, as it will be served.

    Raises:
        DataError: there is no package, or its student is gone.
        GateFailed: with what is missing.
    """
    from isthmus.distill.reports import require_boundary as require

    report = Artifacts(project, declared).packaged_report()
    profile = serving_profile(project, Artifacts(project, declared).last_package())
    require(report)
    served = {"precision": profile.precision, "threads": profile.threads}
    half = report["serving"]
    if other := [name for name, value in served.items() if half[name] != value]:
        raise GateFailed(
            f"boundary card of {declared.name}",
            f"the serving half was measured with {', '.join(f'{name} {half[name]}' for name in other)}",
            expected=", ".join(f"{name} {served[name]}" for name in other),
            remedy="run `isthmus export`",
        )


def require_release(project: Project, declared: Distillation) -> None:
    """Refuses the last package if what it costs is not known, or if its student does not reach the gates of today.

    Raises:
        ConfigurationError: a gate is about nothing that the report has.
        DataError: there is no package, or its student is gone.
        GateFailed: with what is missing.
    """
    require_boundary(project, declared)
    _require_gates(declared, Artifacts(project, declared).packaged_report())


def _inputs(contract: Contract, service: str) -> list[ModelInput]:
    return [ModelInput(column.name, column.dtype) for column in contract.inputs(service)]


def _missing(extra: str, error: ImportError) -> DependencyError:
    return DependencyError(extra, f"cannot be imported ({error})", remedy=f"install it: pip install 'isthmus[{extra}]'")
