"""A spine from a SQL query over the views' histories and the project's raw data."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.errors import DataError, RequestError, first_line
from isthmus.features.pointintime.join import BATCH
from isthmus.features.pointintime.spine import SpineRows

# Beginning of a query. A path such as values.csv does not match.
_QUERY = re.compile(
    r"(?>\s+|--[^\n]*|/\*.*?\*/|\()*+(select|with|from|values)(?=[\s(*'\"]|/\*)", re.IGNORECASE | re.DOTALL
)


def is_sql(text: str) -> bool:
    return bool(_QUERY.match(text))


def spine_from_sql(query: str, tables: Mapping[str, ds.Dataset | pa.Table], threads: int) -> SpineRows:
    """Run a user's SELECT over `tables` with DuckDB, and return its rows as a spine. The rows can be read only once.

    Uses up to `threads` threads. Times are in UTC. The query cannot access files, the network or variables of this
    process. Raises RequestError if it is not a single SELECT. Raises DataError if it fails, also later while the rows
    are read.
    """
    database = duckdb.connect(config={
        "threads": threads, "python_enable_replacements": False,
        "autoinstall_known_extensions": False, "autoload_known_extensions": False,
    })  # fmt: skip
    known = f"the tables are {', '.join(sorted(tables))}"
    with sql_errors_as_data_errors(known):
        statements = database.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise RequestError("spine", f"its SQL is {len(statements)} statements or writes", expected="one SELECT")
        for name, table in tables.items():
            database.register(name, table)
        database.execute("SET TimeZone = 'UTC'")
        database.execute("SET enable_external_access = false")
        database.execute("SET lock_configuration = true")
        reader = database.sql(query).to_arrow_reader(BATCH)

    def batches() -> Iterator[pa.RecordBatch]:
        with sql_errors_as_data_errors(known), database:
            yield from reader

    return SpineRows(reader.schema, batches, once=True)


@contextmanager
def sql_errors_as_data_errors(known: str) -> Iterator[None]:
    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        raise DataError("spine", f"its SQL fails ({first_line(error)})", remedy=known) from error
