"""A Delta table in a folder or in object storage (`StoredTable`), and the texts of its errors (`TableErrors`)."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction, write_deltalake
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from isthmus.features.errors import DataError, DependencyError, IsthmusError, first_line
from isthmus.features.files import private_folder, require_delta

if TYPE_CHECKING:
    import pyarrow.fs as fs

_OWN = "isthmus."
"""Prefix of the metadata that Isthmus adds to commits."""

HARMLESS = ("OPTIMIZE", "VACUUM START", "VACUUM END")
"""Delta operations, of `isthmus maintain` or other tools, that do not change the rows."""

_SIGNS = ("Generic S3 error", "Generic GCS error", "Generic MicrosoftAzure error", "lacked the necessary privileges",
          "<Error><Code>", "Error performing ")  # fmt: skip
"""Parts of deltalake's error messages when a storage refuses a request or does not answer."""

_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class TableErrors:
    """The texts of a table's errors: its name, two remedies, and (problem, remedy) of a conflict between writers."""

    where: str
    damaged: str
    conflict: tuple[str, str]
    unwritten: str


class VersionGoneError(DataError):
    """An older version of a table was removed, by `isthmus maintain` after `keep_days` or by another tool."""


class StoredTable:
    """The Delta table `name` under `root`, a folder or a URL. `private` keeps other users out of a local folder.

    With `versions`, older versions stay readable until `isthmus maintain` removes them. Otherwise, deltalake removes
    them after 30 days.

    Methods raise DataError if the table cannot be read or written, and DependencyError if the storage does not answer.
    """

    def __init__(
        self, root: str | Path, name: str, storage_options: Mapping[str, str] | None, errors: TableErrors,
        *, private: bool = False, versions: bool = False,
    ) -> None:  # fmt: skip
        self.path = f"{str(root).rstrip('/')}/{name}"
        self.options = dict(storage_options or {}) if "://" in self.path else None
        self._errors, self._private = errors, private
        # With None, deltalake deletes old log entries whenever it writes a checkpoint.
        self.hook = PostCommitHookProperties(cleanup_expired_logs=False) if versions else None

    def open(self, version: int | None = None, *, check: bool = True) -> DeltaTable | None:
        """Return the Delta table at `version`, by default the newest, or None if the table does not exist.

        With `check`, a local table also counts as damaged if a data file is missing or has a wrong size. Raise
        DataError if the table is damaged, VersionGoneError if the table no longer has this version, and DependencyError
        if object storage does not answer.
        """
        with self.reading():
            try:
                table = DeltaTable(self.path, version=version, storage_options=self.options)
                if check and self.options is None:
                    _check_files(table, Path(self.path))
            except (DeltaError, FileNotFoundError) as error:
                where = self._errors.where
                if version is not None and not unavailable(where, self.path, error):
                    newest = self.open(check=False)
                    if newest is not None and newest.version() != version:
                        raise VersionGoneError(
                            where, f"version {version} was removed ({first_line(error)})",
                            remedy="to keep versions longer, raise `keep_days` in [stores]; let no other tool vacuum",
                        ) from error  # fmt: skip
                if isinstance(error, TableNotFoundError):
                    return None
                raise
            else:
                return table

    def append(
        self, rows: pa.Table, *, transactions: list[Transaction] | None = None, retries: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Append rows in one commit, and create the table if it does not exist.

        If another process commits first, try again up to `retries` times; None uses deltalake's default. `transactions`
        are the application transactions that Delta records with the commit. `options` are arguments of
        `write_deltalake`. Raise DataError or DependencyError if the commit fails.
        """
        properties = CommitProperties(app_transactions=transactions, max_commit_retries=retries)
        with self.writing():
            write_deltalake(
                self.path, rows, mode="append", storage_options=self.options, commit_properties=properties,
                post_commithook_properties=self.hook, **options,
            )  # fmt: skip

    def commit(
        self, table: DeltaTable | None, rows: pa.Table | pa.RecordBatchReader, metadata: Mapping[str, str], *,
        transactions: list[Transaction] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Write rows as the next version of the table. Raise DataError if another process has written that version.

        Args:
            table: the table at its newest version; None to create the table.
            rows: rows to write.
            metadata: texts to store with the commit. Names must start with "isthmus.". If object storage reports an
                error but the next version has exactly this metadata, the commit counts as made. Otherwise, raise
                DependencyError.
            transactions: application transactions that Delta records with the commit.
            options: arguments of `write_deltalake`.
        """
        # No retries: the metadata is only right if this is the next commit of the table.
        properties = CommitProperties(
            custom_metadata=dict(metadata), app_transactions=transactions, max_commit_retries=0
        )
        target = self.path if table is None else table
        with self.writing(-1 if table is None else table.version(), metadata):
            write_deltalake(
                target, rows, storage_options=self.options, commit_properties=properties,
                post_commithook_properties=self.hook, **options,
            )  # fmt: skip

    def commit_files(
        self, table: DeltaTable | None, added: list[AddAction], removed: list[RemoveAction] | None,
        schema: pa.Schema, metadata: Mapping[str, str], partition: str,
    ) -> None:  # fmt: skip
        """Commit files that lie in the table's folder already, as `commit` does rows.

        `removed` has the files that they replace; None replaces the whole table and its schema. `partition` is the
        partition column.
        """
        properties = CommitProperties(custom_metadata=dict(metadata), max_commit_retries=0)
        columns = DeltaSchema.from_arrow(schema)
        with self.writing(-1 if table is None else table.version(), metadata):
            if table is None:
                create_table_with_add_actions(
                    self.path, columns, added, mode="error", partition_by=[partition], storage_options=self.options,
                    commit_properties=properties,
                )  # fmt: skip
            else:
                table.create_write_transaction(
                    [*added, *(removed or ())], mode="overwrite" if removed is None else "append", schema=columns,
                    partition_by=[partition], commit_properties=properties, post_commithook_properties=self.hook,
                )  # fmt: skip
                table.update_incremental()

    def commits(self, table: DeltaTable, count: int) -> list[dict[str, Any]]:
        if self.options is not None:
            listed: list[dict[str, Any]] = table.history(count)
            return listed
        # deltalake reads all commits after an older version, and none if the path contains "#" or "?".
        entries: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            for version in range(table.version(), max(table.version() - count, -1), -1):
                lines = (Path(self.path) / "_delta_log" / f"{version:020}.json").read_bytes().splitlines()
                entries += [json.loads(line)["commitInfo"] for line in lines if line.startswith(b'{"commitInfo"')]
        return entries

    @contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except (DeltaError, OSError, pa.ArrowException, _duckdb_error(), ValueError) as error:
            errors = self._errors
            raise unavailable(errors.where, self.path, error) or DataError(
                errors.where, f"{self.path} cannot be read ({first_line(error)})", remedy=errors.damaged
            ) from error

    @contextmanager
    def writing(self, before: int | None = None, metadata: Mapping[str, str] | None = None) -> Iterator[None]:
        """Turn errors of writing into a DataError, or a DependencyError if object storage does not answer.

        For a private local table, first create its folder. Object storage may report an error for a commit that it has
        made. The error is ignored if the version after `before` has exactly this `metadata`. `before` is -1 for a new
        table. Without `before` or `metadata`, no error is ignored.
        """
        try:
            if self._private and self.options is None:
                private_folder(Path(self.path))
            yield
        except (DeltaError, OSError, pa.ArrowException, ValueError, RuntimeError) as error:
            if before is not None and metadata and self._has(before + 1, metadata):
                return
            errors = self._errors
            if refusal := unavailable(errors.where, self.path, error):
                raise refusal from error
            new = before == -1 and DeltaTable.is_deltatable(self.path, self.options)
            if isinstance(error, CommitFailedError) or new:
                raise self.conflict() from error
            raise DataError(
                errors.where, f"{self.path} cannot be written ({first_line(error)})", remedy=errors.unwritten
            ) from error

    def conflict(self) -> DataError:
        problem, remedy = self._errors.conflict
        return DataError(self._errors.where, problem, remedy=remedy)

    def _has(self, version: int, metadata: Mapping[str, str]) -> bool:
        # The storage may have made the commit although its reply was lost: deltalake's retry then collides with its own
        # first attempt, and reports another writer.
        if self.options is None:
            return False
        with suppress(IsthmusError, DeltaError, OSError):
            table = self.open()
            if table is not None and table.version() >= version:
                for entry in self.commits(table, table.version() - version + 1)[-1:]:
                    own = {name: str(value) for name, value in entry.items() if name.startswith(_OWN)}
                    return own == dict(metadata)
        return False


def unavailable(where: str, place: str, error: BaseException) -> DependencyError | None:
    if "://" not in place or not any(sign in str(error) for sign in _SIGNS):
        return None
    return DependencyError(
        where, f"{place} is not available ({first_line(error)})",
        remedy="its rows are unchanged: check storage_options, the bucket, and the credentials in the environment "
        "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY or others), "
        "then try again",
    )  # fmt: skip


def files_of(table: DeltaTable, place: str) -> "fs.FileSystem":
    import pyarrow.fs as fs
    from deltalake.fs import DeltaStorageHandler

    # Arrow's threads may outlive a scan of a Python file system, and abort the process at exit (apache/arrow#36389).
    if "://" in place:
        return fs.PyFileSystem(DeltaStorageHandler.from_table(table._table, table._storage_options))
    return storage_files(place, {})


def storage_files(place: str, options: Mapping[str, str]) -> "fs.FileSystem":
    """Return the files below a folder or URL. Credentials for a URL come from the environment of this process.

    Raise ConfigurationError for a URL with characters that deltalake would misread.
    """
    import pyarrow.fs as fs
    from deltalake.fs import DeltaStorageHandler

    if "://" in place:
        require_delta("object storage", place, "choose another URL")
        return fs.PyFileSystem(DeltaStorageHandler(place, dict(options)))
    return fs.SubTreeFileSystem(place, fs.LocalFileSystem())


def open_output(storage: "fs.FileSystem", path: str) -> Any:
    """Open a file for writing. A buffer makes of Arrow's many small writes those that deltalake takes."""
    return storage.open_output_stream(path, buffer_size=_BUFFER)


def _check_files(table: DeltaTable, folder: Path) -> None:
    for file in pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist():
        path = folder / file["path"]
        if not path.exists():
            raise FileNotFoundError(f"{path.name} is missing")
        if path.stat().st_size != file["size_bytes"]:
            raise OSError(f"{path.name} has {path.stat().st_size} bytes instead of {file['size_bytes']}")


def _duckdb_error() -> type[Exception]:
    # Imported only after a failure: many commands need a table but not DuckDB.
    import duckdb

    return duckdb.Error
