"""Adversarial losses: a discriminator learns to tell the student's outputs from the teacher's."""

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import relu
from torch.nn.utils.parametrizations import spectral_norm

from isthmus.distill.shapes import check_tensors, floats, to_float32


def hinge_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Return the hinge loss that trains a discriminator to tell outputs of the teacher from outputs of the student.

    The loss is mean max(0, 1 - real) + mean max(0, 1 + fake) (Lim and Ye, 2017, arXiv:1705.02894). `real` has the
    discriminator's scores for outputs of the teacher, and `fake` its scores for outputs of the student. Detach the
    student's outputs before scoring them; otherwise this loss also trains the student.
    """
    check_tensors("hinge discriminator", real=floats(real, "..."))
    check_tensors("hinge discriminator", fake=floats(fake, "..."))
    return relu(1 - to_float32(real)).mean() + relu(1 + to_float32(fake)).mean()


def hinge_generator(fake: Tensor) -> Tensor:
    """Return the hinge loss that trains a student to make its outputs look like the teacher's (Lim and Ye, 2017).

    The loss is minus the mean of `fake`, the discriminator's scores for outputs of the student.
    """
    check_tensors("hinge generator", fake=floats(fake, "..."))
    return -to_float32(fake).mean()


class PatchDiscriminator(nn.Sequential):
    """A discriminator that scores overlapping patches of images (PatchGAN, Isola et al., 2017, arXiv:1611.07004).

    Maps (batch, channels, height, width) to unbounded scores (batch, 1, rows, columns). 4x4 convolutions halve height
    and width and double the channels, and one more scores. Spectral norm (Miyato et al., 2018, arXiv:1802.05957)
    replaces the paper's batch norm, so the score of an image does not depend on other images.

    Args:
        channels: number of channels of the images.
        width: number of channels after the first convolution.
        halvings: number of convolutions that halve height and width; with 3, a score depends on 46x46 pixels.
    """

    def __init__(self, channels: int, *, width: int = 64, halvings: int = 3):
        layers: list[nn.Module] = []
        for halving in range(halvings):
            wider = width * 2**halving
            layers += [spectral_norm(nn.Conv2d(channels, wider, 4, stride=2, padding=1)), nn.LeakyReLU(0.2)]
            channels = wider
        super().__init__(*layers, spectral_norm(nn.Conv2d(channels, 1, 4, padding=1)))


class Adversarial(nn.Module):
    """A student and a discriminator that are trained together, as a term whose value is the student's loss.

    One optimizer has the weights of both, and each gets the gradient of its own loss. The term's weight scales both
    losses; under AdamW without `clip` this does not affect the discriminator.

    Args:
        discriminator: scores a batch of outputs, such as a `PatchDiscriminator`; trained with this term.
    """

    def __init__(self, discriminator: nn.Module) -> None:
        super().__init__()
        self.discriminator = discriminator

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of the student on a batch; its backward pass also trains the discriminator.

        The value is the student's loss alone. The discriminator gets the gradient of its own loss. `student` and
        `teacher` are outputs for the same rows, in the shape that the discriminator takes.
        """
        student, teacher = to_float32(student), to_float32(teacher.detach())
        constants = {name: weights.detach() for name, weights in self.discriminator.named_parameters()}
        generating = hinge_generator(functional_call(self.discriminator, constants, (student,)))
        learning = hinge_discriminator(self.discriminator(teacher), self.discriminator(student.detach()))
        # Adds 0 to the value, but the gradient of the discriminator.
        return generating + (learning - learning.detach())
