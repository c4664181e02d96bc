import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import GateFailed
from isthmus.features.types import TYPES, Array, Bool, Bytes, DataType, Float32, Float64, Int64, String, UnixTimestamp
from isthmus.features.values.columns import Values, from_python
from isthmus.package.verdict import EXAMPLES, FeatureVerdict, ValueDifference, Verdict, compare
from tests.features.support import VALUES, bits


def _compare(left: list[Any], right: list[Any], dtype: DataType) -> FeatureVerdict:
    return compare([f"k{n}" for n in range(len(left))], from_python(left, dtype), from_python(right, dtype), dtype)


def _equal(left: Any, right: Any, dtype: DataType) -> bool:
    if dtype.element is not None and left is not None and right is not None:
        element = dtype.element
        return len(left) == len(right) and all(_equal(a, b, element) for a, b in zip(left, right, strict=True))
    return bool(bits(left, dtype) == bits(right, dtype) or (left != left and right != right))


def test_examples_are_of_different_keys_first() -> None:
    keys = ["a", "a", "a", "b", "c", "c", "d"]
    wrong = from_python(list(range(1, 8)), Int64)
    examples = compare(keys, from_python([0] * 7, Int64), wrong, Int64).examples
    assert [(one.key, one.online) for one in examples] == [("a", 1), ("b", 4), ("c", 5)]
    examples = compare(["a"] * 7, from_python([0] * 7, Int64), wrong, Int64).examples
    assert [one.online for one in examples] == [1, 2, 3]


@given(st.sampled_from(list(TYPES.values())), st.data())
def test_comparison_is_by_bits_but_for_nans(dtype: DataType, data: st.DataObject) -> None:
    values = st.none() | VALUES[dtype.name]
    pairs = data.draw(st.lists(st.tuples(values, values) | values.map(lambda value: (value, value)), max_size=10))
    left, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    verdict = _compare(left, right, dtype)
    differing = [n for n, (a, b) in enumerate(pairs) if not _equal(a, b, dtype)]
    assert (verdict.compared, verdict.differing) == (len(pairs), len(differing))
    assert [example.key for example in verdict.examples] == [f"k{n}" for n in differing[:EXAMPLES]]
    assert (verdict.worst == 0.0) or differing
    assert not np.isnan(verdict.worst)


def _float(payload: int) -> float:
    return float(np.array([payload], "<u8").view("<f8")[0])


NAN, OTHER_NAN = _float(0x7FF8000000000000), _float(0x7FF8000000000001)


@pytest.mark.parametrize(
    ("dtype", "left", "right", "worst"),
    [
        (Float64, NAN, NAN, None),
        (Float64, NAN, OTHER_NAN, None),
        (Float64, -0.0, 0.0, 0.0),
        (Float64, None, 0.0, float("inf")),
        (Float64, None, None, None),
        (Float64, 1.0, 3.5, 2.5),
        (Float64, float("inf"), 1.0, float("inf")),
        (Float64, float("inf"), float("-inf"), float("inf")),
        (Float64, 1.7e308, -1.7e308, float("inf")),
        (Float32, 1.0, NAN, float("inf")),
        (Int64, 0, None, float("inf")),
        (Int64, -(1 << 63), (1 << 63) - 1, 2.0**64),
        (Int64, 1 << 60, (1 << 60) + 1, 1.0),
        (String, "é", "e\u0301", float("inf")),
        (String, "", None, float("inf")),
        (Bytes, b"\0", b"\0", None),
        (Bytes, b"\0", b"", float("inf")),
        (Array(Float64), [NAN, -0.0], [OTHER_NAN, 0.0], 0.0),
        (Array(Float64), [float("inf"), NAN, 1.0], [float("inf"), OTHER_NAN, 1.5], 0.5),
        (Array(Float64), [NAN, float("inf")], [OTHER_NAN, float("inf")], None),
        (Array(Float32), [1.0], [1.0, 1.0], float("inf")),
        (Array(Int64), [], None, float("inf")),
        (Array(Int64), [1, 2], [1, 5], 3.0),
        (Array(Bool), [True], [False], 1.0),
        (Array(String), ["a", "b"], ["ab"], float("inf")),
        (Array(String), [], [], None),
    ],
)
def test_what_differs_and_by_how_much(dtype: DataType, left: Any, right: Any, worst: float | None) -> None:
    for a, b in ((left, right), (right, left)):
        verdict = _compare([a], [b], dtype)
        assert verdict.differing == (0 if worst is None else 1)
        assert verdict.worst == (worst or 0.0)


def test_signalling_nans_compare_without_a_warning() -> None:
    signalling = Values(np.array([0x7F800001], "<u4").view("<f4"), np.array([True]))
    assert compare(["k"], signalling, signalling, Float32).differing == 0
    assert compare(["k"], signalling, from_python([1.0], Float32), Float32).worst == float("inf")


def test_what_lies_under_a_null_does_not_count() -> None:
    hidden = Values(np.array([5.0, 6.0]), np.array([False, True]))
    assert compare(["a", "b"], hidden, from_python([None, 6.0], Float64), Float64).differing == 0


def test_columns_of_different_length_are_refused() -> None:
    for left, right, keys in (([1], [1, 1], 2), ([1, 1], [1], 2), ([1, 1], [1, 1], 1)):
        with pytest.raises(ValueError, match="2"):
            compare(["k"] * keys, from_python(left, Int64), from_python(right, Int64), Int64)


