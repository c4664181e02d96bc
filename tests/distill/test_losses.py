import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.losses import distillation_loss

LOGITS = st.floats(-15, 15)


def naive(rows: list[tuple[float, int, float]], temperature: float, soft: float) -> float:
    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def entropy(p: float, q: float) -> float:
        return -p * math.log(q) - (1 - p) * math.log(1 - q)

    total = 0.0
    for student, label, teacher in rows:
        hard = entropy(label, sigma(student))
        softened = entropy(sigma(teacher / temperature), sigma(student / temperature))
        total += (1 - soft) * hard + soft * temperature**2 * softened
    return total / len(rows)


@given(
    st.lists(st.tuples(LOGITS, st.integers(0, 1), LOGITS), min_size=1, max_size=8),
    st.floats(0.5, 10),
    st.floats(0, 1),
)
def test_the_loss_is_the_formula(rows: list[tuple[float, int, float]], temperature: float, soft: float) -> None:
    student, labels, teacher = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    loss = distillation_loss(student, labels, teacher, temperature=temperature, soft_weight=soft)
    assert loss.item() == pytest.approx(naive(rows, temperature, soft), rel=1e-6, abs=1e-9)


def test_without_soft_weight_the_teacher_has_no_part() -> None:
    student, labels = torch.zeros(3), torch.ones(3)
    loss = distillation_loss(student, labels, torch.full((3,), torch.nan), temperature=2, soft_weight=0)
    assert loss.item() == pytest.approx(math.log(2))


def test_the_soft_gradient_hardly_depends_on_the_temperature() -> None:
    gradients = []
    for temperature in (20.0, 40.0):
        student = torch.zeros(1, requires_grad=True)
        distillation_loss(student, torch.ones(1), torch.ones(1), temperature=temperature, soft_weight=1).backward()  # type: ignore[no-untyped-call]
        assert student.grad is not None
        gradients.append(student.grad.item())
    assert gradients[0] == pytest.approx(gradients[1], rel=0.01)
