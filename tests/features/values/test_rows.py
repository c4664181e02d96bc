import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import Column
from isthmus.features.errors import ContractMismatch, DataError
from isthmus.features.types import Array, Bool, Bytes, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.columns import Values
from isthmus.features.values.rows import HEADER, RowCodec
from tests.features.support import ALL, MOMENTS, bits, bits_of, columns_of, encode_row, make_view, schemas, values_of

MIXED = make_view({"a": String, "b": Int32, "c": Bytes, "d": Float64, "e": String})
ARRAYS = make_view({"a": Array(Float32), "b": Int32, "c": Array(String), "d": Array(Bytes)})
FIXED = make_view({"a": Int32, "b": Float64, "c": Bool})


def _encode(view: Any, rows: list[tuple[int, int, dict[str, Any]]]) -> list[bytes]:
    event, known = (np.array([row[n] for row in rows], np.int64) for n in (0, 1))
    return RowCodec(view).encode(event, known, columns_of(view, [row[2] for row in rows]))


@st.composite
def _batches(draw: st.DrawFn, largest: int = 12) -> tuple[Any, list[tuple[int, int, dict[str, Any]]]]:
    fields = draw(schemas(0, largest))
    rows = draw(st.lists(st.tuples(MOMENTS, MOMENTS, values_of(fields)), max_size=5))
    return make_view(fields), rows


def test_an_array_of_another_size_than_declared_is_refused() -> None:
    fields = (Column("x", Array(Int32), size=2), Column("words", Array(String), size=1))
    view = replace(ARRAYS, fields=fields)
    rows: list[Any] = [(0, 0, {"x": [1, 2], "words": ["a"]}), (0, 0, {"x": None, "words": None})]
    assert RowCodec(view).decode([*_encode(view, rows)]).columns["words"].tolist(Array(String)) == [["a"], None]
    for name, wrong, found in (("x", [1], 1), ("x", [], 0), ("words", ["a", "b"], 2)):
        row = (0, 0, {"x": [1, 2], "words": ["a"], name: wrong})
        with pytest.raises(DataError, match=f"feature {name} of .*: an array of {found} elements in row 2; exp"):
            _encode(view, [*rows, row])


@given(_batches())
def test_codec_writes_what_the_layout_says(batch: Any) -> None:
    view, rows = batch
    assert _encode(view, rows) == [encode_row(view, *row) for row in rows]


@given(_batches(), st.data())
def test_decode_gives_back_every_bit_with_missing_rows_between(batch: Any, data: st.DataObject) -> None:
    view, rows = batch
    packed: list[bytes | None] = list(_encode(view, rows))
    stored: list[Any] = list(rows)
    for position in sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)), reverse=True):
        packed.insert(position, None)
        stored.insert(position, None)
    block = RowCodec(view).decode(packed)
    assert block.present.tolist() == [row is not None for row in stored]
    assert block.event.tolist() == [row[0] if row else 0 for row in stored]
    assert block.known.tolist() == [row[1] if row else 0 for row in stored]
    assert set(block.columns) == {field.name for field in view.fields}
    for field in view.fields:
        expected = [bits(row[2][field.name], field.dtype) if row else None for row in stored]
        assert bits_of(block.columns[field.name], field.dtype) == expected
    filled = [row is not None and any(value is not None for value in row[2].values()) for row in stored]
    assert block.columns.filled.tolist() == filled
    chosen = data.draw(st.lists(st.sampled_from(sorted(block.columns)), unique=True) if block.columns else st.just([]))
    nulls = sum(row is None or row[2][name] is None for row in stored for name in chosen)
    assert block.columns.nulls(RowCodec(view).bits(chosen)) == nulls


@pytest.mark.parametrize("check", [False, True])
def test_the_content_of_rows_beside_one_of_another_form_is_looked_at(*, check: bool) -> None:
    fine, altered = _encode(FIXED, [(1, 2, {"a": 3, "b": 1.5, "c": True})] * 2)
    altered = altered[:-1] + bytes([altered[-1] ^ 1])
    block, damaged = RowCodec(FIXED).decode_lenient([fine[:10], altered, None, fine], check=check)
    assert damaged is not None
    assert damaged.tolist() == [True, check, False, False]
    assert block.present.tolist() == [False, not check, False, True]


@given(_batches(), st.data())
def test_any_choice_of_columns_reads_what_each_of_them_is(batch: Any, data: st.DataObject) -> None:
    view, rows = batch
    codec = RowCodec(view)
    packed = _encode(view, rows)
    names = [field.name for field in view.fields]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True) if names else st.just([]))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), bool)
    columns = codec.decode(packed).columns.only(present)
    selections = codec.select(chosen)
    assert sorted(name for selection in selections for name in selection.names) == sorted(chosen)
    types = {field.name: field.dtype for field in view.fields}
    for selection in selections:
        matrix, null = columns.read(selection)
        for n, name in enumerate(selection.names):
            values = Values(matrix[n], np.ones(len(rows), bool) if null is None else ~null[n])
            expected = [
                bits(row[2][name], types[name]) if kept else None for row, kept in zip(rows, present, strict=True)
            ]
            assert bits_of(values, types[name]) == expected
            assert selection.dtype == types[name]
            hidden = values.data[~values.valid].tolist()
            assert hidden == [None if types[name].numpy is None else 0] * len(hidden)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 63, 64, 65, 70])
