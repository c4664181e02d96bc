"""How far apart two answers are: whatever is no number, or of another kind, is infinitely far."""

import numpy as np
import pytest

from isthmus.package.replay import Array, deviation

F = np.float32
ONE = np.array([1, -np.inf], F)


@pytest.mark.parametrize(("expected", "found", "apart"), [
    (ONE, ONE, 0.0),
    (ONE, ONE + F(0.25), 0.25),
    (ONE, np.array([1, np.inf], F), np.inf),
    (ONE, np.array([1, 0], F), np.inf),
    (ONE, np.array([np.nan, -np.inf], F), np.inf),
    (np.array([np.nan], F), np.array([np.nan], F), np.inf),
    (ONE, ONE[:, None], np.inf),
    (ONE, ONE[:0], np.inf),
    (ONE, ONE.astype(np.float64), np.inf),
    (np.array([1, 2]), np.array([1, 2]), 0.0),
    (np.array([1, 2]), np.array([1, 2], np.int32), np.inf),
    (np.array([2**53]), np.array([2**53 + 1]), np.inf),
    (np.array(["a", ""], object), np.array(["a", ""], object), 0.0),
    (np.array(["a"], object), np.array(["b"], object), np.inf),
])  # fmt: skip
def test_how_far_answers_are_apart(expected: Array, found: Array, apart: float) -> None:
    sides = (expected, found), (found, expected)
    assert [deviation("y", *pair, 1e-5).by for pair in sides] == [apart, apart]
