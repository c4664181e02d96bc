"""What a segment gives back: whole batches, whatever came behind them."""

import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.features.types import Float32, String
from isthmus.features.values.columns import Values, from_python
from isthmus.serving.recorder.batch import (
    HEAD,
    MAGIC,
    PACK,
    VERSION,
    AnswerBatch,
    AnswerGroup,
    DamagedBatchError,
    OtherVersionError,
    StoredViewRows,
    batches,
    encoded,
    table_bytes,
)
from isthmus.serving.recorder.digest import digests, tensors_digest

FIRST, SECOND = (AnswerBatch("ab", number, 5, 0, "isthmus 1", ("",), ()) for number in (1, 2))


@dataclass
class _Read:
    whole: list[int]
    problem: str


def _read(segment: bytes | bytearray) -> _Read:
    whole: list[int] = []
    try:
        whole.extend(batch.number for batch in batches(segment))
    except (DamagedBatchError, OtherVersionError) as error:
        return _Read(whole, f"{type(error).__name__}: {error}")
    return _Read(whole, "")


def test_a_batch_cut_anywhere_leaves_those_before_it() -> None:
    segment, end = encoded(FIRST) + encoded(SECOND), len(encoded(FIRST))
    assert _read(segment) == _Read([1, 2], "")
    for cut in range(end + 1, len(segment)):
        read = _read(segment[:cut])
        assert read.whole == [1]
        assert "ends " in read.problem


def test_a_batch_with_another_byte_is_none() -> None:
    segment, end = encoded(FIRST) + encoded(SECOND), len(encoded(FIRST))
    for place in range(end, len(segment)):
        altered = bytearray(segment)
        altered[place] ^= 1
        read = _read(bytes(altered))
        assert read.whole == [1]
        assert read.problem


def test_a_batch_of_another_version_is_named() -> None:
    later = bytearray(encoded(SECOND))
    later[4] = 9
    read = _read(encoded(FIRST) + bytes(later))
    problem = f"OtherVersionError: has a batch of version 9 at byte {len(encoded(FIRST))}"
    assert (read.whole, read.problem) == ([1], problem)
    assert HEAD.size == 13


def test_the_size_of_a_batch_has_the_ends_of_each_request() -> None:
    answers = b"".join(PACK(n, 0, 0.0, 0, 1, n % 2, 1) for n in range(10))
    templates = ((b"", b""), (b"x" * 600, b"y" * 400))
    group = AnswerGroup("lookup", "", "", "", answers, b"0123456789", (), b"", 0, b"", (), templates)
    assert table_bytes(AnswerBatch("ab", 1, 5, 0, "", ("",), (group,))) == len(answers) + 10 + 5 * 1000


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ([1.0, None], [1.0, None], True),
        ([0.0, 1.0], [-0.0, 1.0], False),
        ([0.0, 1.0], [None, 1.0], False),
        ([1.0, 2.0], [1.0, 2.0000002], False),
    ],
)
def test_digests_are_equal_for_equal_bits(left: list[float | None], right: list[float | None], *, same: bool) -> None:
    sides = [digests({"x": from_python(side, Float32), "t": from_python(["a", "b"], String)}) for side in (left, right)]
    assert (sides[0] == sides[1]).all() == same
    assert sides[0][0] != sides[0][1]


def test_one_nan_is_like_another() -> None:
    other = np.array([0x7FC00001], "<u4").view("<f4")
    sides = [digests({"x": Values(data, np.ones(1, bool))}) for data in (np.array([np.nan], np.float32), other)]
    assert sides[0] == sides[1]


def test_the_digest_of_tensors_has_their_names_types_shapes_and_bits() -> None:
    words = np.empty((2, 1), object)
    words[:, 0] = ["a", "é"]
    first: dict[str, np.ndarray[Any, Any]] = {"x": np.arange(4, dtype=np.float32), "y": words}
    others: list[dict[str, np.ndarray[Any, Any]]] = [
        {"x": first["x"], "z": words},
        {"x": first["x"].astype(np.float64), "y": words},
        {"x": first["x"].reshape(2, 2), "y": words},
        {"x": np.array([-0.0, 1, 2, 3], np.float32), "y": words},
        {"x": first["x"], "y": words[::-1]},
        {"x": np.array([np.nan, 1, 2, 3], np.float32), "y": words},
    ]
    found = [tensors_digest(tensors) for tensors in (first, *others)]
    assert len(set(found)) == len(found)
    assert tensors_digest(dict(reversed(first.items()))) == found[0]
    assert 0 <= min(found) <= max(found) < 1 << 64


def _answers(**columns: Any) -> AnswerGroup:
    """Two answers of two rows each over a view, with other values in some columns of `Group`."""
    numbers = {"sequence": 1, "at": 5, "seconds": 0.0, "caller": 0, "rows": 2, "template": 0, "length": 2}
    numbers |= {name: columns.pop(name) for name in list(columns) if name in numbers}
    view = StoredViewRows("v", "h", bytes(32), bytes(32), bytes(32), columns.pop("status", bytes(4)))
    fields: dict[str, Any] = {
        "requests": b"{}{}",
        "outputs": bytes(16),
        "width": 1,
        "digest": b"",
        "contract": "c0ffee",
    } | columns
    return AnswerGroup(
        "predict", fields["contract"], "", "", PACK(*numbers.values()) * 2, fields["requests"], (view,),
        fields["outputs"], fields["width"], fields["digest"], (), ((b"", b""),),
    )  # fmt: skip


def _sealed(payload: bytes) -> bytes:
    return HEAD.pack(MAGIC, VERSION, len(payload), zlib.crc32(payload)) + payload


WRONG: dict[str, bytes | bytearray] = {
    "no batch": _sealed(b"\xc1"),
    "text that is none": _sealed(b"\x97\xa1\xff\x01\x05\x00\xa0\x91\xa0\x90"),
    "nested without end": _sealed(b"\x91" * 100_000),
    **{
        name: encoded(msgspec.structs.replace(FIRST, **{name: value}))
        for name, value in {"number": 1 << 60, "written": 1 << 62, "dropped": -1}.items()
    },
    "number 0": encoded(msgspec.structs.replace(FIRST, number=0)),
    **{
        f"{name} {value!r:.20}": encoded(msgspec.structs.replace(FIRST, groups=(_answers(**{name: value}),)))
        for name, value in [
            ("caller", 1), ("caller", -1), ("template", 1), ("template", -1), ("rows", -2), ("length", -2),
            ("at", 1 << 62), ("at", -(1 << 62)), ("sequence", -1), ("requests", b"{}"), ("outputs", b"ab"),
            ("width", -1), ("digest", b"ab"), ("contract", "../../x"), ("contract", "a\0b"), ("status", b"\0\0\0\x09"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_batch_that_is_wrong_inside_hides_none_behind_it(wrong: str) -> None:
    right = encoded(msgspec.structs.replace(SECOND, groups=(_answers(),)))
    read = _read(bytes(WRONG[wrong]) + bytes(right))
    assert read.whole == [2]
    assert read.problem.startswith("DamagedBatchError: has a batch at byte 13 that ")


def test_no_batch_is_found_within_a_damaged_one() -> None:
    """A request holds whatever its caller wants: none may put answers into the table."""
    planted = bytes(encoded(SECOND))
    outer = _answers(requests=b"{}" + planted)
    whole = bytearray(encoded(msgspec.structs.replace(FIRST, groups=(outer,))))
    assert planted in whole
    for place in (0, 4, 5, 20, len(whole) - 1):
        altered = bytearray(whole)
        altered[place] ^= 1
        assert _read(altered).whole == []
