"""What a segment gives back: whole batches, whatever came behind them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from isthmus.features.types import Float32, String
from isthmus.features.values.columns import Values, from_python
from isthmus.serving.recorder.batch import (
    HEAD,
    PACK,
    Batch,
    DamagedBatchError,
    Group,
    OtherVersionError,
    batches,
    encoded,
    size,
)
from isthmus.serving.recorder.digest import digests, tensors_digest

FIRST, SECOND = (Batch("ab", number, 5, 0, "isthmus 1", ("",), ()) for number in (1, 2))


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
    group = Group("lookup", "", "", "", answers, b"0123456789", (), b"", 0, b"", (), templates)
    assert size(Batch("ab", 1, 5, 0, "", ("",), (group,))) == len(answers) + 10 + 5 * 1000


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
