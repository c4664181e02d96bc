"""What a table is to a build, whatever system it is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import pyarrow as pa

from isthmus.features import clock
from isthmus.features.days import FIRST, LAST
from isthmus.features.errors import DataError, IsthmusError, first_line
from isthmus.features.offline.storage import unavailable

Within: TypeAlias = tuple[int, int] | None
"""The wanted times in [first, end), in microseconds since 1970 UTC; None for all rows."""

REPAIR = "nothing was written: see that the table is there and whole, then run it again"


class SourceTable(Protocol):
    """A table as it was when it was opened: what others write to it since changes none of its rows.

    Attributes:
        place: where it is, for messages; without a secret.
        version: what identifies its rows; None if nothing does.
    """

    place: str
    version: str | None

    @property
    def schema(self) -> pa.Schema:
        """Return the columns, in the types of the table's own system."""
        ...

    def batches(self, column: str | None, within: Within) -> Iterator[pa.RecordBatch]:
        """The rows whose `column` lies within, and those without a time; without a column all rows."""
        ...


def moments(within: tuple[int, int]) -> tuple[str, str]:
    """Both ends, in the form that every kind of SQL reads."""
    first, end = (clock.moment(min(max(at, FIRST), LAST)).isoformat(timespec="microseconds") for at in within)
    return first, end


def condition(column: str, within: tuple[int, int], literal: str) -> str:
    """The rows of a range as SQL; `literal` makes a time of a text: "TIMESTAMPTZ {}"."""
    name = '"' + column.replace('"', '""') + '"'
    first, end = (literal.format(f"'{moment}'") for moment in moments(within))
    return f"{name} IS NULL OR ({name} >= {first} AND {name} < {end})"


@contextmanager
def reading(source: str, place: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns the errors of a library into a DataError of the source."""
    try:
        yield
    except IsthmusError:
        raise
    except (*errors, pa.ArrowException, OSError, ValueError) as error:
        if refusal := unavailable(f"source {source}", place, error):
            raise refusal from error
        raise DataError(f"source {source}", f"{place} cannot be read ({first_line(error)})", remedy=REPAIR) from error
