"""The file of a snapshot: what it holds, what reads it, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.types import Float32, Int64, String
from isthmus.features.values.entitykey import decode_values
from isthmus.features.values.rows import RowCodec
from isthmus.package.snapshot.file import SnapshotFile, read_snapshot, to_online_row
from isthmus.package.snapshot.signature import SnapshotSigner, create_key, require_sealed
from tests.features.support import bits, bits_of, make_view
from tests.package.snapshot.support import Content, as_documented, contents, made, sealer, views

VIEWS = [
    make_view({"n": Int64, "x": Float32}, name="one"),
    make_view({"text": String, "n": Int64}, {"place": String}, name="two"),
]
ROWS: list[Content] = [
    {(7,): (10, 11, {"n": -1, "x": 0.5}), (-2,): (12, 13, {"n": None, "x": None})},
    {("JFK",): (20, 21, {"text": "wet", "n": 2}), ("",): (22, 23, {"text": "", "n": None})},
]


@given(st.data())
def test_it_is_written_as_documented_and_gives_back_every_bit(data: st.DataObject) -> None:
    of = data.draw(views())
    rows = [data.draw(contents(view)) for view in of]
    file = made(of, rows)
    assert file.body == as_documented(of, rows)
    read = read_snapshot(file.data, of)
    require_sealed(read, sealer().public_key)
    assert (read.header, read.digest) == (file.header, file.digest)
    for view, content in zip(of, rows, strict=True):
        found = {decode_values(key): row for key, row in read.rows[view.name].items()}
        assert found.keys() == content.keys()
        block = RowCodec(view).decode([to_online_row(row, view) for row in found.values()])
        expected = [content[key] for key in found]
        assert list(zip(block.event.tolist(), block.known.tolist(), strict=True)) == [row[:2] for row in expected]
        for column in view.fields:
            values = [bits(row[2][column.name], column.dtype) for row in expected]
            assert bits_of(block.columns[column.name], column.dtype) == values


def test_torn_at_any_byte_it_is_refused() -> None:
    file = made(VIEWS, ROWS)
    for size in range(len(file.data)):
        with pytest.raises(DataError):
            require_sealed(read_snapshot(file.data[:size], VIEWS), sealer().public_key)


def test_with_any_bit_flipped_it_is_refused() -> None:
    file = made(VIEWS, ROWS)
    for place in range(len(file.data)):
        data = bytearray(file.data)
        data[place] ^= 1 << place % 8
        with pytest.raises(DataError):
            require_sealed(read_snapshot(bytes(data), VIEWS), sealer().public_key)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_garbage_is_refused_as_such(noise: bytes, place: int) -> None:
    data = made(VIEWS, ROWS).data
    for harmed in (noise, data[:13] + noise, data[:place] + noise + data[place:], data[:place] + noise):
        if harmed != data:
            with pytest.raises(DataError):
                require_sealed(read_snapshot(harmed, VIEWS), sealer().public_key)


def _unsorted(file: SnapshotFile) -> bytes:
    head, first, second, *rest = file.parts
    return b"".join([head, second, first, *rest])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda file: b"PK\3\4" + file.data[4:], "begins with b'PK"),
        (lambda file: file.data[:8] + b"\2" + file.data[9:], "version 2; expected version 1"),
        (lambda file: file.data[:100], "has a header that cannot be read"),
        (lambda file: file.data[:-70], "ends within a row of two"),
        (lambda file: file.data + bytes(3), "3 bytes more than its header says"),
        (_unsorted, "in the wrong order"),
    ],
)
def test_what_is_wrong_is_said(change: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        read_snapshot(change(made(VIEWS, ROWS)), VIEWS)


def test_a_file_of_other_views_is_refused() -> None:
    other: Sequence[ViewContract] = [VIEWS[0], replace(VIEWS[1], name="three")]
    with pytest.raises(DataError, match="has views one, two; expected one, three"):
        read_snapshot(made(VIEWS, ROWS).data, other)


def test_the_signature_of_somebody_else_is_refused(tmp_path: Any) -> None:
    create_key(tmp_path / "other.pem")
    other = SnapshotSigner.of(tmp_path / "other.pem").seal(made(VIEWS, ROWS))
    with pytest.raises(DataError, match="not signed by the key"):
        require_sealed(other, sealer().public_key)


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Any) -> None:
    file = tmp_path / "keys" / "key.pem"
    create_key(file)
    before = file.read_bytes()
    create_key(file)
    assert file.read_bytes() == before
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["key.pem"]


def test_a_key_that_browsers_cannot_use_is_refused(tmp_path: Any) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    file = tmp_path / "key.pem"
    key = generate_private_key(SECP384R1())
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigurationError, match="has curve secp384r1; expected secp256r1"):
        SnapshotSigner.of(file)
