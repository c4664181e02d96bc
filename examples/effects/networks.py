"""The large generator, the small network for devices, and their export."""

import logging
import warnings

import onnx
import torch
from photographs import SIDE
from torch import Tensor, nn
from torch.nn.functional import interpolate, pixel_shuffle
from torch.utils.flop_counter import FlopCounterMode

OPSET = 20
CLEAR = 3.0  # logit of no ink, the initial output


class Generator(nn.Module):
    """A residual generator (Johnson, Alahi and Fei-Fei, 2016, arXiv:1603.08155) that draws on a photograph.

    It has no normalization, which would mix a whole frame; blocks are initialized as identities instead. Skip
    connections are as in a U-Net.

    Args:
        width: channels at full size.
        blocks: number of residual blocks, at a quarter of the size.
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
        """Draw images (n, 3, height, width) in [0, 1]; sides must be multiples of 4. The result has the same shape."""
        full = self.down[0](image - 0.5)
        half = self.down[1](full)
        states = self.blocks(self.down[2](half))
        for layer, across in zip(self.up, (half, full), strict=True):
            states = layer(interpolate(states, scale_factor=2.0)) + across
        return drawn(image, self.strokes(states))


class Residual(nn.Module):
    """A residual block of two convolutions, initialized as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolved(width, width), begun(nn.Conv2d(width, width, 3, padding=1)))

    def forward(self, states: Tensor) -> Tensor:
        """Return states of the same shape."""
        return states + self.layers(states)


class Painter(nn.Module):
    """A U-Net (Ronneberger, Fischer and Brox, 2015, arXiv:1505.04597) of MobileNet's inverted residuals.

    It works at half the size and below, and a pixel shuffle makes the full size (Shi et al., 2016, arXiv:1609.05158).

    Args:
        width: channels at half the size; the next two levels have twice and four times as many.
        wider: expansion factor of channels inside a block.
        blocks: number of blocks at an eighth of the size.
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
        """Draw images (n, 3, height, width) in [0, 1]; sides must be multiples of 8. The result has the same shape."""
        large = self.large(self.stem(image - 0.5))
        middle = self.middle(large)
        states = self.small(middle)
        for narrower, layer, across in zip(self.narrower, self.up, (middle, large), strict=True):
            states = layer(interpolate(narrower(states), scale_factor=2.0) + across)
        return drawn(image, pixel_shuffle(self.strokes(states), 2))


class Inverted(nn.Module):
    """An inverted residual block (Sandler et al., 2018, arXiv:1801.04381): expand, depthwise convolution, project.

    It has no batch norm, because the frames of a batch can be as different as a night sky and a flower.
    """

    def __init__(self, channels: int, out: int, wider: int, stride: int = 1) -> None:
        super().__init__()
        inner = wider * channels
        self.adds = channels == out and stride == 1
        last = nn.Conv2d(inner, out, 1)
        self.layers = nn.Sequential(
            convolved(channels, inner, 1),
            convolved(inner, inner, stride=stride, groups=inner),
            begun(last) if self.adds else last,
        )

    def forward(self, states: Tensor) -> Tensor:
        """Map (n, channels, height, width) to (n, out, height / stride, width / stride)."""
        result: Tensor = self.layers(states)
        return states + result if self.adds else result


def convolved(channels: int, out: int, size: int = 3, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution, padded to keep the size (divided by the stride), followed by ReLU."""
    layer = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups)
    nn.init.kaiming_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.ReLU())


def begun(layer: nn.Conv2d) -> nn.Conv2d:
    """Set the weights to zero and return the layer (Fixup; Zhang, Dauphin and Ma, 2019, arXiv:1901.09321)."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def drawn(image: Tensor, strokes: Tensor) -> Tensor:
    """Return images with changed colors and ink, in [0, 1].

    Args:
        image: images (n, 3, height, width).
        strokes: (n, 4, height, width): offsets of the three colors, and the logit of the absence of ink.
    """
    return (image + strokes[:, :3]).clamp(0, 1) * torch.sigmoid(strokes[:, 3:] + CLEAR)


def multiply_adds(network: nn.Module) -> int:
    """Return the multiply-adds of the convolutions for one frame."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, SIDE, SIDE))
    return counter.get_total_flops() // 2


def exported(network: nn.Module) -> onnx.ModelProto:
    """Export a network: `frame`, float32 (N, 3, 256, 256), to `image` of the same shape."""
    # The exporter logs hints about other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # emitted by the exporter itself
        program = torch.onnx.export(
            network.eval(), (torch.zeros(2, 3, SIDE, SIDE),), dynamo=True, opset_version=OPSET, verbose=False,
            external_data=False, dynamic_shapes=({0: torch.export.Dim("N")},), input_names=["frame"],
            output_names=["image"],
        )  # fmt: skip
    assert program is not None  # noqa: S101 - never None with dynamo
    return program.model_proto
