"""What a server records of its answers, and how much room that may take."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """`[server.record]` of isthmus.toml.

    Attributes:
        share: of the answers that are recorded.
        lookups: whether those of `/get-online-features` are.
        predictions: whether those of `/predict` and `/v2` are.
        texts: whether those of `/generate` are, with the prompts that users wrote.
        private: views whose join keys are written as a keyed hash, wherever a request has them.
        memory_mb: of batches that wait for the disk, in a worker.
        spool_mb: of the folder that they are written to, until they are collected.
        full: which batches are dropped where there is no room, in memory or on disk: the newest, or the oldest.
        keep_days: how long an answer stays in the table; None for ever.
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
