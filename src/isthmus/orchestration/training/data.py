"""Training data for any spine and any features: looked at in a notebook, or kept with a record that can be repeated."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from isthmus.features.contract.contract import Contract, one_of
from isthmus.features.errors import ContractMismatch, DataError, RequestError
from isthmus.features.files import publish, write_atomically
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.scan import in_lots
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.asserved import ServedJoin
from isthmus.features.pointintime.join import BATCH, Join
from isthmus.features.pointintime.spine import SpineRows, spine_rows
from isthmus.features.values.columns import ARROW
from isthmus.orchestration.artifacts import DATA, RECORD, SPINE, STATISTICS, TrainingSet, records_folder
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.enginejoin import EngineJoin
from isthmus.orchestration.training.record import find, recorded_history, recorded_spine
from isthmus.orchestration.training.requestcolumns import RequestColumns, recorded_columns, request_columns
from isthmus.orchestration.training.spinesql import is_sql, spine_from_sql

if TYPE_CHECKING:
    from isthmus.orchestration.tensors import Tensors

JOINS = ("embedded", "engine")
"""Where a join can run: in this process, or by the engine of the project."""


class TrainingData:
    """A spine and the versions of the tables that will be joined to it. Nothing is joined before it is asked for.

    Args:
        offline: where the histories are.
        histories: the views, each at its version.
        spine: the rows.
        features: view to the features that are wanted.
        status: whether to say what each view answered.
        served: whether to join what serving answered instead of what could have been known; or view to the moment up to
            which its log is replayed.
        engine: the engine to join by; None to join in this process. The rows are the same.
        request_columns: what computes request transforms, if any are wanted.
        threads: CPU threads.
        contract: hash of the contract, for the record.
        named: what the record calls the spine.
        records: the folder in which an id leads to the training set, wherever it was written.

    Attributes:
        schema: the columns of the training data.
    """

    def __init__(
        self,
        offline: OfflineStore,
        histories: Sequence[ViewHistory],
        spine: SpineRows,
        features: Mapping[str, Sequence[str]],
        *,
        status: bool,
        threads: int,
        contract: str,
        named: str,
        records: Path,
        served: bool | Mapping[str, int] = False,
        engine: str | None = None,
        request_columns: RequestColumns | None = None,
    ) -> None:
        self._records, self._computing = records, request_columns
        self._offline, self._histories, self._spine = offline, histories, spine
        self._features, self._status, self._contract, self._named = features, status, contract, named
        self._join: Join | ServedJoin | EngineJoin
        if engine is not None:
            self._join = EngineJoin(
                spine.schema, offline, histories, features=features, status=status, threads=threads, name=engine
            )
        elif served is False:
            self._join = Join(
                spine.schema, histories, features=features, status=status, threads=threads, reading=offline.reading
            )
        else:
            self._join = ServedJoin(
                spine.schema, offline, histories, features=features, status=status, threads=threads,
                until=None if served is True else served,
            )  # fmt: skip
        self.schema = request_columns.schema(self._join.schema) if request_columns else self._join.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows in order, a batch at a time, in bounded memory.

        Raises:
            DataError: the spine or a table cannot be read, or a row has no time or a key that does not fit.
        """
        return self._joined(self._spine.batches())

    def reader(self) -> pa.RecordBatchReader:
        """The rows as Arrow's own stream, which pandas, Polars and DuckDB read."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches())

    def table(self) -> pa.Table:
        """All rows, in memory."""
        return pa.Table.from_batches(self.batches(), self.schema)

    def torch(self, *, columns: Sequence[str] | None = None, batch: int = 1024) -> "Tensors":
        """The rows as a torch `IterableDataset`, joined anew in each epoch: see `tensors.Tensors`."""
        from isthmus.orchestration.tensors import Tensors

        return Tensors(self.schema, self.batches, columns, batch, workers=False)

    def write(self, path: Path | str, *, like: str | None = None, beside: Path | None = None) -> TrainingSet:
        """Writes the rows and a record from which they can be made again, all or nothing.

        Args:
            path: the folder to make: `data.parquet` and `_record.json`, and the spine's rows if they have no file that
                stays. A training set that is there is replaced.
            like: the id that it must have.
            beside: the folder of the same training set, of which the statistics are kept, too.

        Raises:
            DataError: as `batches`; or the path holds something else than a training set.
        """
        target = Path(path).absolute()
        if target.exists() and not (target / RECORD).is_file():
            raise DataError(f"training set {target}", "something else is there", remedy="name a folder to be made")
        kept = {file.name: file.read_bytes() for file in beside.glob(STATISTICS)} if beside else {}
        publish(target, lambda folder: self._fill(folder, target, like, kept))
        made = TrainingSet.read(target)
        write_atomically(self._records / made.id, str(target).encode())
        return made

    def _fill(self, folder: Path, target: Path, like: str | None, kept: Mapping[str, bytes]) -> None:
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        spine = HashedSpine(self._spine, None if self._spine.path else folder / SPINE)
        with pq.ParquetWriter(folder / DATA, self.schema) as file:
            written = 0
            for batch in self._joined(spine.batches()):
                file.write_batch(batch)
                written += len(batch)
        record = self._record(spine, written, target)
        if like is not None and record.id != like:
            raise DataError(f"training set {like}", "its spine changed while it was read", remedy="run it again")
        (folder / RECORD).write_text(json.dumps(record.as_dict(), indent=1) + "\n")

    def identity(self, spine_sha256: str) -> str:
        """The id of the training set of a spine with these rows."""
        return hashlib.sha256(json.dumps(self._known(spine_sha256), sort_keys=True).encode()).hexdigest()[:16]

    def _record(self, spine: "HashedSpine", rows_out: int, path: Path) -> TrainingSet:
        file = str(self._spine.path) if self._spine.path else None
        known, identity = self._known(spine.sha256), self.identity(spine.sha256)
        lag = None
        if isinstance(self._join, ServedJoin):
            told = self._join.report()
            lag = {view: {name: asdict(part) for name, part in parts.items()} for view, parts in told.items()}
        return TrainingSet(
            **known, id=identity, path=path, spine_file=file, rows_in=spine.rows, rows_out=rows_out, lag=lag
        )

    def _known(self, spine_sha256: str) -> dict[str, Any]:
        """All that decides the content."""
        # Only where there are any: what was made before they existed keeps its id.
        computed = {"computed": self._computing.known} if self._computing else {}
        return {
            **computed,
            "contract": self._contract,
            "spine": self._named,
            "spine_sha256": spine_sha256,
            "views": {history.view.name: history.view.as_dict() for history in self._histories},
            "features": {name: list(features) for name, features in self._features.items()},
            "tables": {history.view.name: history.version for history in self._histories},
            "tables_sha256": {history.view.name: history.fingerprint for history in self._histories},
            "options": {"status": self._status},
            "served": self._join.until if isinstance(self._join, ServedJoin) else None,
        }

    def _joined(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        joined = self._join.batches(spine)
        return self._computing.batches(joined) if self._computing else joined


def training_data(
    project: Project,
    features: str | Sequence[str],
    spine: object,
    *,
    status: bool = True,
    as_served: bool = False,
    join: str = "embedded",
) -> TrainingData:
    """What the views answered at each row's own moment.

    Args:
        project: the project, applied and built.
        features: the name of a service, or features as `view:feature`; a view's name alone stands for all of its own.
            So do request transforms and their fields; the stored features that they take come along.
        spine: one row per question, with `event_timestamp` in a time zone, the join keys, and what else is to come
            along: a table in any of the forms of `spines.FORMS`, or a SELECT in DuckDB's SQL over the views, by name,
            and over sources that are Parquet.
        status: whether to add a column per view that says what it answered.
        as_served: whether to answer with what was readable online at each moment, by the log of materializations.
        join: "embedded" in this process, or "engine" by the engine of the project.

    Raises:
        RequestError: a feature is not in the contract, the SQL is no single SELECT, or options do not go together.
        DataError: a table is not there, the spine cannot be read, or lacks a column or has it in another type.
    """
    contract = project.applied()
    offline = OfflineStore(project.offline)
    chosen = select_features(contract, features)
    histories = [offline.history(contract.views[name]) for name in chosen.stored]
    threads = project.settings.profiles.training.threads
    if isinstance(spine, str) and is_sql(spine):
        rows, named = spine_from_sql(spine, _tables(project, contract, offline, histories), threads), "SQL"
    else:
        rows = spine_rows(spine, _key_types(histories))
        named = str(rows.path) if rows.path else "rows"
    return TrainingData(
        offline, histories, rows, chosen.stored, status=status, threads=threads, contract=contract.hash, named=named,
        records=records_folder(project), served=as_served, engine=join_engine(project, join, as_served=as_served),
        request_columns=request_columns(project, contract, chosen.computed),
    )  # fmt: skip


def join_engine(project: Project, join: str, *, as_served: bool) -> str | None:
    """The engine to join by; None for this process.

    Raises:
        RequestError: nothing joins by this name, or not what is asked.
    """
    if join not in JOINS:
        raise RequestError("join", f"{join!r} is not known", expected=one_of(JOINS))
    if join == "engine" and as_served:
        raise RequestError("join", "the engine cannot join as served: the log of materializations is replayed here",
                           expected="either as served or by the engine")  # fmt: skip
    return project.settings.engine if join == "engine" else None


def repeat(project: Project, record: str, out: Path | str | None = None, *, join: str = "embedded") -> TrainingSet:
    """Makes a training set again, from the same versions of the same tables: the same bytes, whatever came since.

    Args:
        project: the project.
        record: the folder of a training set, its record, or its id.
        out: the folder to make; by default the one that the training set is in.
        join: as `training_data` takes it. The record does not say how it was joined: the rows are the same.

    Raises:
        RequestError: there is no such training set, or it is one as served, and is to be joined by the engine.
        DataError: it cannot be made again, because a table's version, the spine or a request transform is gone or not
            what it was.
    """
    made = find(project, record)
    where = f"training set {made.id}"
    offline = OfflineStore(project.offline)
    histories = [recorded_history(offline, made, name) for name in made.features]
    try:
        spine = recorded_spine(made, _key_types(histories))
        noted = HashedSpine(spine)
        read = noted.read()
    except DataError as error:
        raise DataError(where, f"the rows of its spine cannot be read ({error})", remedy="bring them back") from error
    if read != made.spine_sha256:
        raise DataError(where, f"its spine {made.spine_file or SPINE} holds other rows now: {noted.rows} of them",
                        expected=f"the {made.rows_in} rows with hash {made.spine_sha256[:12]}",
                        remedy="bring those rows back, or make a new training set")  # fmt: skip
    data = TrainingData(
        offline, histories, spine, made.features, status=made.options["status"],
        threads=project.settings.profiles.training.threads, contract=made.contract, named=made.spine,
        records=records_folder(project), served=made.served or False,
        engine=join_engine(project, join, as_served=made.served is not None),
        request_columns=recorded_columns(project, made),
    )  # fmt: skip
    return data.write(out or made.path, like=made.id, beside=made.path)


class FeatureSelection(NamedTuple):
    """What was asked for.

    Attributes:
        stored: view to features, those that request transforms take included.
        computed: request transform to fields.
    """

    stored: dict[str, list[str]]
    computed: dict[str, list[str]]


def select_features(contract: Contract, features: str | Sequence[str]) -> FeatureSelection:
    """The features of a service, of a list, or of a list with commas, in the order in which they are named.

    Raises:
        RequestError: a name is not in the contract, or named twice.
    """
    if isinstance(features, str) and features in contract.services:
        service = contract.service(features)
        features = [f"{name}:{feature}" for name, feature in (*service.features, *service.computed)]
    names = features.replace(",", " ").split() if isinstance(features, str) else list(features)
    chosen = FeatureSelection({}, {})
    for name in names:
        owner, _, feature = name.partition(":")
        declared = contract.views.get(owner) or contract.transforms.get(owner)
        if declared is None:
            named = one_of([*contract.views, *contract.transforms])
            expected = f"{one_of(contract.services)} for a service, or view:feature with {named}"
            raise RequestError(f"features, {name!r}", "is not in the contract", expected=expected)
        kind = "view" if owner in contract.views else "request transform"
        known = [column.name for column in declared.fields]
        if feature and feature not in known:
            raise RequestError(f"features, {name!r}", f"{kind} {owner} has no such feature", expected=one_of(known))
        mine = (chosen.stored if kind == "view" else chosen.computed).setdefault(owner, [])
        for added in [feature] if feature else known:
            if added in mine:
                raise RequestError(f"features, {owner}:{added}", "is named twice", expected="each feature once")
            mine.append(added)
    for transform in chosen.computed:
        for view, feature in contract.transforms[transform].stored:
            if feature not in (mine := chosen.stored.setdefault(view, [])):
                mine.append(feature)
    if not chosen.stored and not chosen.computed:
        raise RequestError("features", "none are named", expected="a service, or features as view:feature")
    return chosen


class HashedSpine:
    """The rows of a spine as they go by: counted, hashed and, if a file is named, kept.

    Attributes:
        rows: how many went by.
    """

    def __init__(self, spine: SpineRows, file: Path | None = None) -> None:
        self._spine, self._file = spine, file
        self._hash = hashlib.sha256(spine.schema.to_string().encode())
        self.rows = 0

    @property
    def sha256(self) -> str:
        """The hash of what went by, whatever the sizes of its batches."""
        return self._hash.hexdigest()

    def read(self) -> str:
        """Reads all rows; returns their hash."""
        for _ in self.batches():
            pass
        return self.sha256

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, a batch at a time."""
        with ExitStack() as open_files:
            file = self._file and open_files.enter_context(pa.ipc.new_stream(self._file, self._spine.schema))
            for rows in in_lots(self._spine.batches(), BATCH):
                for batch in rows.combine_chunks().to_batches():
                    self._hash.update(batch.serialize())
                    self.rows += len(batch)
                    if file:
                        file.write_batch(batch)
                    yield batch


def _tables(
    project: Project, contract: Contract, offline: OfflineStore, joined: Sequence[ViewHistory]
) -> dict[str, ds.Dataset | pa.Table]:
    """What a spine's SQL can name: the histories of views that are built, and sources that are Parquet."""
    tables: dict[str, ds.Dataset | pa.Table] = {}
    views, spines = project.definitions.views.values(), project.definitions.spines.values()
    sources = [source for view in views for source in view.sources]
    for source in [*sources, *(source for spine in spines for source in spine.sources)]:
        file = project.root / source.path
        if file.suffix == ".parquet" and file.exists():
            tables[source.name] = ds.dataset(file)
    at_hand = {history.view.name: history for history in joined}
    for name, view in contract.views.items():
        try:
            tables[name] = (at_hand.get(name) or offline.history(view)).data
        except (ContractMismatch, DataError):
            continue  # not built: the query's own error says what there is
    return tables


def _key_types(histories: Sequence[ViewHistory]) -> dict[str, pa.DataType]:
    return {column.name: ARROW[column.dtype.name] for history in histories for column in history.view.keys}
