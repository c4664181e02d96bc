"""The file of a snapshot: the latest row of each key of a service's views at a moment, signed.

magic       8 bytes   "isthsnap"
version     1 byte
size        4 bytes   of the header
header      JSON, see `Header`
rows        of each view in the header's order, ascending by key:
  key       each value as in the name of a hash of the online store (`entitykey`), by the names of the join keys
  event     8 bytes   event time, microseconds since 1970 UTC, signed
  known     8 bytes   known time, likewise
  ...       the packed row of the online store (`rows`) from its null bits on, of the features in the snapshot alone
signature   64 bytes  ECDSA with P-256 over the SHA-256 of all before it: r and s, big-endian

All other numbers are little-endian. Version, contract and content hash of each packed row are left out: the header says
the first two of all rows, and the signature covers every byte.
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
"""Bytes of a file: a device refuses more."""

_START = struct.Struct("<8sBI")
_TIMES = struct.Struct("<qq")
_END = struct.Struct("<I")

Rows = Mapping[bytes, bytes]
"""Keys, as in the file, to rows: their times, and the packed row from its null bits on."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a snapshot is of.

    Attributes:
        hash: of the service in the contract: a model that was trained for it can read the rows.
        contract: the hash of the whole contract.
        made: the moment that it shows, microseconds since 1970 UTC.
        number: greater than that of every earlier snapshot of the service.
        views: name and number of rows of each.
        owner: the join key whose rows are of one value alone, and that value as text (`owners`); None, and left out,
            where every device gets the same file.
    """

    project: str
    service: str
    hash: str
    contract: str
    made: int
    number: int
    views: tuple[tuple[str, int], ...]
    owner: tuple[str, str] | None = None


def head(header: Header) -> bytes:
    """How the file with this header begins."""
    text = msgspec.json.encode(header)
    return _START.pack(MAGIC, VERSION, len(text)) + text


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot, read or yet to be signed.

    Attributes:
        rows: view name to its rows.
        signature: zeros before it is signed.
    """

    header: Header
    rows: Mapping[str, Rows]
    signature: bytes = bytes(SIGNATURE_SIZE)

    @cached_property
    def body(self) -> bytes:
        """Everything that is signed."""
        return b"".join(self.parts[:-1])

    @cached_property
    def parts(self) -> list[bytes]:
        """The bytes of the file in pieces: the header, each row with its key, the signature."""
        rows = [key + row for name, _ in self.header.views for key, row in sorted(self.rows[name].items())]
        return [head(self.header), *rows, self.signature]

    @cached_property
    def data(self) -> bytes:
        """The bytes of the file."""
        return b"".join(self.parts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, in hex: its name."""
        return hashlib.sha256(self.data).hexdigest()

    def signed(self, signature: bytes) -> "SnapshotFile":
        """The same with its signature."""
        return SnapshotFile(self.header, self.rows, signature)


def packed(row: bytes, view: ViewContract) -> bytes:
    """A row of a snapshot in the form of the online store, whose content hash is 0."""
    event, known = _TIMES.unpack_from(row)
    return ROW_HEADER.pack(1, view.prefix, event, known, 0) + row[_TIMES.size :]


def unpacked(row: bytes, event: int, known: int) -> bytes:
    """A packed row as a snapshot has it, with its times."""
    return _TIMES.pack(event, known) + row[ROW_HEADER.size :]


def read_header(data: bytes, where: str) -> tuple[Header, int]:
    """The header of a file, and where its rows begin.

    Raises:
        DataError: it is no snapshot.
    """
    if len(data) < _START.size + SIGNATURE_SIZE:
        raise DataError(where, f"has {len(data)} bytes", expected="a snapshot")
    magic, version, size = _START.unpack_from(data)
    if magic != MAGIC:
        raise DataError(where, f"begins with {magic!r}", expected=f"a snapshot, which begins with {MAGIC!r}")
    if version != VERSION:
        raise DataError(where, f"is of version {version}", expected=f"version {VERSION}")
    text = data[_START.size : _START.size + size]
    try:
        return msgspec.json.decode(text, type=Header), _START.size + size
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(where, f"its header cannot be read ({error})", expected="a snapshot") from error


def read_snapshot(data: bytes, views: Sequence[ViewContract], where: str = "snapshot") -> SnapshotFile:
    """A file whose rows are those of these views.

    Raises:
        DataError: it is torn, damaged, or of other views.
    """
    header, place = read_header(data, where)
    if [name for name, _ in header.views] != [view.name for view in views]:
        named = ", ".join(name for name, _ in header.views)
        raise DataError(where, f"is of views {named}", expected=", ".join(view.name for view in views))
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
    """So many rows of a view from a place on, and the place after them.

    Raises:
        DataError: the bytes end before, or the keys do not ascend.
    """
    found: dict[bytes, bytes] = {}
    fixed = _TIMES.size + RowCodec(view).width - ROW_HEADER.size
    variable = any(column.dtype.numpy is None for column in view.fields)
    torn = DataError(where, f"ends within a row of {view.name}, or is damaged there")
    for _ in range(count):
        try:
            begin = place + key_size(view.keys, data, place)
            stop = begin + _row_size(fixed, variable, data, begin)
        except (struct.error, ValueError) as error:
            raise torn from error
        if stop > len(data):
            raise torn
        found[data[place:begin]] = data[begin:stop]
        place = stop
    if len(found) < count or any(one >= other for one, other in pairwise(found)):
        raise DataError(where, f"its rows of {view.name} are not in order", expected="each key once, ascending")
    return found, place


def _row_size(fixed: int, variable: bool, data: bytes, place: int) -> int:
    """The bytes of a row without its key: the last end says how many of variable length follow the fixed ones."""
    return fixed + (_END.unpack_from(data, place + fixed - _END.size)[0] if variable else 0)
