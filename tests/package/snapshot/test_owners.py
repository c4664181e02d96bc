"""Each owner's file: the shared rows and its own, as a filter of a screenful gives them, and nobody else's."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.errors import DataError
from isthmus.features.types import Bool, Bytes, DataType, Int32, Int64, String, UnixTimestamp
from isthmus.package.snapshot.file import Header, read_header, read_snapshot
from isthmus.package.snapshot.owners import decode_key_text, encode_key_text, encode_owner, open_owners, write_owners
from isthmus.package.snapshot.signature import signature_checker
from isthmus.package.snapshot.store import SnapshotFolder
from tests.features.support import FIRST, LAST, MOMENTS, VALUES, values_of
from tests.package.snapshot.support import Content, as_documented, made, put_owners, sealer, views
from tests.package.snapshot.test_file import ROWS, VIEWS

OWNER = Column("k", Int64)


@st.composite
def owned(draw: st.DrawFn) -> tuple[Sequence[ViewContract], Sequence[Content], Column]:
    """Rows of views, and a join key of one of them, of which several rows have the same value."""
    of = draw(views())
    owner = draw(st.sampled_from([key for view in of for key in view.keys]))
    pool = draw(st.lists(VALUES[owner.dtype.name], min_size=1, max_size=3))
    rows = []
    for view in of:
        columns = sorted(view.keys, key=lambda key: key.name)
        values = [st.sampled_from(pool) if key == owner else VALUES[key.dtype.name] for key in columns]
        fields = values_of({column.name: column.dtype for column in view.fields})
        rows.append(
            draw(st.dictionaries(st.tuples(*values), st.tuples(MOMENTS, MOMENTS, fields), min_size=1, max_size=5))
        )
    return of, rows, owner


def filtered(views: Sequence[ViewContract], rows: Sequence[Content], owner: str, value: Any) -> list[Content]:
    """The oracle: of views with the join key, the rows of this value; of the others, all."""
    found: list[Content] = []
    for view, content in zip(views, rows, strict=True):
        names = sorted(key.name for key in view.keys)
        found.append({
            key: row for key, row in content.items() if owner not in names or key[names.index(owner)] == value
        })  # fmt: skip
    return found


@given(owned())
def test_each_owner_has_the_rows_that_a_filter_gives(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Sequence[ViewContract], Sequence[Content], Column]
) -> None:
    of, rows, owner = drawn
    shelf = SnapshotFolder(tmp_path_factory.mktemp("shelf"))
    latest = put_owners(shelf, of, rows, owner)
    names = [sorted(key.name for key in view.keys) for view in of]
    values = {
        key[name.index(owner.name)]
        for name, content in zip(names, rows, strict=True)
        if owner.name in name
        for key in content
    }
    signed = signature_checker(sealer().public_key)
    with open_owners(shelf.owners(latest.snapshot)) as owners:
        assert len(owners) == len(values)
        for value in values:
            file = owners.file(encode_owner(value, owner))
            assert file is not None
            assert signed(file.data)
            text = json.dumps(value) if not isinstance(value, str) else value
            expected = filtered(of, rows, owner.name, value)
            assert file.data[:-64] == as_documented(of, expected, owner=(owner.name, text))
            assert read_snapshot(file.data, of).rows == made(of, expected).rows
        assert [key for key, _, _ in owners] == sorted(encode_owner(value, owner) for value in values)


def test_what_all_have_is_stored_once(tmp_path: Path) -> None:
    own = {(n,): (n, n, {"n": n, "x": n / 3}) for n in range(2000)}
    shared = {(f"place {n}",): (n, n, {"text": "wet" * 20, "n": n}) for n in range(300)}
    shelf = SnapshotFolder(tmp_path)
    latest = put_owners(shelf, VIEWS, [own, shared], OWNER)
    of_one = shelf.owner_snapshot(encode_owner(7, OWNER), latest)
    assert of_one is not None
    assert shelf.owners(latest.snapshot).stat().st_size < 2000 * 250 + 2 * len(of_one[1])
    assert 2000 * len(of_one[1]) > 50_000_000


@pytest.mark.parametrize(
    ("dtype", "texts", "others"),
    [
        (Int64, {"-9223372036854775808": -(2**63), "7": 7, "0": 0}, ("9223372036854775808", "7.0", "1e3", "true")),
        (Int32, {"2147483647": 2**31 - 1}, ("2147483648", "-2147483649", "x" * 5000, "9" * 5000)),
        (UnixTimestamp, {str(FIRST): FIRST, str(LAST): LAST}, ("1970-01-01", "1_0")),
        (Int64, {"-1": -1}, ("", "07", "+7", "-0", " 7", "7 ", "\u0667")),
        (Bool, {"true": True, "false": False}, ("0", "1", "True", "", "null")),
        (String, {"...": "...", "a/b %": "a/b %", "München 🛫": "München 🛫"}, ("\ud800", "", ".", "..")),
        (Bytes, {"AP8=": b"\0\xff"}, ("", "AP8", "AP9=AP8=", "AP8=\n", "!", "AP9=")),
    ],
)
def test_a_value_has_a_single_text(dtype: DataType, texts: dict[str, Any], others: Sequence[str]) -> None:
    for text, value in texts.items():
        assert (decode_key_text(text, dtype), encode_key_text(value)) == (value, text)
    for other in others:
        with pytest.raises(ValueError, match=r"(?s).*"):
            decode_key_text(other, dtype)


def test_a_file_for_all_has_no_word_of_owners() -> None:
    file = made(VIEWS, ROWS)
    assert b"owner" not in file.data
    assert read_header(file.data, "")[0].owner is None
    header = msgspec.structs.replace(file.header, owner=("k", "7"))
    assert msgspec.json.encode(header) == msgspec.json.encode(file.header)[:-1] + b',"owner":["k","7"]}'
    assert msgspec.json.decode(msgspec.json.encode(header), type=Header) == header


def test_torn_or_flipped_it_is_found_or_nothing(tmp_path: Path) -> None:
    """Whatever byte of the file it is: it cannot be read, or devices refuse the file, or it is as it was."""
    shelf = SnapshotFolder(tmp_path)
    latest = put_owners(shelf, VIEWS, ROWS, OWNER)
    file, key, signed = shelf.owners(latest.snapshot), encode_owner(7, OWNER), signature_checker(sealer().public_key)
    whole, good = file.read_bytes(), shelf.owner_snapshot(key, latest)
    assert good is not None
    refused = torn = 0
    flipped = [whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :] for place in range(0, len(whole), 11)]
    for harmed in (*flipped, *(whole[:size] for size in range(0, len(whole), 997))):
        file.write_bytes(harmed)
        try:
            found = shelf.owner_snapshot(key, latest)
        except DataError:
            torn += 1
            continue
        if found is None or not signed(found[1]):
            refused += 1
        else:
            assert found == good
    assert refused > 10
    assert torn > 10


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE owners SET signature = 1099511627776",
        "UPDATE owners SET signature = 'text'",
        "UPDATE owners SET rows = X'909090'",
        "UPDATE owners SET key = X'6907'",
        "UPDATE owners SET key = X'62'",
    ],
)
def test_a_damaged_row_of_owners_is_named(tmp_path: Path, damage: str) -> None:
    shelf = SnapshotFolder(tmp_path)
    latest = put_owners(shelf, VIEWS, ROWS, OWNER)
    with closing(sqlite3.connect(shelf.owners(latest.snapshot), isolation_level=None)) as db:
        # Of one owner alone: keys are distinct.
        db.execute(f"{damage} WHERE key = ?", [encode_owner(7, OWNER)])
    with open_owners(shelf.owners(latest.snapshot)) as owners, pytest.raises(DataError, match="is damaged"):
        list(owners)
    if "SET key" not in damage:
        with pytest.raises(DataError, match="is damaged"):
            shelf.owner_snapshot(encode_owner(7, OWNER), latest)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    latest = put_owners(SnapshotFolder(tmp_path), VIEWS, ROWS, OWNER)
    with open_owners(SnapshotFolder(tmp_path).owners(latest.snapshot)) as owners:
        generation = owners.generation
    # As in a folder that nobody may write to, or without room for another name.
    with pytest.raises(OSError, match=r"unable to open database file.*owners"):
        list(write_owners(tmp_path / "gone" / "owners", generation, [], sealer().sign))


def test_under_a_damaged_key_nobody_gets_the_rows_of_another(tmp_path: Path) -> None:
    shelf = SnapshotFolder(tmp_path)
    latest = put_owners(shelf, VIEWS, ROWS, OWNER)
    with closing(sqlite3.connect(shelf.owners(latest.snapshot), isolation_level=None)) as db:
        db.execute("UPDATE owners SET key = ? WHERE key = ?", [encode_owner(6, OWNER), encode_owner(7, OWNER)])
    with pytest.raises(DataError, match=r"is damaged .*of another k"):
        shelf.owner_snapshot(encode_owner(6, OWNER), latest)


def test_what_is_not_there_is_no_file_of_owners(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_owners(tmp_path / "none"):
        pass
    odd = tmp_path / "a #?%41 file.owners"
    latest = put_owners(SnapshotFolder(tmp_path), VIEWS, ROWS, OWNER)
    SnapshotFolder(tmp_path).owners(latest.snapshot).rename(odd)
    with open_owners(odd) as owners:
        assert len(owners) == 2
