"""The offline store: the full history of every view, as Delta tables in a folder or in object storage.

A table is written in one Delta commit, so a reader sees the old rows or the new ones and a killed writer leaves no
trace. Each commit carries the contract hash of the view and the fingerprint of the rows; rows that are already there
are not written again.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from isthmus.features.columns import from_arrow, null_elements
from isthmus.features.contract import ViewContract
from isthmus.features.errors import ContractMismatch, DataError
from isthmus.features.pointintime import History, table_schema
from isthmus.features.rows import RowCodec

_CONTRACT, _FINGERPRINT, _ROWS = "isthmus.contract", "isthmus.fingerprint", "isthmus.rows"


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did.

    Attributes:
        rows: rows of the table now.
        added: rows more than before; 0 when nothing was written.
        version: version of the Delta table now.
        changed: whether anything was written.
    """

    rows: int
    added: int
    version: int
    changed: bool

    def as_dict(self) -> dict[str, int | bool]:
        """The machine-readable form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows that may become the history of a view.

    Attributes:
        view: the view.
        rows: the rows as they will be stored.
        fingerprint: SHA-256 of the rows.
        before: what the commit of the table says of itself, empty if there is no table.
        version: version of the table, if there is one.
    """

    view: ViewContract
    rows: pa.Table
    fingerprint: str
    before: Mapping[str, str]
    version: int | None


class OfflineStore:
    """The tables of one project.

    Args:
        root: folder or object-storage URL that holds one Delta table per view.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = str(root).rstrip("/")

    def path(self, view: str) -> str:
        """Where the table of a view is."""
        return f"{self.root}/{view}"

    def prepare(self, view: ViewContract, rows: pa.Table) -> "Prepared":
        """Checks everything that can keep `rows` from becoming the history of a view; writes nothing.

        Args:
            view: the view.
            rows: keys, `event_timestamp`, `known_at` and features in the types of the view; one row per key and times.

        Raises:
            DataError: two rows have the same key and times, or the table at the path is damaged.
        """
        table = self._table(view.name)
        before = self._commit(view.name, table) if table else {}
        rows = _canonical(view, rows)
        return Prepared(view, rows, _fingerprint(rows), before, table.version() if table else None)

    def write(self, prepared: "Prepared") -> Written:
        """Makes prepared rows the history of their view, unless they already are.

        Raises:
            DataError: another process wrote to the table meanwhile.
        """
        view, rows, before = prepared.view, prepared.rows, prepared.before
        if (
            prepared.version is not None
            and before.get(_CONTRACT) == view.hash
            and before.get(_FINGERPRINT) == prepared.fingerprint
        ):
            return Written(len(rows), 0, prepared.version, changed=False)
        metadata = {_CONTRACT: view.hash, _FINGERPRINT: prepared.fingerprint, _ROWS: str(len(rows))}
        with _damage(view.name, self.path(view.name)):
            try:
                write_deltalake(
                    self.path(view.name), rows, mode="overwrite", schema_mode="overwrite",
                    commit_properties=CommitProperties(custom_metadata=metadata),
                )  # fmt: skip
            except CommitFailedError as error:
                raise DataError(
                    f"offline table of {view.name}", "another process wrote to it at the same moment",
                    remedy="its rows are whole: run `isthmus build` again once the other run has ended",
                ) from error  # fmt: skip
            version = DeltaTable(self.path(view.name)).version()
        return Written(len(rows), len(rows) - int(before.get(_ROWS, "0")), version, changed=True)

    def check(self, history: History) -> None:
        """Reads a history whole and computes the content hash of every row again.

        Raises:
            DataError: a row is not what was written.
        """
        view = history.view
        with self.reading(view.name):
            rows = history.data if isinstance(history.data, pa.Table) else history.data.to_table()
            values = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
            altered = np.flatnonzero(RowCodec(view).content(values, len(rows)) != rows["content_hash"].to_numpy())
            if len(altered):
                raise OSError(f"{len(altered)} of {len(rows)} rows are not what was written")

    def history(self, view: ViewContract, version: int | None = None) -> History:
        """The history of a view, now or at a version of its table.

        Raises:
            ContractMismatch: the table was built under another contract of the view.
            DataError: there is no table, or it is damaged.
        """
        table = self._table(view.name, version)
        if table is None:
            raise DataError(f"offline table of {view.name}", f"nothing at {self.path(view.name)}",
                            remedy="run `isthmus build` first")  # fmt: skip
        built = self._commit(view.name, table).get(_CONTRACT, "no contract")
        if built != view.hash:
            raise ContractMismatch(f"offline table of {view.name}", f"built under {built[:12]}",
                                   expected=view.hash[:12], remedy="run `isthmus build`")  # fmt: skip
        with _damage(view.name, self.path(view.name)):
            data = table.to_pyarrow_dataset()
            return History(view, data, table.version())

    def fingerprint(self, history: History) -> str:
        """SHA-256 of the rows of a history, by its commit: in a table that was removed, versions begin anew."""
        table = self._table(history.view.name, history.version)
        return self._commit(history.view.name, table).get(_FINGERPRINT, "") if table else ""

    def built(self, history: History) -> int:
        """When the table of a history was written, in milliseconds since 1970 UTC."""
        table = self._table(history.view.name, history.version)
        return int(self._commit(history.view.name, table).get("timestamp", "0")) if table else 0

    @contextmanager
    def reading(self, view: str) -> Iterator[None]:
        """Turns what a damaged table makes of a scan into one clear error."""
        with _damage(view, self.path(view)):
            yield

    def _table(self, view: str, version: int | None = None) -> DeltaTable | None:
        try:
            with _damage(view, self.path(view)):
                table = DeltaTable(self.path(view), version=version)
                if "://" not in self.root:
                    _check_files(table, Path(self.path(view)))
                return table
        except TableNotFoundError:
            return None

    def _commit(self, view: str, table: DeltaTable) -> dict[str, str]:
        """What the commit of the table's version says of itself."""
        with _damage(view, self.path(view)):
            # Of a table at an older version, deltalake lists the commits from the newest one down to that version.
            commits = table.history(1)
            if not commits:
                raise OSError("its last commit is empty")
            return {key: str(value) for key, value in commits[-1].items()}


