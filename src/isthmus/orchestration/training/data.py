"""Training data for any spine and features, to read in a notebook or to write with a reproducible record."""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from isthmus.features.contract.schema import Contract
from isthmus.features.definition.spec import FeatureView, Spine
from isthmus.features.errors import ContractMismatch, DataError, RequestError, did_you_mean, one_of
from isthmus.features.files import publish, require_local, write_atomically
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.scan import rebatch
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import BATCH, Join
from isthmus.features.pointintime.served import ServedJoin
from isthmus.features.pointintime.spine import SpineRows, spine_rows
from isthmus.features.types import TYPES, DataType, UnixTimestamp
from isthmus.orchestration.artifacts import (
    DATA,
    RECORD,
    SPINE,
    STATISTICS,
    TrainingSet,
    described,
    records_folder,
    to_pandas,
)
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.enginejoin import EngineJoin
from isthmus.orchestration.training.requestcolumns import RequestColumns, request_columns
from isthmus.orchestration.training.spinesql import is_sql, spine_from_sql

if TYPE_CHECKING:
    import pandas as pd

    from isthmus.orchestration.tensors import Tensors

# Values of `join`: join in this process, or in the project's engine.
JOINS = ("embedded", "engine")


@dataclass(frozen=True)
class TrainingOrigin:
    """Everything that determines a training set except the rows of its spine, the table of training examples.

    `contract` is a hash, and `spine` a name. `status` adds a status column per view.
    """

    contract: str
    spine: str
    histories: Sequence[ViewHistory]
    features: Mapping[str, Sequence[str]]
    status: bool
    computed: RequestColumns | None

    def as_dict(self, spine_sha256: str, served: dict[str, int] | None) -> dict[str, Any]:
        # The key is missing without request transforms, so that older training sets keep their id.
        computed = {"computed": self.computed.identity} if self.computed else {}
        return {
            **computed,
            "contract": self.contract,
            "spine": self.spine,
            "spine_sha256": spine_sha256,
            "views": {history.view.name: history.view.as_dict() for history in self.histories},
            "features": {name: list(features) for name, features in self.features.items()},
            "tables": {history.view.name: history.version for history in self.histories},
            "tables_sha256": {history.view.name: history.fingerprint for history in self.histories},
            "options": {"status": self.status},
            "served": served,
        }


