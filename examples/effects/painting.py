"""The effect: a photograph as a comic drawing. Slow, and known in every number.

Video abstraction without its quantization (Winnemöller, Olsen and Gooch, 2006, doi:10.1145/1141911.1142018): bilateral
filters, which smooth what varies little and keep edges, stronger colors, and the valleys of a difference of Gaussians
in ink.
"""

import math
from functools import cache

import torch
from photographs import photograph
from torch import Tensor
from torch.nn.functional import conv2d, pad

FILTERS = 3
RADIUS, SPACE, RANGE = 3, 2.5, 0.12
"""Of each bilateral filter: pixels, and the standard deviations of distance and of color."""
COLOR = 1.4
FINE, COARSE = 1.3, 3.5
"""Standard deviations of the Gaussians, in pixels."""
DEPTH, SHARPNESS = 0.03, 70.0
"""Of a valley that is half covered by ink, and how much more of a deeper one is."""
BRIGHTNESS = (0.299, 0.587, 0.114)


@cache
def painted(name: str) -> Tensor:
    """A photograph with the effect, (3, height, width) float32, 0 to 1."""
    return effect(torch.from_numpy(photograph(name).copy()).permute(2, 0, 1)[None].float() / 255)[0]


def effect(images: Tensor) -> Tensor:
    """The effect on images (n, 3, height, width), 0 to 1."""
    for _ in range(FILTERS):
        images = bilateral(images)
    gray = brightness(images)
    ink = torch.sigmoid(SHARPNESS * (blurred(gray, FINE) - blurred(gray, COARSE) + DEPTH))
    return (gray + COLOR * (images - gray)).clamp(0, 1) * ink


def bilateral(images: Tensor) -> Tensor:
    """The mean of the pixels around each, weighed by how near they are in place and color (Tomasi, Manduchi, 1998)."""
    height, width = images.shape[2:]
    around = pad(images, (RADIUS,) * 4, mode="reflect")
    total, weights = torch.zeros_like(images), torch.zeros_like(images[:, :1])
    for y in range(-RADIUS, RADIUS + 1):
        for x in range(-RADIUS, RADIUS + 1):
            far = x**2 + y**2
            if far <= (RADIUS + 0.5) ** 2:
                there = around[..., RADIUS + y : RADIUS + y + height, RADIUS + x : RADIUS + x + width]
                unlike = (there - images).square().sum(1, keepdim=True)
                weight = torch.exp(-far / (2 * SPACE**2) - unlike / (2 * RANGE**2))
                total += weight * there
                weights += weight
    return total / weights


def blurred(gray: Tensor, deviation: float) -> Tensor:
    """Gray images (n, 1, height, width) after a Gaussian."""
    radius = math.ceil(3 * deviation)
    kernel = torch.exp(-torch.arange(-radius, radius + 1.0).square() / (2 * deviation**2))
    kernel = kernel / kernel.sum()
    around = pad(gray, (radius,) * 4, mode="reflect")
    return conv2d(conv2d(around, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))


def brightness(images: Tensor) -> Tensor:
    """Colors as gray (Rec. 601)."""
    return (images * torch.tensor(BRIGHTNESS).view(1, 3, 1, 1)).sum(1, keepdim=True)
