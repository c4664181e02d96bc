"""Students that read images: MobileNets, U-Nets, or the user's module."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import hardsigmoid, interpolate, pixel_shuffle

from isthmus.distill.causal.models import call_function
from isthmus.distill.language.image import Image, MobileNet, UNet
from isthmus.distill.tabular.answers import LabelStudent
from isthmus.features.errors import ConfigurationError, Problem

STAGES: tuple[tuple[Any, ...], ...] = (
    (16, 1, 1, 3, True, nn.ReLU, 2),
    (24, 2, 4, 3, False, nn.ReLU, 2),
    (40, 3, 5, 5, True, nn.Hardswish, 2),
    (48, 2, 3, 5, True, nn.Hardswish, 1),
    (96, 3, 6, 5, True, nn.Hardswish, 2),
)
"""Stages of MobileNetV3-Small: channels, blocks, expansion, kernel, squeeze and excitation, activation, stride."""
_SMALLEST = 8
"""Smallest side of a map that a MobileNet halves, so that it still sees where things are in a small image."""
_GAINS = {nn.ReLU: math.sqrt(2), nn.Hardswish: 1.67}
"""Factors of initial weights that keep the scale of the states from layer to layer, in place of batch norm."""
_CLEAR = 3.0
"""Logit of the factor by which a U-Net multiplies colors at first, 0.95."""


class ImageNetwork(nn.Module):
    """A student as a device runs it: from images to the answer, such as probabilities."""

    def __init__(self, student: LabelStudent) -> None:
        super().__init__()
        self.student = student

    def forward(self, image: Tensor) -> Tensor:
        answer: Tensor = self.student.answer(self.student.answer.scores(self.student.network(image)))
        return answer


class SqueezeExcite(nn.Module):
    """Factors of the channels, computed from their means (Hu, Shen and Sun, CVPR 2018, arXiv:1709.01507)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 4)
        self.layers = nn.Sequential(convolved(channels, inner, 1), nn.Conv2d(inner, channels, 1))

    def forward(self, states: Tensor) -> Tensor:
        return states * (2 * hardsigmoid(self.layers(states.mean((2, 3), keepdim=True))))


