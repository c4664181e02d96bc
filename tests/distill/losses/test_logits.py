import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isthmus.features.errors import ConfigurationError
from isthmus.losses import (
    binary_hard_targets,
    binary_soft_targets,
    generalized,
    hard_targets,
    soft_targets,
    top_k_tail,
    top_k_targets,
)
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

TEMPERATURES = st.floats(0.5, 10)
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 5))

Soft = Callable[..., Tensor]
SOFT: list[Soft] = [soft_targets, *(partial(generalized, beta=beta) for beta in (0.0, 0.3, 1.0))]
BETAS = st.sampled_from([0.0, 1.0]) | st.floats(0.01, 0.99)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def t(array: Array) -> Tensor:
    return torch.from_numpy(array)


@st.composite
def classified(draw: st.DrawFn, least: int = 1) -> tuple[Array, Array, Array, Array]:
    """Student, teacher, labels and mask of some rows."""
    rows, classes = draw(st.integers(1, 4)), draw(st.integers(least, 5))
    labels = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)))
    return draw(numbers(rows, classes)), draw(numbers(rows, classes)), labels, draw(masks(rows))


@given(classified(), TEMPERATURES)
def test_soft_targets_are_the_formula(data: tuple[Array, Array, Array, Array], temperature: float) -> None:
    student, teacher, _, mask = data
    rows = [
        temperature**2 * kl(softmax(b / temperature), softmax(a / temperature))
        for a, b, counts in zip(student, teacher, mask, strict=True)
        if counts
    ]
    loss = soft_targets(t(student), t(teacher), temperature=temperature, mask=t(mask))
    assert loss.item() == pytest.approx(mean(rows), rel=1e-6, abs=1e-9)


@given(classified(), TEMPERATURES)
def test_binary_soft_targets_are_the_formula(data: tuple[Array, Array, Array, Array], temperature: float) -> None:
    student, teacher, _, mask = data
    found = []
    for a, b in zip(student[mask].flat, teacher[mask].flat, strict=True):
        p, q = ([1 / (1 + math.exp(-x / temperature)), 1 / (1 + math.exp(x / temperature))] for x in (b, a))
        found.append(temperature**2 * kl(p, q))
    wide = np.broadcast_to(mask[:, None], student.shape).copy()
    loss = binary_soft_targets(t(student), t(teacher), temperature=temperature, mask=t(wide))
    assert loss.item() == pytest.approx(mean(found), rel=1e-6, abs=1e-8)


@given(classified(least=2), TEMPERATURES)
def test_binary_targets_have_the_gradient_of_the_loss_of_two_classes(
    data: tuple[Array, Array, Array, Array], temperature: float
) -> None:
    a, teacher, labels = t(data[0][:, 0]).requires_grad_(), t(data[1][:, 0]), t(data[2] % 2)
    ours = 0.3 * binary_hard_targets(a, labels.double()) + 0.7 * binary_soft_targets(
        a, teacher, temperature=temperature
    )
    two, other = (torch.stack([torch.zeros_like(x), x], 1) for x in (a, teacher))
    theirs = 0.3 * hard_targets(two, labels) + 0.7 * soft_targets(two, other, temperature=temperature)
    torch.testing.assert_close(*(torch.autograd.grad(loss, a)[0] for loss in (ours, theirs)))


@given(classified())
def test_hard_targets_are_the_formula(data: tuple[Array, Array, Array, Array]) -> None:
    student, _, labels, mask = data
    rows = [-math.log(softmax(a)[y]) for a, y, counts in zip(student, labels, mask, strict=True) if counts]
    loss = hard_targets(t(student), t(np.where(mask, labels, -100)))
    assert loss.item() == pytest.approx(mean(rows), rel=1e-6, abs=1e-9)


def test_binary_hard_targets_are_the_formula() -> None:
    loss = binary_hard_targets(
        torch.tensor([2.0, -1.0, NAN]), torch.tensor([1.0, 0.25, 1.0]), mask=torch.tensor([True, True, False])
    )
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))
    assert loss.item() == pytest.approx((-math.log(p) - 0.25 * math.log(q) - 0.75 * math.log(1 - q)) / 2)


