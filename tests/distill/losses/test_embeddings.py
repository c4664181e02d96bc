import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import ConfigurationError
from isthmus.losses import cosine, similarities
from tests.distill.losses.support import (
    EXTREME,
    NAN,
    Array,
    finite,
    gradient_is_right,
    kl,
    masks,
    numbers,
    seeded,
    softmax,
)


def cos(a: Array, b: Array) -> float:
    return float(sum(a * b)) / max(math.sqrt(sum(a * a)), 1e-8) / max(math.sqrt(sum(b * b)), 1e-8)


@st.composite
def embeddings(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return draw(numbers(rows, width)), draw(numbers(rows, width)), draw(masks(rows))


@given(embeddings())
def test_cosine_is_the_formula(data: tuple[Array, Array, Array]) -> None:
    student, teacher, mask = data
    a, b, where = (torch.from_numpy(array) for array in data)
    angles = [1 - cos(x, y) for x, y in zip(student[mask], teacher[mask], strict=True)]
    assert cosine(a, b, mask=where).item() == pytest.approx(sum(angles) / max(len(angles), 1), abs=1e-6)


@given(st.integers(3, 5).flatmap(lambda n: st.tuples(numbers(n, 3), numbers(n, 2))), st.floats(0.05, 2))
def test_similarities_are_the_formula(data: tuple[Array, Array], temperature: float) -> None:
    # A vector near 0 has the direction of its rounding.
    student, teacher = (np.where(np.abs(array) < 1e-3, 1.0, array) for array in data)
    found = []
    for i in range(len(student)):
        others = [j for j in range(len(student)) if j != i]
        rows = [softmax([cos(x[i], x[j]) / temperature for j in others]) for x in (teacher, student)]
        found.append(kl(*rows))
    loss = similarities(torch.from_numpy(student), torch.from_numpy(teacher), temperature=temperature)
    assert loss.item() == pytest.approx(sum(found) / len(found), rel=1e-6, abs=1e-9)


def test_the_gradients_are_those_of_finite_differences() -> None:
    mask = torch.tensor([True, False, True])
    assert gradient_is_right(lambda x: cosine(x, seeded(3, 4), mask=mask), 3, 4)
    assert gradient_is_right(lambda x: similarities(x, seeded(4, 2), temperature=0.5), 4, 3)


def test_what_does_not_count_may_be_anything() -> None:
    student, teacher = seeded(2, 3), seeded(2, 3, seed=1)
    student[1], teacher[1] = NAN, math.inf
    assert finite(lambda x: cosine(x, teacher, mask=torch.tensor([True, False])), student)
    assert cosine(student, teacher, mask=torch.tensor([False, False])).item() == 0


@pytest.mark.parametrize("size", [EXTREME, 0.0])
def test_extreme_embeddings_and_zeros_stay_finite(size: float) -> None:
    student, teacher = torch.full((3, 4), size), torch.full((3, 4), -size)
    assert finite(lambda x: cosine(x, teacher), student)
    assert finite(lambda x: similarities(x, teacher, temperature=0.05), student)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = seeded(3, 4).requires_grad_(), seeded(3, 4, seed=1).requires_grad_()
    (cosine(student, teacher) + similarities(student, teacher, temperature=1)).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert teacher.grad is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="teacher: width 3; expected 4, as in student"):
        cosine(seeded(2, 4), seeded(2, 3))
    with pytest.raises(ConfigurationError, match="empty"):
        cosine(torch.zeros(0, 4), torch.zeros(0, 4))
    with pytest.raises(ConfigurationError, match="batch: 2 rows; expected at least 3"):
        similarities(seeded(2, 4), seeded(2, 3), temperature=1)
    with pytest.raises(ConfigurationError, match="teacher: batch 4; expected 3, as in student"):
        similarities(seeded(3, 4), seeded(4, 3), temperature=1)
