"""What the steps of a project leave in its state folder, and which of it is the last."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from isthmus.distill.declaration import Distillation
from isthmus.features.contract.contract import Contract
from isthmus.features.contract.diff import service_differences
from isthmus.features.errors import DataError
from isthmus.features.files import read_pointer
from isthmus.features.package.manifest import read_contract, read_package
from isthmus.features.pointintime.join import BATCH
from isthmus.features.profiles import FASTEST, ServingProfile
from isthmus.orchestration.project import Project

if TYPE_CHECKING:
    from isthmus.distill.declaration import Distillation
    from isthmus.orchestration.tensors import Tensors


DATA, RECORD, SPINE, STATISTICS = "data.parquet", "_record.json", "_spine.arrow", "statistics.json"
"""What a training set's folder holds. Readers of Parquet folders pass over names that begin with an underscore."""


@dataclass(frozen=True)
class TrainingSet:
    """A training set and what it was made from.

    Attributes:
        id: hash of all that decides its content.
        path: its folder.
        contract: hash of the contract.
        spine: name of the declared spine, path of the file, or "rows" if they were given in another form.
        spine_file: the file or folder that holds the spine's rows; None if they are kept beside the record.
        spine_sha256: hash of the spine's rows.
        views: the views, with their contracts.
        features: view to the names of the features that were asked of it.
        tables: view to the version of its table.
        tables_sha256: view to the hash of that version's rows.
        options: what else decides the content: `status`, whether it says what each view answered.
        rows_in: rows of the spine.
        rows_out: rows of the training set.
        served: of a training set as served, view to the moment at which the last rows that it saw became readable.
        lag: of a training set as served, view to feature to how it differs from the ideal join.
        computed: request transform to its hash and the fields that were computed.
    """

    id: str
    path: Path
    contract: str
    spine: str
    spine_file: str | None
    spine_sha256: str
    views: dict[str, dict[str, Any]]
    features: dict[str, list[str]]
    tables: dict[str, int]
    tables_sha256: dict[str, str]
    options: dict[str, bool]
    rows_in: int
    rows_out: int
    served: dict[str, int] | None = None
    lag: dict[str, dict[str, Any]] | None = None
    computed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form, which is also the record beside the data."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def read(cls, folder: Path) -> "TrainingSet":
        """The training set of a folder. Its place is where it is found, not where it was made: a project can be moved.

        Raises:
            FileNotFoundError: there is no record.
            ValueError, TypeError: the record is damaged.
        """
        return cls(**{**json.loads((folder / RECORD).read_text()), "path": folder})

    def table(self) -> pa.Table:
        """The rows, in the order of the spine.

        Raises:
            DataError: the file is missing or damaged.
        """
        try:
            return pq.read_table(self.path / DATA)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def torch(self, *, columns: Sequence[str] | None = None, batch: int = 1024) -> "Tensors":
        """The rows as a torch `IterableDataset`: see `tensors.Tensors`."""
        from isthmus.orchestration.tensors import Tensors

        try:
            data = ds.dataset(self.path / DATA)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        return Tensors(
            data.schema, lambda: data.to_batches(batch_size=BATCH, batch_readahead=4), columns, batch, workers=True
        )

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"training set {self.id}", f"{self.path / DATA} cannot be read ({error})",
                         remedy=f"remove {self.path} and run `isthmus training-set`")  # fmt: skip


def records_of(project: Project) -> Path:
    """The folder in which an id leads to its training set."""
    return project.state / "records"


_NO_TRAINING_SET = "run `isthmus training-set`"


def last_training_set(project: Project, declared: Distillation) -> TrainingSet:
    """The training set of the last `training-set`, which must have been made under the contract in force.

    Raises:
        DataError: there is none, or it is damaged, or made under another contract.
    """
    folder = project.state / "training" / declared.name
    result = _training_set_of(declared, folder, lambda: read_pointer(folder / "latest"))
    contract = project.applied().hash
    if result.contract != contract:
        raise DataError(f"training set of {declared.name}", f"made under contract {result.contract[:12]}",
                        expected=contract[:12], remedy=_NO_TRAINING_SET)  # fmt: skip
    return result


def latest_training_set(project: Project, declared: Distillation) -> TrainingSet | None:
    """The training set of the last `training-set`, under whatever contract it was made; None if there was none.

    Raises:
        DataError: it is damaged.
    """
    folder = project.state / "training" / declared.name
    return (
        _training_set_of(declared, folder, lambda: read_pointer(folder / "latest"))
        if (folder / "latest").exists()
        else None
    )


def made_training_set(project: Project, declared: Distillation, identity: str) -> TrainingSet:
    """A training set that a student learned from, under whatever contract it was made.

    Raises:
        DataError: it is gone or damaged.
    """
    folder = project.state / "training" / declared.name
    return _training_set_of(declared, folder / identity, lambda: folder / identity)