@contextmanager
def _damage(view: str, path: str) -> Iterator[None]:
    try:
        yield
    except TableNotFoundError:
        raise
    except (DeltaError, OSError, pa.ArrowException, duckdb.Error, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"offline table of {view}", f"{path} cannot be read ({first})",
            remedy="it is half-written or damaged: remove that folder and run `isthmus build`, which computes it again",
        ) from error  # fmt: skip


def _check_files(table: DeltaTable, folder: Path) -> None:
    """Every file of a local table is there and as long as its commit says: read from the log, not from the data."""
    for file in pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist():
        path = folder / file["path"]
        if not path.exists():
            raise OSError(f"{path.name} is missing")
        if path.stat().st_size != file["size_bytes"]:
            raise OSError(f"{path.name} has {path.stat().st_size} bytes instead of {file['size_bytes']}")


def _canonical(view: ViewContract, rows: pa.Table) -> pa.Table:
    """The rows in the one order and form in which they are stored, with their content hashes."""
    # The hash is that of the values as they are stored, so they take their types first.
    content = table_schema(view).field("content_hash")
    rows = _cast(view, rows, table_schema(view).remove(table_schema(view).get_field_index(content.name)))
    columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
    rows = rows.append_column(content, pa.array(RowCodec(view).content(columns, len(rows))))
    identity = [column.name for column in view.keys] + ["event_timestamp", "known_at"]
    rows = rows.sort_by([(name, "ascending") for name in identity]).combine_chunks()
    _refuse_duplicates(view, rows.select(identity))
    return rows


def _cast(view: ViewContract, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of the schema, in its types, without loss."""
    columns = []
    for field in schema:
        where = f"view {view.name}, column {field.name}"
        count = rows.column_names.count(field.name)
        if count != 1:
            raise DataError(where, f"there are {count} columns of this name", expected="one")
        column = rows[field.name]
        if not field.nullable and column.null_count:
            raise DataError(where, f"{column.null_count} nulls", expected="no null")
        if pa.types.is_timestamp(field.type) and not getattr(column.type, "tz", None):
            raise DataError(where, f"has type {column.type}", expected="a timestamp with a time zone")
        if nulls := null_elements(column):
            raise DataError(
                where, f"its arrays hold {nulls} nulls", expected="arrays of values, or null in their place"
            )
        try:
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(where, f"does not fit its type ({error})", expected=str(field.type)) from None
    return pa.table(columns, schema=schema)


def _refuse_duplicates(view: ViewContract, identity: pa.Table) -> None:
    same = None
    for name in identity.column_names:
        column = identity[name]
        equal = pc.equal(column[1:], column[:-1]) if len(column) > 1 else pa.array([], pa.bool_())
        same = equal if same is None else pc.and_(same, equal)
    first = pc.index(same, True).as_py()
    if first >= 0:
        row = ", ".join(f"{name}={value[0]}" for name, value in identity.slice(first, 1).to_pydict().items())
        raise DataError(
            f"view {view.name}", f"{pc.sum(same).as_py()} rows have the key and times of another row, first {row}",
            expected="one row per key, event_timestamp and known_at", remedy="aggregate in the transform",
        )  # fmt: skip


def _fingerprint(rows: pa.Table) -> str:
    """SHA-256 over keys, times and content hashes, in stored order."""
    sink = pa.BufferOutputStream()
    identity = rows.select([field.name for field in rows.schema if not field.nullable])
    with pa.ipc.new_stream(sink, identity.schema) as stream:
        stream.write_table(identity)
    return hashlib.sha256(sink.getvalue()).hexdigest()
