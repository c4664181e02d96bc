"""What single values become in Python is what they become in ONNX Runtime, operator by operator, to the bit."""

import math
import time
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isthmus.features.request.kernels import function
from isthmus.features.request.onnxbytes import ELEMENTS, NUMPY, OnnxNode, one_node_model, read

NUMBERS = {name: number for number, name in ELEMENTS.items()}
WHOLE, REAL = ("int32", "int64"), ("float", "double")
SIDES = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
NUMERIC = ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", *SIDES)
TWO = [*((name, kind) for name in NUMERIC for kind in (*WHOLE, *REAL)),
       *((name, kind) for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor") for kind in WHOLE),
       ("And", "bool"), ("Or", "bool"), ("Equal", "bool"), ("Equal", "string"), ("StringConcat", "string")]  # fmt: skip
ONE = [*((name, kind) for name in ("Abs", "Neg") for kind in (*WHOLE, *REAL)),
       *((name, kind) for name in ("Floor", "Ceil", "Round", "Sqrt", "Sign", "IsNaN", "IsInf") for kind in REAL),
       *(("BitwiseNot", kind) for kind in WHOLE), ("Not", "bool")]  # fmt: skip
CASTS = [(one, other) for one in ("bool", *WHOLE, *REAL) for other in (*WHOLE, *REAL) if one != other]
CASTS += [(one, "string") for one in WHOLE]
TINY = 2.0**-126
"""Below it, float32 has less than 24 bits."""
ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0]
SAME = {("float", "double"), ("int32", "int64")}
"""Casts that change nothing."""


def _near(bound: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(-bound, bound - 1), st.integers(-9, 9), st.sampled_from([-bound, bound - 1]))


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(), "int32": _near(1 << 31), "string": st.text(),
    # Halfway between two of float32 but for what a double does not hold.
    "int64": st.one_of(_near(1 << 63), st.sampled_from([(1 << 62) + (1 << 38) + 1, -(1 << 62) - (1 << 38) - 1])),
    "float": st.one_of(
        st.sampled_from(ODD), st.floats(width=32), st.integers(-9, 9).map(float), st.floats(-TINY, TINY, width=32)),
    "double": st.one_of(
        st.sampled_from(ODD), st.floats(), st.integers(-9, 9).map(lambda n: n / 2), st.floats(-1e6, 1e6)),
}  # fmt: skip


@cache
def _session(name: str, kind: str, count: int, gives: str, written: tuple[bytes, ...]) -> ort.InferenceSession:
    node = OnnxNode(name, tuple(map(str, range(count))), ("y",), {}, written)
    model = one_node_model(node, [(kind, (1, 1))] * count, gives, (1, 1))
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def _number(name: str, value: int) -> tuple[bytes, ...]:
    """An attribute of type INT, as it stands in a file; the value below 128."""
    called = name.encode()
    return (b"\x0a" + bytes([len(called)]) + called + b"\x18" + bytes([value]) + b"\xa0\x01\x02",)


def by_the_runtime(
    name: str, kind: str, values: tuple[Any, ...], gives: str = "", written: tuple[bytes, ...] = ()
) -> Any:
    session = _session(name, kind, len(values), gives or kind, written)
    feeds = {str(place): np.array([[value]], NUMPY[kind]) for place, value in enumerate(values)}
    return session.run(["y"], feeds)[0].item()


def _same(one: Any, other: Any) -> bool:
    """The same type and bits, any NaN for a NaN."""
    if isinstance(one, float) and isinstance(other, float):
        return (one != one and other != other) or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize(("name", "kind"), TWO)
@given(data=st.data())
def test_two_values(name: str, kind: str, data: st.DataObject) -> None:
    a, b = data.draw(VALUES[kind]), data.draw(VALUES[kind])
    if name in ("Div", "Mod") and kind in WHOLE:
        assume(b not in (0, -1))  # of which processors die, and graphs take care
    # Which of two zeros is the greater one, processors may decide.
    assume(name not in ("Max", "Min") or a != b)
    attributes = {"fmod": 1} if name == "Mod" and kind in REAL else {}
    known = function(name, kind, attributes)
    assert known is not None
    gives = "bool" if name in SIDES else kind
    written = _number("fmod", 1) if attributes else ()
    wanted = by_the_runtime(name, kind, (a, b), gives, written)
    assert _same(wanted, known[0](a, b)), (a, b, wanted, known[0](a, b))


@pytest.mark.parametrize(("name", "kind"), ONE)
@given(data=st.data())
def test_one_value(name: str, kind: str, data: st.DataObject) -> None:
    a = data.draw(VALUES[kind])
    known = function(name, kind, {})
    assert known is not None
    apply, second = known
    wanted = by_the_runtime(name, kind, (a,), "bool" if name.startswith("Is") else kind)
    assert _same(wanted, apply(a, a if second is None else second)), a


