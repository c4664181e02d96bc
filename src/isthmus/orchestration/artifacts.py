"""The files that the steps write to the state folder, and pointers to the last of each kind."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.gates import check_gates
from isthmus.features.contract.diff import service_differences
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.files import read_pointer
from isthmus.features.profiles import FASTEST, ServingProfile
from isthmus.orchestration.project import Project
from isthmus.package.manifest import open_package, read_contract, read_package

if TYPE_CHECKING:
    import pandas as pd

    from isthmus.orchestration.tensors import Tensors


DATA, RECORD, SPINE, STATISTICS = "data.parquet", "_record.json", "_spine.arrow", "statistics.json"
"""The files of a training set. Readers of Parquet folders skip names that begin with an underscore."""


@dataclass(frozen=True)
class TrainingSet:
    """The record of a training set, as it is in its folder.

    Attributes:
        id: hash of everything that decides its content.
        spine: name of the declared spine, path of a file, "SQL", or "rows" for a spine in memory.
        spine_file: file or folder with the spine's rows; None if they are beside the record.
        spine_sha256: hash of the spine's rows.
        views: the views, with their contracts.
        features: view to the joined features.
        tables: view to the version of its table.
        tables_sha256: view to the hash of that version's rows.
        options: further inputs of the hash: `status`, whether each view has a status column.
        served: view to the moment up to which its log was replayed, and `VIEW|pushed` to the version of its log of
            pushes, if the join was as served.
        lag: view to feature to its difference from the ideal join, if the join was as served.
        computed: request transform to its hash and the computed fields.
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

    def __repr__(self) -> str:
        chosen = described({**self.features, **{name: part["fields"] for name, part in self.computed.items()}})
        return f"<TrainingSet {self.id}: {self.rows_out:,} rows, {chosen}; in {self.path}>"

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form, which is the record beside the data."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def read(cls, folder: Path) -> "TrainingSet":
        """The training set in a folder. The folder in the record is ignored: a project can be moved.

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
        import pyarrow.parquet as pq

        try:
            return pq.read_table(self.path / DATA)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def pandas(self) -> "pd.DataFrame":
        """The rows as a DataFrame, with pandas's nullable types: see `to_pandas`."""
        return to_pandas(self.table())

    def torch(self, *, columns: Sequence[str] | None = None, batch: int = 1024) -> "Tensors":
        """The rows as a torch `IterableDataset`: see `tensors.Tensors`."""
        import pyarrow.dataset as ds

        from isthmus.features.pointintime.join import BATCH
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


def described(features: Mapping[str, Sequence[str]]) -> str:
    """`7 features of habits and moment`, for the features of views and request transforms, by their names."""
    names = list(features)
    count = sum(map(len, features.values()))
    of = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{count} feature{'' if count == 1 else 's'} of {of or 'none'}"


