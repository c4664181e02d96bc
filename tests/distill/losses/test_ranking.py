import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import ConfigurationError
from isthmus.losses import graded_lists, grouped_lists, lists
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

MASK = torch.tensor([[True, True, False, True], [False, True, True, True], [True, False, False, False]])


@st.composite
def scores(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    shape = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return draw(numbers(*shape)), draw(numbers(*shape)), draw(masks(*shape))


@given(scores(), st.floats(0.5, 10))
def test_lists_are_the_formula(data: tuple[Array, Array, Array], temperature: float) -> None:
    found = []
    for s, t, counts in zip(*data, strict=True):
        if counts.any():
            found.append(kl(softmax(t[counts] / temperature), softmax(s[counts] / temperature)))
    student, teacher, mask = (torch.from_numpy(array) for array in data)
    loss = lists(student, teacher, temperature=temperature, mask=mask)
    assert loss.item() == pytest.approx(sum(found) / max(len(found), 1), rel=1e-6, abs=1e-9)


def test_without_a_mask_all_candidates_count() -> None:
    student, teacher = seeded(3, 4), seeded(3, 4, seed=1)
    everything = torch.ones(3, 4, dtype=torch.bool)
    assert lists(student, teacher).item() == pytest.approx(lists(student, teacher, mask=everything).item())


def test_the_gradient_is_that_of_finite_differences() -> None:
    assert gradient_is_right(lambda x: lists(x, seeded(3, 4), mask=MASK), 3, 4)
    assert gradient_is_right(lambda x: lists(x, seeded(3, 4)), 3, 4)


def test_extremes_stay_finite_and_what_does_not_count_may_be_anything() -> None:
    student, teacher = EXTREME * seeded(3, 4).sign(), EXTREME * seeded(3, 4, seed=1).sign()
    assert finite(lambda x: lists(x, teacher), student)
    student[~MASK], teacher[~MASK] = NAN, math.inf
    assert finite(lambda x: lists(x, teacher, mask=MASK), student)
    assert lists(student, teacher, mask=MASK & False).item() == 0


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = seeded(3, 4).requires_grad_(), seeded(3, 4, seed=1).requires_grad_()
    lists(student, teacher).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert teacher.grad is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="candidates: a single candidate per query; expected at least two"):
        lists(seeded(3, 1), seeded(3, 1))
    with pytest.raises(ConfigurationError, match="teacher: candidates 5; expected 4, as in student"):
        lists(seeded(3, 4), seeded(3, 5))
    with pytest.raises(ConfigurationError, match="empty"):
        lists(torch.zeros(0, 4), torch.zeros(0, 4))


def test_grouped_lists_are_lists_of_each_group() -> None:
    groups = torch.tensor([4, 0, 4, 9, 0, 4, 7])
    student, teacher = torch.randn(7, requires_grad=True), torch.randn(7)
    loss = grouped_lists(student, teacher, groups, temperature=2.0)
    expected = torch.zeros(())
    for group in (0, 4, 7, 9):
        s, t = (scores[groups == group] / 2 for scores in (student, teacher))
        expected = expected + (t.softmax(0) * (t.log_softmax(0) - s.log_softmax(0))).sum()
    torch.testing.assert_close(loss, 4 * expected / 4)
    torch.testing.assert_close(*(torch.autograd.grad(value, student)[0] for value in (loss, expected)))
    alone = grouped_lists(student[:2], teacher[:2], groups[:2], temperature=1.0)
    assert alone.item() == 0, "groups of a single row have no order"


def test_graded_lists_learn_the_gains_of_groups_with_a_relevant_row() -> None:
    groups, relevance = torch.tensor([1, 1, 1, 5, 5, 8]), torch.tensor([0, 3, 1, 0, 0, 2])
    student = torch.randn(6, requires_grad=True)
    loss = graded_lists(student, relevance, groups)
    wanted = torch.tensor([0.0, 7.0, 1.0]) / 8
    rows = student[:3].log_softmax(0)
    entropy = torch.special.entr(wanted).sum()
    # Of the group with a single row, a softmax of 1; the group without a relevant row does not count.
    torch.testing.assert_close(loss, (-(wanted * rows).sum() - entropy) / 2)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(gradient[:3], (student[:3].softmax(0) - wanted).detach() / 2)
    assert gradient[3:].eq(0).all()
    assert graded_lists(student[3:5], relevance[3:5], groups[3:5]).item() == 0


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"graded lists: groups: torch.float32; expected integers"):
        graded_lists(torch.zeros(2), torch.ones(2).long(), torch.zeros(2))
    with pytest.raises(ConfigurationError, match="grouped lists: temperature"):
        grouped_lists(torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), temperature=0)
