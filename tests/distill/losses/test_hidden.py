from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import ConfigurationError
from isthmus.losses import HiddenStates
from tests.distill.losses.support import EXTREME, NAN, Array, finite, gradient_is_right, masks, numbers, seeded

WIDTHS = {"student_widths": [2, 3, 3], "teacher_widths": [3, 3, 4, 3]}


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Array], list[Array], Array]:
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    student = [draw(numbers(*shape, width)) for width in WIDTHS["student_widths"]]
    teacher = [draw(numbers(*shape, width)) for width in WIDTHS["teacher_widths"]]
    return student, teacher, draw(masks(*shape))


@given(states())
def test_the_loss_is_the_formula(data: tuple[list[Array], list[Array], Array]) -> None:
    student, teacher, mask = data
    layers = {0: 1, 1: 2, 2: 3}
    loss = HiddenStates(layers, **WIDTHS).double()
    weights = {int(name.split(".")[1]): weight.detach().numpy() for name, weight in loss.named_parameters()}
    assert set(weights) == {0, 1}
    pairs = []
    for ours, theirs in layers.items():
        squares = []
        for place in product(*map(range, mask.shape)):
            if mask[place]:
                row = student[ours][place]
                row = np.array([sum(row * line) for line in weights[ours]]) if ours in weights else row
                squares += [(a - b) ** 2 for a, b in zip(row, teacher[theirs][place], strict=True)]
        pairs.append(sum(squares) / len(squares) if squares else 0.0)
    found = loss([torch.from_numpy(x) for x in student], [torch.from_numpy(x) for x in teacher], torch.from_numpy(mask))
    assert found.item() == pytest.approx(sum(pairs) / 3, rel=1e-9, abs=1e-12)


def test_the_gradient_is_that_of_finite_differences() -> None:
    loss = HiddenStates({0: 0}, student_widths=[2], teacher_widths=[3]).double()
    mask = torch.tensor([[True, False, True]])
    assert gradient_is_right(lambda x: loss([x], [seeded(1, 3, 3)], mask), 1, 3, 2)


def test_only_layers_of_another_width_have_a_projection_and_it_learns() -> None:
    loss = HiddenStates({0: 0, 1: 1}, **WIDTHS)
    assert [name for name, _ in loss.named_parameters()] == ["projections.0.weight"]
    student = [torch.randn(4, width) for width in WIDTHS["student_widths"]]
    teacher = [torch.randn(4, width, requires_grad=True) for width in WIDTHS["teacher_widths"]]
    loss(student, teacher).backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())
    assert all(state.grad is None for state in teacher)


def test_what_does_not_count_may_be_anything() -> None:
    loss = HiddenStates({0: 0}, student_widths=[2], teacher_widths=[3])
    student, teacher = torch.randn(1, 2, 2), torch.randn(1, 2, 3)
    student[0, 1], teacher[0, 1] = NAN, EXTREME
    assert finite(lambda x: loss([x], [teacher], torch.tensor([[True, False]])), student)
    assert loss([student], [teacher], torch.tensor([[False, False]])).item() == 0


def test_extreme_states_stay_finite() -> None:
    loss = HiddenStates({0: 0}, student_widths=[2], teacher_widths=[3])
    assert finite(lambda x: loss([x], [torch.full((1, 2, 3), -EXTREME)]), torch.full((1, 2, 2), EXTREME))


def test_a_map_to_a_layer_that_is_not_there_is_refused_with_all_its_problems() -> None:
    with pytest.raises(
        ConfigurationError, match=r"(?s)student: layer 3; expected 0 to 2.*teacher: layer -1; expected 0 to 3"
    ):
        HiddenStates({3: 0, 0: -1}, **WIDTHS)
    with pytest.raises(ConfigurationError, match="no pair of layers"):
        HiddenStates({}, **WIDTHS)


def test_states_that_do_not_fit_are_refused() -> None:
    loss = HiddenStates({0: 1}, **WIDTHS)
    student = [torch.randn(1, 2, width) for width in WIDTHS["student_widths"]]
    teacher = [torch.randn(1, 2, width) for width in WIDTHS["teacher_widths"]]
    with pytest.raises(ConfigurationError, match="teacher: 3 states; expected 4"):
        loss(student, teacher[:3])
    with pytest.raises(ConfigurationError, match=r"0 -> 1: teacher: shape \(1, 2, 4\); expected \(..., 3\)"):
        loss(student, [teacher[0], teacher[2], *teacher[2:]])
    with pytest.raises(ConfigurationError, match=r"mask: leading sizes \(1, 3\); expected \(1, 2\), as in student"):
        loss(student, teacher, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ConfigurationError, match=r"mask: torch\.int64; expected booleans"):
        loss(student, teacher, torch.ones(1, 2, dtype=torch.int64))
