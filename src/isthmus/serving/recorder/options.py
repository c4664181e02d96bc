"""`Recording`: which answers to record, and the space they may take."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """Which answers a server records, and the space they may take: `[server.record]` of isthmus.toml.

    Attributes:
        share: fraction of answers to record, 0 to 1.
        lookups: record answers of `/get-online-features`.
        predictions: record answers of `/predict` and `/v2`.
        texts: record answers of `/generate`, including the prompts that users wrote.
        private: views whose join keys are always written as keyed hashes.
        memory_mb: MiB per worker for batches waiting to be written to disk.
        spool_mb: MiB for the folder that holds batches until they are collected.
        full: batches to drop when memory or disk is full.
        keep_days: days that an answer stays in the table; None to keep it forever.
    """

    share: Annotated[float, Ge(0), Le(1)] = 1.0
    lookups: bool = True
    predictions: bool = True
    texts: bool = True
    private: tuple[str, ...] = ()
    memory_mb: Annotated[float, Gt(0)] = 32.0
    spool_mb: Annotated[float, Gt(0)] = 1024.0
    full: Literal["newest", "oldest"] = "newest"
    keep_days: Annotated[float, Gt(0)] | None = 30.0
