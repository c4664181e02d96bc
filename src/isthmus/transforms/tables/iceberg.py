"""Iceberg tables, by pyiceberg: a snapshot of a table never changes.

The catalog, with its address and its secrets, is configured as pyiceberg wants it: by variables of the environment,
such as PYICEBERG_CATALOG__WAREHOUSE__URI, or by its own file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from isthmus.features.definition.spec import Source
from isthmus.features.errors import DataError, DependencyError, extra, first_line
from isthmus.transforms.tables.table import Table, Within, moments, reading


class _IcebergTable:
    def __init__(self, source: Source, table: Any) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        self.place, self._source, self._table = source.iceberg, source.name, table
        snapshot = table.current_snapshot()
        self._snapshot = None if snapshot is None else snapshot.snapshot_id
        # A table that was dropped and made again has another id, and may have a snapshot of the same.
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
        with reading(self._source, self.place, *_errors()):
            yield from self._scan(**options).to_arrow_batch_reader()

    def _scan(self, **options: Any) -> Any:
        return self._table.scan(snapshot_id=self._snapshot, **options)


@contextmanager
def opened(source: Source) -> Iterator[Table]:
    """The current snapshot of an Iceberg table.

    Raises:
        DataError: there is no such table, or it is damaged.
        DependencyError: pyiceberg is not installed, or the catalog is not configured or does not answer.
    """
    with extra("iceberg"):
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    name, _, identifier = source.iceberg.partition(".")
    where = f"source {source.name}"
    try:
        loaded = load_catalog(name).load_table(identifier)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        problem = f"there is no Iceberg table {identifier} in the catalog {name}"
        raise DataError(where, problem, remedy="correct iceberg= of the source, or bring it there") from error
    except Exception as error:  # a catalog raises what its own library does
        raise DependencyError(
            where, f"the Iceberg catalog {name} does not answer ({type(error).__name__}: {first_line(error)})",
            remedy=f"configure it by variables such as PYICEBERG_CATALOG__{name.upper()}__URI, or start it",
        ) from error  # fmt: skip
    with reading(source.name, source.iceberg, *_errors()):
        table = _IcebergTable(source, loaded)
    yield table


def _errors() -> tuple[type[Exception], ...]:
    from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, RESTError, ServerError

    return CommitFailedException, NoSuchTableError, RESTError, ServerError, KeyError, TypeError, NotImplementedError
