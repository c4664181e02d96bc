"""What one request, and all requests together, may ask of a server process."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from isthmus.serving.wire.errors import TooLargeError

_Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True)
class Limits:
    """`[server.limits]` of isthmus.toml.

    Attributes:
        body_bytes: length of a request's body.
        rows: rows that one request may ask for.
        values: rows times features that one request may ask for.
        concurrency: requests that one worker answers at the same time; more are refused at once.
        deadline_seconds: from a request's head to its answer, the reading of its body included.
        requests_per_second: requests of one API key to one worker, in the mean; None for any number.
    """

    body_bytes: _Count = 1 << 20
    rows: _Count = 10_000
    values: _Count = 1_000_000
    concurrency: _Count = 256
    deadline_seconds: Annotated[float, Gt(0), Le(60)] = 5.0
    requests_per_second: _Count | None = None

    def require_values(self, where: str, rows: int, features: int) -> None:
        """Refuses an answer that would have too many values.

        Raises:
            TooLargeError: it would.
        """
        if rows * features > self.values:
            found = f"{rows:,} rows of {features:,} features are {rows * features:,} values"
            raise TooLargeError(where, found, expected=f"{self.values:,} at most", remedy="ask in several requests")