def _training_set_of(declared: Distillation, place: Path, found: Callable[[], Path]) -> TrainingSet:
    where = f"training set of {declared.name}"
    try:
        return TrainingSet.read(found())
    except FileNotFoundError as error:
        raise DataError(where, f"there is none in {place}", remedy=_NO_TRAINING_SET) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(where, f"its record cannot be read ({error})", remedy=_NO_TRAINING_SET) from error


REPORT = "report.json"


def read_report(model: Path, package: Path | None = None) -> dict[str, Any]:
    """The report of a student, with the serving half that was measured with a package of it.

    Raises:
        DataError: one of both is damaged.
    """
    report = read_json(model / REPORT, "distill")
    measured = None if package is None else serving_file(package)
    report["serving"] = read_json(measured, "export") if measured and measured.exists() else None
    return report


def read_json(file: Path, verb: str) -> dict[str, Any]:
    """A JSON object that a step has written.

    Raises:
        DataError: it cannot be read; the remedy is to run `verb` again.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(str(file), f"cannot be read: {error}", remedy=f"run `isthmus {verb}` again") from error


def serving_profile(project: Project, package: Path) -> ServingProfile:
    """How a package is served: where the profile asks for the fastest precision, in the one that was when exported.

    Raises:
        DataError: what was measured is not there.
    """
    profile = project.settings.profiles.serving
    if profile.precision != FASTEST:
        return profile
    return replace(profile, precision=read_json(serving_file(package), "export")["precision"])


def serving_file(package: Path) -> Path:
    """Not in the package: figures inside would make its bytes differ from one export to the next."""
    return package.parents[1] / "serving" / f"{package.name}.json"


def searches(project: Project, declared: "Distillation") -> Path:
    """The folder of the searches of a distillation."""
    return project.state / "search" / declared.name


def is_exported(project: Project, declared: Distillation, contract: Contract) -> bool:
    """Whether a package of the distillation is there that can run under the contract."""
    return latest_package(project, declared).exists() and not outdated(last_package(project, declared), contract)


def outdated(package: Path, contract: Contract) -> list[str]:
    """What of all that a package reads is not what it was when it was made: empty if it can run under the contract.

    Raises:
        PackageError: it is damaged.
    """
    manifest = read_package(package)
    return service_differences(read_contract(package, manifest), contract, manifest.service)


def last_model(project: Project, declared: Distillation) -> Path:
    """The folder of the last student."""
    return _last(models_folder(project, declared) / "latest", "student", declared, "distill")


def last_report(project: Project, declared: Distillation) -> dict[str, Any]:
    """What the last distillation reported."""
    return read_report(last_model(project, declared))


def packaged_report(project: Project, declared: Distillation) -> dict[str, Any]:
    """What was reported of the student in the last package."""
    package = last_package(project, declared)
    student = models_folder(project, declared) / read_package(package).model
    if not student.exists():
        raise DataError(str(student), "is gone, with what the package cost", remedy="run `isthmus distill` and export")
    return read_report(student, package)


def last_package(project: Project, declared: Distillation) -> Path:
    """The folder of the last package."""
    return _last(latest_package(project, declared), "package", declared, "export")


def _last(pointer: Path, what: str, declared: Distillation, verb: str) -> Path:
    where, remedy = f"{what} of {declared.name}", f"run `isthmus {verb}`"
    try:
        return read_pointer(pointer)
    except FileNotFoundError as error:
        raise DataError(where, f"there is none in {pointer.parent}", remedy=remedy) from error
    except ValueError as error:
        raise DataError(where, f"{pointer.parent} is damaged ({error})", remedy=remedy) from error


def models_folder(project: Project, declared: Distillation) -> Path:
    """The folder of all students of a distillation."""
    return project.state / "models" / declared.name


def outputs_folder(project: Project, declared: Distillation) -> Path:
    """Where the outputs of teachers and references are kept."""
    return project.state / "teacher" / declared.name


def latest_package(project: Project, declared: Distillation) -> Path:
    """The file that points to the last package."""
    return project.state / "packages" / f"{declared.name}.latest"


def verdict_file(project: Project, declared: Distillation | None) -> Path:
    """Where the last verdict of a distillation, or of a project without any, is."""
    return project.state / "verdicts" / f"{declared.name if declared else 'features'}.json"


def page_file(project: Project, name: str | None = None) -> Path:
    """Where the page of the last verdict is, of a distillation or of a project that has one or none."""
    declared = project.distillation(name) if name or project.definitions.distillations else None
    return verdict_file(project, declared).with_suffix(".html")
