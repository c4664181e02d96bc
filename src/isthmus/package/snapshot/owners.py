"""A SQLite file with the rows of each owner, from which the snapshot of each owner is assembled.

    generation  a single row: the part that all owners share, see `SharedSnapshot`, as MessagePack
    owners      a row per owner; its key is the value of the owner's join key, encoded as in a snapshot:
      rows        the owner's rows of each view that has this join key, each after its encoded key, as MessagePack
      signature   of the owner's snapshot, which includes the shared rows

Each owner's snapshot is hashed and signed as a whole, since its header, which differs, comes first.
"""

import errno
import sqlite3
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.types import TYPES, DataType
from isthmus.features.values.entitykey import KeyValue, decode_values, encode_keys, key_part
from isthmus.package.snapshot.file import Header, Rows, encode_header

_TABLES = (
    "CREATE TABLE generation (content BLOB NOT NULL)",
    "CREATE TABLE owners (key BLOB PRIMARY KEY, rows BLOB NOT NULL, signature BLOB NOT NULL) WITHOUT ROWID",
)
_TRUTHS = {"true": True, "false": False}
_UNNAMED = ("", ".", "..")
"""Texts that change in a URL path, and so would name another owner or the whole service."""
_BITS = {"Int32": 31, "Int64": 63, "UnixTimestamp": 63}

Owner = tuple[str, Annotated[str, msgspec.Meta(pattern=rf"^(String|Bytes|Bool|{'|'.join(_BITS)})\Z")]]
"""Name and type of a join key."""

Lines = Sequence[bytes]
"""The rows of a view, each after its key, ascending."""

_LINES = msgspec.msgpack.Decoder(tuple[tuple[bytes, ...], ...])


def encode_key_text(value: KeyValue) -> str:
    """Encode a join key value as text for a URL or header: a string as is, bytes in Base64, others as in JSON."""
    match value:
        case str():
            return value
        case bytes():
            return b64encode(value).decode()
        case bool():
            return "true" if value else "false"
    return str(value)


def decode_key_text(text: str, dtype: DataType) -> KeyValue:
    """Decode a join key value from its text in a URL, the inverse of `encode_key_text`.

    Raises ValueError if the text is not the exact text of a value of type `dtype`, or is empty, "." or "..", which
    cannot be a part of a URL's path.
    """
    if text in _UNNAMED:
        raise ValueError(text)
    value: KeyValue
    match dtype.name:
        case "String":
            text.encode()  # raises for half of a surrogate pair
            return text
        case "Bytes":
            value = b64decode(text, validate=True)
        case "Bool":
            if text not in _TRUTHS:
                raise ValueError(text)
            value = _TRUTHS[text]
        case name:
            value = int(text)
            if not -(1 << _BITS[name]) <= value < 1 << _BITS[name]:
                raise ValueError(text)
    if encode_key_text(value) != text:
        # Each value has exactly one text.
        raise ValueError(text)
    return value


def owner_column(owner: tuple[str, str]) -> Column:
    name, dtype = owner
    return Column(name, TYPES[dtype])


def encode_owner(value: KeyValue, owner: Column) -> bytes:
    return encode_keys([owner], {owner.name: [value]})[0]


class SharedSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the snapshots that all owners share. `owner` is the name and type of the join key.

    `header` has no owner, and the numbers of rows of all owners. `shared` has the rows of each view in the header's
    order; None for a view with rows per owner.
    """

    header: Header
    owner: Owner
    shared: tuple[tuple[bytes, ...] | None, ...]

    @property
    def column(self) -> Column:
        return owner_column(self.owner)

    def file(self, key: bytes, own: Sequence[Lines]) -> "OwnFile":
        (value,) = decode_values(key)
        rest = iter(own)
        lines = [next(rest) if shared is None else shared for shared in self.shared]
        views = tuple((name, len(rows)) for (name, _), rows in zip(self.header.views, lines, strict=True))
        header = msgspec.structs.replace(self.header, views=views, owner=(self.owner[0], encode_key_text(value)))
        return OwnFile([encode_header(header), *(line for rows in lines for line in rows)])


@dataclass(frozen=True)
class OwnFile:
    """The snapshot of an owner in pieces: its header, each row with its key, and its signature, if it has one."""

    parts: list[bytes]

    @cached_property
    def data(self) -> bytes:
        return b"".join(self.parts)

    @cached_property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()

    def signed(self, signature: bytes) -> "OwnFile":
        return OwnFile([*self.parts, signature])


def split_by_owner(
    header: Header, owner: Column, views: Sequence[ViewContract], rows: Mapping[str, Rows]
) -> tuple[SharedSnapshot, dict[bytes, list[Lines]]]:
    """Split the rows of a snapshot so that each owner's device gets its own rows and those that all owners share.

    `owner` is the join key that identifies an owner, such as a user id. A view without this key is shared. `rows` has
    the rows of each view by key. Returns the shared part, and a dict from each owner's encoded key to the owner's rows,
    one list per view that is not shared. The keys of the dict are in ascending order.
    """
    own = [view for view in views if owner in view.keys]
    grouped: dict[bytes, list[list[bytes]]] = {}
    for place, view in enumerate(own):
        for key, row in sorted(rows[view.name].items()):
            lines = grouped.setdefault(key_part(view.keys, owner.name, key), [[] for _ in own])
            lines[place].append(key + row)
    shared = tuple(
        None if view in own else tuple(key + row for key, row in sorted(rows[view.name].items())) for view in views
    )
    generation = SharedSnapshot(header, (owner.name, owner.dtype.name), shared)
    return generation, {key: [*lines] for key, lines in sorted(grouped.items())}


def write_owners(
    file: Path, generation: SharedSnapshot, own: Iterable[tuple[bytes, Sequence[Lines]]], sign: Callable[[bytes], bytes]
) -> Iterator[tuple[bytes, OwnFile]]:
    """Write the snapshots of all owners to a new SQLite file; yield each owner's encoded key and signed snapshot.

    An owner is a value of a join key, such as a user id, whose devices get only its own rows and shared rows.
    `generation` is the part that all owners share. `own` has pairs of an owner's encoded key and the owner's rows, in
    ascending order of keys. `sign` returns the signature for the bytes of a snapshot. Nothing is written before the
    result is iterated, and the file is complete only after the last item. A killed process leaves a partial file.
    Raises OSError if `file` already has content or cannot be written.
    """
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            # No process reads the file before it is complete, so it needs no journal.
            for line in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", *_TABLES, "BEGIN"):
                db.execute(line)
            db.execute("INSERT INTO generation VALUES (?)", [msgspec.msgpack.encode(generation)])
            for key, rows in own:
                made = generation.file(key, rows)
                signed = made.signed(sign(made.data))
                db.execute("INSERT INTO owners VALUES (?, ?, ?)", [key, msgspec.msgpack.encode(rows), signed.parts[-1]])
                yield key, signed
            db.execute("COMMIT")
    except sqlite3.Error as error:
        raise OSError(errno.ENOSPC if "full" in str(error) else errno.EIO, str(error), str(file)) from error


class Owners:
    """An open file of owners, see `open_owners`. Its length is the number of owners."""

    def __init__(self, db: sqlite3.Connection, where: str) -> None:
        self._db, self._where = db, where

    @cached_property
    def generation(self) -> SharedSnapshot:
        with self._reading():
            ((content,),) = self._db.execute("SELECT content FROM generation")
            return msgspec.msgpack.decode(content, type=SharedSnapshot)

    def __len__(self) -> int:
        with self._reading():
            ((count,),) = self._db.execute("SELECT count(*) FROM owners")
            return int(count)

    def file(self, key: bytes) -> OwnFile | None:
        with self._reading():
            record = self._db.execute("SELECT rows, signature FROM owners WHERE key = ?", [key]).fetchone()
            if record is None:
                return None
            rows = _LINES.decode(record[0])
            # A device would refuse another owner's rows, but they must not be sent at all.
            if not all(key in line for part in rows for line in part):
                raise ValueError(f"rows of another {self.generation.column.name}")
            return self.generation.file(key, rows).signed(_blob(record[1]))

    def __iter__(self) -> Iterator[tuple[bytes, Sequence[Lines], OwnFile]]:
        with self._reading():
            for key, content, signature in self._db.execute("SELECT key, rows, signature FROM owners ORDER BY key"):
                rows = _LINES.decode(content)
                yield key, rows, self.generation.file(key, rows).signed(_blob(signature))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, struct.error, msgspec.MsgspecError, TypeError, ValueError, StopIteration,
                LookupError) as error:  # fmt: skip
            raise DataError(self._where, f"is damaged ({error})", remedy="run `isthmus features snapshot`") from error


def _blob(value: object) -> bytes:
    """Return `value` if it is bytes. A damaged file may have a number, which `bytes` would take as a size."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} instead of bytes")
    return value


@contextmanager
def open_owners(file: Path) -> Iterator[Owners]:
    try:
        db = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "does not exist", str(file)) from error
        raise DataError(str(file), f"cannot be read ({error})", remedy="run `isthmus features snapshot`") from error
    with closing(db):
        yield Owners(db, str(file))