@pytest.mark.parametrize(("one", "other"), CASTS)
@given(data=st.data())
def test_casts(one: str, other: str, data: st.DataObject) -> None:
    a = data.draw(VALUES[one])
    if one in REAL and other in WHOLE:
        bits = 31 if other == "int32" else 63
        assume(-(1 << bits) - 1 < a < 1 << bits)  # what else comes out is the processor's
    known = function("Cast", one, {"to": other})
    wanted = by_the_runtime("Cast", one, (a,), other, _number("to", NUMBERS[other]))
    if (one, other) in SAME:
        assert known is None
        assert _same(wanted, a)
        return
    assert known is not None
    apply, second = known
    assert _same(wanted, apply(a, a if second is None else second)), a


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 2.0**63, -(2.0**64)])
def test_a_number_that_does_not_fit_becomes_some_whole_number(value: float) -> None:
    for kind, bits in (("int32", 31), ("int64", 63)):
        known = function("Cast", "double", {"to": kind})
        assert known is not None
        assert -(1 << bits) <= known[0](value, value) < 1 << bits


def pattern_attribute(pattern: str) -> tuple[bytes, ...]:
    """The attribute of a pattern, as it stands in a file."""
    content = pattern.encode()
    return (b"\x0a\x07pattern\x22" + bytes([len(content)]) + content + b"\xa0\x01\x03",)


PATTERNS = [
    "(?s)a.*", "(?s).*b", "(?s).*a\\.b.*", "(?s)a.b", "(?s).*", "(?s)", "(?s)\\\\.*", "(?s)...", "(?s)....*",
    "(?s).*\\(.*", "(?s)a%_é.*", "(?s)\\..*", "(?s)\\$\\^\\{\\}.*", "(?s)a.*a", "(?s)ab.*\\.b", "(?s).*\\\\",
    "(?s).*.*", r"[\x00-\x7f]*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.one_of(st.text("ab.\\(%_é\n\0$^{}", max_size=8), st.text(max_size=4)))
def test_patterns(pattern: str, text: str) -> None:
    known = function("RegexFullMatch", "string", {"pattern": pattern.encode()})
    assert known is not None
    expected = by_the_runtime("RegexFullMatch", "string", (text,), "bool", pattern_attribute(pattern))
    assert known[0](text, text) is expected


@pytest.mark.parametrize(
    "pattern",
    ["(?s)a.*b.*c", "(?s).*a.*b", "(?s).*a.*b.*", "(?s).*a.b.*", "(?s).*a.", "(?s).a.*b", "a.*", "(?s)[ab]", "(?s)a|b",
     "(?s)a+"],
)  # fmt: skip
def test_a_pattern_that_takes_long_or_is_none_of_ours_is_left_to_the_runtime(pattern: str) -> None:
    assert function("RegexFullMatch", "string", {"pattern": pattern.encode()}) is None


@pytest.mark.parametrize("pattern", ["(?s).*{}.*", "(?s).*{}", "(?s)a.*{}"])
def test_a_pattern_that_nearly_stands_everywhere_takes_no_time(pattern: str) -> None:
    known = function("RegexFullMatch", "string", {"pattern": pattern.format("a" * 2000 + "b").encode()})
    assert known is not None
    text, begun = "a" * 1_000_000, time.process_time()
    assert known[0](text, text) is False
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    ("name", "kind", "attributes"),
    [
        ("Erf", "double", {}), ("Tanh", "float", {}), ("Mod", "double", {}), ("Mod", "int64", {"fmod": 1}),
        ("Cast", "string", {"to": "int64"}), ("Cast", "double", {"to": "string"}), ("Cast", "int64", {"to": ""}),
        ("StringNormalizer", "string", {"case_change_action": b"NONE"}),
        ("StringNormalizer", "string", {"case_change_action": b"LOWER", "locale": b"de_DE"}),
        ("StringNormalizer", "string", {"case_change_action": b"LOWER", "locale": b"C", "stopwords": [b"a"]}),
        ("LabelEncoder", "string", {"keys_strings": [b"a"], "values_floats": [1.0]}),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_guessed(name: str, kind: str, attributes: dict[str, Any]) -> None:
    assert function(name, kind, attributes) is None


@pytest.mark.parametrize(("default", "wanted"), [({"default_int64": 7}, 7), ({}, -1)])
def test_what_is_in_no_vocabulary(default: dict[str, int], wanted: int) -> None:
    known = function("LabelEncoder", "string", {"keys_strings": [b"a"], "values_int64s": [3], **default})
    assert known is not None
    apply, second = known
    assert [apply("a", second), apply("b", second)] == [3, wanted]


def test_a_graph_of_one_node_reads_as_it_was_written() -> None:
    node = OnnxNode("Mod", ("0", "1"), ("y",), {"fmod": 1}, _number("fmod", 1))
    nodes, constants = read(one_node_model(node, [("double", (2, 1)), ("double", ())], "double", (2, 1)))
    assert nodes == [node]
    assert constants == {}
