"""The record of a view in Redis: which version of its offline table Redis holds, and whether the rows are complete.

The record is written after the rows, so a single server that still has the record has the rows, too. With it, the next
materialization compares two versions of a table instead of a table with Redis.
"""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from isthmus.features.contract.schema import ViewContract
from isthmus.features.values.columns import Ints, Mask

NEVER = -(1 << 63)
"""Horizon of a table without rows."""

WAITING = 1_000_000
"""Default maximum of pushed rows of a view that wait for its history."""


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Times that Redis stores once for all rows of a view known by `until`; all in microseconds since 1970 UTC."""

    until: int
    event: int
    known: int

    def apply(self, event: Ints, known: Ints) -> tuple[Ints, Ints]:
        stamped = known <= self.until
        return np.where(stamped, self.event, event), np.where(stamped, self.known, known)

    def changes_times(self, event: Ints, known: Ints) -> Mask:
        altered: Mask = (known <= self.until) & ((event != self.event) | (known != self.known))
        return altered


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a view in Redis: which version of its offline table Redis holds.

    Attributes:
        fingerprint: hash of the rows of the offline table's `version`.
        built: time at which the table was written, milliseconds since 1970 UTC.
        at: time whose latest rows were written, microseconds since 1970 UTC.
        horizon: latest known time that a materialization has covered, microseconds since 1970 UTC.
        servers: number of evicted keys by run id of each Redis process.
        stamp: common times of the unchanged rows, if they have any.
        pending: True while rows are being written, or if that run was killed.
        complete: while a run is pending, the horizon of the last run that wrote all of its rows; NEVER if unknown.
    """

    contract: str
    version: int
    fingerprint: str
    built: int
    at: int
    horizon: int
    servers: dict[str, int]
    stamp: Stamp | None = None
    pending: bool = False
    complete: int = NEVER

    @property
    def complete_until(self) -> int:
        return self.complete if self.pending else self.horizon


_DECODER = msgspec.json.Decoder(Published)


def records(project: str) -> bytes:
    return f"{project}:tables".encode()


def view_key(project: str, view: str, what: str) -> bytes:
    return f"{project}:tables|{view}|{what}".encode()


def decode(text: bytes | None) -> Published | None:
    try:
        return None if text is None else _DECODER.decode(text)
    except msgspec.MsgspecError:
        return None


def stamp_of(view: ViewContract, record: Published | None) -> Stamp | None:
    return record.stamp if record is not None and record.contract == view.hash else None


def query(project: str, views: Collection[ViewContract]) -> tuple[bytes, ...]:
    return (b"HMGET", records(project), *(view.online_name.encode() for view in views))


def stamps(views: Collection[ViewContract], reply: Sequence[bytes | None]) -> dict[str, Stamp]:
    records = zip(views, map(decode, reply), strict=True)
    return {view.name: stamp for view, record in records if (stamp := stamp_of(view, record))}
