"""`training-set`: the examples of a distillation, each with what every view answered at its moment."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.distill.declaration import Distillation
from isthmus.features.contract import Column, Contract
from isthmus.features.errors import DataError, RequestError
from isthmus.features.files import publish, read_pointer, write_atomically
from isthmus.features.offline import OfflineStore
from isthmus.features.pointintime import point_in_time
from isthmus.features.types import TYPES
from isthmus.orchestration import reference
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables import Progress, reading, silent
from isthmus.transforms.compute import compute_spine

_DATA, _RECORD = "data.parquet", "record.json"


@dataclass(frozen=True)
class TrainingSet:
    """A training set and what it was made from.

    Attributes:
        id: hash of all that decides its content.
        path: its folder.
        contract: hash of the contract.
        spine: name of the spine.
        spine_sha256: hash of the spine's rows.
        tables: view to the version of its table.
        tables_sha256: view to the hash of that version's rows.
        rows_in: rows of the spine.
        rows_out: rows of the training set.
    """

    id: str
    path: Path
    contract: str
    spine: str
    spine_sha256: str
    tables: dict[str, int]
    tables_sha256: dict[str, str]
    rows_in: int
    rows_out: int

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form, which is also the record beside the data."""
        return {**asdict(self), "path": str(self.path)}

    def table(self) -> pa.Table:
        """The rows, in the order of the spine.

        Raises:
            DataError: the file is missing or damaged.
        """
        try:
            return pq.read_table(self.path / _DATA)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"training set {self.id}", f"{self.path / _DATA} cannot be read ({error})",
                            remedy=f"remove {self.path} and run `isthmus training-set`") from error  # fmt: skip


def training_set(project: Project, name: str | None = None, *, progress: Progress = silent) -> TrainingSet:
    """Joins the views of a distillation to its spine by the time rules.

    Args:
        project: the project, applied and built.
        name: the distillation; may be left out where there is only one.
        progress: told what is being done and the share that is done.
    """
    contract = project.applied()
    declared = distillation(project, name)
    offline = OfflineStore(project.offline)
    views = dict.fromkeys(
        view for service in (declared.teacher, declared.student) for view, _ in contract.service(service.name).features
    )
    histories = [offline.history(contract.views[view]) for view in views]
    progress(f"computing {declared.spine.name}", 0.0)
    with reading(project, [declared.spine]) as frames:
        spine = compute_spine(declared.spine, spine_columns(contract, declared.spine.name), frames)
    table = spine
    for n, history in enumerate(histories):
        progress(f"joining {history.view.name} to {len(spine)} rows", 0.4 + 0.4 * n / len(histories))
        with offline.reading(history.view.name):
            table = point_in_time(table, [history], project.settings.profiles.training.threads)
    versions = {history.view.name: history.version for history in histories}
    rows = {history.view.name: offline.fingerprint(history) for history in histories}
    spine_sha256 = _sha256(spine)
    made = json.dumps([contract.hash, declared.spine.name, spine_sha256, versions, rows], sort_keys=True)
    identity = hashlib.sha256(made.encode()).hexdigest()[:16]
    folder = project.state / "training" / declared.name
    result = TrainingSet(
        id=identity,
        path=folder / identity,
        contract=contract.hash,
        spine=declared.spine.name,
        spine_sha256=spine_sha256,
        tables=versions,
        tables_sha256=rows,
        rows_in=len(spine),
        rows_out=len(table),
    )
    if not all((result.path / name).exists() for name in (_RECORD, reference.FILE)):
        progress("writing", 0.8)
        columns = dict.fromkeys(
            column for service in (declared.teacher, declared.student) for column in contract.inputs(service.name)
        )

        def write(fresh: Path) -> None:
            _write(fresh, result, table)
            reference.write(fresh, fresh / _DATA, result, list(columns), histories, offline)

        publish(result.path, write)
    write_atomically(folder / "latest", identity.encode())
    progress("the training set is written", 1.0)
    return result


def last_training_set(project: Project, declared: Distillation) -> TrainingSet:
    """The training set of the last `training-set`, which must have been made under the contract in force.

    Raises:
        DataError: there is none, or it is damaged, or made under another contract.
    """
    folder = project.state / "training" / declared.name
    remedy = "run `isthmus training-set`"
    where = f"training set of {declared.name}"
    try:
        # The place is where it is found, not where it was made: a project can be moved.
        path = read_pointer(folder / "latest")
        result = TrainingSet(**{**json.loads((path / _RECORD).read_text()), "path": path})
    except FileNotFoundError as error:
        raise DataError(where, f"there is none in {folder}", remedy=remedy) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(where, f"its record cannot be read ({error})", remedy=remedy) from error
    contract = project.applied().hash
    if result.contract != contract:
        raise DataError(where, f"made under contract {result.contract[:12]}", expected=contract[:12], remedy=remedy)
    return result


def distillation(project: Project, name: str | None) -> Distillation:
    """The distillation of this name, or the only one.

    Raises:
        RequestError: there is none, or there are several and none is named.
    """
    known = project.definitions.distillations
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        found = "none is named" if name is None else f"{name!r} is not declared"
        raise RequestError("distillation", found, expected="one of " + (", ".join(known) or "none: none is declared"))
    return known[name]


def spine_columns(contract: Contract, name: str) -> list[Column]:
    """Keys, request fields and label of a spine. A request field named like a key is that key."""
    spine = contract.spines[name]
    types = dict((*spine["keys"], *spine["request"], spine["label"]))
    return [Column(column, TYPES[dtype]) for column, dtype in types.items()]


def _write(folder: Path, result: TrainingSet, table: pa.Table) -> None:
    pq.write_table(table, folder / _DATA)
    (folder / _RECORD).write_text(json.dumps(result.as_dict(), indent=1) + "\n")


def _sha256(table: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()
