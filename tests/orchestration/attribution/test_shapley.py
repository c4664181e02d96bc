from itertools import permutations
from math import factorial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.orchestration.attribution.shapley import Numbers, Shares, shapley


def shapley_naively(values: Numbers) -> Shares:
    """The oracle: every order of the players, each joining those before it."""
    players = len(values).bit_length() - 1
    added: list[list[Numbers]] = [[] for _ in range(players)]
    for order in permutations(range(players)):
        coalition = 0
        for player in order:
            added[player].append(values[coalition | 1 << player] - values[coalition])
            coalition |= 1 << player
    assert len(added[0]) == factorial(players)
    return Shares(*(np.array([how(each, axis=0) for each in added]) for how in (np.mean, np.min, np.max)))


@st.composite
def games(draw: st.DrawFn) -> Numbers:
    """Coalitions of one to five players, a value for each of some rows."""
    players, rows = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    numbers = st.floats(-1e3, 1e3, allow_subnormal=False)
    values = draw(st.lists(st.lists(numbers, min_size=rows, max_size=rows), min_size=2**players, max_size=2**players))
    return np.array(values, np.float64).reshape(2**players, rows)


@given(games())
def test_the_weights_are_those_of_all_orders(values: Numbers) -> None:
    fast, slow = shapley(values), shapley_naively(values)
    for ours, theirs in zip(fast, slow, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    np.testing.assert_allclose(fast.value.sum(0), values[-1] - values[0], rtol=0, atol=1e-9)
    # Whatever is added on average lies between the least and the most that is added.
    assert (fast.low <= fast.value + 1e-9).all()
    assert (fast.value <= fast.high + 1e-9).all()


@given(games(), st.integers(0, 4))
def test_a_player_that_changes_nothing_has_no_share(values: Numbers, player: int) -> None:
    player %= len(values).bit_length() - 1
    idle = values[np.arange(len(values)) & ~(1 << player)]
    shares = shapley(idle)
    assert not any(part[player].any() for part in shares)


def test_shares_of_scores_sum_to_their_difference() -> None:
    values = np.random.default_rng(0).random((32, 100_000))
    shares = shapley(values)
    assert np.abs(shares.value.sum(0) - (values[-1] - values[0])).max() <= 1e-12


def test_a_game_by_hand() -> None:
    # Either of two is enough: half each, and nothing or all of it, as the order has it.
    shares = shapley(np.array([0.0, 1.0, 1.0, 1.0]))
    assert [part.tolist() for part in shares] == [[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]
