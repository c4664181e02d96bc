import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import ConfigurationError
from isthmus.losses import (
    Adversarial,
    Objective,
    PatchDiscriminator,
    Term,
    hinge_discriminator,
    hinge_generator,
)
from tests.distill.losses.support import EXTREME, Array, finite, gradient_is_right, numbers, seeded


@given(st.integers(1, 4).flatmap(numbers), st.integers(1, 4).flatmap(numbers))
def test_the_losses_are_their_formulas(real: Array, fake: Array) -> None:
    a, b = torch.from_numpy(real), torch.from_numpy(fake)
    n, m = len(real), len(fake)
    hinge = sum(max(0, 1 - x) for x in real) / n + sum(max(0, 1 + x) for x in fake) / m
    assert hinge_discriminator(a, b).item() == pytest.approx(hinge)
    assert hinge_generator(b).item() == pytest.approx(-sum(fake) / m)


def test_the_gradients_are_those_of_finite_differences() -> None:
    assert gradient_is_right(lambda x: hinge_discriminator(x, seeded(2, 3)), 4)
    assert gradient_is_right(lambda x: hinge_discriminator(seeded(2, 3), x), 4)
    assert gradient_is_right(hinge_generator, 4)


def test_extreme_scores_stay_finite_and_empty_ones_are_refused() -> None:
    extreme = torch.tensor([EXTREME, -EXTREME])
    assert finite(lambda x: hinge_discriminator(x, -x), extreme)
    with pytest.raises(ConfigurationError, match=r"fake: empty: shape \(0,\)"):
        hinge_discriminator(extreme, torch.zeros(0))
    assert finite(hinge_generator, extreme)
    with pytest.raises(ConfigurationError, match="fake: a list; expected a tensor"):
        hinge_generator([])  # type: ignore[arg-type]


def test_a_score_sees_its_patch_alone() -> None:
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(3, width=4).eval()
    images = torch.randn(2, 3, 128, 128, requires_grad=True)
    scores = discriminator(images)
    assert scores.shape == (2, 1, 15, 15)
    scores[0, 0, 7, 7].backward()
    assert images.grad is not None
    assert images.grad[1].abs().sum() == 0
    rows, columns = images.grad[0].abs().sum(0).nonzero().unbind(1)
    assert [int(x.max() - x.min()) + 1 for x in (rows, columns)] == [46, 46]


def test_a_discriminator_learns_to_tell_two_kinds_of_images() -> None:
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(1, width=4, halvings=1)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.02)
    real, fake = torch.randn(8, 1, 8, 8) + 1, torch.randn(8, 1, 8, 8) - 1
    losses = []
    for _ in range(15):
        loss = hinge_discriminator(discriminator(real), discriminator(fake))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_each_gets_the_gradient_of_its_own_loss() -> None:
    torch.manual_seed(1)
    # In evaluation mode spectral norm stays as it is, and both ways see the same discriminator.
    discriminator = PatchDiscriminator(3, width=4, halvings=1).eval()
    teacher, student = torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16, requires_grad=True)
    weights = list(discriminator.parameters())
    value = Adversarial(discriminator)(student, teacher)
    mine, *theirs = torch.autograd.grad(value, [student, *weights])
    own = hinge_generator(discriminator(student))
    assert value.item() == pytest.approx(own.item())
    torch.testing.assert_close(mine, torch.autograd.grad(own, student)[0])
    learning = hinge_discriminator(discriminator(teacher), discriminator(student.detach()))
    for found, expected in zip(theirs, torch.autograd.grad(learning, weights), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.accept
def test_a_student_comes_to_its_teacher_by_a_discriminator_alone() -> None:
    torch.manual_seed(0)
    shade = torch.nn.Parameter(torch.tensor(-0.5))
    objective = Objective(
        {
            "adversarial": Term(
                Adversarial(PatchDiscriminator(1, width=4, halvings=1)),
                student="student.image",
                teacher="teacher.image",
            )
        }
    )
    optimizer = torch.optim.AdamW([shade, *objective.parameters()], lr=0.005, weight_decay=0)
    assert any("discriminator" in name for name, _ in objective.named_parameters())
    shades = []
    for _ in range(240):
        image, wanted = torch.randn(8, 1, 8, 8) * 0.1 + shade, (torch.randn(8, 1, 8, 8) * 0.1 + 0.5).half()
        total, terms = objective({"image": image}, {"image": wanted}, None, 0.0)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        assert terms["adversarial"].isfinite()
        shades.append(shade.item())
    # It circles around the teacher's.
    assert sum(shades[-100:]) / 100 == pytest.approx(0.5, abs=0.25)