@st.composite
def cached(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    """A student's logits, and k of a teacher's probabilities with their classes."""
    rows, classes = draw(SIZES)
    k = draw(st.integers(1, classes))
    teacher = np.array([softmax(row) for row in draw(numbers(rows, classes))])
    order = np.argsort(-teacher, axis=1)[:, :k]
    return draw(numbers(rows, classes)), np.take_along_axis(teacher, order, 1), order


def between(p: list[float], q: list[float], beta: float) -> float:
    """The divergence of GKD, of the teacher's p and the student's q, as it reads."""
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@given(classified(), TEMPERATURES, BETAS)
def test_generalized_targets_are_the_formula(
    data: tuple[Array, Array, Array, Array], temperature: float, beta: float
) -> None:
    student, teacher, _, mask = data
    rows = [
        temperature**2 * between(softmax(b / temperature), softmax(a / temperature), beta)
        for a, b, counts in zip(student, teacher, mask, strict=True)
        if counts
    ]
    loss = generalized(t(student), t(teacher), beta=beta, temperature=temperature, mask=t(mask))
    assert loss.item() == pytest.approx(mean(rows), rel=1e-6, abs=1e-8)


@given(cached(), TEMPERATURES, BETAS)
def test_top_k_with_a_tail_is_the_formula(data: tuple[Array, Array, Array], temperature: float, beta: float) -> None:
    student, probabilities, indexes = data
    rows = []
    for a, p, chosen in zip(student, probabilities, indexes, strict=True):
        q, theirs = softmax(a / temperature), [*p]
        ours = [q[index] for index in chosen]
        if len(chosen) < len(a):
            theirs.append(max(0.0, 1 - sum(p)))
            ours.append(sum(value for index, value in enumerate(q) if index not in chosen))
        floored = [max(value, 2.0**-24) for value in theirs]
        rows.append(temperature**2 * between([value / sum(floored) for value in floored], ours, beta))
    loss = top_k_tail(t(student), t(probabilities), t(indexes), beta=beta, temperature=temperature)
    assert loss.item() == pytest.approx(mean(rows), rel=1e-5, abs=1e-6)


@given(classified(), TEMPERATURES, BETAS)
def test_all_of_the_probabilities_leave_no_tail(
    data: tuple[Array, Array, Array, Array], temperature: float, beta: float
) -> None:
    student, teacher, _, mask = (t(array) for array in data)
    values, indexes = (teacher / temperature / 4).softmax(-1).sort(-1, descending=True)
    loss = top_k_tail(student, values, indexes, beta=beta, temperature=temperature, mask=mask)
    expected = generalized(student, teacher / 4, beta=beta, temperature=temperature, mask=mask)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"beta: 1.5; expected 0 to 1"):
        generalized(seeded(1, 3), seeded(1, 3), beta=1.5)
    with pytest.raises(ConfigurationError, match=r"beta: -1; expected 0 to 1"):
        top_k_tail(seeded(1, 3), seeded(1, 1).sigmoid(), torch.zeros(1, 1, dtype=torch.int64), beta=-1)


@given(cached(), TEMPERATURES)
def test_top_k_targets_are_the_formula(data: tuple[Array, Array, Array], temperature: float) -> None:
    student, probabilities, indexes = data
    rows = []
    for a, p, chosen in zip(student, probabilities, indexes, strict=True):
        others = len(a) - len(chosen)
        full = [max(0.0, 1 - sum(p)) / others if others else 0.0] * len(a)
        for index, value in zip(chosen, p, strict=True):
            full[index] = value
        rows.append(temperature**2 * kl([x / sum(full) for x in full], softmax(a / temperature)))
    loss = top_k_targets(t(student), t(probabilities), t(indexes), temperature=temperature)
    assert loss.item() == pytest.approx(mean(rows), rel=1e-5, abs=1e-8)


@given(classified(), TEMPERATURES)
def test_all_of_the_probabilities_are_the_soft_targets(
    data: tuple[Array, Array, Array, Array], temperature: float
) -> None:
    student, teacher, _, mask = (t(array) for array in data)
    values, indexes = (teacher / temperature).softmax(-1).sort(-1, descending=True)
    loss = top_k_targets(student, values, indexes, temperature=temperature, mask=mask)
    expected = soft_targets(student, teacher, temperature=temperature, mask=mask)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)


