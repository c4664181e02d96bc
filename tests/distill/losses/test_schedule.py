import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import ConfigurationError
from isthmus.losses import Schedule


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 1), st.floats(0, 1))
def test_a_weight_goes_from_start_to_end_and_stays(start: float, end: float, until: float, progress: float) -> None:
    for curve in ("linear", "cosine"):
        schedule = Schedule(start, end, curve, until)
        x = min(1.0, progress / until)
        x = x if curve == "linear" else (1 - math.cos(math.pi * x)) / 2
        assert schedule(progress) == pytest.approx(start + (end - start) * x, abs=1e-12)
        assert schedule(0) == start
        assert schedule(1) == schedule(until) == end


def test_a_cosine_leaves_slowly_and_is_half_way_at_half_time() -> None:
    linear, cosine = Schedule(0, 1), Schedule(0, 1, "cosine")
    assert cosine(0.1) < linear(0.1) / 2
    assert cosine(0.5) == pytest.approx(linear(0.5))


def test_what_is_no_schedule_is_refused_with_all_its_problems() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Schedule(math.nan, math.inf, "step", 0)  # type: ignore[arg-type]
    assert [problem.where for problem in refusal.value.problems] == ["start", "end", "curve", "until"]
