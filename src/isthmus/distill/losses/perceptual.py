"""A loss of images, in the features of a frozen network."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from isthmus.distill.shapes import check_pair, check_tensors, to_float32
from isthmus.distill.teachers.taps import tapped
from isthmus.features.errors import ConfigurationError, Problem


class Perceptual(nn.Module):
    """Distance of images in the features of a frozen network (Johnson, Alahi and Fei-Fei, 2016, arXiv:1603.08155).

    The loss is the sum over the layers l of the mean of (f_l(student) - f_l(teacher))², with f_l the output of layer l.

    Args:
        network: network that takes the images; in eval mode, with no parameter that requires a gradient. Images in half
            precision are converted to float32 first. It is not a submodule: it is not moved, saved or trained with the
            loss.
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
        """Return how different the images of student and teacher look to the network, summed over its compared layers.

        Both are (batch, channels, height, width). The teacher's images get no gradient. Raises a ConfigurationError if
        the shapes differ, or if a layer is not called or returns no tensor.
        """
        check_pair("perceptual loss", "batch channels height width", student, teacher)
        (network,) = self._network
        with tapped(network, self.layers) as seen:
            network(to_float32(student))
        with torch.no_grad(), tapped(network, self.layers) as wanted:
            network(to_float32(teacher))  # cached outputs have half precision
        problems = [
            Problem(layer, f"returns a {type(seen[layer]).__name__}" if layer in seen else "is not called", "a tensor")
            for layer in self.layers
            if not isinstance(seen.get(layer), Tensor)
        ]
        check_tensors("perceptual loss: layers of the network", *problems)
        return torch.stack(
            [mse_loss(to_float32(seen[layer]), to_float32(wanted[layer])) for layer in self.layers]
        ).sum()
