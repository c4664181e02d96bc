"""Rows of Iceberg tables, read with pyiceberg, which is configured by PYICEBERG_CATALOG__NAME__URI or its own file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from isthmus.features.definition.spec import Source
from isthmus.features.errors import DataError, DependencyError, extra, first_line
from isthmus.transforms.tables.table import SourceTable, Within, moments, reading

_REFUSED = "AWS Error"
"""Part of Arrow's message when an S3 storage refuses a request or does not answer."""


class _IcebergTable:
    def __init__(self, source: Source, table: Any) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        self.place, self._source, self._table = source.iceberg, source, table
        snapshot = table.current_snapshot()
        self._snapshot = None if snapshot is None else snapshot.snapshot_id
        # A table that was dropped and recreated has another id, but may have a snapshot with the same id.
        self.version: str | None = f"{table.metadata.table_uuid} {self._snapshot}"
        self.schema = schema_to_pyarrow(self._scan().projection(), include_field_ids=False)

    def batches(self, column: str | None, within: Within) -> Iterator[pa.RecordBatch]:
        from pyiceberg import expressions

        are: Any = expressions
        if self._snapshot is None:
            return
        options: dict[str, Any] = {}
        if column and within:
            first, end = moments(within)
            options["row_filter"] = are.Or(
                are.IsNull(column), are.And(are.GreaterThanOrEqual(column, first), are.LessThan(column, end))
            )
        with _reading(self._source):
            yield from self._scan(**options).to_arrow_batch_reader()

    def _scan(self, **options: Any) -> Any:
        return self._table.scan(snapshot_id=self._snapshot, **options)


@contextmanager
def open_table(source: Source) -> Iterator[SourceTable]:
    """Open the current snapshot of an Iceberg table, so that its rows can be copied for a build.

    `source.iceberg` is CATALOG.TABLE. Environment variables of PyIceberg configure the catalog. Raises DataError if the
    table is missing or damaged, and DependencyError if the catalog or storage does not answer or pyiceberg is not
    installed.
    """
    with extra("iceberg"):
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    name, _, identifier = source.iceberg.partition(".")
    where = f"source {source.name}"
    try:
        loaded = load_catalog(name).load_table(identifier)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        problem = f"the catalog {name} has no Iceberg table {identifier}"
        raise DataError(where, problem, remedy="correct iceberg= of the source, or create the table") from error
    except Exception as error:  # a catalog raises the errors of its own library
        if isinstance(error, FileNotFoundError) or _REFUSED in str(error):
            # The catalog has answered: the error is about the table's files.
            with _reading(source):
                raise
        raise DependencyError(
            where, f"the Iceberg catalog {name} does not answer ({_words(name, error)})",
            remedy=f"configure it by variables such as PYICEBERG_CATALOG__{name.upper()}__URI, or start it",
        ) from error  # fmt: skip
    with _reading(source):
        table = _IcebergTable(source, loaded)
    yield table


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        with reading(source.name, source.iceberg, *_errors()):
            yield
    except DataError as error:
        if _REFUSED not in error.found:
            raise
        variables = f"PYICEBERG_CATALOG__{source.iceberg.partition('.')[0].upper()}__S3__ENDPOINT"
        raise DependencyError(
            error.where, f"the storage of {source.iceberg} is not available ({first_line(error.__cause__ or error)})",
            remedy=f"check that it runs, and {variables} and similar variables (address, region, key); then try again",
        ) from error  # fmt: skip


def _words(name: str, error: Exception) -> str:
    """Return an error's type and first line; no line if it may contain part of an address with a password."""
    from pyiceberg.utils.config import Config

    kind, address = type(error).__name__, (Config().get_catalog_config(name) or {}).get("uri")
    if isinstance(error, ValueError) and "@" in str(address):
        return f"{kind}: pyiceberg cannot read its address; write %40 for @ and %25 for % in a password"
    return f"{kind}: {first_line(error)}"


def _errors() -> tuple[type[Exception], ...]:
    from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, RESTError, ServerError

    return CommitFailedException, NoSuchTableError, RESTError, ServerError, KeyError, TypeError, NotImplementedError