def _verdict(**features: FeatureVerdict) -> Verdict:
    return Verdict("c0ffee", 5, {"traffic": features})


GOOD, BAD, EMPTY = FeatureVerdict(3, 0, 0.0), FeatureVerdict(3, 1, 2.0), FeatureVerdict(0, 0, 0.0)
EXAMPLE = FeatureVerdict(4, 2, 0.25, [ValueDifference("k=1", None, 1.5)])


def test_passed_needs_something_compared_and_nothing_differing() -> None:
    assert _verdict(a=GOOD).passed
    assert _verdict(a=GOOD, b=EMPTY).passed
    assert not _verdict().passed
    assert not Verdict("c", 0, {}).passed
    assert not _verdict(a=EMPTY).passed
    assert not _verdict(a=GOOD, b=BAD).passed
    assert not Verdict("c", 0, {"traffic": {"a": GOOD}}, {}, {}, "p", BAD).passed
    assert (_verdict(a=GOOD, b=BAD).compared, _verdict(a=GOOD, b=BAD).differing) == (6, 1)
    for group in ("inputs", "device", "singly"):
        group_of: Any = {group: {"x": BAD}}
        verdict = replace(_verdict(a=GOOD), **group_of)
        assert (verdict.passed, verdict.compared, verdict.differing) == (False, 6, 1), group


def test_a_verdict_whose_sums_are_not_its_own_is_refused() -> None:
    text = _verdict(a=BAD).dumps()
    for what, instead in ((b'"passed": false', b'"passed": true'), (b'"differing": 1', b'"differing": 0')):
        altered = text.replace(what, instead, 1)
        assert altered != text
        with pytest.raises(GateFailed, match="The file was changed"):
            Verdict.loads(altered)


def _strictly(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("c", 0, {}),
        _verdict(a=GOOD, status=EMPTY),
        Verdict("c", -1, {"v": {"a": EXAMPLE}}, {"v": "f00d"}, {"v": 3}, "pkg", BAD),
        _verdict(a=FeatureVerdict(1, 1, float("inf"), [ValueDifference("k", "x", None)])),
    ],
)
def test_loads_is_the_inverse_of_dumps(verdict: Verdict) -> None:
    read = Verdict.loads(verdict.dumps())
    assert read.dumps() == verdict.dumps()
    assert read.passed == verdict.passed
    assert (read.contract, read.at, read.package) == (verdict.contract, verdict.at, verdict.package)
    for view, features in verdict.views.items():
        for name, feature in features.items():
            found = read.views[view][name]
            assert (found.compared, found.differing, found.worst) == (
                feature.compared,
                feature.differing,
                feature.worst,
            )
            assert list(found.examples) == list(feature.examples)


@pytest.mark.parametrize(
    ("dtype", "left", "right"),
    [
        (Float64, NAN, 1.0),
        (Float64, float("inf"), None),
        (Bytes, b"\xff", b""),
        (Float32, float("-inf"), 1.0),
        (Array(Bool), [True], None),
        (Array(Float64), [NAN, 1.0], [NAN]),
        (Array(Bytes), [b"\xff"], []),
    ],
)
def test_the_file_is_strict_json_whatever_differs(dtype: DataType, left: Any, right: Any) -> None:
    verdict = _verdict(a=_compare([left], [right], dtype))
    data = _strictly(verdict.dumps())
    assert data["passed"] is False
    assert (data["compared"], data["differing"]) == (1, 1)
    assert data["views"]["traffic"]["a"]["examples"][0]["key"] == "k0"
    assert _strictly(json.dumps(verdict.as_dict()).encode()) == data
    assert Verdict.loads(verdict.dumps()).views["traffic"]["a"].worst == float("inf")


def _text(feature: str) -> bytes:
    return (
        f'{{"contract": "c", "at": 0, "views": {{"v": {{"a": {feature}}}}}, "package": null, "model": null}}'.encode()
    )


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 100_000,
        _text('{"compared": "3", "differing": 0, "worst": 0, "examples": []}'),
        _text('{"compared": 3, "differing": -1, "worst": 0, "examples": []}'),
        _text('{"compared": 3, "differing": 0, "worst": 0, "examples": [1]}'),
    ],
)  # fmt: skip
def test_what_is_no_verdict_fails_the_gate(text: bytes) -> None:
    with pytest.raises(GateFailed, match=r"here\.json: is not a verdict"):
        Verdict.loads(text, "here.json")


def test_every_truncation_fails_the_gate() -> None:
    text = _verdict(a=BAD).dumps()
    for size in range(len(text) - 2):
        with pytest.raises(GateFailed):
            Verdict.loads(text[:size])


def test_times_that_differ_are_told_as_times() -> None:
    verdict = _compare([1748418603368150, None], [1748411403368150, 0], UnixTimestamp)
    assert [(one.offline, one.online) for one in verdict.examples] == [
        ("2025-05-28T07:50:03.368150Z", "2025-05-28T05:50:03.368150Z"), (None, "1970-01-01T00:00:00Z"),
    ]  # fmt: skip
    assert _compare([1748418603368150], [1748411403368150], UnixTimestamp).worst == 7.2e9