def to_pandas(table: pa.Table) -> "pd.DataFrame":
    """A table as a DataFrame with pandas's nullable types: whole numbers are Int64 and so on, truth values boolean.

    Its other types have no null for them: a column would become one of floats, exact up to 2**53, or of objects.
    """
    import pandas as pd

    whole = [f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
    types = {pa.from_numpy_dtype(name.lower()): pd.api.types.pandas_dtype(name) for name in whole}
    types[pa.bool_()] = pd.BooleanDtype()
    return table.to_pandas(types_mapper=types.get)


_NO_TRAINING_SET = "run `isthmus training-set`"


def records_folder(project: Project) -> Path:
    """The folder in which the id of a training set leads to its folder."""
    return project.state / "records"


class Artifacts:
    """The files of a distillation in the state folder. Each DataError names the step to run first.

    Attributes:
        training_sets: folder of the training sets, by id.
        models: folder of the students, by id.
        outputs: cache of the outputs of teachers and references.
        searches: folder of the searches.
        package_pointer: the file that names the last package.
    """

    def __init__(self, project: Project, declared: Distillation) -> None:
        self.project, self.declared = project, declared
        self.training_sets = project.state / "training" / declared.name
        self.models = project.state / "models" / declared.name
        self.outputs = project.state / "teacher" / declared.name
        self.searches = project.state / "search" / declared.name
        self.package_pointer = project.state / "packages" / f"{declared.name}.latest"

    @classmethod
    def of(cls, project: Project, name: str | None = None) -> "Artifacts":
        """The files of the distillation with this name, or of the only distillation.

        Raises:
            RequestError: there is none, or there are several and no name.
        """
        return cls(project, project.distillation(name))

    def training_set(self, identity: str) -> TrainingSet:
        """The training set with this id, under whatever contract it was written.

        Raises:
            DataError: it is gone or damaged.
        """
        return self._training_set(self.training_sets / identity)

    def latest_training_set(self) -> TrainingSet | None:
        """The training set of the last `training-set`, under whatever contract it was written; None if there is none.

        Raises:
            DataError: it is damaged.
        """
        return self._training_set() if (self.training_sets / "latest").exists() else None

    def current_training_set(self) -> TrainingSet:
        """The training set of the last `training-set`, under the contract in force.

        Raises:
            DataError: there is none, or it is damaged, or was written under another contract.
        """
        training_set, contract = self._training_set(), self.project.applied().hash
        if training_set.contract != contract:
            found = f"was written under contract {training_set.contract[:12]}"
            where, expected = f"training set of {self.declared.name}", contract[:12]
            raise DataError(where, found, expected=expected, remedy=_NO_TRAINING_SET)
        return training_set

    def _training_set(self, folder: Path | None = None) -> TrainingSet:
        where = f"training set of {self.declared.name}"
        try:
            return TrainingSet.read(folder or read_pointer(self.training_sets / "latest"))
        except FileNotFoundError as error:
            message = f"there is none in {folder or self.training_sets}"
            raise DataError(where, message, remedy=_NO_TRAINING_SET) from error
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(where, f"its record cannot be read ({error})", remedy=_NO_TRAINING_SET) from error

    def last_model(self) -> Path:
        """Folder of the last student."""
        return self._last(self.models / "latest", "student", "distill")

    def last_report(self) -> dict[str, Any]:
        """What the last distillation reported."""
        return read_report(self.last_model())

    def last_package(self) -> Path:
        """Folder of the last package."""
        return self._last(self.package_pointer, "package", "export")

    def packaged_report(self) -> dict[str, Any]:
        """The report of the student in the last package."""
        package = self.last_package()
        student = self.models / read_package(package).model
        if not student.exists():
            raise DataError(
                str(student), "is gone, with what the package cost", remedy="run `isthmus distill` and `isthmus export`"
            )
        return read_report(student, package)

    def exported(self, contract: Contract) -> Path | None:
        """Folder of the last package; None if there is none that can run under the contract."""
        package = self.last_package() if self.package_pointer.exists() else None
        return package if package and not outdated(package, contract) else None

    def blocked(self) -> str:
        """Say why the last student is not exported; empty if its gates hold, or if no student exists."""
        with suppress(IsthmusError):
            results = check_gates(self.last_report(), self.declared.required, self.declared.where)
            if failed := [result.failure for result in results if not result.holds]:
                return f"export is blocked: {'; '.join(failed)}"
        return ""

    def _last(self, pointer: Path, what: str, verb: str) -> Path:
        where, remedy = f"{what} of {self.declared.name}", f"run `isthmus {verb}`"
        try:
            return read_pointer(pointer)
        except FileNotFoundError as error:
            if verb == "export" and (blocked := self.blocked()):
                remedy = "train longer or on more data, or change the gates in the definitions"
                raise DataError(where, blocked, remedy=remedy) from error
            raise DataError(where, f"there is none in {pointer.parent}", remedy=remedy) from error
        except ValueError as error:
            raise DataError(where, f"{pointer.parent} is damaged ({error})", remedy=remedy) from error


REPORT = "report.json"


def read_report(model: Path, package: Path | None = None) -> dict[str, Any]:
    """A student's report, with the `serving` part that was measured when `package` was exported.

    Raises:
        DataError: a file is damaged.
    """
    report = read_json(model / REPORT, "distill")
    measured = serving_file(package) if package else None
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
    """The profile to serve a package with; the precision "fastest" becomes the fastest that `export` measured.

    Raises:
        DataError: the measurement is missing.
    """
    profile = project.settings.profiles.serving
    if profile.precision != FASTEST:
        return profile
    return replace(profile, precision=read_json(serving_file(package), "export")["precision"])


def serving_file(package: Path) -> Path:
    """The measurement of `export`. Not in the package, whose bytes would differ between exports."""
    return package.parents[1] / "serving" / f"{package.name}.json"


def outdated(package: Path, contract: Contract) -> list[str]:
    """The changes that keep a package from running under a contract; empty if it can.

    Raises:
        PackageError: the package is damaged.
    """
    found = open_package(package)
    return service_differences(read_contract(found), contract, found.manifest.service)


def verdict_file(project: Project, declared: Distillation | None) -> Path:
    """The last verdict of a distillation, or of a project without any."""
    return project.state / "verdicts" / f"{declared.name if declared else 'features'}.json"


def page_file(project: Project, name: str | None = None) -> Path:
    """The page of the last verdict; the name may be omitted unless the project has several distillations."""
    declared = project.distillation(name) if name or project.definitions.distillations else None
    return verdict_file(project, declared).with_suffix(".html")
