"""The rows of each owner beside those that all have: a file of SQLite, of which the file of each owner is made.

generation  a single row: what the files of all owners share, see `Generation`, as MessagePack
owners      for each owner, by the key of its value as in a snapshot:
  rows        of each view with the owner's join key, the rows, each with its key, as MessagePack
  signature   of the owner's file, which holds the shared rows, too

A million owners are a file, and the shared rows are in it once. Each owner's file is hashed and signed whole: what
differs, its header, comes first.
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
from isthmus.package.snapshot.file import Header, Rows, head

_TABLES = (
    "CREATE TABLE generation (content BLOB NOT NULL)",
    "CREATE TABLE owners (key BLOB PRIMARY KEY, rows BLOB NOT NULL, signature BLOB NOT NULL) WITHOUT ROWID",
)
_TRUTHS = {"true": True, "false": False}
_UNNAMED = ("", ".", "..")
"""Texts that a path loses on its way: what is asked for is another one's, or everybody's."""
_BITS = {"Int32": 31, "Int64": 63, "UnixTimestamp": 63}

Owner = tuple[str, Annotated[str, msgspec.Meta(pattern=rf"^(String|Bytes|Bool|{'|'.join(_BITS)})\Z")]]
"""Name and type of a join key."""

Lines = Sequence[bytes]
"""The rows of a view, each with its key before it, ascending."""

_LINES = msgspec.msgpack.Decoder(tuple[tuple[bytes, ...], ...])


def text_of(value: KeyValue) -> str:
    """A value of a join key as it stands in headers and paths: as in JSON, without quotes; bytes in Base64."""
    match value:
        case str():
            return value
        case bytes():
            return b64encode(value).decode()
        case bool():
            return "true" if value else "false"
    return str(value)


def value_of(text: str, dtype: DataType) -> KeyValue:
    """The value with this text.

    Raises:
        ValueError: there is none of this type, or no path can name it.
    """
    if text in _UNNAMED:
        raise ValueError(text)
    value: KeyValue
    match dtype.name:
        case "String":
            text.encode()  # half of a surrogate pair has no form in UTF-8
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
    if text_of(value) != text:
        # Nobody has two names.
        raise ValueError(text)
    return value


def owner_column(owner: tuple[str, str]) -> Column:
    """The join key with this name and type."""
    name, dtype = owner
    return Column(name, TYPES[dtype])


def key_of(value: KeyValue, owner: Column) -> bytes:
    """The key of an owner's value."""
    return encode_keys([owner], {owner.name: [value]})[0]


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the files of all owners share.

    Attributes:
        header: with the rows of all owners, and without an owner.
        owner: name and type of the join key.
        shared: the rows of each view in the header's order; None where each owner has rows of its own.
    """

    header: Header
    owner: Owner
    shared: tuple[tuple[bytes, ...] | None, ...]

    @property
    def column(self) -> Column:
        """The join key."""
        return owner_column(self.owner)

    def file(self, key: bytes, own: Sequence[Lines]) -> "OwnFile":
        """The file of an owner, yet to be signed, with its rows of the views that have the join key."""
        (value,) = decode_values(key)
        rest = iter(own)
        lines = [next(rest) if shared is None else shared for shared in self.shared]
        views = tuple((name, len(rows)) for (name, _), rows in zip(self.header.views, lines, strict=True))
        header = msgspec.structs.replace(self.header, views=views, owner=(self.owner[0], text_of(value)))
        return OwnFile([head(header), *(line for rows in lines for line in rows)])


@dataclass(frozen=True)
class OwnFile:
    """The file of an owner in pieces: its header, each row with its key, and its signature, if it has one."""

    parts: list[bytes]

    @cached_property
    def data(self) -> bytes:
        """The bytes of the file."""
        return b"".join(self.parts)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, in hex."""
        return sha256(self.data).hexdigest()

    def signed(self, signature: bytes) -> "OwnFile":
        """The same with a signature."""
        return OwnFile([*self.parts, signature])


def generation_of(
    header: Header, owner: Column, views: Sequence[ViewContract], rows: Mapping[str, Rows]
) -> tuple[Generation, dict[bytes, list[Lines]]]:
    """What all owners share of these rows of views, and what each has of its own, by the keys of owners, ascending."""
    own = [view for view in views if owner in view.keys]
    grouped: dict[bytes, list[list[bytes]]] = {}
    for place, view in enumerate(own):
        for key, row in sorted(rows[view.name].items()):
            lines = grouped.setdefault(key_part(view.keys, owner.name, key), [[] for _ in own])
            lines[place].append(key + row)
    shared = tuple(
        None if view in own else tuple(key + row for key, row in sorted(rows[view.name].items())) for view in views
    )
    generation = Generation(header, (owner.name, owner.dtype.name), shared)
    return generation, {key: [*lines] for key, lines in sorted(grouped.items())}


def write_owners(
    file: Path, generation: Generation, own: Iterable[tuple[bytes, Sequence[Lines]]], sign: Callable[[bytes], bytes]
) -> Iterator[tuple[bytes, OwnFile]]:
    """Writes a new file of owners, whose keys ascend, and signs the file of each, which it yields.

    It is complete when the iterator ends. A process that is killed leaves a part of it.
    """
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            # Nobody reads the file before it is complete, and nobody one that is not.
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
    """A file of owners that is read; see `open_owners`."""

    def __init__(self, db: sqlite3.Connection, where: str) -> None:
        self._db, self._where = db, where

    @cached_property
    def generation(self) -> Generation:
        """What the files of all owners share."""
        with self._reading():
            ((content,),) = self._db.execute("SELECT content FROM generation")
            return msgspec.msgpack.decode(content, type=Generation)

    def __len__(self) -> int:
        with self._reading():
            ((count,),) = self._db.execute("SELECT count(*) FROM owners")
            return int(count)

    def file(self, key: bytes) -> OwnFile | None:
        """The file of an owner; None if it has no rows."""
        with self._reading():
            found = self._db.execute("SELECT rows, signature FROM owners WHERE key = ?", [key]).fetchone()
            if found is None:
                return None
            rows = _LINES.decode(found[0])
            # No device would take it, but the rows would be with somebody else.
            if not all(key in line for part in rows for line in part):
                raise ValueError(f"rows of another {self.generation.column.name}")
            return self.generation.file(key, rows).signed(_blob(found[1]))

    def __iter__(self) -> Iterator[tuple[bytes, Sequence[Lines], OwnFile]]:
        """Every owner's key, its own rows, and its file, by ascending keys."""
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
            raise DataError(self._where, f"is damaged ({error})", remedy="run `isthmus snapshot`") from error


def _blob(value: object) -> bytes:
    """The bytes of a column, which a damaged file may have as a number: `bytes` would take it for a size."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} in place of bytes")
    return value


@contextmanager
def open_owners(file: Path) -> Iterator[Owners]:
    """A file of owners, which nobody writes to any more.

    Raises:
        FileNotFoundError: there is none.
        DataError: it is damaged; also while it is read.
    """
    try:
        db = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(file)) from error
        raise DataError(str(file), f"cannot be read ({error})", remedy="run `isthmus snapshot`") from error
    with closing(db):
        yield Owners(db, str(file))
