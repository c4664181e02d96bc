"""What the tests of losses share: tensors as Hypothesis draws them, and how a gradient is held against differences."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

Array = np.ndarray[Any, Any]

EXTREME = 1e4
NAN = float("nan")


def numbers(*shape: int, largest: float = 15.0) -> st.SearchStrategy[Array]:
    """float64 arrays of a shape."""
    return arrays(np.float64, shape, elements=st.floats(-largest, largest, width=32))


def masks(*shape: int) -> st.SearchStrategy[Array]:
    return arrays(np.bool_, shape)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient_is_right(loss: Callable[[Tensor], Tensor], *shape: int) -> bool:
    """Whether the gradient is that of finite differences."""
    return bool(torch.autograd.gradcheck(loss, (seeded(*shape, seed=1).requires_grad_(),)))


def softmax(row: list[float] | Array) -> list[float]:
    """As it reads, of numbers whose exponentials a float holds."""
    exponentials = [float(np.exp(np.longdouble(x) - np.max(row))) for x in row]
    return [x / sum(exponentials) for x in exponentials]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * float(np.log(a / b)) for a, b in zip(p, q, strict=True) if a > 0)


def finite(loss: Callable[[Tensor], Tensor], extreme: Tensor) -> bool:
    """Whether loss and gradient are finite at extreme inputs, in float32."""
    at = extreme.float().requires_grad_()
    value = loss(at)
    (gradient,) = torch.autograd.grad(value, at)
    return bool(torch.isfinite(value) and torch.isfinite(gradient).all())
