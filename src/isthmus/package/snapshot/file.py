"""The file of a snapshot: the latest row of each key of a service's views at a moment, signed.

    magic       8 bytes   "isthsnap"
    version     1 byte
    size        4 bytes   of the header
    header      JSON, see `Header`
    rows        of each view in the header's order, ascending by key:
      key       values as in the name of a hash of the online store (`entitykey`), in the order of the join keys' names
      event     8 bytes   event time, microseconds since 1970 UTC, signed
      known     8 bytes   known time, microseconds since 1970 UTC, signed
      ...       the packed row of the online store (`rows`) from its null bits on, with the snapshot's features only
    signature   64 bytes  ECDSA with P-256 over the SHA-256 of everything before it: r and s, big-endian

All other numbers are little-endian. The version, contract and content hash of packed rows are omitted: the header has
the first two for all rows, and the signature covers every byte.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.values.entitykey import key_size
from isthmus.features.values.rows import HEADER as ROW_HEADER
from isthmus.features.values.rows import RowCodec

MAGIC, VERSION = b"isthsnap", 1
SIGNATURE_SIZE = 64
LARGEST = 2**26
"""Maximum bytes of a file: a device refuses more."""

_START = struct.Struct("<8sBI")
_TIMES = struct.Struct("<qq")
_END = struct.Struct("<I")

Rows = Mapping[bytes, bytes]
"""Rows by key, as in the file: their times, and the packed row from its null bits on."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The header of a snapshot.

    Attributes:
        hash: hash of the service in the contract: a model trained for it can read the rows.
        contract: hash of the whole contract.
        made: time of the snapshot's state, microseconds since 1970 UTC.
        number: greater than in every earlier snapshot of the service.
        views: name and number of rows of each view.
        owner: join key with only one value in the rows, and that value as text (`owners`); None if all devices get the
            same file.
    """

    project: str
    service: str
    hash: str
    contract: str
    made: int
    number: int
    views: tuple[tuple[str, int], ...]
    owner: tuple[str, str] | None = None


def encode_header(header: Header) -> bytes:
    text = msgspec.json.encode(header)
    return _START.pack(MAGIC, VERSION, len(text)) + text


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot, with rows by view name. The signature is zeros before signing."""

    header: Header
    rows: Mapping[str, Rows]
    signature: bytes = bytes(SIGNATURE_SIZE)

    @cached_property
    def body(self) -> bytes:
        return b"".join(self.parts[:-1])

    @cached_property
    def parts(self) -> list[bytes]:
        rows = [key + row for name, _ in self.header.views for key, row in sorted(self.rows[name].items())]
        return [encode_header(self.header), *rows, self.signature]

    @cached_property
    def data(self) -> bytes:
        return b"".join(self.parts)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def signed(self, signature: bytes) -> "SnapshotFile":
        return SnapshotFile(self.header, self.rows, signature)


def to_online_row(row: bytes, view: ViewContract) -> bytes:
    event, known = _TIMES.unpack_from(row)
    return ROW_HEADER.pack(1, view.prefix, event, known, 0) + row[_TIMES.size :]


def to_snapshot_row(row: bytes, event: int, known: int) -> bytes:
    return _TIMES.pack(event, known) + row[ROW_HEADER.size :]


def read_header(data: bytes, where: str) -> tuple[Header, int]:
    if len(data) < _START.size + SIGNATURE_SIZE:
        raise DataError(where, f"has {len(data)} bytes", expected="a snapshot")
    magic, version, size = _START.unpack_from(data)
    if magic != MAGIC:
        raise DataError(where, f"begins with {magic!r}", expected=f"a snapshot, which begins with {MAGIC!r}")
    if version != VERSION:
        raise DataError(where, f"has version {version}", expected=f"version {VERSION}")
    text = data[_START.size : _START.size + size]
    try:
        return msgspec.json.decode(text, type=Header), _START.size + size
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(where, f"has a header that cannot be read ({error})", expected="a snapshot") from error


def read_snapshot(data: bytes, views: Sequence[ViewContract], where: str = "snapshot") -> SnapshotFile:
    """Parse the bytes of a snapshot, a file of feature rows for devices. Does not check its signature.

    `views` are the views that the file must contain, in order, and `where` names the file in errors. Raises DataError
    if the file is damaged or has other views.
    """
    header, place = read_header(data, where)
    if [name for name, _ in header.views] != [view.name for view in views]:
        named = ", ".join(name for name, _ in header.views)
        raise DataError(where, f"has views {named}", expected=", ".join(view.name for view in views))
    end = len(data) - SIGNATURE_SIZE
    rows, body = dict[str, dict[bytes, bytes]](), data[:end]
    for (name, count), view in zip(header.views, views, strict=True):
        rows[name], place = read_rows(view, count, body, place, where)
    if place != end:
        raise DataError(where, f"has {end - place} bytes more than its header says")
    return SnapshotFile(header, rows, data[end:])


def read_rows(
    view: ViewContract, count: int, data: bytes, place: int = 0, where: str = "snapshot"
) -> tuple[dict[bytes, bytes], int]:
    result: dict[bytes, bytes] = {}
    fixed = _TIMES.size + RowCodec(view).width - ROW_HEADER.size
    variable = any(column.dtype.numpy is None for column in view.fields)
    truncated = DataError(where, f"ends within a row of {view.name}, or is damaged there")
    for _ in range(count):
        try:
            begin = place + key_size(view.keys, data, place)
            stop = begin + _row_size(fixed, variable, data, begin)
        except (struct.error, ValueError) as error:
            raise truncated from error
        if stop > len(data):
            raise truncated
        result[data[place:begin]] = data[begin:stop]
        place = stop
    if len(result) < count or any(key >= following for key, following in pairwise(result)):
        raise DataError(where, f"has rows of {view.name} in the wrong order", expected="each key once, ascending")
    return result, place


def _row_size(fixed: int, variable: bool, data: bytes, place: int) -> int:
    """Return the size of a row without its key. The last number of its fixed part is the size of the variable part."""
    return fixed + (_END.unpack_from(data, place + fixed - _END.size)[0] if variable else 0)
