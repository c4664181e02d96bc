"""Train, search, export and check students. Without a name, functions use the project's only distillation."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation, Plan
from isthmus.distill.gates import check_gates
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.types import Index
from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import Contract
from isthmus.features.definition.spec import Snapshot
from isthmus.features.errors import DataError, GateFailed, PackageError, extra
from isthmus.features.files import write_atomically
from isthmus.features.latency import LatencyReader
from isthmus.features.progress import Progress, silent
from isthmus.features.types import UnixTimestamp
from isthmus.orchestration.artifacts import DATA, Artifacts, TrainingSet, serving_profile
from isthmus.orchestration.models import cards
from isthmus.orchestration.models.tracking import track
from isthmus.orchestration.project import Project
from isthmus.package.checksums import verify_checksums
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import Package, open_package, package_digest, read_package
from isthmus.package.signature import require_signature
from isthmus.package.snapshot.selection import device_manifest
from isthmus.transforms import engine
from isthmus.transforms.tables import parquet
from isthmus.transforms.tables.missing import explain_missing

if TYPE_CHECKING:
    from isthmus.distill.distillation import DistillationReport
    from isthmus.distill.export.export import ExportReport
    from isthmus.distill.export.ladder import Ladder
    from isthmus.distill.export.parity import Parity
    from isthmus.distill.restore import Restored
    from isthmus.distill.search.search import SearchReport
    from isthmus.distill.tasks.task import Material
    from isthmus.package.inspect import Runtime
    from isthmus.transforms.preparation.fit import Preparation


def distill(
    project: Project, name: str | None = None, *, again: bool = False, progress: Progress = silent,
    part: tuple[int, int] | None = None,
) -> "DistillationReport":  # fmt: skip
    """Train the models of a distillation on its latest training set, and write the documents about the new student.

    The models are the teacher, the student, a control (the student trained without a teacher) and a reference: for
    tabular data, a teacher that reads only the student's features; for texts with a label, TF-IDF with a linear model.
    The student becomes the last one of its distillation, which `export` packages. Nothing is trained if nothing has
    changed since the last training, unless `again` is true. SIGINT or SIGTERM raises Stopped; the same call then
    continues the training. Processes that a launcher started train together, and only the first one writes. With `part`
    (index and number), train this share of students and controls; the part that ends last reports and writes.

    Raise DataError for an unusable training set, and an IsthmusError if training fails. Raise ConfigurationError for an
    invalid declaration or, after saving the student, for a gate on an unknown metric.
    """
    _limit_spinning()
    with extra("distill"):
        from isthmus.distill.distillation import distill as run
        from isthmus.distill.training.processes import joined
    artifacts = Artifacts.of(project, name)
    # The task may be a module in the project's folder.
    with (
        joined(project.settings.profiles.training, artifacts.declared.where) as processes,
        project.importing(),
    ):
        report = run(
            processes.in_turn(lambda: _material(artifacts, artifacts.current_training_set())),
            folder=artifacts.models,
            cache=artifacts.outputs,
            runs=project.state / "runs" / artifacts.declared.name,
            again=again,
            progress=progress,
            part=part,
        )
    if not report.leads:
        return report
    # Write the pointer before the documents, which fail for a gate on an unknown metric: fixing it needs no training.
    write_atomically(artifacts.models / "latest", report.id.encode())
    track(artifacts, progress=progress)
    cards.write(artifacts, report.path, _package_of(artifacts, report.id))
    return report


def search(
    project: Project, name: str | None = None, *, trials: int | None = None, progress: Progress = silent
) -> "SearchReport":
    """Search for the best student: train and measure the variants that `search` of a distillation declares.

    Writes a page about them. `trials` is the total number of variants, including those of earlier calls; by default the
    declared number. The student of the distillation does not change. SIGINT or SIGTERM raises Stopped; the same call
    then continues the search. Raise DataError for an unusable training set or a damaged journal, and GateFailed if the
    first loss is not finite. Raise ConfigurationError for a missing or invalid declaration. Raise DependencyError if
    another process runs this search, or a library or disk space is missing.
    """
    _limit_spinning()
    with extra("search"):
        from isthmus.distill.reports.searchpage import search_page
        from isthmus.distill.search.search import search as run
    artifacts = Artifacts.of(project, name)
    material = _material(artifacts, artifacts.current_training_set())
    with project.importing():
        report = run(
            material,
            folder=artifacts.searches,
            cache=artifacts.outputs,
            runs=project.state / "runs" / artifacts.declared.name / "search",
            profile=project.settings.profiles.serving,
            trials=trials,
            progress=progress,
        )
    write_atomically(artifacts.searches / "latest", report.path.name.encode())
    write_atomically(report.path / cards.SEARCH, search_page(report.data).encode())
    return report


def _limit_spinning() -> None:
    """Limit busy waiting of OpenMP threads, which slows down other processes. Call it before importing torch."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _material(artifacts: Artifacts, examples: TrainingSet) -> "Material":
    from isthmus.distill.tasks.task import Material

    project, declared = artifacts.project, artifacts.declared
    contract, profile = project.applied(), project.settings.profiles.training
    inputs = _inputs(contract, declared.student.name)
    material = Material(
        replace(declared, runtimes=project.runtimes(declared)),
        examples.table(),
        teacher_inputs=_inputs(contract, declared.teacher.name),
        student_inputs=inputs,
        label=declared.spine.label.name,
        training_set=examples.id,
        contract=contract.hash,
        profile=profile,
        request_inputs=RequestInputs.of(contract, declared.student.name),
        learn=lambda plan, before: _learn(project, str(examples.path / DATA), inputs, plan, before),
        latency=LatencyReader(project.latency_folder) if profile.give_way else None,
        root=project.root,
    )
    device = declared.student.device
    return material if device is None else _on_device(artifacts, examples, material, device)


