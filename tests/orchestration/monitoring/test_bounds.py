"""Bounds on slices: the worst counts, and of many some may be off by chance."""

import pytest

from isthmus.distill.gates import Gate, limits_text, value_text
from isthmus.features.production import MeasuredValue, SliceQuality
from isthmus.orchestration.monitoring.bounds import check_bound

AT_LEAST = Gate("production.slices.auc", at_least=0.6)


def slices(*found: MeasuredValue) -> list[SliceQuality]:
    return [
        SliceQuality(column="carrier", value=str(n), answers=100, rows=100, measures={"auc": each})
        for n, each in enumerate(found)
    ]


def test_a_slice_beyond_its_bound_breaks_it_although_another_looks_worse() -> None:
    bound = check_bound(
        AT_LEAST, None, slices(MeasuredValue(0.4), MeasuredValue(0.5, 0.47, 0.53), MeasuredValue(0.9, 0.8, 0.95))
    )
    assert (bound.broken, bound.slice) == (True, "carrier: 1")
    assert value_text(bound) == "slices.auc of carrier: 1 is 0.5 (0.47 to 0.53)"
    assert limits_text(bound) == "slices.auc at least 0.6"


@pytest.mark.parametrize(("others", "broken"), [(0, True), (200, False)])
def test_the_more_slices_there_are_the_farther_must_one_be_off(others: int, broken: bool) -> None:
    found = slices(MeasuredValue(0.5, 0.41, 0.59), *[MeasuredValue(0.8, 0.7, 0.9)] * others)
    bound = check_bound(AT_LEAST, None, found)
    assert (bound.broken, bound.slice) == (broken, "carrier: 0")


def test_chance_breaks_a_bound_on_slices_as_seldom_as_one_on_all() -> None:
    """Forty slices that are as good as they must be, a thousand times: one of 40 pairs of ends is no news."""
    import numpy as np

    drawn = np.random.default_rng(7).normal(0.6, 0.05, (1000, 40))
    half = 1.96 * 0.05
    broken = sum(
        check_bound(AT_LEAST, None, slices(*(MeasuredValue(at, at - half, at + half) for at in row))).broken
        for row in drawn.tolist()
    )
    assert 5 < broken < 45  # 25 are expected, as of one figure


def test_without_slices_there_is_nothing_to_break() -> None:
    bound = check_bound(Gate("production.slices.log_loss", at_most=0.1), None, slices(MeasuredValue(0.4, 0.3, 0.5)))
    assert (bound.broken, bound.found, value_text(bound)) == (False, None, "slices.log_loss is not known yet")