class TrainingData:
    """Training data that is joined when it is read: a spine (table of training examples) and tables with features.

    Each read joins the rows again. A spine that is SQL or a stream can be read only once. `schema` has the columns.
    """

    def __init__(
        self, spine: SpineRows, join: Join | ServedJoin | EngineJoin, origin: TrainingOrigin, records: Path
    ) -> None:
        self._spine, self._join, self._origin, self._records = spine, join, origin, records
        self._computed = origin.computed
        self.schema = self._computed.schema(join.schema) if self._computed else join.schema

    def __repr__(self) -> str:
        origin, count = self._origin, self._spine.count
        rows = f"rows of {self._spine.path or origin.spine}" if count is None else f"{count:,} rows"
        computed = self._computed.identity if self._computed else {}
        chosen = described({**origin.features, **{name: part["fields"] for name, part in computed.items()}})
        return f"<TrainingData: {rows}, {chosen}; contract {origin.contract[:12]}>"

    def batches(self) -> Iterator[pa.RecordBatch]:
        return self._joined(self._spine.batches())

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, self.batches())

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.batches(), self.schema)

    def pandas(self) -> "pd.DataFrame":
        """Join the rows and return them as a DataFrame. Integer and boolean columns with nulls keep their type."""
        return to_pandas(self.table())

    def torch(self, *, columns: Sequence[str] | None = None, batch: int = 1024) -> "Tensors":
        """Return a torch `IterableDataset` of batches of `batch` rows, which joins the rows again in each epoch.

        `columns` are the columns to convert (default: all numeric ones). Raises RequestError for a column that is
        missing or not numeric, and when a `DataLoader` with workers reads it.
        """
        from isthmus.orchestration.tensors import Tensors

        return Tensors(self.schema, self.batches, columns, batch, workers=False)

    def write(self, path: Path | str, *, like: TrainingSet | None = None) -> TrainingSet:
        """Join the rows and write them atomically to the local folder `path`, with a record that reproduces them.

        The folder gets `data.parquet`, `_record.json`, and the spine's rows if they do not come from a file. The
        project notes the folder, so that `record.reproduce` finds the training set by id. Replaces an earlier training
        set in the folder. Pass as `like` the training set to reproduce: its statistics are copied, and another id
        raises DataError. Also raises DataError if `path` exists and is not a training set, and RequestError for a URL.
        """
        target = require_local("training set", path).absolute()
        if target.exists() and not (target / RECORD).is_file():
            raise DataError(f"training set {target}", "the folder is not a training set", remedy="choose a new folder")
        statistics = [file.read_bytes() for file in like.path.glob(STATISTICS)] if like else []

        def fill(folder: Path) -> None:
            for content in statistics:
                (folder / STATISTICS).write_bytes(content)
            record = self._write_rows(folder, target)
            if like is not None and record.id != like.id:
                raise DataError(
                    f"training set {like.id}", "its spine changed while it was read", remedy="run the command again"
                )
            (folder / RECORD).write_text(json.dumps(record.as_dict(), indent=1) + "\n")

        publish(target, fill)
        written = TrainingSet.read(target)
        write_atomically(self._records / written.id, str(target).encode())
        return written

    def identity(self, spine_sha256: str) -> str:
        return hashlib.sha256(json.dumps(self._as_dict(spine_sha256), sort_keys=True).encode()).hexdigest()[:16]

    def _write_rows(self, folder: Path, target: Path) -> TrainingSet:
        spine = HashedSpine(self._spine, None if self._spine.path else folder / SPINE)
        with pq.ParquetWriter(folder / DATA, self.schema) as file:
            written = 0
            for batch in self._joined(spine.batches()):
                file.write_batch(batch)
                written += len(batch)
        lag = None
        if isinstance(self._join, ServedJoin):
            lag = {view: {name: asdict(part) for name, part in parts.items()}
                   for view, parts in self._join.report().items()}  # fmt: skip
        return TrainingSet(
            **self._as_dict(spine.sha256),
            id=self.identity(spine.sha256),
            path=target,
            spine_file=str(self._spine.path) if self._spine.path else None,
            rows_in=spine.rows,
            rows_out=written,
            lag=lag,
        )

    def _as_dict(self, spine_sha256: str) -> dict[str, Any]:
        return self._origin.as_dict(spine_sha256, self._join.until if isinstance(self._join, ServedJoin) else None)

    def _joined(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        joined = self._join.batches(spine)
        return self._computed.batches(joined) if self._computed else joined


def training_data(
    project: Project,
    features: str | Sequence[str],
    spine: object,
    *,
    status: bool = True,
    as_served: bool = False,
    join: str = "embedded",
) -> TrainingData:
    """Prepare to join features to the rows of a spine, as of each row's time. Rows are joined when they are read.

    Takes the arguments of `isthmus.training_data` and raises the same errors, but takes only an open `Project`.
    """
    contract = project.applied()
    offline = project.offline_store()
    selection = select_features(contract, features)
    histories = [offline.history(contract.views[name]) for name in selection.stored]
    if isinstance(spine, str) and is_sql(spine):
        tables = _tables(project, contract, offline, histories)
        rows, name = spine_from_sql(spine, tables, project.settings.profiles.training.threads), "SQL"
    else:
        rows = spine_rows(spine, column_types(contract, histories))
        name = str(rows.path) if rows.path else "rows"
    computed = request_columns(project, contract, selection.computed)
    origin = TrainingOrigin(contract.hash, name, histories, selection.stored, status, computed)
    return prepare_join(project, rows, origin, join=join, served=as_served)


def prepare_join(
    project: Project, spine: SpineRows, origin: TrainingOrigin, *, join: str, served: bool | Mapping[str, int]
) -> TrainingData:
    """Prepare to join the views in `origin` to the rows of a spine. Rows are joined when they are read.

    `served` selects the values. False joins the values that were known at each row's time. True joins the values that
    were readable online at that time, by the log of materializations. A mapping, `TrainingSet.served` of an earlier
    training set, replays the log only as far as for that set. `join` is "embedded" for this process or "engine" for the
    project's engine. Raises RequestError if `join` is unknown or the engine cannot do this join. Raises DataError if
    `served` is not False and a view was never materialized.
    """
    require_join(join, as_served=served is not False)
    offline, threads = (
        project.offline_store(),
        project.settings.profiles.training.threads,
    )
    joined: Join | ServedJoin | EngineJoin
    if join == "engine":
        joined = EngineJoin(
            spine.schema, offline, origin.histories, features=origin.features, status=origin.status, threads=threads,
            name=project.settings.engine,
        )  # fmt: skip
    elif served is False:
        joined = Join(
            spine.schema, origin.histories, features=origin.features, status=origin.status, threads=threads,
            reading=offline.reading,
        )  # fmt: skip
    else:
        joined = ServedJoin(
            spine.schema, offline, origin.histories, features=origin.features, status=origin.status, threads=threads,
            until=None if served is True else served,
        )  # fmt: skip
    return TrainingData(spine, joined, origin, records_folder(project))


def require_join(join: str, *, as_served: bool) -> None:
    if join not in JOINS:
        raise RequestError("join", f"{join!r} is not known", expected=one_of(JOINS))
    if join == "engine" and as_served:
        raise RequestError("join", "the engine cannot join as served: it cannot replay the log of materializations",
                           expected="either as served or by the engine")  # fmt: skip


class FeatureSelection(NamedTuple):
    """Stored features by view, with the inputs of request transforms, and computed features by request transform."""

    stored: dict[str, list[str]]
    computed: dict[str, list[str]]


def select_features(contract: Contract, features: str | Sequence[str]) -> FeatureSelection:
    """Return the features that a user selects for a training set, by view and by request transform.

    `features` is the name of a service, or a list or comma-separated text of `view:feature`. The name of a view or of a
    request transform alone selects all its features. Adds stored features that a selected request transform reads.
    Raises RequestError if a name is unknown or repeated, or the list is empty.
    """
    if isinstance(features, str) and features in contract.services:
        service = contract.service(features)
        features = [f"{name}:{feature}" for name, feature in (*service.features, *service.computed)]
    names = features.replace(",", " ").split() if isinstance(features, str) else list(features)
    selection = FeatureSelection({}, {})
    for name in names:
        owner, _, feature = name.partition(":")
        declared = contract.views.get(owner) or contract.transforms.get(owner)
        if declared is None:
            named = one_of([*contract.views, *contract.transforms])
            expected = f"{one_of(contract.services)} for a service, or view:feature with {named}"
            if name in contract.services:
                raise RequestError(f"features, {name!r}", "is a service", expected=f"features={name!r}, without a list")
            near = did_you_mean(owner, [*contract.views, *contract.transforms])
            raise RequestError(f"features, {name!r}", f"is not in the contract{near}", expected=expected)
        kind = "view" if owner in contract.views else "request transform"
        known = [column.name for column in declared.fields]
        if feature and feature not in known:
            problem = f"{kind} {owner} has no such feature{did_you_mean(feature, known)}"
            raise RequestError(f"features, {name!r}", problem, expected=one_of(known))
        selected = (selection.stored if kind == "view" else selection.computed).setdefault(owner, [])
        for added in [feature] if feature else known:
            if added in selected:
                raise RequestError(f"features, {owner}:{added}", "is listed twice", expected="each feature once")
            selected.append(added)
    for transform in selection.computed:
        for view, feature in contract.transforms[transform].stored:
            if feature not in (selected := selection.stored.setdefault(view, [])):
                selected.append(feature)
    if not selection.stored and not selection.computed:
        raise RequestError("features", "the list is empty", expected="a service, or features as view:feature")
    return selection


class HashedSpine:
    """Counts and hashes the rows of a spine (training examples) as they are read, and writes them to `file` if set."""

    def __init__(self, spine: SpineRows, file: Path | None = None) -> None:
        self._spine, self._file = spine, file
        self._hash = hashlib.sha256(spine.schema.to_string().encode())
        self.rows = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def read(self) -> str:
        """Read all rows of the spine, write them to `file` if it is set, and return their hash. Call this only once."""
        deque(self.batches(), maxlen=0)
        return self.sha256

    def batches(self) -> Iterator[pa.RecordBatch]:
        with ExitStack() as open_files:
            file = self._file and open_files.enter_context(pa.ipc.new_stream(self._file, self._spine.schema))
            for rows in rebatch(self._spine.batches(), BATCH):
                for batch in rows.combine_chunks().to_batches():
                    self._hash.update(batch.serialize())
                    self.rows += len(batch)
                    if file:
                        file.write_batch(batch)
                    yield batch


def _tables(
    project: Project, contract: Contract, offline: OfflineStore, joined: Sequence[ViewHistory]
) -> dict[str, ds.Dataset | pa.Table]:
    tables: dict[str, ds.Dataset | pa.Table] = {}
    definitions = project.definitions
    declarations: Iterable[FeatureView | Spine] = (*definitions.views.values(), *definitions.spines.values())
    for source in (source for declaration in declarations for source in declaration.sources):
        file = project.root / source.path
        if file.suffix == ".parquet" and file.exists():
            tables[source.name] = ds.dataset(file)
    opened = {history.view.name: history for history in joined}
    for name, view in contract.views.items():
        try:
            tables[name] = (opened.get(name) or offline.history(view)).data
        except (ContractMismatch, DataError):
            continue  # not built: the error of the query lists the tables
    return tables


def column_types(contract: Contract, histories: Sequence[ViewHistory]) -> dict[str, DataType]:
    declared: dict[str, set[str]] = {}
    inputs = [(column.name, column.dtype.name) for name in contract.services for column in contract.raw_inputs(name)]
    for spine in contract.spines.values():
        inputs += [(column.name, column.dtype.name) for column in (*spine.request, spine.label)]
    for name, dtype in inputs:
        declared.setdefault(name, set()).add(dtype)
    types = {name: TYPES[kinds.pop()] for name, kinds in declared.items() if len(kinds) == 1}
    types |= {column.name: column.dtype for history in histories for column in history.view.keys}
    return types | dict.fromkeys(("event_timestamp", "known_at"), UnixTimestamp)
