"""A delta from one snapshot to a newer one (`difference` makes it): bytes to copy and bytes to insert.

    magic       8 bytes   "isthdiff"
    version     1 byte
    base        32 bytes  SHA-256 of the old file
    target      32 bytes  SHA-256 of the new file
    size        4 bytes   of the new file, little-endian
    then, until the end:
      copy      a number, twice the count of bytes to copy plus 1, then their offset in the old file
      insert    a number, twice the count of bytes, then these bytes

Numbers have seven bits per byte, lowest first; the highest bit says that more follow (LEB128). A delta needs no
signature because its result is a signed file that is verified.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from isthmus.features.errors import DataError

MAGIC, VERSION = b"isthdiff", 1
_START = struct.Struct("<8sB32s32sI")


class Pieces(Protocol):
    """A file in pieces, and its SHA-256 in hex."""

    @property
    def parts(self) -> list[bytes]:
        """The bytes of the file, cut into consecutive pieces. A delta omits the pieces that both files have."""

    @property
    def data(self) -> bytes: ...

    @property
    def digest(self) -> str: ...


@dataclass
class _Step:
    """A run of bytes of the new file. `place` is their offset in the old file, or None if they are not in it."""

    place: int | None
    data: bytearray


def difference(base: Pieces, target: Pieces) -> bytes:
    places: dict[bytes, int] = {}
    place = 0
    for part in base.parts:
        places.setdefault(part, place)
        place += len(part)
    steps: list[_Step] = []
    for part in target.parts:
        begin, last = places.get(part), steps[-1] if steps else None
        follows = None if last is None or last.place is None else last.place + len(last.data)
        if last is not None and begin == follows:
            last.data += part
        else:
            steps.append(_Step(begin, bytearray(part)))
    head = _START.pack(MAGIC, VERSION, bytes.fromhex(base.digest), bytes.fromhex(target.digest), len(target.data))
    return head + b"".join(map(_encoded, steps))


def _encoded(step: _Step) -> bytes:
    count = 2 * len(step.data)
    return _number(count) + step.data if step.place is None else _number(count + 1) + _number(step.place)


def apply_delta(base: bytes, delta: bytes, where: str = "difference") -> bytes:
    """Rebuild the newer snapshot on a device from the snapshot `base` and a delta; return its bytes.

    `where` names the delta in errors. Raises DataError if the delta is damaged, or was made for another base.
    """
    if len(delta) < _START.size:
        raise DataError(where, f"has {len(delta)} bytes", expected="a difference of snapshots")
    magic, version, begin, end, size = _START.unpack_from(delta)
    if (magic, version) != (MAGIC, VERSION):
        raise DataError(where, f"begins with {magic!r} {version}", expected=f"{MAGIC!r} {VERSION}")
    if hashlib.sha256(base).digest() != begin:
        raise DataError(where, "is for another snapshot", expected=begin.hex()[:12])
    made, place = bytearray(), _START.size
    try:
        while place < len(delta) and len(made) <= size:
            count, place = _read_number(delta, place)
            if count & 1:
                source, place = _read_number(delta, place)
                made += _part(base, source, count >> 1)
            else:
                made += _part(delta, place, count >> 1)
                place += count >> 1
    except ValueError as error:
        raise DataError(where, "is truncated or damaged") from error
    if len(made) != size or hashlib.sha256(made).digest() != end:
        raise DataError(where, "is truncated or damaged: it does not produce the snapshot that it names")
    return bytes(made)


def _part(data: bytes, begin: int, count: int) -> bytes:
    if begin + count > len(data):
        raise ValueError
    return data[begin : begin + count]


def _read_number(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift, byte in zip(range(0, 35, 7), data[place : place + 5], strict=False):
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place + shift // 7 + 1
    raise ValueError


def _number(value: int) -> bytes:
    return bytes(_digits(value))


def _digits(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
