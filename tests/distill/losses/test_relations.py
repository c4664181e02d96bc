import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from isthmus.features.errors import ConfigurationError
from isthmus.losses import attention_relations, tapped
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


def naive(student: Array, teacher: Array, heads: int, mask: Array) -> float:
    found = []
    for a, b, counts in zip(student, teacher, mask, strict=True):
        tokens = [token for token in range(len(a)) if counts[token]]
        for head in range(heads):
            for query in tokens:
                rows = []
                for vectors in (b, a):
                    wide = vectors.shape[1] // heads
                    cut = vectors[:, head * wide : (head + 1) * wide]
                    rows.append(softmax([sum(cut[query] * cut[key]) / math.sqrt(wide) for key in tokens]))
                found.append(kl(*rows))
    return sum(found) / len(found) if found else 0.0


@st.composite
def vectors(draw: st.DrawFn) -> tuple[Array, Array, int, Array]:
    batch, tokens, heads = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    student = draw(numbers(batch, tokens, heads * draw(st.integers(1, 2)), largest=3))
    teacher = draw(numbers(batch, tokens, heads * draw(st.integers(1, 3)), largest=3))
    return student, teacher, heads, draw(masks(batch, tokens))


@given(vectors())
def test_the_loss_is_the_formula(data: tuple[Array, Array, int, Array]) -> None:
    student, teacher, heads, mask = data
    a, b = torch.from_numpy(student), torch.from_numpy(teacher)
    loss = attention_relations(a, b, heads=heads, mask=torch.from_numpy(mask))
    assert loss.item() == pytest.approx(naive(student, teacher, heads, mask), rel=1e-6, abs=1e-9)
    loss = attention_relations(a, b, heads=heads)
    assert loss.item() == pytest.approx(naive(student, teacher, heads, mask | True), rel=1e-6, abs=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert gradient_is_right(lambda x: attention_relations(x, seeded(2, 3, 6), heads=2, mask=mask), 2, 3, 4)


def test_what_does_not_count_may_be_anything_and_a_sequence_of_nothing_is_none() -> None:
    student, teacher = seeded(2, 3, 4), seeded(2, 3, 6)
    expected = attention_relations(student[:1, :2], teacher[:1, :2], heads=2)
    student[0, 2], teacher[0, 2], student[1] = NAN, math.inf, NAN
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert attention_relations(student, teacher, heads=2, mask=mask).item() == pytest.approx(expected.item())
    assert finite(lambda x: attention_relations(x, teacher, heads=2, mask=mask), student)
    assert attention_relations(student, teacher, heads=2, mask=mask & False).item() == 0


def test_extreme_vectors_stay_finite() -> None:
    mask = torch.tensor([[True, True, False]])
    teacher = torch.tensor([[[EXTREME, -EXTREME], [-EXTREME, 0], [0, 0]]])
    assert finite(lambda x: attention_relations(x, teacher, heads=1, mask=mask), -teacher[..., :1])


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = seeded(1, 2, 4).requires_grad_(), seeded(1, 2, 4, seed=1).requires_grad_()
    attention_relations(student, teacher, heads=2).backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert teacher.grad is None


def test_widths_that_the_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="student: width 4; expected a multiple of the 3 relation heads"):
        attention_relations(seeded(1, 2, 4), seeded(1, 2, 6), heads=3)
    with pytest.raises(ConfigurationError, match="heads: 0; expected a number above 0"):
        attention_relations(seeded(1, 2, 4), seeded(1, 2, 6), heads=0)
    with pytest.raises(ConfigurationError, match="teacher: tokens 3; expected 2, as in student"):
        attention_relations(seeded(1, 2, 4), seeded(1, 3, 4), heads=2)


class Attention(nn.Module):
    """As much of a transformer's layer as has queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, width), nn.Linear(8, width)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.query(tokens) @ self.key(tokens).mT
        return scores


def test_a_student_comes_to_relate_its_queries_as_its_teacher_does() -> None:
    torch.manual_seed(0)
    student, teacher = Attention(8), Attention(12)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    tokens = torch.randn(8, 5, 8)
    losses = []
    for _ in range(60):
        with tapped(student, ["query", "key"]) as ours, tapped(teacher, ["query", "key"]) as theirs:
            student(tokens)
            teacher(tokens)
        loss = sum((attention_relations(ours[name], theirs[name], heads=2) for name in ours), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert all(parameter.grad is None for parameter in teacher.parameters())
