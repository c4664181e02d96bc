"""Rows of a database query, read in one transaction: from PostgreSQL by ADBC, from a DuckDB file by DuckDB."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from isthmus.features.definition.spec import Source
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem, extra, first_line
from isthmus.transforms.tables.table import SourceTable, Within, condition, reading

_POSTGRESQL = ("postgresql://", "postgres://")
_ADDRESS = "postgresql://USER:PASSWORD@HOST/DATABASE, or duckdb:FILE"
_TIME = "TIMESTAMPTZ {}"
_ROWS = 65_536
"""Rows of a DuckDB batch. PostgreSQL's driver decides itself, by bytes."""


class _Query:
    def __init__(
        self, source: Source, place: str, version: str | None, run: Any, errors: tuple[type[Exception], ...]
    ) -> None:
        self.place, self.version, self._source, self._run, self._errors = place, version, source, run, errors
        if source.version_sql:
            with reading(f"{source.name}, version_sql", place, *errors):
                rows = run(source.version_sql.strip().removesuffix(";")).read_all().to_pylist()
            answer = [value for row in rows for value in row.values()]
            known = any(value is not None for value in answer)
            self.version = repr([source.version_sql, *map(str, answer)]) if known else None
        with reading(source.name, place, *errors):
            # A comment at the end of the query must not swallow the parenthesis.
            query = source.sql.strip().removesuffix(";")
            self._query = f"SELECT * FROM (\n{query}\n) AS source"  # noqa: S608 - the user's own query
            self.schema = run(f"{self._query} LIMIT 0").schema

    def batches(self, column: str | None, within: Within) -> Iterator[pa.RecordBatch]:
        where = f" WHERE {condition(column, within, _TIME)}" if column and within else ""
        with reading(self._source.name, self.place, *self._errors):
            yield from self._run(self._query + where)


@contextmanager
def open_table(source: Source, root: Path) -> Iterator[SourceTable]:
    """Connect to a source's database for a `with` block, and open its SQL query as a table to copy for a build.

    The environment variable named by `source.connection` holds the address. The path in `duckdb:FILE` starts from
    `root`. All queries see the same state of the database, in one read-only transaction. Runs `source.version_sql` at
    the start. Raises ConfigurationError if the variable does not hold an address, and DataError if the DuckDB file is
    missing or a query is rejected. Raises DependencyError if the database does not answer or its driver is missing.
    """
    address = _address(source)
    scheme, _, rest = address.partition(":")
    with (
        _duckdb(source, root / rest, _file_version(source, root))
        if scheme == "duckdb"
        else _postgresql(source, address) as table
    ):
        yield table


def version(source: Source, root: Path) -> str | None:
    """Return a text that changes when the rows of a source's SQL query change, or None if changes cannot be detected.

    With `source.version_sql`, connects to the database and returns the result of that query, or None if all its values
    are null. Otherwise, returns the size and time of the DuckDB file and its log, or None for PostgreSQL. Relative
    paths start from `root`. Raises the errors of `open_table`.
    """
    if source.version_sql:
        with open_table(source, root) as table:
            return table.version
    return _file_version(source, root)


def _file_version(source: Source, root: Path) -> str | None:
    scheme, _, rest = _address(source).partition(":")
    if scheme != "duckdb":
        return None
    path = root / rest
    files = [file for file in (path, path.with_name(f"{path.name}.wal")) if file.exists()]
    return repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def _address(source: Source) -> str:
    value = os.environ.get(source.connection, "")
    wrong = ""
    if not value:
        wrong = "is not set"
    elif not value.startswith((*_POSTGRESQL, "duckdb:")):
        wrong = "does not start with a known scheme"
    elif re.search(r"%(?![0-9A-Fa-f]{2})|@.*@|^\w+://[^@]*[/?].*@", value):
        # The driver's error for such an address quotes part of the password.
        wrong = "has an @, %, / or ? in its user, password or an option"
    if wrong:
        codes = "write %40 for @, %25 for %, %2F for / and %3F for ?"
        remedy = codes if "@" in wrong else "set it where the command runs"
        problem = Problem(f"source {source.name}, the variable {source.connection}", wrong, _ADDRESS)
        raise ConfigurationError("environment", [problem], remedy=remedy)
    return value


@contextmanager
def _postgresql(source: Source, address: str) -> Iterator[SourceTable]:
    with extra("sql"):
        from adbc_driver_manager import Error
        from adbc_driver_postgresql import dbapi
    # Without scheme, user, password, ports and options.
    place = re.sub(r"^\w+://([^/@]*@)?|:\d+(?=[/,?]|$)|\?.*", "", address)
    place = place if place and place[0] != "/" else f"localhost{place}"
    try:
        connection = dbapi.connect(address)
    except Error as error:
        # Without the cause, which may quote the password.
        raise _silence(source, place, _without_password(first_line(error), address)) from None
    with closing(connection), closing(connection.cursor()) as cursor:

        def run(query: str) -> pa.RecordBatchReader:
            cursor.execute(query)
            return cursor.fetch_record_batch()

        with reading(source.name, place, Error):
            # All queries see the rows at the time of the first query.
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield _Query(source, place, None, run, (Error,))


@contextmanager
def _duckdb(source: Source, path: Path, seen: str | None) -> Iterator[SourceTable]:
    with extra("offline"):
        import duckdb
    if "\\" in str(path):
        raise DataError(f"source {source.name}", f"DuckDB reads the \\ in {path} as a /",
                        remedy="rename the file or the folder that has it")  # fmt: skip
    if not path.is_file():
        raise DataError(f"source {source.name}", f"DuckDB file {path} not found",
                        remedy=f"correct the variable {source.connection}, or create the file")  # fmt: skip
    alone: Mapping[str, Any] = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    try:
        connection = duckdb.connect(str(path), read_only=True, config=dict(alone))
    except duckdb.Error as error:
        raise _silence(source, str(path), first_line(error)) from error
    with closing(connection):

        def run(query: str) -> pa.RecordBatchReader:
            return connection.sql(query).to_arrow_reader(_ROWS)

        with reading(source.name, str(path), duckdb.Error):
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute("BEGIN TRANSACTION")
        yield _Query(source, str(path), seen, run, (duckdb.Error,))


def _without_password(text: str, address: str) -> str:
    for passwords in re.findall(r"^\w+://[^/:@]*:([^/@]+)@|[?&](?:ssl)?password=([^&]+)", address):
        for password in filter(None, passwords):
            text = text.replace(password, "***").replace(unquote(password), "***")
    return text


def _silence(source: Source, place: str, why: str) -> DependencyError:
    return DependencyError(f"source {source.name}", f"the database {place} does not answer ({why})",
                           remedy=f"start it, or correct the variable {source.connection}")  # fmt: skip
