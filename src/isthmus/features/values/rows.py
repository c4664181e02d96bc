"""The packed online row: a binary value per view and key. All numbers are little-endian.

version  1 byte
prefix   8 bytes   first bytes of the view's contract hash
event    8 bytes   event time, microseconds since 1970 UTC, signed
known    8 bytes   known time, in the same form
content  8 bytes   hash of the following sections, 63 bits, so that it fits a signed integer
nulls    1 bit per feature, 1 = null, the first feature in the lowest bit
fixed    fixed-width features in declared order, 0 for null
ends     4 bytes per variable-length feature: the offset of its end in the last section
bytes    variable-length features, concatenated; no bytes for null; see `variable` for their form
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

import numpy as np

from isthmus.features.contract.diff import view_differences
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import ContractMismatch, DamagedRowError, DataError
from isthmus.features.types import DataType
from isthmus.features.values.columns import Ints, Mask, Values, first_wrong_size
from isthmus.features.values.variable import pack, unpack

VERSION = 1
HEADER = struct.Struct("<B8sqqQ")
_SEED = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_PART = 1 << 13
"""Rows to hash at a time: they fit into a processor's cache."""


@dataclass(frozen=True, slots=True)
class Block:
    """Decoded rows of a view for n keys; times in microseconds. Keys without a row have times of 0 and nulls."""

    present: Mask
    event: Ints
    known: Ints
    columns: "Columns"


@dataclass(frozen=True, slots=True)
class Selection:
    """Features of one type that are read together: neighboring fixed-width features, or one variable-length feature.

    Attributes:
        part: index of the packed row's field that holds the features, or of a variable-length feature's end.
        picks: positions in that field; None for all.
        bytes: byte of each feature's null bit, shape (m,).
        masks: bit in that byte, shape (m, 1).
    """

    names: tuple[str, ...]
    dtype: DataType
    part: int
    picks: Any
    bytes: Any
    masks: Any