def test_rounded_probabilities_of_all_classes_are_scaled_up() -> None:
    student, indexes = seeded(1, 2), torch.tensor([[1, 0]])
    losses = [
        top_k_targets(student, torch.tensor([p]).double(), indexes, temperature=1).item()
        for p in ([0.6, 0.2], [0.75, 0.25])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_rounded_probabilities_above_one_are_scaled_down() -> None:
    student, indexes = seeded(1, 4), torch.tensor([[2, 0]])
    loss = top_k_targets(student, torch.tensor([[0.8, 0.4]]).double(), indexes, temperature=1)
    assert loss.item() == pytest.approx(
        top_k_targets(student, torch.tensor([[2 / 3, 1 / 3]]).double(), indexes, temperature=1).item(), abs=1e-6
    )


@pytest.mark.parametrize("loss", SOFT)
def test_the_gradient_is_that_of_finite_differences(loss: Soft) -> None:
    mask = torch.tensor([True, False, True])
    assert gradient_is_right(lambda a: loss(a, seeded(3, 4), temperature=2.0, mask=mask), 3, 4)


def test_the_other_gradients_are_those_of_finite_differences() -> None:
    probabilities, indexes = seeded(3, 6).softmax(-1).topk(2)
    assert gradient_is_right(lambda a: top_k_targets(a, probabilities, indexes, temperature=2.0), 3, 6)
    for beta in (0.0, 0.3, 1.0):
        tail = partial(top_k_tail, beta=beta, temperature=2.0)
        assert gradient_is_right(lambda a, tail=tail: tail(a, probabilities, indexes), 3, 6)  # type: ignore[misc]
    assert gradient_is_right(lambda a: binary_soft_targets(a, seeded(5), temperature=2.0), 5)
    assert gradient_is_right(lambda a: hard_targets(a, torch.tensor([0, -100, 3])), 3, 4)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3])
def test_extreme_logits_stay_finite(temperature: float) -> None:
    student = torch.tensor([[EXTREME, -EXTREME, 0], [-EXTREME, EXTREME, EXTREME]])
    teacher = -student
    for loss in SOFT:
        assert finite(lambda a, loss=loss: loss(a, teacher, temperature=temperature), student)  # type: ignore[misc]
    assert finite(lambda a: binary_soft_targets(a, teacher, temperature=temperature), student)
    probabilities, indexes = teacher.softmax(-1).topk(2)
    assert finite(lambda a: top_k_targets(a, probabilities, indexes, temperature=temperature), student)
    for beta in (0.0, 0.3, 1.0):
        tail = partial(top_k_tail, beta=beta, temperature=temperature)
        assert finite(lambda a, tail=tail: tail(a, probabilities, indexes), student)  # type: ignore[misc]
    assert finite(lambda a: hard_targets(a, torch.tensor([1, 0])), student)


def test_one_class_has_nothing_to_learn() -> None:
    student, teacher = seeded(3, 1), seeded(3, 1, seed=1)
    for loss in SOFT:
        assert loss(student, teacher, temperature=2.0).item() == 0
    assert top_k_targets(student, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), temperature=2).item() == 0


def test_a_high_temperature_compares_centered_logits() -> None:
    student, teacher = seeded(4, 6), seeded(4, 6, seed=1)
    gaps = (student - student.mean(-1, keepdim=True)) - (teacher - teacher.mean(-1, keepdim=True))
    loss = soft_targets(student, teacher, temperature=1e4)
    assert loss.item() == pytest.approx(gaps.square().mean().item() / 2, rel=1e-3)


def test_a_low_temperature_asks_for_the_teacher_s_first_class_alone() -> None:
    student, teacher = torch.tensor([[0.0, 2.0, 1.0]]).double(), torch.tensor([[3.0, 1.0, 0.0]]).double()
    assert soft_targets(student, teacher, temperature=1e-2).item() / 1e-2 == pytest.approx(2.0)


def test_leading_sizes_are_free() -> None:
    student, teacher, labels = seeded(2, 3, 4), seeded(2, 3, 4, seed=1), torch.tensor([[0, 1, 2], [3, -100, -100]])
    assert hard_targets(student, labels).item() == pytest.approx(
        hard_targets(student.flatten(0, 1), labels.flatten()).item()
    )
    assert soft_targets(student, teacher, temperature=2.0).item() == pytest.approx(
        soft_targets(student.flatten(0, 1), teacher.flatten(0, 1), temperature=2.0).item()
    )


