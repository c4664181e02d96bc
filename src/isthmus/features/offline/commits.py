"""The metadata of an offline table's commits, from which readers know the table without reading its rows.

Each day has a digest of its rows, and the fingerprint of the table hashes the days: a commit that replaces a few days
computes only their digests.
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
_BUILT = "isthmus.built"
_PACKED = np.dtype([("day", "<i4"), ("rows", "<i8"), ("digest", "V16")])


@dataclass(frozen=True, slots=True)
class Day:
    """The rows of a day.

    Attributes:
        digest: the first 16 bytes of their SHA-256.
    """

    rows: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """The sources that rows were computed from.

    Attributes:
        schemas: source to its columns' types.
        content: hash of the sources' content; empty if unknown.
    """

    schemas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    content: str = ""

    def retyped(self, later: "Origin") -> bool:
        """Whether a column of both has another type later."""
        pairs = ((now, self.schemas.get(source, {})) for source, now in later.schemas.items())
        return any(now[column] != was[column] for now, was in pairs for column in now.keys() & was.keys())


@dataclass(frozen=True, slots=True)
class Commit:
    """The table as of a commit.

    Attributes:
        contract: hash of the view's contract.
        days: the rows by day; None in tables of early versions of Isthmus.
        until: the moment up to which builds have come, in microseconds.
        origin: sources of the rows.
        done: ranges that were built from exactly that content.
        fingerprint: hash of all rows.
        written: time of the commit, in milliseconds since 1970 UTC.
        built: the fingerprint that the last build has left, of a commit that only added pushed rows; else empty.
    """

    contract: str
    days: Mapping[int, Day] | None
    until: int = 0
    origin: Origin = field(default_factory=Origin)
    done: Sequence[Days] = ()
    fingerprint: str = ""
    rows: int = 0
    written: int = 0
    built: str = ""

    @classmethod
    def of(cls, contract: str, days: Mapping[int, Day], until: int, origin: Origin, done: Sequence[Days]) -> "Commit":
        """A commit of these days, with their fingerprint."""
        fingerprint = hashlib.sha256(_pack(days)).hexdigest()
        return cls(contract, days, until, origin, done, fingerprint, sum(day.rows for day in days.values()))

    @property
    def base(self) -> str:
        """The fingerprint that the last build has left: pushes since then make nothing of it outdated."""
        return self.built or self.fingerprint

    def metadata(self) -> dict[str, str]:
        """The custom metadata of the Delta commit."""
        return {
            _CONTRACT: self.contract,
            _FINGERPRINT: self.fingerprint,
            _ROWS: str(self.rows),
            _DAYS: base64.b64encode(_pack(self.days or {})).decode(),
            _UNTIL: str(self.until),
            _ORIGIN: json.dumps({"schemas": self.origin.schemas, "content": self.origin.content}, sort_keys=True),
            _DONE: json.dumps([[days.first, days.end] for days in self.done]),
            **({_BUILT: self.built} if self.built else {}),
        }

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> "Commit | None":
        """The inverse of `metadata`, from a Delta commit; None if it is not our commit.

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
                built=text.get(_BUILT, ""),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"what its commit says of it is damaged: {error}") from error


def digest(rows: pa.Table) -> bytes:
    """Sixteen bytes of SHA-256 over the columns of rows, which have no nulls."""
    sha = hashlib.sha256()
    for name in rows.column_names:
        column = rows[name]
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            # All lengths, then all bytes: "a", "bc" and "ab", "c" must have different digests.
            texts = []
            for chunk in column.cast(pa.binary()).chunks:
                offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                sha.update(np.diff(offsets).tobytes())
                texts.append(memoryview(chunk.buffers()[2] or b"")[offsets[0] : offsets[-1]])
            for text in texts:
                sha.update(text)
        else:
            sha.update((column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_numpy().tobytes())
    return sha.digest()[:16]


def _pack(days: Mapping[int, Day]) -> bytes:
    return np.array([(day, rows.rows, rows.digest) for day, rows in sorted(days.items())], _PACKED).tobytes()


def _unpack(packed: bytes) -> dict[int, Day]:
    return {
        int(entry["day"]): Day(int(entry["rows"]), entry["digest"].tobytes())
        for entry in np.frombuffer(packed, _PACKED)
    }
