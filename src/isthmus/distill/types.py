"""The arrays that training, outputs and metrics exchange."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Answers = Mapping[str, Array]
"""The outputs of a model for n rows, (n, ...) by key."""
Index = np.ndarray[Any, np.dtype[np.int64]]


def spread(count: int, wanted: int) -> Index:
    """Up to `wanted` row numbers below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).astype(np.int64))
