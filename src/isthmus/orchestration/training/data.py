"""Training data for any spine and features, to read in a notebook or to write with a reproducible record."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from isthmus.features.contract.schema import Column, Contract
from isthmus.features.definition.spec import FeatureView, Spine
from isthmus.features.errors import ContractMismatch, DataError, RequestError, did_you_mean, one_of
from isthmus.features.files import is_url, publish, write_atomically
from isthmus.features.offline.delta import open_output
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import Join
from isthmus.features.pointintime.served import ServedJoin
from isthmus.features.pointintime.spine import HashedSpine, SpineRows, spine_rows
from isthmus.features.quality.statistics import FeatureStatistics, ViewStatistics
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
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import executorset
from isthmus.transforms.views.executorset import StoredSpine

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
        self, spine: SpineRows, join: Join | ServedJoin | EngineJoin, origin: TrainingOrigin, records: Path,
        options: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._spine, self._join, self._origin, self._records = spine, join, origin, records
        self._options = options
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
        """Join the rows and write them to the folder or URL `path`, with a record that reproduces them.

        The folder gets `data.parquet`, `_record.json`, and the spine's rows if they do not come from a file. The
        project notes the folder, so that `record.reproduce` finds the training set by id. Replaces an earlier training
        set in the folder, all at once. Below a URL, `data.parquet` is a folder of part files, which the executors of a
        cluster write if the engine joins; it is a training set once it has its record. Pass as `like` the training set
        to reproduce: its statistics are copied, and another id raises DataError. Also raises DataError if `path` has
        other files.
        """
        if is_url(path):
            return self._write_url(Store(str(path).rstrip("/"), self._options), like)
        target = Path(path).absolute()
        if target.exists() and not (target / RECORD).is_file():
            raise DataError(f"training set {target}", "the folder is not a training set", remedy="choose a new folder")
        statistics = [file.read_bytes() for file in like.path.glob(STATISTICS)] if like else []

        def fill(folder: Path) -> None:
            for content in statistics:
                (folder / STATISTICS).write_bytes(content)
            record = self._write_rows(folder, target)
            _require_like(record.id, like)
            (folder / RECORD).write_text(json.dumps(record.as_dict(), indent=1) + "\n")

        publish(target, fill)
        written = TrainingSet.read(target)
        write_atomically(self._records / written.id, str(target).encode())
        return written

    def _write_url(self, target: Store, like: TrainingSet | None) -> TrainingSet:
        """Write below a URL. Reads the whole spine before it deletes a training set there, which may have the spine."""
        target.require_only(RECORD, f"training set {target.root}")
        folders = self._records.parent / "training" / "_remote"
        if isinstance(self._join, EngineJoin) and self._join.remote and self._computed is None:
            with self._join.store.scratch("_spine") as scratch, self._join.session() as spark:
                spine = StoredSpine.write(self._spine, scratch)
                folder = self._cleared(target, folders, spine.sha256, like)
                return self.write_parts(spark, spine, target, folder, like)
        storage, written = target.files(), 0
        with tempfile.TemporaryDirectory(prefix="isthmus-") as here:
            hashed = HashedSpine(self._spine, Path(here) / SPINE)
            folder = self._cleared(target, folders, hashed.read(), like)
            with pa.ipc.open_stream(Path(here) / SPINE) as spine_batches, ExitStack() as stack:
                rows = stack.enter_context(open_output(storage, f"{DATA}/part-00000.parquet"))
                copy = stack.enter_context(open_output(storage, executorset.spine_part(0)))
                file = stack.enter_context(pq.ParquetWriter(rows, self.schema))
                for batch in self._joined(spine_batches):
                    file.write_batch(batch)
                    written += len(batch)
                shutil.copyfileobj(stack.enter_context((Path(here) / SPINE).open("rb")), copy)
        return self._save(self._record(hashed.sha256, hashed.rows, written, folder, target), target, like)

    def _cleared(self, target: Store, folders: Path, spine_sha256: str, like: TrainingSet | None) -> Path:
        identity = self.identity(spine_sha256)
        _require_like(identity, like)
        target.clear(RECORD)
        return folders / identity

    def write_parts(
        self, spark: Any, spine: StoredSpine, target: Store, folder: Path, like: TrainingSet | None = None
    ) -> TrainingSet:
        """Let executors join the rows of a spine and write part files to `target`; write the record to `folder`, too.

        The join must be by the engine, without request transforms. Raises the errors of `executorset.write_parts`.
        """
        join = self._join
        assert isinstance(join, EngineJoin)  # noqa: S101 - the caller has prepared it
        executorset.write_parts(spark, spine, join.views(), join.store, target)
        return self._save(self._record(spine.sha256, spine.rows, spine.rows, folder, target), target, like)

    def measure(
        self, spark: Any, target: Store, columns: Sequence[Column]
    ) -> tuple[int, int, dict[str, FeatureStatistics], dict[str, ViewStatistics]]:
        """Let executors measure part files and the joined tables; return what `baseline.save_statistics` saves."""
        join = self._join
        assert isinstance(join, EngineJoin)  # noqa: S101 - as in `write_parts`
        rows, last, features, views = executorset.measure_parts(spark, target, columns, join.views(), join.store)
        opened = {history.view.name: history for history in self._origin.histories}
        return rows, last, features, {
            name: msgspec.structs.replace(view, version=opened[name].version, fingerprint=opened[name].fingerprint)
            for name, view in views.items()
        }  # fmt: skip

    def _save(self, record: TrainingSet, target: Store, like: TrainingSet | None) -> TrainingSet:
        content = json.dumps(record.as_dict(), indent=1).encode() + b"\n"
        for statistics in like.path.glob(STATISTICS) if like else []:
            write_atomically(record.path / STATISTICS, statistics.read_bytes())
        with open_output(target.files(), target.path(RECORD)) as file:
            file.write(content)
        write_atomically(record.path / RECORD, content)
        write_atomically(self._records / record.id, str(record.path).encode())
        return record

    def identity(self, spine_sha256: str) -> str:
        return hashlib.sha256(json.dumps(self._as_dict(spine_sha256), sort_keys=True).encode()).hexdigest()[:16]

    def _write_rows(self, folder: Path, target: Path) -> TrainingSet:
        spine = HashedSpine(self._spine, None if self._spine.path else folder / SPINE)
        with pq.ParquetWriter(folder / DATA, self.schema) as file:
            written = 0
            for batch in self._joined(spine.batches()):
                file.write_batch(batch)
                written += len(batch)
        return self._record(spine.sha256, spine.rows, written, target)

    def _record(
        self, spine_sha256: str, rows_in: int, rows_out: int, path: Path, store: Store | None = None
    ) -> TrainingSet:
        lag = None
        if isinstance(self._join, ServedJoin):
            lag = {view: {name: asdict(part) for name, part in parts.items()}
                   for view, parts in self._join.report().items()}  # fmt: skip
        return TrainingSet(
            **self._as_dict(spine_sha256),
            id=self.identity(spine_sha256),
            path=path,
            spine_file=str(self._spine.path) if self._spine.path else None,
            rows_in=rows_in,
            rows_out=rows_out,
            lag=lag,
            place=None if store is None else store.place,
            storage_options=dict(store.options) if store else {},
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
    return TrainingData(spine, joined, origin, records_folder(project), project.storage_options)


def _require_like(identity: str, like: TrainingSet | None) -> None:
    if like is not None and identity != like.id:
        raise DataError(
            f"training set {like.id}", "its spine changed while it was read", remedy="run the command again"
        )


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
