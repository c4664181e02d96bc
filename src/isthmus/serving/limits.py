"""Limits of a server process, per request and for all requests together."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from isthmus.features.online.record import WAITING
from isthmus.serving.wire.errors import TooLargeError

_Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True)
class Limits:
    """`[server.limits]` of isthmus.toml.

    Attributes:
        head_bytes: bytes of a request's URL, header fields and trailers.
        push_days: maximum age in days of a row pushed to the history, or the view's `ttl` if that is longer. Each day
            is a partition of the table.
        waiting_rows: pushed rows of a view that may wait for the history; a push beyond this is refused.
        values: rows times features of a request.
        concurrency: simultaneous requests per worker; more are refused at once.
        deadline_seconds: time from a request's head to its answer, including reading the body.
        requests_per_second: average requests per worker and API key; None for no limit.
        generations: texts that a worker generates at the same time; more are refused at once.
        generation_seconds: time from the first to the last token of a text.
    """

    head_bytes: _Count = 1 << 15
    head_fields: _Count = 100
    body_bytes: _Count = 1 << 20
    rows: _Count = 10_000
    push_days: _Count = 400
    waiting_rows: _Count = WAITING
    values: _Count = 1_000_000
    concurrency: _Count = 256
    deadline_seconds: Annotated[float, Gt(0), Le(60)] = 5.0
    requests_per_second: _Count | None = None
    generations: _Count = 8
    generated_tokens: _Count = 1024
    generation_seconds: Annotated[float, Gt(0), Le(3600)] = 120.0

    def head_words(self) -> str:
        return f"{self.head_bytes:,} bytes and {self.head_fields:,} fields at most"

    def require_values(self, where: str, rows: int, features: int) -> None:
        if rows * features > self.values:
            size = f"{rows:,} rows of {features:,} features are {rows * features:,} values"
            raise TooLargeError(
                where, size, expected=f"{self.values:,} at most", remedy="split it into several requests"
            )
