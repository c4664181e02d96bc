import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from isthmus.distill.dataset import VOCABULARY, Preprocessing, Tensors, fit, tensors
from isthmus.distill.student import CLIP, Student
from isthmus.features.columns import Values
from isthmus.features.errors import DataError
from isthmus.features.manifest import ModelInput, feeds
from isthmus.features.types import Bytes, Float32, Int64, String
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


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(0, 4)), elements=st.floats(width=32)),
    st.lists(st.text(max_size=2), min_size=30, max_size=30),
)
def test_preprocessing_survives_json_and_gives_finite_inputs(numeric: np.ndarray, texts: list[str]) -> None:
    categories = np.array(texts[: len(numeric)], object)[:, None]
    data = Tensors(numeric, categories)
    learned = fit(data)
    assert msgspec.json.decode(msgspec.json.encode(learned), type=Preprocessing) == learned
    assert np.isfinite(Student(learned, (4,), 0.0).logits(data)).all()
    index = learned.index(categories)
    words = ["", *learned.vocabularies[0]]
    assert [words[place] for place in index[:, 0]] == categories[:, 0].tolist()


def test_preprocessing_of_awkward_columns() -> None:
    nan, inf = np.nan, np.inf
    numeric = np.array([[1, nan, 7, nan, inf], [3, nan, 7, 2, 1], [2, nan, 7, 4, 1]], np.float32)
    categories = np.array([["b", ""], ["a", ""], ["b", ""]], object)
    learned = fit(Tensors(numeric, categories))
    assert learned.mean == (2.0, 0.0, 7.0, 3.0, 1.0)
    assert learned.scale == pytest.approx((np.sqrt(2 / 3), 1.0, 1.0, 1.0, 1.0))
    assert learned.indicators == (3,)
    assert learned.vocabularies == (("b", "a"), ())
    assert learned.index(np.array([["a", "z"], ["", ""], ["new", ""]], object)).tolist() == [[2, 0], [0, 0], [0, 0]]


def test_a_vocabulary_is_capped_at_the_most_frequent() -> None:
    texts = [f"{number:03}" for number in range(300)] + ["299"]
    vocabulary = fit(Tensors(np.empty((301, 0), np.float32), np.array(texts, object)[:, None])).vocabularies[0]
    assert len(vocabulary) == VOCABULARY
    assert vocabulary[:2] == ("299", "000")


def test_the_student_scales_clips_and_imputes() -> None:
    student = Student(Preprocessing((10.0,), (2.0,), (0,), ()), (), 0.0)
    with torch.no_grad():
        student.layers[-1].weight[:] = torch.tensor([[1.0, 100.0]])  # type: ignore[operator]
        student.layers[-1].bias[:] = 0.0  # type: ignore[operator]
    numeric = np.array([[12], [1e30], [-np.inf], [np.nan]], np.float32)
    logits = student.logits(Tensors(numeric, np.empty((4, 0), object)))
    assert logits.tolist() == [1.0, CLIP, -CLIP, 100.0]
