"""The record of a view: which version of its offline table Redis holds, and whether all of it is there.

The record is written after the rows, into the same Redis: a single server that still has the record has the rows that
came before it. It lets the next materialization compare two versions of a table instead of a table with Redis, and it
carries the stamp: when every unchanged row of a view has been confirmed at a new time, that time is written once and
not into every row.
"""

from collections.abc import Collection, Sequence

import msgspec

from isthmus.features.contract.schema import ViewContract
from isthmus.features.values.stamp import Stamp

NEVER = -(1 << 63)
"""The horizon of a table without a known row."""

WAITING = 1_000_000
"""Pushed rows of a view that may wait for its history, unless the settings say otherwise."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a view.

    Attributes:
        contract: hash of the view's contract.
        version: version of the offline table that was written.
        fingerprint: of the rows of that version.
        built: when the table was written, milliseconds since 1970 UTC.
        at: the moment whose answers were written, microseconds since 1970 UTC.
        horizon: the latest known time that a materialization has decided about.
        servers: name of each Redis process to how many keys it had evicted.
        stamp: the times of the rows that were confirmed at once, if any.
        pending: whether rows are being written, or a run that wrote them was killed.
        complete: the horizon of the last run that wrote all of its rows, while another is pending.
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
        """The horizon of the last run that wrote all of its rows; NEVER if that is not known."""
        return self.complete if self.pending else self.horizon


_DECODER = msgspec.json.Decoder(Published)


def records(project: str) -> bytes:
    """The Redis hash that holds the records of a project, by view."""
    return f"{project}:tables".encode()


def beside(project: str, view: str, what: str) -> bytes:
    """A Redis key of a view besides its rows. No entity key begins like it: no join key has a bar."""
    return f"{project}:tables|{view}|{what}".encode()


def decode(text: bytes | None) -> Published | None:
    """A record; None if it is missing or unreadable, and everything must be compared."""
    try:
        return None if text is None else _DECODER.decode(text)
    except msgspec.MsgspecError:
        return None


def stamp_of(view: ViewContract, record: Published | None) -> Stamp | None:
    """The stamp in the record of a view, if it counts for rows of the view's contract."""
    return record.stamp if record is not None and record.contract == view.hash else None


def query(project: str, views: Collection[ViewContract]) -> tuple[bytes, ...]:
    """The Redis command that reads the records of views."""
    return (b"HMGET", records(project), *(view.online_name.encode() for view in views))


def stamps(views: Collection[ViewContract], reply: Sequence[bytes | None]) -> dict[str, Stamp]:
    """View name to its stamp, if it has one that counts, from the reply to `query`."""
    records = zip(views, map(decode, reply), strict=True)
    return {view.name: stamp for view, record in records if (stamp := stamp_of(view, record))}
