"""Losses of a student whose outputs a discriminator takes for the teacher's, or does not.

The discriminator learns from one loss of a pair, the student from the other. `Adversarial` is both in one term of an
objective. In a loop of one's own, each may have an optimizer of its own.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import relu

from isthmus.distill.shapes import agree, floats, precise
from isthmus.features.errors import Problem


def hinge_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Hinge loss of the discriminator (Lim and Ye, 2017, arXiv:1705.02894).

    mean max(0, 1 - real) + mean max(0, 1 + fake).

    Args:
        real: scores of the teacher's outputs, of any shape.
        fake: scores of the student's outputs, detached from the student, of any shape.
    """
    agree("hinge discriminator", real=floats(real, "..."))
    agree("hinge discriminator", fake=floats(fake, "..."))
    return relu(1 - precise(real)).mean() + relu(1 + precise(fake)).mean()


def hinge_generator(fake: Tensor) -> Tensor:
    """Hinge loss of the student (Lim and Ye, 2017, arXiv:1705.02894): -mean fake, which has no lower bound.

    Args:
        fake: scores of the student's outputs, of any shape.
    """
    agree("hinge generator", fake=floats(fake, "..."))
    return -precise(fake).mean()


def least_squares_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Least-squares loss of the discriminator (LSGAN, Mao et al., 2017, arXiv:1611.04076).

    ½ mean (real - 1)² + ½ mean fake².

    Args:
        real: scores of the teacher's outputs, of any shape.
        fake: scores of the student's outputs, detached from the student, of any shape.
    """
    agree("least-squares discriminator", real=floats(real, "..."))
    agree("least-squares discriminator", fake=floats(fake, "..."))
    return ((precise(real) - 1).square().mean() + precise(fake).square().mean()) / 2


def least_squares_generator(fake: Tensor) -> Tensor:
    """Least-squares loss of the student (LSGAN, Mao et al., 2017, arXiv:1611.04076): ½ mean (fake - 1)².

    Args:
        fake: scores of the student's outputs, of any shape.
    """
    agree("least-squares generator", fake=floats(fake, "..."))
    return (precise(fake) - 1).square().mean() / 2


class PatchDiscriminator(nn.Sequential):
    """Scores overlapping patches of images (PatchGAN, Isola et al., 2017, arXiv:1611.07004).

    (batch, channels, height, width) to (batch, 1, rows, columns) scores without a bound.

    Convolutions of 4x4, each halving height and width and doubling the channels, then one that scores. Spectral norm
    (Miyato et al., 2018, arXiv:1802.05957) stands in for the paper's batch norm: no image's score depends on others.

    Args:
        channels: of the images.
        width: channels after the first convolution.
        halvings: number of convolutions that halve; with 3 a score sees 46x46 pixels.
    """

    def __init__(self, channels: int, *, width: int = 64, halvings: int = 3):
        layers: list[nn.Module] = []
        for halving in range(halvings):
            wider = width * 2**halving
            layers += [_normed(nn.Conv2d(channels, wider, 4, stride=2, padding=1)), nn.LeakyReLU(0.2)]
            channels = wider
        super().__init__(*layers, _normed(nn.Conv2d(channels, 1, 4, padding=1)))


class Adversarial(nn.Module):
    """A student against a discriminator, which learns with it: a term whose value is the student's loss.

    One optimizer has the weights of both, and each gets the gradient of its own loss: the student's loss sees the
    discriminator's weights as numbers, the discriminator's loss sees the student's outputs as numbers. A weight of the
    term scales both, which AdamW does not notice in the discriminator; a `clip` does.

    Args:
        discriminator: gives scores of a batch of outputs, such as a `PatchDiscriminator`. It is trained with this term.
        loss: "hinge" or "least squares".
    """

    def __init__(self, discriminator: nn.Module, loss: Literal["hinge", "least squares"] = "hinge") -> None:
        super().__init__()
        agree("adversarial", None if loss in _PAIRS else Problem("loss", repr(loss), '"hinge" or "least squares"'))
        self.discriminator = discriminator
        self.discriminating, self.generating = _PAIRS[loss]

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The student's loss of one batch; its gradient is the student's, and the discriminator's of its own loss.

        Args:
            student: its outputs, as the discriminator takes them.
            teacher: its outputs; get no gradient.
        """
        student, teacher = precise(student), precise(teacher.detach())
        held = {name: weights.detach() for name, weights in self.discriminator.named_parameters()}
        generating = self.generating(functional_call(self.discriminator, held, (student,)))
        learning = self.discriminating(self.discriminator(teacher), self.discriminator(student.detach()))
        # Nothing is added but the gradient.
        return generating + (learning - learning.detach())


_PAIRS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "hinge": (hinge_discriminator, hinge_generator),
    "least squares": (least_squares_discriminator, least_squares_generator),
}


def _normed(convolution: nn.Conv2d) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(convolution)