def _on_device(artifacts: Artifacts, examples: TrainingSet, material: "Material", device: Snapshot) -> "Material":
    """Return training data with features as old as on devices: at drawn ages, and for test rows at the maximum age."""
    # Imported here, because DuckDB and Arrow's datasets would dominate the start of `isthmus deploy`.
    import pyarrow.parquet as pq

    from isthmus.distill.tabular.tensors import columns
    from isthmus.features.pointintime.staleness import fixed_ages
    from isthmus.features.values.arrow import to_arrow
    from isthmus.orchestration.training.staleness import device_rows_file, rows_file, with_stale_inputs

    project, declared, table, test = artifacts.project, artifacts.declared, material.table, material.parts.test
    file = device_rows_file(project, declared, examples)

    def at_ages(rows: Index, ages: Sequence[int]) -> list[pa.Table]:
        # Join all ages as one spine, so that each view is read once.
        spine, each = pa.concat_tables([table.take(rows)] * len(ages)), np.repeat(np.array(ages, np.int64), len(rows))
        joined = with_stale_inputs(project, declared, examples, spine, fixed_ages(each), computed=False)
        return [joined.slice(place * len(rows), len(rows)) for place in range(len(ages))]

    def completed() -> pa.Table:
        (rows,) = at_ages(test, [device.age // MICROSECOND])
        request = material.request_inputs
        complete, _ = request.complete(columns(rows, request.graph_inputs(material.student_inputs)))
        for item in material.student_inputs:
            if item.name not in rows.column_names:
                rows = rows.append_column(item.name, to_arrow(complete[item.name], item.dtype))
        return rows

    # Training, export and verdict share this file.
    service = project.applied().service(declared.student.name)
    tested = {"service": service.hash, "tested": hashlib.sha256(test.tobytes()).hexdigest()}
    drawn, oldest = pq.read_table(file), pq.read_table(rows_file(examples, device, completed, **tested))
    others = np.setdiff1d(np.arange(len(table)), test)
    places = np.empty(len(table), np.int64)
    places[others], places[test] = np.arange(len(others)), len(others) + np.arange(len(test))
    return replace(
        material,
        learn=lambda plan, before: _learn(project, file, material.student_inputs, plan, before),
        device=pa.concat_tables([drawn.take(others), oldest.select(drawn.schema.names).cast(drawn.schema)]).take(
            places
        ),
        aged=at_ages,
    )


def _inputs(contract: Contract, service: str) -> list[ModelInput]:
    return [ModelInput(column.name, column.dtype, size=column.size) for column in contract.inputs(service)]


def _learn(project: Project, file: str, inputs: Sequence[ModelInput], plan: Plan, before: int) -> "Preparation":
    from isthmus.distill.tabular.preparation import fit_preparation

    types = {item.name: item.dtype.spark for item in inputs}
    types |= dict.fromkeys(("event_timestamp", "known_at"), UnixTimestamp.spark)
    # The schema is explicit, because Sail cannot infer it from files with dictionary columns.
    schema = ", ".join(f"`{name}` {kind}" for name, kind in types.items())
    threads = project.settings.profiles.training.threads
    with explain_missing("preparation"), engine.session(project.settings.engine, threads) as spark:
        return fit_preparation(parquet.read(spark, file, schema=schema), plan, before)


def export(project: Project, name: str | None = None, *, progress: Progress = silent) -> "ExportReport":
    """Export the last student as a package for servers and devices, and sign it if the project has a signing key.

    Also measures serving on this host and writes the documents about the student. The package, in the state folder,
    becomes the last one of its distillation only if no error is raised. Raise GateFailed if a gate fails, or a file is
    too slow, too large or too different from the student. Raise ContractMismatch if the definitions are not applied or
    the student is outdated. Raise DataError if the student or its training set is missing, and PackageError if the
    package lacks the required signature. Raise ConfigurationError if a runtime or the signing key cannot be used.
    """
    with extra("mobile"):
        from isthmus.distill.export.export import export as run
    artifacts = Artifacts.of(project, name)
    contract = project.applied()
    require_quality(project, artifacts.declared)
    model, examples = artifacts.last_model(), artifacts.current_training_set()
    # Read the keys first, to report an unusable key before the long export.
    signer, public_key = project.signer, project.public_key
    with project.importing():
        report = run(
            _material(artifacts, examples),
            model,
            project.state / "packages",
            contract={"hash": contract.hash, **contract.as_dict()},
            profile=project.settings.profiles.serving,
            cache=artifacts.outputs,
            device=device_manifest(contract, artifacts.declared.student, artifacts.declared.stale),
            progress=progress,
        )
    if signer is not None:
        signer.sign(report.path)
    if public_key is not None:
        require_signature(verify_checksums(report.path), public_key)
    cards.write_serving(report)
    cards.write(artifacts, model, report.path)
    write_atomically(artifacts.package_pointer, report.path.name.encode())
    track(artifacts, package=package_digest(report.path), progress=progress)
    return report


@contextmanager
def parity(project: Project, declared: Distillation, package: Package) -> "Iterator[Parity]":
    with extra("distill"):
        from isthmus.distill.export.parity import Parity
    artifacts = Artifacts(project, declared)
    material = _material(artifacts, artifacts.training_set(package.manifest.training_set))
    keys = project.applied().spines[declared.spine.name].key_names
    with project.importing():
        yield Parity(material, package, artifacts.last_model(), keys)


@contextmanager
def student_of_package(project: Project, declared: Distillation, package: Package) -> "Iterator[Restored]":
    """Load the PyTorch student from which a package was exported, with its task, to score rows during the block.

    The contract of the package may be outdated. Raise DataError if the student or its training set is missing. Raise
    ContractMismatch if the definitions are not applied, or the declaration has changed since the training.
    """
    with extra("distill"):
        from isthmus.distill.restore import restore
    artifacts = Artifacts(project, declared)
    student = artifacts.models / package.manifest.model
    if not student.exists():
        raise DataError(str(student), "is missing, and cannot be restored from the package",
                        remedy="run `isthmus distill` and `isthmus model export`")  # fmt: skip
    material = _material(artifacts, artifacts.training_set(package.manifest.training_set))
    with project.importing():
        yield restore(material, student)


def ladder(project: Project, name: str | None = None, *, runtimes: "Mapping[str, Callable[[], Runtime]]") -> "Ladder":
    """Run the latest package in each of several runtimes, and compare its outputs with those of its PyTorch student.

    `runtimes` maps names to factories, each called just before its runtime is used. The inputs are the package's golden
    cases (inputs with known outputs). Deviations and runtimes that are not installed are part of the result and raise
    no error. Raise DataError if package, student or training set is missing. Raise PackageError if the package was
    exported from another student or has other golden cases, and ContractMismatch if the student is outdated.
    """
    with extra("distill"):
        from isthmus.distill.export.ladder import compare_forms
    artifacts = Artifacts.of(project, name)
    package, model = open_package(artifacts.last_package()), artifacts.last_model()
    material = _material(artifacts, artifacts.training_set(package.manifest.training_set))
    with project.importing():
        return compare_forms(material, package, model, runtimes)


def _package_of(artifacts: Artifacts, student: str) -> Path | None:
    try:
        package = artifacts.last_package()
        return package if read_package(package).model == student else None
    except (DataError, PackageError):
        return None


def require_quality(project: Project, declared: Distillation) -> dict[str, float | None]:
    return _require_gates(declared, Artifacts(project, declared).last_report())


def _require_gates(declared: Distillation, report: Mapping[str, Any]) -> dict[str, float | None]:
    results = check_gates(report, declared.required, declared.where)
    if failed := [result for result in results if not result.holds]:
        raise GateFailed(
            f"student of {declared.name}",
            "; ".join(result.failure for result in failed),
            remedy="train longer or on more data, or change the gates in the definitions",
        )
    return {result.metric: result.found for result in results}


def require_costs(project: Project, declared: Distillation) -> None:
    from isthmus.distill.reports.boundarycard import require_boundary

    artifacts = Artifacts(project, declared)
    report, profile = artifacts.packaged_report(), serving_profile(project, artifacts.last_package())
    require_boundary(report)
    served = {"precision": profile.precision, "threads": profile.threads}
    half = report["serving"]
    if differing := [name for name, value in served.items() if half[name] != value]:
        raise GateFailed(
            f"boundary card of {declared.name}",
            f"serving was measured with {', '.join(f'{name} {half[name]}' for name in differing)}",
            expected=", ".join(f"{name} {served[name]}" for name in differing),
            remedy="run `isthmus model export`",
        )


def require_release(project: Project, declared: Distillation) -> None:
    require_costs(project, declared)
    _require_gates(declared, Artifacts(project, declared).packaged_report())