class InvertedResidual(nn.Module):
    """Expand, convolve each channel, project (Sandler et al., CVPR 2018, arXiv:1801.04381).

    A block that keeps the size begins as the identity in place of batch norm (Fixup; Zhang, Dauphin and Ma, ICLR 2019,
    arXiv:1901.09321).
    """

    def __init__(  # noqa: PLR0913 - numbers of a row of `STAGES`
        self, channels: int, out: int, expand: int, size: int = 3, attention: bool = False,
        activation: type[nn.Module] = nn.ReLU, stride: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        inner, self.adds = expand * channels, channels == out and stride == 1
        last = nn.Conv2d(inner, out, 1)
        nn.init.kaiming_normal_(last.weight, nonlinearity="linear")
        self.layers = nn.Sequential(
            convolved(channels, inner, 1, activation=activation),
            convolved(inner, inner, size, stride=stride, groups=inner, activation=activation),
            *([SqueezeExcite(inner)] if attention else []),
            zeroed(last) if self.adds else last,
        )

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.layers(states)
        return states + result if self.adds else result


class MobileNetwork(nn.Module):
    """The network of a `MobileNet`, from images of one size to `outputs` numbers."""

    def __init__(self, declared: MobileNet, side: int, outputs: int) -> None:
        super().__init__()
        channels = _channels(16, declared.width)
        layers: list[nn.Module] = [convolved(3, channels, 3, stride=2, activation=nn.Hardswish)]
        side = -(-side // 2)
        for base, count, expand, size, attention, activation, halved in STAGES:
            stride, out = halved if side >= _SMALLEST else 1, _channels(base, declared.width)
            for _ in range(max(1, round(count * declared.depth))):
                layers.append(InvertedResidual(channels, out, expand, size, attention, activation, stride))
                side, channels, stride = -(-side // stride), out, 1
        layers.append(convolved(channels, 6 * channels, 1, activation=nn.Hardswish))
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(6 * channels, outputs)

    def forward(self, image: Tensor) -> Tensor:
        last: Tensor = self.last(self.layers(4 * image - 2).mean((2, 3)))
        return last


class UNetwork(nn.Module):
    """The network of a `UNet`; a pixel shuffle makes the full size (Shi et al., CVPR 2016, arXiv:1609.05158)."""

    def __init__(self, declared: UNet) -> None:
        super().__init__()
        width, depth, expand = declared.width, declared.depth, declared.expand

        def block(channels: int, out: int, stride: int = 1) -> InvertedResidual:
            return InvertedResidual(channels, out, expand, stride=stride)

        self.stem = nn.Sequential(convolved(3, width, 5, stride=2), block(width, width))
        self.middle = nn.Sequential(block(width, 2 * width, 2), block(2 * width, 2 * width))
        self.small = nn.Sequential(block(2 * width, 4 * width, 2), *(block(4 * width, 4 * width) for _ in range(depth)))
        sizes = (2 * width, width)
        self.narrower = nn.ModuleList(nn.Conv2d(2 * size, size, 1) for size in sizes)
        self.up = nn.ModuleList(nn.Sequential(block(size, size), block(size, size)) for size in sizes)
        self.changes = zeroed(nn.Conv2d(width, 16, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:
        large = self.stem(image - 0.5)
        middle = self.middle(large)
        states = self.small(middle)
        for narrower, layer, across in zip(self.narrower, self.up, (middle, large), strict=True):
            states = layer(interpolate(narrower(states), scale_factor=2.0) + across)
        changes = pixel_shuffle(self.changes(states), 2)
        return (image + changes[:, :3]).clamp(0, 1) * torch.sigmoid(changes[:, 3:] + _CLEAR)


def _channels(base: int, width: float) -> int:
    return max(8, 8 * round(base * width / 8))


def convolved(
    channels: int, out: int, size: int, *, stride: int = 1, groups: int = 1, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    layer = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups)
    nn.init.normal_(layer.weight, std=_GAINS[activation] / math.sqrt(size * size * channels / groups))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(layer, activation())


def zeroed(layer: nn.Conv2d) -> nn.Conv2d:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def image_network(declared: Image, outputs: int, where: str) -> nn.Module:
    """Create an untrained network that returns `outputs` numbers per image or, if `outputs` is 0, a picture.

    Raises a ConfigurationError at `where` if the user's function cannot be imported or does not return a torch module,
    if a layer has `padding="same"`, or if the module fails on three black images or returns another shape for them.
    """
    if isinstance(declared.student, MobileNet):
        return MobileNetwork(declared.student, declared.side, outputs)
    if isinstance(declared.student, UNet):
        return UNetwork(declared.student)
    network = call_function(declared.student, where, *([outputs] if outputs else []))
    if not isinstance(network, nn.Module):
        found = f"returns a {type(network).__name__}"
        raise ConfigurationError(where, [Problem(declared.student, found, "a torch module")])
    if same := [name for name, part in network.named_modules() if getattr(part, "padding", None) == "same"]:
        remedy = "padding=kernel_size // 2: runtimes on devices refuse a padding that they would have to compute"
        raise ConfigurationError(where, [Problem(f"{declared.student}: {same[0]}", 'padding="same"', remedy)])
    images = torch.zeros(3, 3, declared.side, declared.side)
    expected = (3, outputs) if outputs else tuple(images.shape)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = f"returns {tuple(getattr(network.eval()(images), 'shape', ()))}"
    except Exception as error:  # noqa: BLE001 - code of the user
        found = f"raises {type(error).__name__}: {error}"
    if found != f"returns {expected}":
        remedy = f"{expected}: keep the first dimension, the number of images, open (no view(1, ...))"
        raise ConfigurationError(where, [Problem(declared.student, f"its network {found} for three images", remedy)])
    return network.train()
