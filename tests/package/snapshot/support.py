"""What the tests of snapshots share: strategies, a key, and the bytes of a file as its documentation reads."""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from hypothesis import strategies as st

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.types import Bool, DataType, Int32, Int64, String
from isthmus.features.values.entitykey import encode_keys
from isthmus.features.values.rows import RowCodec
from isthmus.package.snapshot.file import Header, SnapshotFile, to_snapshot_row
from isthmus.package.snapshot.owners import split_by_owner
from isthmus.package.snapshot.signature import SnapshotSigner, create_key
from isthmus.package.snapshot.store import Latest, SnapshotFolder
from tests.features.support import MOMENTS, VALUES, columns_of, encode_row, make_view, schemas, values_of

Key = tuple[Any, ...]
Content = Mapping[Key, tuple[int, int, Mapping[str, Any]]]
"""Keys, in the alphabetical order of their join keys, to event time, known time and features."""

KEYS: tuple[dict[str, DataType], ...] = ({"k": Int64}, {"place": String}, {"b": String, "a": Int32, "c": Bool})
TAGS = {"Bool": b"b", "Int32": b"i", "Int64": b"i", "String": b"s"}


KEY_FILE = "SNAPSHOT_TEST_KEY"
"""The variable with the file of the key, for processes that sign with the key of another one."""


@cache
def sealer() -> SnapshotSigner:
    file = Path(os.environ.setdefault(KEY_FILE, f"{mkdtemp()}/key.pem"))
    create_key(file)
    return SnapshotSigner.of(file)


@st.composite
def views(draw: st.DrawFn) -> list[ViewContract]:
    count = draw(st.integers(1, 3))
    return [make_view(draw(schemas(0, 6)), draw(st.sampled_from(KEYS)), name=f"view{n}") for n in range(count)]


def contents(view: ViewContract) -> st.SearchStrategy[Content]:
    keys = sorted(view.keys, key=lambda key: key.name)
    fields = {column.name: column.dtype for column in view.fields}
    return st.dictionaries(
        st.tuples(*(VALUES[key.dtype.name] for key in keys)),
        st.tuples(MOMENTS, MOMENTS, values_of(fields)),
        max_size=5,
    )


def made(views: Sequence[ViewContract], rows: Sequence[Content], number: int = 1) -> SnapshotFile:
    """A snapshot of rows, signed."""
    files = {}
    for view, content in zip(views, rows, strict=True):
        names = sorted(key.name for key in view.keys)
        keys = {name: [key[place] for key in content] for place, name in enumerate(names)}
        event, known = (np.array([row[n] for row in content.values()], np.int64) for n in (0, 1))
        packed = RowCodec(view).encode(event, known, columns_of(view, [row[2] for row in content.values()]))
        times = zip(packed, event.tolist(), known.tolist(), strict=True)
        files[view.name] = dict(
            zip(encode_keys(view.keys, keys), (to_snapshot_row(*row) for row in times), strict=True)
        )
    counts = tuple((view.name, len(content)) for view, content in zip(views, rows, strict=True))
    return sealer().seal(SnapshotFile(Header("prod", "service", "5" * 64, "c" * 64, 1_700, number, counts), files))


def put_owners(
    shelf: SnapshotFolder,
    views: Sequence[ViewContract],
    rows: Sequence[Content],
    owner: Column,
    number: int = 1,
    keep: int = 3,
) -> Latest:
    """Makes a snapshot in which each owner has a file the newest of a shelf."""
    file = made(views, rows, number)
    generation, own = split_by_owner(file.header, owner, views, file.rows)
    with shelf.locked():
        return shelf.add_owners(generation, own, sealer().sign, keep)


def as_documented(
    views: Sequence[ViewContract], rows: Sequence[Content], number: int = 1, owner: tuple[str, str] | None = None
) -> bytes:
    """The oracle: what is signed, byte by byte as the documentation reads."""
    header = {
        "project": "prod", "service": "service", "hash": "5" * 64, "contract": "c" * 64, "made": 1_700,
        "number": number, "views": [[view.name, len(content)] for view, content in zip(views, rows, strict=True)],
    }  # fmt: skip
    header |= {"owner": owner} if owner else {}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    found = b"isthsnap" + bytes([1]) + struct.pack("<I", len(text)) + text
    for view, content in zip(views, rows, strict=True):
        types = [key.dtype.name for key in sorted(view.keys, key=lambda key: key.name)]
        lines = []
        for key, (event, known, values) in content.items():
            line = b""
            for kind, value in zip(types, key, strict=True):
                if kind == "String":
                    line += TAGS[kind] + struct.pack("<I", len(value.encode())) + value.encode()
                else:
                    line += TAGS[kind] + struct.pack("<?" if kind == "Bool" else "<q", value)
            # The packed row begins with a version, a contract, two times and a content hash: 33 bytes.
            lines.append((line, struct.pack("<qq", event, known) + encode_row(view, event, known, values)[33:]))
        found += b"".join(key + row for key, row in sorted(lines))
    return found