def test_what_does_not_count_may_be_anything() -> None:
    student, teacher = seeded(2, 3), seeded(2, 3, seed=1)
    student[1], teacher[1] = NAN, math.inf
    mask, labels = torch.tensor([True, False]), torch.tensor([1, -100])
    indexes = torch.tensor([[0], [99]])
    for loss in SOFT:
        assert finite(lambda a, loss=loss: loss(a, teacher, temperature=2.0, mask=mask), student)  # type: ignore[misc]
    assert finite(lambda a: binary_soft_targets(a[:, 0], teacher[:, 0], temperature=2.0, mask=mask), student)
    assert finite(lambda a: top_k_targets(a, teacher[:, :1].sigmoid(), indexes, temperature=2, mask=mask), student)
    assert finite(lambda a: top_k_tail(a, teacher[:, :1].sigmoid(), indexes, beta=1, mask=mask), student)
    assert finite(lambda a: hard_targets(a, labels), student)


def test_if_nothing_counts_the_loss_is_zero_with_a_gradient_of_zero() -> None:
    student = seeded(2, 3).requires_grad_()
    nothing, labels = torch.tensor([False, False]), torch.tensor([-100, -100])
    for loss in (
        soft_targets(student, seeded(2, 3), temperature=2.0, mask=nothing),
        top_k_targets(student, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64), temperature=2, mask=nothing),
        hard_targets(student, labels),
    ):
        assert loss.item() == 0
        assert torch.autograd.grad(loss, student)[0].abs().sum() == 0


def test_the_teacher_gets_no_gradient() -> None:
    teacher = seeded(3, 4).requires_grad_()
    student = seeded(3, 4, seed=1).requires_grad_()
    probabilities, indexes = teacher.softmax(-1).topk(2)
    for loss in (
        soft_targets(student, teacher, temperature=2.0),
        binary_soft_targets(student, teacher, temperature=2.0),
        top_k_targets(student, probabilities, indexes, temperature=2.0),
    ):
        assert torch.autograd.grad(loss, teacher, allow_unused=True, retain_graph=True)[0] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_to_float32(dtype: torch.dtype) -> None:
    student, teacher = seeded(3, 4).to(dtype), seeded(3, 4, seed=1).to(dtype)
    for loss in SOFT:
        found = loss(student, teacher, temperature=2.0)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(loss(student.double(), teacher.double(), temperature=2.0).item(), rel=1e-4)


def test_logits_of_other_classes_are_refused() -> None:
    for loss in SOFT:
        with pytest.raises(ConfigurationError, match="teacher: classes 5; expected 4, as in student"):
            loss(seeded(3, 4), seeded(3, 5), temperature=2.0)
    with pytest.raises(ConfigurationError, match=r"leading sizes \(2,\); expected \(3,\), as in student"):
        hard_targets(seeded(3, 4), torch.zeros(2, dtype=torch.int64))


def test_a_byte_that_is_a_label_is_not_taken_for_the_ignored_one() -> None:
    label = torch.tensor([156], dtype=torch.uint8)
    assert hard_targets(torch.zeros(1, 200), label).item() == pytest.approx(math.log(200))


def test_labels_and_indexes_of_no_class_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="labels: 4; expected 0 to 3"):
        hard_targets(seeded(2, 4), torch.tensor([4, 0]))
    with pytest.raises(ConfigurationError, match="labels: -1; expected 0 to 3"):
        hard_targets(seeded(2, 4), torch.tensor([-1, 0]))
    with pytest.raises(ConfigurationError, match="indexes: 7; expected 0 to 3"):
        top_k_targets(seeded(1, 4), torch.ones(1, 1), torch.tensor([[7]]), temperature=2.0)
    with pytest.raises(ConfigurationError, match="indexes: 2 a row; expected at most the student's 1 classes"):
        top_k_targets(seeded(1, 1), torch.ones(1, 2), torch.tensor([[0, 0]]), temperature=2.0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, NAN])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    for loss in [*SOFT, binary_soft_targets]:
        with pytest.raises(ConfigurationError, match=r"temperature: .* expected a finite number above 0"):
            loss(seeded(3, 4), seeded(3, 4), temperature=temperature)


def test_an_empty_batch_is_refused() -> None:
    for loss in [*SOFT, binary_soft_targets]:
        with pytest.raises(ConfigurationError, match=r"student: empty: shape \(0, 4\)"):
            loss(torch.zeros(0, 4), torch.zeros(0, 4), temperature=2.0)
    with pytest.raises(ConfigurationError, match="labels: empty"):
        hard_targets(seeded(1, 4), torch.zeros(0, dtype=torch.int64))
