"""Losses of images: on feature maps, and on features of a frozen network."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss, normalize

from isthmus.distill.shapes import agree, agree_pair, floats, precise
from isthmus.distill.teachers.taps import tapped
from isthmus.features.errors import ConfigurationError, Problem


def attention_transfer(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the activation-based attention transfer loss (Zagoruyko and Komodakis, ICLR 2017, arXiv:1612.03928).

    The attention Q(A), (height · width), of feature maps A is the sum of A² over the channels. The loss is the mean
    over the images of::

        ‖Q(S) / ‖Q(S)‖₂ - Q(T) / ‖Q(T)‖₂‖₂²

    The paper does not square the norm; the square gives a defined gradient where both are equal. The feature maps S of
    the student and T of the teacher are (batch, channels, height, width); their channels may differ.
    """
    agree(
        "attention transfer",
        student=floats(student, "batch student height width"),
        teacher=floats(teacher, "batch teacher height width"),
    )
    return (_attention(student) - _attention(teacher.detach())).square().sum(-1).mean()


class FeatureMaps(nn.Module):
    """Distance of feature maps, after a learned 1x1 convolution if the channels differ.

    The convolution is the regressor of FitNets (Romero et al., 2015, arXiv:1412.6550) without spatial extent. With the
    student's maps S, convolved if needed, and the teacher's T, the loss is the mean of |S - T| for "l1", or of (S - T)²
    for "l2".

    Args:
        student_channels: number of channels of the student's maps.
        teacher_channels: number of channels of the teacher's maps.
        norm: "l1" or "l2".

    Raises:
        ConfigurationError: `norm` is not one of these.
    """

    def __init__(self, student_channels: int, teacher_channels: int, *, norm: Literal["l1", "l2"] = "l2"):
        super().__init__()
        agree("feature maps", None if norm in _DISTANCES else Problem("norm", repr(norm), '"l1" or "l2"'))
        self.channels = student_channels, teacher_channels
        self.norm = norm
        same = student_channels == teacher_channels
        self.projection = nn.Identity() if same else nn.Conv2d(*self.channels, kernel_size=1, bias=False)

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of a batch of (batch, channels, height, width) maps."""
        ours, theirs = (f"batch {channels} height width" for channels in self.channels)
        agree("feature maps", student=floats(student, ours), teacher=floats(teacher, theirs))
        return _DISTANCES[self.norm](self.projection(precise(student)), precise(teacher.detach()))


class Perceptual(nn.Module):
    """Distance of images in the features of a frozen network (Johnson, Alahi and Fei-Fei, 2016, arXiv:1603.08155).

    With f_l the output of layer l of the network, the loss is the sum over the layers of the mean of (f_l(student) -
    f_l(teacher))².

    Args:
        network: network that takes the images in at least float32; in eval mode, with no parameter that requires a
            gradient. It is not a submodule: it is not moved, saved or trained with the loss.
        layers: names of its submodules whose outputs are compared.

    Raises:
        ConfigurationError: the network is not frozen, or lacks a layer.
    """

    def __init__(self, network: nn.Module, layers: Sequence[str]):
        super().__init__()
        learning = sum(parameter.requires_grad for parameter in network.parameters())
        problems = [] if layers else [Problem("layers", "none", "names of submodules")]
        if network.training:
            problems.append(Problem("network", "is in training mode", "evaluation mode"))
        if learning:
            problems.append(Problem("network", f"{learning} of its parameters require a gradient", "no gradients"))
        if problems:
            raise ConfigurationError("perceptual loss", problems, remedy="call network.eval().requires_grad_(False)")
        with tapped(network, layers):
            self.layers = tuple(layers)
        self._network = (network,)  # in a tuple, so that torch does not register it as a submodule

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss of a batch of (batch, channels, height, width) images."""
        agree_pair("perceptual loss", "batch channels height width", student, teacher)
        (network,) = self._network
        with tapped(network, self.layers) as seen:
            network(precise(student))
        with torch.no_grad(), tapped(network, self.layers) as wanted:
            network(precise(teacher))  # cached outputs have half precision
        problems = [
            Problem(layer, f"returns a {type(seen[layer]).__name__}" if layer in seen else "is not called", "a tensor")
            for layer in self.layers
            if not isinstance(seen.get(layer), Tensor)
        ]
        agree("perceptual loss: layers of the network", *problems)
        return torch.stack([mse_loss(precise(seen[layer]), precise(wanted[layer])) for layer in self.layers]).sum()


_DISTANCES = {"l1": l1_loss, "l2": mse_loss}


def _attention(maps: Tensor) -> Tensor:
    return normalize(precise(maps).square().sum(1).flatten(1), dim=-1)
