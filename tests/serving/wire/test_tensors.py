import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from isthmus.features.errors import RequestError
from isthmus.serving.wire.tensors import from_bytes, from_json, to_bytes, to_json
from tests.serving.tensors import ELEMENTS

Array = np.ndarray[Any, Any]
DTYPES: dict[str, Any] = {
    "bool": np.bool_, "uint8": np.uint8, "int32": np.int32, "int64": np.int64, "float": np.float32,
    "double": np.float64, "string": object,
}  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, Array]:
    """An element type, and a tensor of it."""
    element = draw(st.sampled_from(ELEMENTS))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, max_side=4))
    return element, draw(arrays.arrays(DTYPES[element], shape, elements=TEXTS if element == "string" else None))


def same(one: Array, two: Array) -> bool:
    """To the bit, but for the payload of a NaN."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    if one.dtype.kind != "f":
        return bool(one.tolist() == two.tolist())
    signs = np.signbit(one) == np.signbit(two)
    return np.array_equal(one, two, equal_nan=True) and bool((signs | np.isnan(one)).all())


def naive(value: Any, element: str) -> Any:
    """A number of JSON as one of this type; a list of them likewise."""
    if isinstance(value, list):
        return [naive(item, element) for item in value]
    return DTYPES[element](value) if element != "string" else value


@given(tensors(), st.booleans())
def test_a_tensor_comes_back_as_it_went(tensor: tuple[str, Array], flat: bool) -> None:
    element, array = tensor
    text = orjson.dumps(to_json(array))
    if not flat and array.ndim:
        text = json.dumps(np.array(json.loads(text), object).reshape(array.shape).tolist()).encode()
    decoded = from_json("x", text, element, array.shape)
    assert same(decoded, array)
    assert same(from_bytes("x", memoryview(to_bytes(array)), element, array.shape), array)
    by_hand = np.empty(array.size, DTYPES[element])
    by_hand[:] = naive(np.array(json.loads(text), object).ravel().tolist(), element)
    assert same(decoded, by_hand.reshape(array.shape))


@pytest.mark.parametrize("text", ["[]", "[ ]", "[[]]"])
def test_a_list_of_nothing_is_no_element(text: str) -> None:
    with pytest.raises(RequestError, match=r"^x: (has 0 elements|has another nesting)"):
        from_json("x", text.encode(), "float", (1,))


@pytest.mark.parametrize("wrong", [None, 70_000])
def test_many_numbers_are_decoded_in_parts_and_the_place_of_a_wrong_one_is_theirs(wrong: int | None) -> None:
    array = np.random.default_rng(3).random((300, 3, 100), np.float32)
    array[0, 0, :3] = np.nan, np.inf, -0.0
    text = orjson.dumps(to_json(array))
    if wrong is None:
        assert same(from_json("x", text, "float", array.shape), array)
        return
    numbers = json.loads(text)
    numbers[wrong] = True
    with pytest.raises(RequestError, match=rf"got `bool` - at `data\[{wrong}\]`"):
        from_json("x", json.dumps(numbers).encode(), "float", array.shape)


@given(tensors(), st.data())
def test_what_is_cut_or_added_is_refused(tensor: tuple[str, Array], data: st.DataObject) -> None:
    element, array = tensor
    raw = bytes(to_bytes(array))
    cut = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\x00"):
        with pytest.raises(RequestError, match=r"^x: "):
            from_bytes("x", memoryview(wrong), element, array.shape)


@contextmanager
def refused() -> Iterator[None]:
    """What is refused is refused by its name, and by nothing but a RequestError."""
    try:
        yield
    except RequestError as error:
        if error.where != "x":
            raise


@given(st.binary(max_size=40), st.sampled_from(ELEMENTS), arrays.array_shapes(min_dims=0, max_dims=3, max_side=3))
def test_any_bytes_are_a_tensor_or_refused(raw: bytes, element: str, shape: tuple[int, ...]) -> None:
    with refused():
        array = from_bytes("x", memoryview(raw), element, shape)
        assert array.flags.aligned
        assert to_bytes(array) == raw


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS, st.lists)


@given(JSON, st.sampled_from(ELEMENTS), arrays.array_shapes(min_dims=0, max_dims=3, max_side=3))
def test_any_json_is_a_tensor_or_refused(value: Any, element: str, shape: tuple[int, ...]) -> None:
    with refused():
        array = from_json("x", json.dumps(value).encode(), element, shape)
        assert (array.shape, array.dtype) == (shape, DTYPES[element])
        assert np.array(value, object).size == math.prod(shape)
