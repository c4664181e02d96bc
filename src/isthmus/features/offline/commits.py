"""What a commit of an offline table says of the whole table, so that nobody has to read the rows to know.

Each day has a digest of its rows, and the fingerprint of the table is one of all days: a commit that replaces a few
days computes only those anew.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from isthmus.features.days import Days

_CONTRACT, _FINGERPRINT, _ROWS = "isthmus.contract", "isthmus.fingerprint", "isthmus.rows"
_DAYS, _UNTIL, _ORIGIN, _DONE = "isthmus.days", "isthmus.until", "isthmus.sources", "isthmus.done"
_PACKED = np.dtype([("day", "<i4"), ("rows", "<i8"), ("digest", "V16")])


@dataclass(frozen=True, slots=True)
class Day:
    """The rows of one day.

    Attributes:
        rows: how many.
        digest: the first 16 bytes of SHA-256 over them.
    """

    rows: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """What rows were computed from.

    Attributes:
        schemas: source to its columns' types.
        content: hash of what the sources held; empty if nobody can say.
    """

    schemas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    content: str = ""

    def retyped(self, later: "Origin") -> bool:
        """Whether a column that both know has another type later."""
        known = ((now, self.schemas.get(source, {})) for source, now in later.schemas.items())
        return any(now[column] != was[column] for now, was in known for column in now.keys() & was.keys())


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit says of its table.

    Attributes:
        contract: hash of the view's contract.
        days: the rows by day; None in a table of a version of Isthmus that did not know days.
        until: how far builds have come, in microseconds.
        origin: what the rows were computed from.
        done: ranges that were built from exactly that content.
        fingerprint: hash of all rows.
        rows: number of rows.
        written: when it was committed, in milliseconds since 1970 UTC.
    """

    contract: str
    days: Mapping[int, Day] | None
    until: int = 0
    origin: Origin = field(default_factory=Origin)
    done: Sequence[Days] = ()
    fingerprint: str = ""
    rows: int = 0
    written: int = 0

    @classmethod
    def of(cls, contract: str, days: Mapping[int, Day], until: int, origin: Origin, done: Sequence[Days]) -> "Commit":
        """The commit of these days."""
        fingerprint = hashlib.sha256(_pack(days)).hexdigest()
        return cls(contract, days, until, origin, done, fingerprint, sum(day.rows for day in days.values()))

    def metadata(self) -> dict[str, str]:
        """What the commit carries."""
        return {
            _CONTRACT: self.contract,
            _FINGERPRINT: self.fingerprint,
            _ROWS: str(self.rows),
            _DAYS: base64.b64encode(_pack(self.days or {})).decode(),
            _UNTIL: str(self.until),
            _ORIGIN: json.dumps({"schemas": self.origin.schemas, "content": self.origin.content}, sort_keys=True),
            _DONE: json.dumps([[days.first, days.end] for days in self.done]),
        }

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> "Commit | None":
        """The inverse of `metadata`, of all that a commit carries; None if it is not one of ours.

        Raises:
            ValueError: the metadata are damaged.
        """
        if _CONTRACT not in metadata:
            return None
        text = {key: str(value) for key, value in metadata.items()}
        try:
            origin = json.loads(text.get(_ORIGIN, "{}"))
            return cls(
                contract=text[_CONTRACT],
                days=_unpack(base64.b64decode(text[_DAYS])) if _DAYS in text else None,
                until=int(text.get(_UNTIL, "0")),
                origin=Origin(origin.get("schemas", {}), origin.get("content", "")),
                done=tuple(Days(first, end) for first, end in json.loads(text.get(_DONE, "[]"))),
                fingerprint=text.get(_FINGERPRINT, ""),
                rows=int(text.get(_ROWS, "0")),
                written=int(text.get("timestamp", "0")),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"what its commit says of it is damaged: {error}") from error


def digest(rows: pa.Table) -> bytes:
    """Sixteen bytes of SHA-256 over the columns of rows, in their order, which have no nulls."""
    sha = hashlib.sha256()
    for name in rows.column_names:
        column = rows[name]
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            # Lengths beside the bytes: neither "a", "bc" nor "ab", "c" has the other's digest.
            for chunk in column.cast(pa.binary()).chunks:
                offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                sha.update(np.diff(offsets).tobytes())
            for chunk in column.cast(pa.binary()).chunks:
                offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                sha.update(memoryview(chunk.buffers()[2] or b"")[offsets[0] : offsets[-1]])
        else:
            whole = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
            sha.update(whole.to_numpy().tobytes())
    return sha.digest()[:16]


def _pack(days: Mapping[int, Day]) -> bytes:
    packed = np.zeros(len(days), _PACKED)
    for n, (day, rows) in enumerate(sorted(days.items())):
        packed[n] = (day, rows.rows, rows.digest)
    return packed.tobytes()


def _unpack(packed: bytes) -> dict[int, Day]:
    return {
        int(entry["day"]): Day(int(entry["rows"]), entry["digest"].tobytes())
        for entry in np.frombuffer(packed, _PACKED)
    }
