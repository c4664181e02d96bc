import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isthmus.distill.losses import lists, margins
from isthmus.features.errors import ConfigurationError
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

BOTH: list[Callable[..., Tensor]] = [lists, margins]
MASK = torch.tensor([[True, True, False, True], [False, True, True, True], [True, False, False, False]])


@st.composite
def scores(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    shape = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return draw(numbers(*shape)), draw(numbers(*shape)), draw(masks(*shape))


@given(scores())
def test_margins_are_the_formula(data: tuple[Array, Array, Array]) -> None:
    found = []
    for s, t, counts in zip(*data, strict=True):
        others = [j for j in range(1, len(s)) if counts[0] and counts[j]]
        found += [((s[0] - s[j]) - (t[0] - t[j])) ** 2 for j in others]
    student, teacher, mask = (torch.from_numpy(array) for array in data)
    assert margins(student, teacher, mask=mask).item() == pytest.approx(sum(found) / max(len(found), 1), abs=1e-9)


@given(scores(), st.floats(0.5, 10))
def test_lists_are_the_formula(data: tuple[Array, Array, Array], temperature: float) -> None:
    found = []
    for s, t, counts in zip(*data, strict=True):
        if counts.any():
            found.append(kl(softmax(t[counts] / temperature), softmax(s[counts] / temperature)))
    student, teacher, mask = (torch.from_numpy(array) for array in data)
    loss = lists(student, teacher, temperature=temperature, mask=mask)
    assert loss.item() == pytest.approx(sum(found) / max(len(found), 1), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("loss", BOTH)
def test_without_a_mask_all_candidates_count(loss: Callable[..., Tensor]) -> None:
    student, teacher = seeded(3, 4), seeded(3, 4, seed=1)
    everything = torch.ones(3, 4, dtype=torch.bool)
    assert loss(student, teacher).item() == pytest.approx(loss(student, teacher, mask=everything).item())


@pytest.mark.parametrize("loss", BOTH)
def test_the_gradient_is_that_of_finite_differences(loss: Callable[..., Tensor]) -> None:
    assert gradient_is_right(lambda x: loss(x, seeded(3, 4), mask=MASK), 3, 4)
    assert gradient_is_right(lambda x: loss(x, seeded(3, 4)), 3, 4)


@pytest.mark.parametrize("loss", BOTH)
def test_extremes_stay_finite_and_what_does_not_count_may_be_anything(loss: Callable[..., Tensor]) -> None:
    student, teacher = EXTREME * seeded(3, 4).sign(), EXTREME * seeded(3, 4, seed=1).sign()
    assert finite(lambda x: loss(x, teacher), student)
    student[~MASK], teacher[~MASK] = NAN, math.inf
    assert finite(lambda x: loss(x, teacher, mask=MASK), student)
    assert loss(student, teacher, mask=MASK & False).item() == 0


@pytest.mark.parametrize("loss", BOTH)
def test_the_teacher_gets_no_gradient(loss: Callable[..., Tensor]) -> None:
    student, teacher = seeded(3, 4).requires_grad_(), seeded(3, 4, seed=1).requires_grad_()
    loss(student, teacher).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert teacher.grad is None


@pytest.mark.parametrize("loss", BOTH)
def test_what_does_not_fit_is_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(ConfigurationError, match="candidates: a single candidate of each query; expected at least two"):
        loss(seeded(3, 1), seeded(3, 1))
    with pytest.raises(ConfigurationError, match="teacher: candidates 5; expected 4, as in student"):
        loss(seeded(3, 4), seeded(3, 5))
    with pytest.raises(ConfigurationError, match="empty"):
        loss(torch.zeros(0, 4), torch.zeros(0, 4))
