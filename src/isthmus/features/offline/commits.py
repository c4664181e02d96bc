"""Metadata of an offline table's commits: summaries of its days (`Day`), and the sources of its rows (`RowSources`)."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa

from isthmus.features.days import DAY, Days, union

_CONTRACT, _FINGERPRINT, _ROWS = "isthmus.contract", "isthmus.fingerprint", "isthmus.rows"
_DAYS, _UNTIL, _ORIGIN, _DONE = "isthmus.days", "isthmus.until", "isthmus.sources", "isthmus.done"
_BUILT = "isthmus.built"
_PACKED = np.dtype([("day", "<i4"), ("rows", "<i8"), ("digest", "V16")])


@dataclass(frozen=True, slots=True)
class Day:
    """The number of rows of a day, and the first 16 bytes of the SHA-256 of their keys, times and content hashes."""

    rows: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The events that a table's rows include.

    Attributes:
        watermark: the table has the rows that were known before it, in microseconds since 1970 UTC; None after a build,
            which does not wait for late events.
        offsets: next offset of each partition, by source.
    """

    watermark: int | None
    offsets: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RowSources:
    """The sources of computed rows: column types by source and column name, and a content hash, empty if unknown.

    `position` tells which events of streams the rows include; None for views without streams.
    """

    schemas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    content: str = ""
    position: StreamPosition | None = None

    def retyped(self, later: "RowSources") -> bool:
        pairs = ((now, self.schemas.get(source, {})) for source, now in later.schemas.items())
        return any(now[column] != was[column] for now, was in pairs for column in now.keys() & was.keys())


@dataclass(frozen=True, slots=True)
class Commit:
    """The state of an offline table after a commit, stored in the commit's metadata.

    Attributes:
        contract: hash of the view's contract.
        days: summaries by day, counted from 1970-01-01; None in tables of early versions of Isthmus.
        until: end of the time that builds have covered, in microseconds since 1970 UTC.
        done: ranges of days that were built from sources with the content `origin.content`.
        fingerprint: SHA-256 of `days`, which changes if any row changes.
        written: time of the commit, in milliseconds since 1970 UTC.
        built: fingerprint of the last build, if later commits only added pushed rows; otherwise empty.
    """

    contract: str
    days: Mapping[int, Day] | None
    until: int = 0
    origin: RowSources = field(default_factory=RowSources)
    done: Sequence[Days] = ()
    fingerprint: str = ""
    rows: int = 0
    written: int = 0
    built: str = ""

    @classmethod
    def of(
        cls, contract: str, days: Mapping[int, Day], until: int, origin: RowSources, done: Sequence[Days]
    ) -> "Commit":
        fingerprint = hashlib.sha256(_pack(days)).hexdigest()
        return cls(contract, days, until, origin, done, fingerprint, sum(day.rows for day in days.values()))

    @classmethod
    def after(  # noqa: PLR0913 - everything that a build knows about its rows
        cls, before: "Commit | None", contract: str, days: Mapping[int, Day], within: Days | None, origin: RowSources,
        done: Sequence[Days], now: int,
    ) -> "Commit":  # fmt: skip
        """Return the state of an offline table after a build, to store it with the build's commit.

        Args:
            before: state before the build; None if the table does not exist yet.
            contract: hash of the view's contract.
            days: row count and digest of each day after the build, by days since 1970-01-01.
            within: days that were built; None for all days.
            origin: column types and content of the sources that were read.
            done: ranges of days that the same build has already found unchanged.
            now: time of the build, in microseconds since 1970 UTC.
        """
        until = now if within is None else max(before.until if before else 0, min(now, within.end * DAY))
        if within is not None and before is None:
            # Events on other days are not in the table.
            origin = RowSources(origin.schemas, origin.content)
        if within is None or before is None:
            built = union([within, *done]) if within and origin.content else ()
        else:
            schemas = {name: {**before.origin.schemas.get(name, {}), **kinds} for name, kinds in origin.schemas.items()}
            # The other days have the events of the position before.
            origin = RowSources(schemas, origin.content, before.origin.position)
            earlier = before.done if before.origin.content == origin.content else ()
            built = union([*earlier, *done, within]) if origin.content else ()
        return cls.of(contract, days, until, origin, tuple(built))

    @property
    def base(self) -> str:
        """Fingerprint of the rows of the last build, to decide if derived results are outdated.

        Pushed rows do not change it, so that they do not make derived results outdated.
        """
        return self.built or self.fingerprint

    def metadata(self) -> dict[str, str]:
        return {
            _CONTRACT: self.contract,
            _FINGERPRINT: self.fingerprint,
            _ROWS: str(self.rows),
            _DAYS: base64.b64encode(_pack(self.days or {})).decode(),
            _UNTIL: str(self.until),
            _ORIGIN: json.dumps(_origin(self.origin), sort_keys=True),
            _DONE: json.dumps([[days.first, days.end] for days in self.done]),
            **({_BUILT: self.built} if self.built else {}),
        }

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> "Commit | None":
        if _CONTRACT not in metadata:
            return None
        text = {key: str(value) for key, value in metadata.items()}
        try:
            origin = json.loads(text.get(_ORIGIN, "{}"))
            return cls(
                contract=text[_CONTRACT],
                days=_unpack(base64.b64decode(text[_DAYS])) if _DAYS in text else None,
                until=int(text.get(_UNTIL, "0")),
                origin=RowSources(
                    origin.get("schemas", {}),
                    origin.get("content", ""),
                    StreamPosition(**origin["position"]) if "position" in origin else None,
                ),
                done=tuple(Days(first, end) for first, end in json.loads(text.get(_DONE, "[]"))),
                fingerprint=text.get(_FINGERPRINT, ""),
                rows=int(text.get(_ROWS, "0")),
                written=int(text.get("timestamp", "0")),
                built=text.get(_BUILT, ""),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the metadata of its commit is damaged: {error}") from error


def digest(rows: pa.Table) -> bytes:
    """Return the first 16 bytes of the SHA-256 over all columns of a table, to notice changed rows.

    The order of rows and columns matters. No value may be null.
    """
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


def _origin(origin: RowSources) -> dict[str, object]:
    parts = asdict(origin)
    return parts if origin.position else {name: parts[name] for name in ("schemas", "content")}


def _pack(days: Mapping[int, Day]) -> bytes:
    return np.array([(day, rows.rows, rows.digest) for day, rows in sorted(days.items())], _PACKED).tobytes()


def _unpack(packed: bytes) -> dict[int, Day]:
    return {
        int(entry["day"]): Day(int(entry["rows"]), entry["digest"].tobytes())
        for entry in np.frombuffer(packed, _PACKED)
    }
