"""Two networks that paint: the generator, which is large, and a small one for a device. And the graph of a network."""

import logging
import warnings

import onnx
import torch
from photographs import SIDE
from torch import Tensor, nn
from torch.nn.functional import interpolate, pixel_shuffle
from torch.utils.flop_counter import FlopCounterMode

OPSET = 20
CLEAR = 3.0
"""Logit of no ink, where a network begins."""


class Generator(nn.Module):
    """A residual generator (Johnson, Alahi and Fei-Fei, 2016, arXiv:1603.08155) that draws on a photograph.

    Without its normalization, which is of a whole frame: blocks begin as identities instead. What goes down has a way
    across, as in a U-Net.

    Args:
        width: channels at full size.
        blocks: residual blocks, at a quarter of the size.
    """

    def __init__(self, width: int = 24, blocks: int = 5) -> None:
        super().__init__()
        self.down = nn.Sequential(
            convolved(3, width, 9), convolved(width, 2 * width, stride=2), convolved(2 * width, 4 * width, stride=2)
        )
        self.blocks = nn.Sequential(*(Residual(4 * width) for _ in range(blocks)))
        self.up = nn.ModuleList([convolved(4 * width, 2 * width), convolved(2 * width, width)])
        self.strokes = begun(nn.Conv2d(width, 4, 9, padding=4))

    def forward(self, image: Tensor) -> Tensor:
        """Of images (n, 3, height, width), 0 to 1, whose sides are multiples of 4: the same sizes."""
        full = self.down[0](image - 0.5)
        half = self.down[1](full)
        states = self.blocks(self.down[2](half))
        for layer, across in zip(self.up, (half, full), strict=True):
            states = layer(interpolate(states, scale_factor=2.0)) + across
        return drawn(image, self.strokes(states))


class Residual(nn.Module):
    """Two convolutions, whose result is added to what they are given; in the beginning it is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolved(width, width), begun(nn.Conv2d(width, width, 3, padding=1)))

    def forward(self, states: Tensor) -> Tensor:
        """The same sizes."""
        return states + self.layers(states)


class Painter(nn.Module):
    """A U-Net (Ronneberger, Fischer and Brox, 2015, arXiv:1505.04597) of MobileNet's inverted residuals.

    It works at half the size and below; four pixels of the result are channels there (Shi et al., 2016,
    arXiv:1609.05158).

    Args:
        width: channels at half the size; twice and four times as many below.
        wider: how many times as many there are inside a block.
        blocks: at an eighth of the size.
    """

    def __init__(self, width: int = 16, wider: int = 3, blocks: int = 4) -> None:
        super().__init__()
        self.stem = convolved(3, width, 5, stride=2)
        self.large = Inverted(width, width, wider)
        self.middle = nn.Sequential(Inverted(width, 2 * width, wider, 2), Inverted(2 * width, 2 * width, wider))
        self.small = nn.Sequential(
            Inverted(2 * width, 4 * width, wider, 2), *(Inverted(4 * width, 4 * width, wider) for _ in range(blocks))
        )
        self.narrower = nn.ModuleList([nn.Conv2d(4 * width, 2 * width, 1), nn.Conv2d(2 * width, width, 1)])
        self.up = nn.ModuleList(
            [
                nn.Sequential(Inverted(2 * width, 2 * width, wider), Inverted(2 * width, 2 * width, wider)),
                nn.Sequential(Inverted(width, width, wider), Inverted(width, width, wider)),
            ]
        )
        self.strokes = begun(nn.Conv2d(width, 16, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:
        """Of images (n, 3, height, width), 0 to 1, whose sides are multiples of 8: the same sizes."""
        large = self.large(self.stem(image - 0.5))
        middle = self.middle(large)
        states = self.small(middle)
        for narrower, layer, across in zip(self.narrower, self.up, (middle, large), strict=True):
            states = layer(interpolate(narrower(states), scale_factor=2.0) + across)
        return drawn(image, pixel_shuffle(self.strokes(states), 2))


class Inverted(nn.Module):
    """MobileNet's block (Sandler et al., 2018, arXiv:1801.04381): wider, each channel by itself, narrower.

    It has no batch norm: frames of one batch may be of a night sky and of a flower, and a single frame of either.
    """

    def __init__(self, channels: int, given: int, wider: int, stride: int = 1) -> None:
        super().__init__()
        inner = wider * channels
        self.adds = channels == given and stride == 1
        last = nn.Conv2d(inner, given, 1)
        self.layers = nn.Sequential(
            convolved(channels, inner, 1),
            convolved(inner, inner, stride=stride, groups=inner),
            begun(last) if self.adds else last,
        )

    def forward(self, states: Tensor) -> Tensor:
        """Of (n, channels, height, width), (n, given, height / stride, width / stride)."""
        found: Tensor = self.layers(states)
        return states + found if self.adds else found


def convolved(channels: int, given: int, size: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size, or divides it by the stride, and what is above zero of it."""
    layer = nn.Conv2d(channels, given, size, stride, size // 2, groups=groups)
    nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.ReLU())


def begun(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with zeros for weights (Fixup, Zhang, Dauphin and Ma, 2019, arXiv:1901.09321)."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def drawn(image: Tensor, strokes: Tensor) -> Tensor:
    """An image with other colors and under ink, 0 to 1.

    Args:
        image: (n, 3, height, width).
        strokes: (n, 4, height, width): what is added to each color, and how little ink there is, as a logit.
    """
    return (image + strokes[:, :3]).clamp(0, 1) * torch.sigmoid(strokes[:, 3:] + CLEAR)


def multiply_adds(network: nn.Module) -> int:
    """Of one frame: those of its convolutions."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, SIDE, SIDE))
    return counter.get_total_flops() // 2


def exported(network: nn.Module) -> onnx.ModelProto:
    """The graph of a network: `frame`, float32 (N, 3, 256, 256), to `image`, of the same sizes."""
    # It says what it could do for networks of other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(
            network.eval(), (torch.zeros(2, 3, SIDE, SIDE),), dynamo=True, opset_version=OPSET, verbose=False,
            external_data=False, dynamic_shapes=({0: torch.export.Dim("N")},), input_names=["frame"],
            output_names=["image"],
        )  # fmt: skip
    assert program is not None  # noqa: S101 - with dynamo
    return program.model_proto