def test_null_bitmap_of_any_width(count: int) -> None:
    view = make_view({f"f{n}": Int32 for n in range(count)})
    rows = [{f"f{n}": None if n == hole else n for n in range(count)} for hole in range(-1, count)]
    packed = _encode(view, [(1, 2, row) for row in rows])
    assert packed == [encode_row(view, 1, 2, row) for row in rows]
    assert {len(row) for row in packed} == {HEADER.size + (count + 7) // 8 + 4 * count}
    block = RowCodec(view).decode(packed)
    for n in range(count):
        assert block.columns[f"f{n}"].tolist(Int32) == [row[f"f{n}"] for row in rows]


def test_signalling_nan_keeps_its_bits() -> None:
    view = make_view({"a": Float32})
    payload = np.array([0x7F800001, 0xFFC12345, 0x80000000], "<u4").view("<f4")
    columns = {"a": columns_of(view, [{"a": 0.0}] * 3)["a"]}
    columns["a"].data[:] = payload
    packed = RowCodec(view).encode(np.zeros(3, np.int64), np.zeros(3, np.int64), columns)
    assert RowCodec(view).decode(packed).columns["a"].data.tobytes() == payload.tobytes()


def test_no_rows() -> None:
    for view in (MIXED, FIXED):
        codec = RowCodec(view)
        assert _encode(view, []) == []
        assert codec.decode([]).present.tolist() == []
        assert codec.decode([None, None]).present.tolist() == [False, False]


def test_text_without_utf8_is_a_data_error() -> None:
    row = {"a": "ok", "b": 1, "c": b"", "d": 1.0, "e": "\ud800"}
    with pytest.raises(DataError, match=r"e.*UTF-8"):
        _encode(MIXED, [(0, 0, row)])


ROW = (-5, 7, {"a": "Zürich", "b": 3, "c": None, "d": -0.0, "e": "x"})
SMALL = (-5, 7, {"a": 3, "b": 2.5, "c": None})


@pytest.mark.parametrize(("view", "row"), [(MIXED, ROW), (FIXED, SMALL)])
def test_every_truncation_is_a_data_error(view: Any, row: Any) -> None:
    whole = _encode(view, [row])[0]
    for size in range(len(whole)):
        for batch in ([whole[:size]], [None, whole[:size], whole], [whole[:size], whole]):
            with pytest.raises(DataError, match=f"rows of view {view.name}: .*isthmus materialize"):
                RowCodec(view).decode(batch)


@pytest.mark.parametrize(("view", "row"), [(MIXED, ROW), (FIXED, SMALL)])
def test_bytes_too_many_are_a_data_error(view: Any, row: Any) -> None:
    whole = _encode(view, [row])[0]
    with pytest.raises(DataError):
        RowCodec(view).decode([whole + b"\0"])
    # One too short, one too long by as much: the sum of their sizes is right.
    for shift in (1, 8, 9):
        with pytest.raises((DataError, ContractMismatch)):
            RowCodec(view).decode([whole[:-shift], whole + bytes(shift)])


def test_shifted_rows_are_found_under_every_first_byte_of_the_prefix() -> None:
    views = [make_view({"a": Int32}, code=str(n)) for n in range(2000)]
    view = next(view for view in views if view.prefix[0] == 0)
    whole = _encode(view, [(1, 2, {"a": 3})])[0]
    with pytest.raises(DataError):
        RowCodec(view).decode([whole[:-1], whole + b"\0"])


@pytest.mark.parametrize("version", [0, 2, 255])
@pytest.mark.parametrize(("view", "row"), [(MIXED, ROW), (FIXED, SMALL)])
def test_another_version_is_a_data_error(view: Any, row: Any, version: int) -> None:
    whole = _encode(view, [row])[0]
    with pytest.raises(DataError, match=f"version {version:02x}; expected version 01"):
        RowCodec(view).decode([whole, bytes([version]) + whole[1:]])


def test_another_contract_is_named() -> None:
    other = make_view({"a": Int32, "b": Float64, "c": Bool}, code="2")
    row = _encode(FIXED, [SMALL])[0]
    with pytest.raises(ContractMismatch) as caught:
        RowCodec(other).decode([None, row])
    assert FIXED.prefix.hex() in str(caught.value)
    assert other.prefix.hex() in str(caught.value)


@pytest.mark.parametrize("ends", [(99, 99, 99), (0, 0, 99), (9, 0, 8), (7, 99, 8), (7, 7, 7), (0xFFFFFFFF, 7, 8)])
def test_ends_pointing_outside_are_a_data_error(ends: tuple[int, int, int]) -> None:
    whole = bytearray(_encode(MIXED, [ROW])[0])
    width = RowCodec(MIXED).width
    assert struct.unpack_from("<3I", whole, width - 12) == (7, 7, 8)
    struct.pack_into("<3I", whole, width - 12, *ends)
    with pytest.raises(DataError):
        RowCodec(MIXED).decode([bytes(whole)])


def test_end_of_a_null_pointing_outside_is_a_data_error() -> None:
    view = make_view({"a": String, "b": String})
    whole = bytearray(_encode(view, [(0, 0, {"a": None, "b": ""})])[0])
    struct.pack_into("<2I", whole, RowCodec(view).width - 8, 50, 50)
    with pytest.raises(DataError):
        RowCodec(view).decode([bytes(whole)])


def test_broken_utf8_is_a_data_error_to_whoever_reads_it() -> None:
    whole = bytearray(_encode(MIXED, [ROW])[0])
    whole[-1] = 0xFF
    columns = RowCodec(MIXED).decode([bytes(whole)]).columns
    assert columns["a"].tolist(String) == ["Zürich"]
    with pytest.raises(DataError, match="traffic"):
        columns["e"]


@pytest.mark.parametrize(("dtype", "value", "cut"), [
    (Array(Int32), [1], 1), (Array(Int32), [1], 3), (Array(String), ["a", "bcd"], 1), (Array(String), ["a", "bcd"], 6),
    (Array(Bytes), [b"a"], 3),
])  # fmt: skip
def test_an_array_cut_within_an_element_is_a_data_error(dtype: Any, value: list[Any], cut: int) -> None:
    view = make_view({"a": dtype})
    row = bytearray(_encode(view, [(0, 0, {"a": value})])[0][:-cut])
    width = RowCodec(view).width
    struct.pack_into("<I", row, width - 4, len(row) - width)
    with pytest.raises(DataError, match="traffic: a row is damaged"):
        RowCodec(view).decode([bytes(row)]).columns["a"]


@pytest.mark.parametrize(("dtype", "value"), [(Array(Float32), [1.0, None]), (Array(String), ["a", None])])
def test_an_array_with_a_null_is_not_written(dtype: Any, value: list[Any]) -> None:
    view = make_view({"a": dtype})
    data = np.empty(1, object)
    data[0] = value
    with pytest.raises(DataError, match="feature a of view traffic: an array holds a null"):
        RowCodec(view).content({"a": Values(data, np.array([True]))}, 1)


def test_a_matrix_is_no_array() -> None:
    data = np.empty(1, object)
    data[0] = np.zeros((2, 2))
    with pytest.raises(DataError, match="2 dimensions"):
        RowCodec(make_view({"a": Array(Float64)})).content({"a": Values(data, np.array([True]))}, 1)


@given(st.sampled_from([MIXED, ARRAYS]), st.binary(max_size=120), st.booleans())
def test_any_bytes_are_refused_or_decoded(view: Any, noise: bytes, lead: bool) -> None:
    row = bytes([1]) + view.prefix + noise if lead else noise
    try:
        block = RowCodec(view).decode([row])
        dict(block.columns)
    except (DataError, ContractMismatch):
        return
    assert block.present.tolist() == [True]
    assert lead or row[:9] == bytes([1]) + view.prefix


@given(schemas(1, 10).flatmap(lambda fields: st.tuples(st.just(fields), values_of(fields), values_of(fields))))
def test_content_is_equal_for_equal_content_only(case: Any) -> None:
    fields, left, right = case
    view = make_view(fields)
    hashes = RowCodec(view).content(columns_of(view, [left, right, left]), 3)
    assert hashes.dtype == np.int64
    assert (hashes >= 0).all()
    assert hashes[0] == hashes[2]
    equal = all(bits(left[name], dtype) == bits(right[name], dtype) for name, dtype in fields.items())
    assert (hashes[0] == hashes[1]) == equal
    packed = _encode(view, [(1, 2, left)])[0]
    assert int.from_bytes(packed[25:33], "little") == hashes[0]


@given(values_of(ALL), st.integers(0))
def test_content_differs_when_one_bit_differs(values: dict[str, Any], choice: int) -> None:
    view = make_view(ALL)
    for name, dtype in (("int64", Int64), ("unixtimestamp", UnixTimestamp)):
        if values[name] is None:
            continue
        columns = columns_of(view, [values, values])
        columns[name].data[1] ^= 1 << choice % 63
        first, second = RowCodec(view).content(columns, 2).tolist()
        assert first != second, dtype