class Columns(Mapping[str, Values]):
    """The features of n rows. Each is decoded when it is read, which raises DataError if a text or array is damaged.

    `complete` is True if there are rows, none of them is missing, and no value is null. `packed` has the fixed parts.
    """

    def __init__(self, codec: "RowCodec", rows: Sequence[bytes | None], packed: np.ndarray[Any, Any]) -> None:
        self._codec, self._rows, self.packed = codec, rows, packed
        self._nulls = packed["nulls"]
        # Count bytes: `any` takes several times as long for a few rows.
        self.complete = self._nulls.tobytes().count(0) == self._nulls.size > 0

    def __getitem__(self, name: str) -> Values:
        data, null = self.read(self._codec.single[name])
        return Values(data[0], np.ones(len(self._rows), bool) if null is None else ~null[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._codec.single)

    def __len__(self) -> int:
        return len(self._codec.single)

    @property
    def filled(self) -> Mask:
        if self.complete:
            return np.full(len(self._rows), len(self) > 0)
        filled: Mask = np.any(~self._nulls & self._codec.every, axis=1)
        return filled

    def nulls(self, bits: bytes) -> int:
        if self.complete:
            return 0
        # For a few rows, a Python integer counts its bits in a tenth of NumPy's time.
        null = int.from_bytes(self._nulls.tobytes(), "little")
        return (null & int.from_bytes(bits * len(self._rows), "little")).bit_count()

    def only(self, present: Mask) -> "Columns":
        packed = self.packed.copy()
        packed[~present] = self._codec.nothing
        rows = [row if keep else None for row, keep in zip(self._rows, present.tolist(), strict=True)]
        return Columns(self._codec, rows, packed)

    def read(self, selection: Selection) -> tuple[np.ndarray[Any, Any], Mask | None]:
        """Decode m features of one type at once, which is faster than one by one.

        `selection` comes from `RowCodec.select`. Return their values and a mask of nulls, both of shape (m, n). The
        mask is None if `complete` is True.
        """
        null: Mask | None = None
        if not self.complete:
            null = (self._nulls.T[selection.bytes] & selection.masks).astype(bool)
        if selection.dtype.numpy is None:
            return self._variable(selection, np.zeros(len(self._rows), bool) if null is None else null[0])[None], null
        matrix = self.packed[f"f{selection.part}"].T
        return matrix if selection.picks is None else matrix[selection.picks], null

    def _variable(self, selection: Selection, null: Mask) -> np.ndarray[Any, Any]:
        ends = self.packed["ends"]
        stop = ends[:, selection.part]
        start = ends[:, selection.part - 1] if selection.part else np.zeros_like(stop)
        width = self._codec.width
        places = zip(self._rows, (start + width).tolist(), (stop + width).tolist(), null.tolist(), strict=True)
        packed = [None if skip or row is None else row[begin:end] for row, begin, end, skip in places]
        try:
            return unpack(packed, selection.dtype)
        except ValueError:
            self._codec.refuse(self._rows)


class RowCodec:
    """Encoder and decoder of one view's packed rows, as Redis stores them.

    `earlier` definitions of the view serve to say in errors what has changed since a row was written. `width` is the
    size of the fixed part in bytes, `every` the null bits of a row without values.
    """

    def __init__(self, view: ViewContract, earlier: Iterable[ViewContract] = ()) -> None:
        self.view = view
        self._earlier = {former.prefix: former for former in earlier}
        self._variable = [column for column in view.fields if column.dtype.numpy is None]
        fixed = [column for column in view.fields if column.dtype.numpy is not None]
        self._runs = [(dtype, [c.name for c in run]) for dtype, run in groupby(fixed, lambda column: column.dtype)]
        count = len(view.fields)
        self._dtype = np.dtype(
            [("version", "u1"), ("prefix", "<u8"), ("event", "<i8"), ("known", "<i8"), ("content", "<u8")]
            + [("nulls", "u1", ((count + 7) // 8,))]
            + [(f"f{i}", dtype.numpy, (len(names),)) for i, (dtype, names) in enumerate(self._runs)]
            + [("ends", "<u4", (len(self._variable),))]
        )
        self.width = self._dtype.itemsize
        self.every = np.packbits(np.ones(count, bool), bitorder="little")
        self.nothing = np.zeros((), self._dtype)
        self.nothing["nulls"] = self.every
        self._absent = self.nothing.tobytes()
        self._prefix = np.frombuffer(view.prefix, "<u8")[0]
        self._bit = {column.name: bit for bit, column in enumerate(view.fields)}
        self.single = {column.name: self.select([column.name])[0] for column in view.fields}

    def select(self, names: Sequence[str]) -> list[Selection]:
        requested, selections = dict.fromkeys(names), []
        for part, (dtype, run) in enumerate(self._runs):
            places = [place for place, name in enumerate(run) if name in requested]
            if places:
                picks: Any = None
                if len(places) < len(run):
                    adjacent = len(places) == places[-1] + 1 - places[0]
                    picks = slice(places[0], places[-1] + 1) if adjacent else np.array(places)
                selections.append(self._selection([run[place] for place in places], dtype, part, picks))
        for part, column in enumerate(self._variable):
            if column.name in requested:
                selections.append(self._selection([column.name], column.dtype, part, None))
        return selections

    def bits(self, names: Sequence[str]) -> bytes:
        bits = sum(1 << self._bit[name] for name in dict.fromkeys(names))
        return bits.to_bytes(len(self.every), "little")

    def _selection(self, names: Sequence[str], dtype: DataType, part: int, picks: Any) -> Selection:
        bits = np.array([self._bit[name] for name in names])
        masks = np.uint8(1) << (bits % 8).astype(np.uint8)
        return Selection(tuple(names), dtype, part, picks, bits // 8, masks[:, None])

    def encode(self, event: Ints, known: Ints, columns: Mapping[str, Values]) -> list[bytes]:
        packed, tails = self._pack(columns, len(event))
        packed["version"] = VERSION
        packed["prefix"] = self._prefix
        packed["event"] = event
        packed["known"] = known
        packed["content"] = self._hash(packed, tails)
        raw = packed.tobytes()
        rows = [raw[start : start + self.width] for start in range(0, len(raw), self.width)]
        return [row + tail for row, tail in zip(rows, tails, strict=True)] if tails else rows

    def content(self, columns: Mapping[str, Values], rows: int) -> Ints:
        packed, tails = self._pack(columns, rows)
        hashes = np.empty(rows, np.int64)
        for start in range(0, rows, _PART):
            part = slice(start, start + _PART)
            hashes[part] = self._hash(packed[part], tails[part])
        return hashes

    def intact(self, rows: Sequence[bytes | None], block: Block) -> Mask:
        packed = block.columns.packed
        tails = [b"" if row is None else row[self.width :] for row in rows] if self._variable else []
        intact: Mask = (self._hash(packed, tails) == packed["content"]) | ~block.present
        return intact

    def decode(self, rows: Sequence[bytes | None]) -> Block:
        """Unpack the rows of n keys from Redis. None stands for a key without a row. Content hashes are not checked.

        Raise ContractMismatch if a row was written under another definition of the view, and DataError if one is
        damaged.
        """
        block = self._decode(rows)
        return self.refuse(rows) if block is None else block

    def decode_lenient(self, rows: Sequence[bytes | None], *, check: bool) -> tuple[Block, Mask | None]:
        """Unpack the rows of n keys from Redis, but treat bad rows as missing, so that they do not fail a request.

        Bad rows are damaged, or were written under another definition of the view. With `check`, a row whose content
        does not match its hash is bad, too. Return the decoded rows and a mask of the bad rows, or None as mask if
        every row is good. Raise ContractMismatch if all rows were written under another definition.
        """
        block = self._decode(rows)
        if block is not None and not check:
            return block, None
        if block is None:
            damaged = np.array([row is not None and self._decode([row]) is None for row in rows])
            if np.count_nonzero(damaged) == len(rows) - rows.count(None) and self._foreign(rows):
                self.refuse(rows)
        else:
            damaged = ~self.intact(rows, block)
            if not damaged.any():
                return block, None
        whole = [None if bad else row for row, bad in zip(rows, damaged.tolist(), strict=True)]
        # Each remaining row can be decoded. Check the content now if damaged rows have prevented that above.
        block, altered = self.decode_lenient(whole, check=check and block is None)
        return block, damaged if altered is None else damaged | altered

    def _foreign(self, rows: Sequence[bytes | None]) -> bool:
        return all(
            row is None or (len(row) >= HEADER.size and row[0] == VERSION and row[1:9] != self.view.prefix)
            for row in rows
        )

    def _decode(self, rows: Sequence[bytes | None]) -> Block | None:
        missing = rows.count(None)
        filled: Any = rows
        if missing:
            filled = [self._absent if row is None else row for row in rows]
        fixed = b"".join([row[: self.width] for row in filled] if self._variable else filled)
        if len(fixed) != len(rows) * self.width:
            return None
        packed = np.frombuffer(fixed, self._dtype)
        present = (packed["version"] == VERSION) & (packed["prefix"] == self._prefix)
        if np.count_nonzero(present) != len(rows) - missing:
            return None
        if self._variable:
            # Check every end, even of a null: the next value starts there.
            ends = packed["ends"]
            sizes = np.fromiter(map(len, filled), np.int64, len(filled)) - self.width
            if (ends[:, 1:] < ends[:, :-1]).any() or (ends[:, -1] != sizes).any():
                return None
        return Block(present, packed["event"], packed["known"], Columns(self, rows, packed))

    def _pack(self, columns: Mapping[str, Values], rows: int) -> tuple[np.ndarray[Any, Any], list[bytes]]:
        packed = np.zeros(rows, self._dtype)
        null = np.empty((rows, len(self.view.fields)), bool)
        for name, bit in self._bit.items():
            np.logical_not(columns[name].valid, out=null[:, bit])
        packed["nulls"] = np.packbits(null, axis=1, bitorder="little")
        for i, (_, names) in enumerate(self._runs):
            matrix = packed[f"f{i}"]
            for place, name in enumerate(names):
                matrix[:, place] = columns[name].data
        if not self._variable:
            return packed, []
        parts = []
        ends = np.zeros(rows, np.int64)
        for i, column in enumerate(self._variable):
            where = f"feature {column.name} of view {self.view.name}"
            data = columns[column.name].data
            if column.size is not None and (wrong := first_wrong_size(data, column.size)):
                raise DataError(where, f"an array of {wrong[1]} elements in row {wrong[0]}",
                                expected=f"{column.size}, as declared")  # fmt: skip
            encoded = pack(data, column.dtype, where)
            ends += np.fromiter(map(len, encoded), np.int64, rows)
            packed["ends"][:, i] = ends
            parts.append(encoded)
        return packed, [b"".join(part) for part in zip(*parts, strict=True)]

    def _hash(self, packed: np.ndarray[Any, Any], tails: list[bytes]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Hash rows: fold their 64-bit words with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
        body = packed.view(np.uint8).reshape(len(packed), self.width)[:, HEADER.size :]
        padded = np.zeros((len(packed), -(-body.shape[1] // 8) * 8), np.uint8)
        padded[:, : body.shape[1]] = body
        words = padded.view("<u8").astype(np.uint64)
        state = np.full(len(packed), _SEED, np.uint64)
        for i in range(words.shape[1]):
            state = mix(state ^ words[:, i])
        if tails:
            digests = b"".join([hashlib.blake2b(tail, digest_size=8).digest() for tail in tails])
            state = mix(state ^ np.frombuffer(digests, "<u8"))
        return state >> np.uint64(1)

    def refuse(self, rows: Sequence[bytes | None]) -> NoReturn:
        where = f"online rows of view {self.view.name}"
        remedy = "run `isthmus materialize --full` to write them again"
        for row in rows:
            if row is None:
                continue
            if len(row) < HEADER.size or row[0] != VERSION:
                expected = f"version {VERSION:02x}, at least {HEADER.size} bytes"
                value = f"a value of {len(row)} bytes, version {row[:1].hex()}"
                raise DamagedRowError(where, value, expected=expected, remedy=remedy)
            if row[1:9] != self.view.prefix:
                known = self._earlier.get(row[1:9])
                since = f" ({view_differences(known, self.view)})" if known else ""
                origin = f"written under contract {row[1:9].hex()}{since}"
                raise ContractMismatch(where, origin, expected=self.view.prefix.hex(), remedy=remedy)
        expected = f"{self.width} bytes, then the features with the lengths stated there"
        raise DamagedRowError(where, "a row is damaged", expected=expected, remedy=remedy)


def mix(state: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Hash each 64-bit number with the finalizer of SplitMix64 (Steele, Lea and Flood 2014).

    Different numbers have different hashes. Stored rows have content hashes made with it, so its results must never
    change.
    """
    state = state + np.uint64(_SEED)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FACTORS[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return state ^ (state >> np.uint64(31))


def known_times(rows: Sequence[bytes]) -> Ints:
    return np.fromiter((HEADER.unpack_from(row)[3] for row in rows), np.int64, len(rows))
