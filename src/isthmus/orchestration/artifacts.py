"""Files that the steps write to the state folder, and pointers to the latest ones."""

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
from isthmus.features.profiles import FASTEST, SMALLEST, ServingProfile
from isthmus.orchestration.project import Project
from isthmus.package.manifest import open_package, read_contract, read_package

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow.dataset as ds

    from isthmus.orchestration.tensors import Tensors
    from isthmus.transforms.tables.stored import Store


# Files of a training set. Readers of Parquet folders skip names that begin with an underscore.
DATA, RECORD, SPINE, STATISTICS = "data.parquet", "_record.json", "_spine.arrow", "statistics.json"


@dataclass(frozen=True)
class TrainingSet:
    """A training set on disk: its folder and the record in it.

    Attributes:
        id: hash of every input that determines the content.
        spine: name of the declared spine (table of training examples), path of a file, "SQL", or "rows" for a spine in
            memory.
        spine_file: file or folder with the spine's rows; None if they are stored with the training set.
        tables: version of each view's table; `tables_sha256` has the hash of its rows at that version.
        options: other inputs of the id; `status` adds a status column for each view.
        served: for a join as served: time (microseconds) up to which a view's log was replayed, and under `VIEW|pushed`
            the version of its log of pushed rows.
        lag: for a join as served: difference from the ideal join, by view and feature.
        computed: hash and computed fields by request transform.
        place: folder or URL of the rows' part files; None if the rows are in `path`. `storage_options` belong to it.
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
    place: str | None = None
    storage_options: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        chosen = described({**self.features, **{name: part["fields"] for name, part in self.computed.items()}})
        return f"<TrainingSet {self.id}: {self.rows_out:,} rows, {chosen}; in {self.place or self.path}>"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def read(cls, folder: Path) -> "TrainingSet":
        return cls(**{**json.loads((folder / RECORD).read_text()), "path": folder})

    def table(self) -> pa.Table:
        """Read all rows of the training set into memory, in the order of its spine (the table of training examples).

        Raise DataError if the file is missing or damaged.
        """
        try:
            return self.dataset().to_table()
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def dataset(self) -> "ds.Dataset":
        """Open the rows as a lazy Arrow dataset, in the order of the spine."""
        import pyarrow.dataset as ds

        from isthmus.transforms.views import executorset

        return ds.dataset(self.path / DATA) if self.store is None else executorset.parts(self.store)

    @property
    def store(self) -> "Store | None":
        from isthmus.transforms.tables.stored import Store

        return None if self.place is None else Store(self.place, self.storage_options)

    def pandas(self) -> "pd.DataFrame":
        """Read all rows of the training set into a DataFrame, to explore them or to train on them.

        The columns have nullable pandas types, so that integers with nulls do not become floats. Raise DataError if the
        file is missing or damaged.
        """
        return to_pandas(self.table())

    def torch(self, *, columns: Sequence[str] | None = None, batch: int = 1024) -> "Tensors":
        """Return a torch `IterableDataset` over the training set, to train on more rows than fit in memory.

        It yields batches of `batch` rows; see `Tensors` for their form. `columns` names the columns to read, by default
        all numeric ones. Raise RequestError if a column is missing or not numeric, and DataError if the file is missing
        or damaged.
        """
        from isthmus.features.pointintime.join import BATCH
        from isthmus.orchestration.tensors import Tensors

        try:
            data = self.dataset()
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        return Tensors(
            data.schema, lambda: data.to_batches(batch_size=BATCH, batch_readahead=4), columns, batch, workers=True
        )

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"training set {self.id}", f"{self.place or self.path}/{DATA} cannot be read ({error})",
                         remedy=f"remove {self.path} and run `isthmus features training-set`")  # fmt: skip


def described(features: Mapping[str, Sequence[str]]) -> str:
    names = list(features)
    count = sum(map(len, features.values()))
    of = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{count} feature{'' if count == 1 else 's'} of {of or 'none'}"


def to_pandas(table: pa.Table) -> "pd.DataFrame":
    import pandas as pd

    whole = [f"{sign}Int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
    types = {pa.from_numpy_dtype(name.lower()): pd.api.types.pandas_dtype(name) for name in whole}
    types[pa.bool_()] = pd.BooleanDtype()
    return table.to_pandas(types_mapper=types.get)


_NO_TRAINING_SET = "run `isthmus features training-set`"


def records_folder(project: Project) -> Path:
    return project.state / "records"


class Artifacts:
    """Finds the files of one distillation in the state folder. If a file is missing, a DataError names the step to run.

    Training sets and students are in subfolders named by id, of `training_sets` and `models`. `outputs` is the cache of
    teacher and reference outputs. The file `package_pointer` has the name of the latest package's folder beside it.
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
        return cls(project, project.distillation(name))

    def training_set(self, identity: str) -> TrainingSet:
        return self._training_set(self.training_sets / identity)

    def latest_training_set(self) -> TrainingSet | None:
        return self._training_set() if (self.training_sets / "latest").exists() else None

    def current_training_set(self) -> TrainingSet:
        """Return the training set that was written last for this distillation, to train or export a student.

        Raise DataError if no training set was written, if it is damaged, or if it was written under another contract
        than the applied one. Raise ContractMismatch if the definitions have changed since the last `isthmus apply`.
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
            message = f"not found in {folder or self.training_sets}"
            raise DataError(where, message, remedy=_NO_TRAINING_SET) from error
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(where, f"its record cannot be read ({error})", remedy=_NO_TRAINING_SET) from error

    def last_model(self) -> Path:
        return self._last(self.models / "latest", "student", "distill")

    def last_report(self) -> dict[str, Any]:
        return read_report(self.last_model())

    def last_package(self) -> Path:
        return self._last(self.package_pointer, "package", "model export")

    def packaged_report(self) -> dict[str, Any]:
        package = self.last_package()
        student = self.models / read_package(package).model
        if not student.exists():
            raise DataError(
                str(student),
                "is missing, with the report of the package's student",
                remedy="run `isthmus distill` and `isthmus model export`",
            )
        return read_report(student, package)

    def exported(self, contract: Contract) -> Path | None:
        package = self.last_package() if self.package_pointer.exists() else None
        return package if package and not contract_changes(package, contract) else None

    def blocked(self) -> str:
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
            if verb == "model export" and (blocked := self.blocked()):
                remedy = "train longer or on more data, or change the gates in the definitions"
                raise DataError(where, blocked, remedy=remedy) from error
            raise DataError(where, f"not found in {pointer.parent}", remedy=remedy) from error
        except ValueError as error:
            raise DataError(where, f"{pointer.parent} is damaged ({error})", remedy=remedy) from error


REPORT = "report.json"


def read_report(model: Path, package: Path | None = None) -> dict[str, Any]:
    report = read_json(model / REPORT, "distill")
    measured = serving_file(package) if package else None
    report["serving"] = read_json(measured, "model export") if measured and measured.exists() else None
    return report


def read_json(file: Path, verb: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(str(file), f"cannot be read: {error}", remedy=f"run `isthmus {verb}` again") from error


def serving_profile(project: Project, package: Path) -> ServingProfile:
    profile = project.settings.profiles.serving
    if profile.precision not in (FASTEST, SMALLEST):
        return profile
    return replace(profile, precision=read_json(serving_file(package), "model export")["precision"])


def serving_file(package: Path) -> Path:
    return package.parents[1] / "serving" / f"{package.name}.json"


def devices_folder(package: Path) -> Path:
    return package.parents[1] / "devices" / package.name


def contract_changes(package: Path, contract: Contract) -> list[str]:
    """List the changes from a package's contract to `contract` that keep the package from running; [] if it can run.

    Used before a package is run, and by `isthmus apply --diff` and `isthmus status` to report stale packages. Raise
    PackageError if the package is damaged.
    """
    opened = open_package(package)
    return service_differences(read_contract(opened), contract, opened.manifest.service)


def verdict_file(project: Project, declared: Distillation | None) -> Path:
    return project.state / "verdicts" / f"{declared.name if declared else 'features'}.json"


def page_file(project: Project, name: str | None = None) -> Path:
    declared = project.distillation(name) if name or project.definitions.distillations else None
    return verdict_file(project, declared).with_suffix(".html")
