"""The interface through which builds read tables of other systems, and helpers for its implementations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import pyarrow as pa

from isthmus.features import clock
from isthmus.features.days import FIRST, LAST
from isthmus.features.errors import DataError, IsthmusError, first_line
from isthmus.features.offline.delta import unavailable

Within: TypeAlias = tuple[int, int] | None
"""Times in [first, end), in microseconds since 1970 UTC; None for all rows."""

REPAIR = "nothing was written: check that the table exists and is complete, then try again"


class SourceTable(Protocol):
    """A table as of the time it was opened; later writes do not change its rows.

    `version` identifies the rows; None if unknown. `place` is the table's location, for messages.
    """

    place: str
    version: str | None

    @property
    def schema(self) -> pa.Schema: ...

    def batches(self, column: str | None, within: Within) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose time is in the range `within`, and the rows without a time, to copy them for a build.

        `column` is the name of the time column. Yields all rows if either argument is None. A table that cannot filter
        by that column may yield more rows.
        """
        ...


def moments(within: tuple[int, int]) -> tuple[str, str]:
    first, end = (clock.moment(min(max(at, FIRST), LAST)).isoformat(timespec="microseconds") for at in within)
    return first, end


def condition(column: str, within: tuple[int, int], literal: str) -> str:
    name = '"' + column.replace('"', '""') + '"'
    first, end = (literal.format(f"'{moment}'") for moment in moments(within))
    return f"{name} IS NULL OR ({name} >= {first} AND {name} < {end})"


@contextmanager
def reading(source: str, place: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert errors that a table's library raises in the block while a source is read.

    Raises a DependencyError if the storage does not answer, else a DataError. Converts OSError, ValueError, Arrow's
    errors and the types in `errors`. `source` is the name of the source, and `place` its path or address, for the
    message.
    """
    try:
        yield
    except IsthmusError:
        raise
    except (*errors, pa.ArrowException, OSError, ValueError) as error:
        if refusal := unavailable(f"source {source}", place, error):
            raise refusal from error
        raise DataError(f"source {source}", f"{place} cannot be read ({first_line(error)})", remedy=REPAIR) from error
