import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.tabular.tensors import VOCABULARY, TabularTensors, tensors, vocabularies
from isthmus.features.errors import DataError
from isthmus.features.types import Bytes, Float32, Int64, String
from isthmus.features.values.columns import Values
from isthmus.package.inputs import ModelInput, feeds
from tests.distill.support import STUDENT, training_set

TEXTS = st.one_of(st.none(), st.text(max_size=4))
NUMBERS = st.one_of(st.none(), st.floats(), st.integers(-(2**53), 2**53).map(float))


@given(st.lists(st.tuples(NUMBERS, TEXTS), min_size=1, max_size=20))
def test_feeds_cast_value_by_value(rows: list[tuple[float | None, str | None]]) -> None:
    numbers, texts = zip(*rows, strict=True)
    columns = {
        "x": Values(
            np.array([0.0 if value is None else value for value in numbers]),
            np.array([value is not None for value in numbers]),
        ),
        "t": Values(np.array(texts, object), np.array([text is not None for text in texts])),
    }
    fed = feeds([ModelInput("t", String), ModelInput("x", Float32)], columns)
    with np.errstate(over="ignore"):
        expected = [np.float32(np.nan if value is None else value) for value in numbers]
    np.testing.assert_array_equal(fed["numeric"][:, 0], np.array(expected, np.float32))
    assert fed["categories"][:, 0].tolist() == [text or "" for text in texts]


def test_a_tensor_without_inputs_is_left_out() -> None:
    one = Values(np.array([3]), np.array([True]))
    assert feeds([ModelInput("n", Int64)], {"n": one}).keys() == {"numeric"}
    word = Values(np.array(["a"], object), np.array([True]))
    assert feeds([ModelInput("n", String)], {"n": word}).keys() == {"categories"}


def test_what_cannot_be_fed_is_named() -> None:
    with pytest.raises(DataError, match="no column n"):
        feeds([ModelInput("n", Int64)], {})
    with pytest.raises(DataError, match="type is Bytes"):
        feeds([ModelInput("n", Bytes)], {"n": Values(np.array([b""], object), np.array([True]))})
    with pytest.raises(DataError, match="no column n; expected n of type Int64"):
        tensors(pa.table({"m": [1]}), [ModelInput("n", Int64)])
    with pytest.raises(DataError, match="column n"):
        tensors(pa.table({"n": ["one"]}), [ModelInput("n", Int64)])


def test_every_type_becomes_a_tensor() -> None:
    table = training_set(300)
    data = tensors(table, STUDENT)
    assert data.numeric.shape == (300, 6)
    assert data.numeric.dtype == np.float32
    distance = table["distance"].to_numpy()
    np.testing.assert_array_equal(data.numeric[:, 0], distance)
    np.testing.assert_array_equal(data.numeric[:, 2], table["weekend"].to_numpy())
    np.testing.assert_array_equal(data.numeric[:, 3], table["scheduled"].cast(pa.int64()).to_numpy().astype("f4"))
    assert np.isnan(data.numeric[:, 4]).all()
    assert data.categories[:, 0].tolist() == [text or "" for text in table["carrier"].to_pylist()]
    assert set(data.categories[:, 1]) == {""}


def test_a_vocabulary_is_capped_at_the_most_frequent() -> None:
    texts = [f"{number:03}" for number in range(300)] + ["299", "", ""]
    data = TabularTensors(np.empty((303, 0), np.float32), np.array(texts, object)[:, None])
    (vocabulary,) = vocabularies(data)
    assert len(vocabulary) == VOCABULARY
    assert vocabulary[:2] == ("299", "000")
