"""The packed online row: one binary value per view and key.

    version  1 byte
    prefix   8 bytes   first bytes of the view's contract hash
    event    8 bytes   event time, microseconds since 1970 UTC, signed
    known    8 bytes   known time, likewise
    content  8 bytes   hash of what follows, 63 bits
    nulls    1 bit per feature, 1 = null, the first feature in the lowest bit
    fixed    fixed-width features in declared order, 0 where null
    ends     4 bytes per variable-length feature: where its bytes end in the last section
    bytes    variable-length features, one after the other

All numbers are little-endian. The fixed part of all rows of a view has one width, so the rows of many keys decode
together as one NumPy array. The content hash folds the fixed part and the variable part into 63 bits, so that it is
the same number in languages with and without unsigned integers.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from isthmus.features.columns import Values
from isthmus.features.contract import ViewContract
from isthmus.features.errors import ContractMismatch, DataError

VERSION = 1
HEADER = struct.Struct("<B8sqqQ")
_SEED = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Bool = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Block:
    """Decoded rows of one view for n keys; what `found` leaves out is 0 or null everywhere else.

    Attributes:
        found: shape (n,), which keys have a row.
        event: shape (n,) int64 microseconds.
        known: shape (n,) int64 microseconds.
        columns: feature name to its values.
    """

    found: Bool
    event: Int64
    known: Int64
    columns: Mapping[str, Values]


class RowCodec:
    """Encodes and decodes the rows of one view."""

    def __init__(self, view: ViewContract) -> None:
        self.view = view
        self.fixed = [column for column in view.fields if column.dtype.numpy is not None]
        self.variable = [column for column in view.fields if column.dtype.numpy is None]
        self._bit = {column.name: position for position, column in enumerate(view.fields)}
        self._nulls = (len(view.fields) + 7) // 8
        self._dtype = np.dtype(
            [("version", "u1"), ("prefix", "V8"), ("event", "<i8"), ("known", "<i8"), ("content", "<u8")]
            + [("nulls", "u1", (self._nulls,))]
            + [(f"f{i}", column.dtype.numpy) for i, column in enumerate(self.fixed)]
            + [(f"v{i}", "<u4") for i in range(len(self.variable))]
        )
        self.width = self._dtype.itemsize
        self._absent = bytes(self.width)
        self._prefix = np.frombuffer(view.prefix, "V8")[0]

    def encode(self, event: Int64, known: Int64, columns: Mapping[str, Values]) -> list[bytes]:
        """Packed rows of n keys.

        Args:
            event: shape (n,) int64 microseconds.
            known: shape (n,) int64 microseconds.
            columns: every feature of the view to its values, shape (n,).

        Raises:
            DataError: a text has no UTF-8 form.
        """
        packed, tails = self._pack(columns, len(event))
        packed["version"] = VERSION
        packed["prefix"] = self._prefix
        packed["event"] = event
        packed["known"] = known
        packed["content"] = self._hash(packed, tails)
        raw = packed.tobytes()
        rows = [raw[start : start + self.width] for start in range(0, len(raw), self.width)]
        return [row + tail for row, tail in zip(rows, tails, strict=True)] if tails else rows

    def content(self, columns: Mapping[str, Values], rows: int) -> Int64:
        """The content hash of each row, shape (n,) int64, as it stands in the packed row."""
        return self._hash(*self._pack(columns, rows)).astype(np.int64)

    def decode(self, rows: Sequence[bytes | None]) -> Block:
        """The rows of n keys, decoded together.

        Raises:
            ContractMismatch: a row was written under another contract of the view.
            DataError: a row is damaged.
        """
        if self.variable:
            fixed = b"".join([self._absent if row is None else row[: self.width] for row in rows])
        else:
            fixed = b"".join([self._absent if row is None else row for row in rows])
        if len(fixed) != len(rows) * self.width:
            self._refuse(rows)
        packed = np.frombuffer(fixed, self._dtype)
        found = packed["version"] != 0
        if np.count_nonzero(found) != len(rows) - rows.count(None):
            self._refuse(rows)
        if not ((packed["version"] == VERSION) & (packed["prefix"] == self._prefix) | ~found).all():
            self._refuse(rows)
        columns = {}
        for i, column in enumerate(self.fixed):
            columns[column.name] = Values(packed[f"f{i}"], self._valid(packed, column.name, found))
        if self.variable:
            self._unpack_variable(rows, packed, found, columns)
        return Block(found, packed["event"], packed["known"], columns)

    def _pack(self, columns: Mapping[str, Values], rows: int) -> tuple[np.ndarray[Any, Any], list[bytes]]:
        """The fixed part of each row without its header, and the variable parts."""
        packed = np.zeros(rows, self._dtype)
        for name, bit in self._bit.items():
            packed["nulls"][:, bit // 8] |= (~columns[name].valid).astype(np.uint8) << (bit % 8)
        for i, column in enumerate(self.fixed):
            packed[f"f{i}"] = columns[column.name].data
        if not self.variable:
            return packed, []
        parts = []
        ends = np.zeros(rows, np.int64)
        for i, column in enumerate(self.variable):
            try:
                encoded = [
                    b"" if value is None else value.encode() if isinstance(value, str) else value
                    for value in columns[column.name].data
                ]
            except UnicodeEncodeError as error:
                raise DataError(
                    f"feature {column.name} of view {self.view.name}",
                    f"{error.object!r} is not text",
                    expected="text with a UTF-8 form",
                ) from None
            ends += np.fromiter(map(len, encoded), np.int64, rows)
            packed[f"v{i}"] = ends
            parts.append(encoded)
        return packed, [b"".join(part) for part in zip(*parts, strict=True)]

    def _hash(self, packed: np.ndarray[Any, Any], tails: list[bytes]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Folds 64-bit words with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
        body = packed.view(np.uint8).reshape(len(packed), self.width)[:, HEADER.size :]
        padded = np.zeros((len(packed), -(-body.shape[1] // 8) * 8), np.uint8)
        padded[:, : body.shape[1]] = body
        words = padded.view("<u8").astype(np.uint64)
        state = np.full(len(packed), _SEED, np.uint64)
        for i in range(words.shape[1]):
            state = _mix(state ^ words[:, i])
        if tails:
            digests = b"".join([hashlib.blake2b(tail, digest_size=8).digest() for tail in tails])
            state = _mix(state ^ np.frombuffer(digests, "<u8"))
        return state >> np.uint64(1)

    def _valid(self, packed: np.ndarray[Any, Any], name: str, found: Bool) -> Bool:
        bit = self._bit[name]
        valid: Bool = found & ((packed["nulls"][:, bit // 8] >> (bit % 8)) & 1 == 0)
        return valid

    def _unpack_variable(
        self, rows: Sequence[bytes | None], packed: np.ndarray[Any, Any], found: Bool, columns: dict[str, Values]
    ) -> None:
        # Every end is checked, also that of a null: the next value starts there.
        ends = np.array([np.zeros(len(rows))] + [packed[f"v{i}"] for i in range(len(self.variable))], np.int64)
        sizes = np.array([self.width if row is None else len(row) for row in rows], np.int64) - self.width
        if (np.diff(ends, axis=0) < 0).any() or (ends[-1] != sizes).any():
            self._refuse(rows)
        for i, column in enumerate(self.variable):
            start, end = ends[i].tolist(), ends[i + 1].tolist()
            valid = self._valid(packed, column.name, found)
            data = np.full(len(rows), None, dtype=object)
            text = column.dtype.name == "String"
            for n in np.flatnonzero(valid).tolist():
                row = rows[n]
                assert row is not None  # noqa: S101 - valid implies found
                value = row[self.width + start[n] : self.width + end[n]]
                try:
                    data[n] = value.decode() if text else value
                except UnicodeDecodeError:
                    self._refuse(rows)
            columns[column.name] = Values(data, valid)

    def _refuse(self, rows: Sequence[bytes | None]) -> NoReturn:
        """Raises the error that says which row is wrong, and how."""
        where = f"online rows of view {self.view.name}"
        remedy = "run `isthmus materialize` to write them again"
        for row in rows:
            if row is None:
                continue
            if len(row) < HEADER.size or row[0] != VERSION:
                raise DataError(
                    where,
                    f"a value of {len(row)} bytes, version {row[:1].hex()}",
                    expected=f"version {VERSION:02x}",
                    remedy=remedy,
                )
            if row[1:9] != self.view.prefix:
                raise ContractMismatch(
                    where, f"written under contract {row[1:9].hex()}", expected=self.view.prefix.hex(), remedy=remedy
                )
        raise DataError(where, "a row is damaged", expected=f"{self.width} bytes and what they announce", remedy=remedy)


def _mix(state: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    state = state + np.uint64(_SEED)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FACTORS[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return state ^ (state >> np.uint64(31))


def encode_row(view: ViewContract, event: int, known: int, values: Mapping[str, Any]) -> bytes:
    """One packed row, written as the layout reads: the oracle of `RowCodec`.

    Args:
        view: the view.
        event: event time in microseconds.
        known: known time in microseconds.
        values: feature name to Python value (None is null; UnixTimestamp in microseconds).
    """
    nulls, fixed, ends, tail = 0, b"", b"", b""
    for bit, column in enumerate(view.fields):
        nulls |= (values[column.name] is None) << bit
    for column in view.fields:
        value = values[column.name]
        if column.dtype.numpy is None:
            tail += b"" if value is None else value.encode() if isinstance(value, str) else value
            ends += struct.pack("<I", len(tail))
        else:
            code = {"|u1": "B", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}[column.dtype.numpy]
            fixed += struct.pack("<" + code, 0 if value is None else value)
    body = nulls.to_bytes((len(view.fields) + 7) // 8, "little") + fixed + ends
    state = _SEED
    words = [int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body), 8)]
    if any(column.dtype.numpy is None for column in view.fields):
        words.append(int.from_bytes(hashlib.blake2b(tail, digest_size=8).digest(), "little"))
    for word in words:
        state = ((state ^ word) + _SEED) & _WORD
        state = ((state ^ (state >> 30)) * _FACTORS[0]) & _WORD
        state = ((state ^ (state >> 27)) * _FACTORS[1]) & _WORD
        state ^= state >> 31
    return HEADER.pack(VERSION, view.prefix, event, known, state >> 1) + body + tail
