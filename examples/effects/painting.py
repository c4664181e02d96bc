"""The effect: a photograph as a comic drawing. Slow but deterministic.

Video abstraction without quantization (Winnemöller, Olsen and Gooch, 2006, doi:10.1145/1141911.1142018): bilateral
filters, which smooth surfaces and keep edges, stronger colors, and ink in the valleys of a difference of Gaussians.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

FILTERS = 3
RADIUS, SPACE, RANGE = 3, 2.5, 0.12
"""Bilateral filter: radius in pixels, and standard deviations of distance and color."""
COLOR = 1.4
FINE, COARSE = 1.3, 3.5
"""Standard deviations of the Gaussians, in pixels."""
DEPTH, SHARPNESS = 0.03, 70.0
"""Depth of a valley at which ink covers half, and how quickly ink increases with depth."""
BRIGHTNESS = (0.299, 0.587, 0.114)


def effect(images: Tensor) -> Tensor:
    """Apply the effect to images (n, 3, height, width) in [0, 1]."""
    for _ in range(FILTERS):
        images = bilateral(images)
    gray = brightness(images)
    ink = torch.sigmoid(SHARPNESS * (blurred(gray, FINE) - blurred(gray, COARSE) + DEPTH))
    return (gray + COLOR * (images - gray)).clamp(0, 1) * ink


def bilateral(images: Tensor) -> Tensor:
    """Average neighboring pixels, weighted by distance and color difference (Tomasi and Manduchi, 1998)."""
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
    """Apply a Gaussian blur to gray images (n, 1, height, width)."""
    radius = math.ceil(3 * deviation)
    kernel = torch.exp(-torch.arange(-radius, radius + 1.0).square() / (2 * deviation**2))
    kernel = kernel / kernel.sum()
    around = pad(gray, (radius,) * 4, mode="reflect")
    return conv2d(conv2d(around, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1))


def brightness(images: Tensor) -> Tensor:
    """Convert colors to gray (Rec. 601)."""
    return (images * torch.tensor(BRIGHTNESS).view(1, 3, 1, 1)).sum(1, keepdim=True)
