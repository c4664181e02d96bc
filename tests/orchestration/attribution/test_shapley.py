from collections.abc import Mapping
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.orchestration.attribution.shapley import Numbers, Shares, shapley


def shapley_naively(values: Numbers, needs: Mapping[int, int]) -> Shares:
    """The oracle: every order of the players in which none comes before one that it needs, each joining the rest."""
    players = len(values).bit_length() - 1
    added: list[list[Numbers]] = [[] for _ in range(players)]
    for order in permutations(range(players)):
        steps, coalition = [], 0
        for player in order:
            if needs.get(player, 0) & ~coalition:
                break
            steps.append((player, values[coalition | 1 << player] - values[coalition]))
            coalition |= 1 << player
        if len(steps) == players:
            for player, step in steps:
                added[player].append(step)
    return Shares(*(np.array([how(each, axis=0) for each in added]) for how in (np.mean, np.min, np.max)))


@st.composite
def games(draw: st.DrawFn) -> tuple[Numbers, dict[int, int]]:
    """Coalitions of one to five players, a value for each of some rows; and who needs players of smaller numbers."""
    players, rows = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    numbers = st.floats(-1e3, 1e3, allow_subnormal=False)
    values = draw(st.lists(st.lists(numbers, min_size=rows, max_size=rows), min_size=2**players, max_size=2**players))
    needs = {player: draw(st.integers(0, (1 << player) - 1)) for player in draw(st.sets(st.integers(0, players - 1)))}
    return np.array(values, np.float64).reshape(2**players, rows), needs


@given(games())
def test_the_weights_are_those_of_all_orders(game: tuple[Numbers, dict[int, int]]) -> None:
    values, needs = game
    fast, slow = shapley(values, needs), shapley_naively(values, needs)
    for ours, theirs in zip(fast, slow, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    np.testing.assert_allclose(fast.value.sum(0), values[-1] - values[0], rtol=0, atol=1e-9)
    # Whatever is added on average lies between the least and the most that is added.
    assert (fast.low <= fast.value + 1e-9).all()
    assert (fast.value <= fast.high + 1e-9).all()


@given(games(), st.integers(0, 4))
def test_a_player_that_changes_nothing_has_no_share(game: tuple[Numbers, dict[int, int]], player: int) -> None:
    values, needs = game
    player %= len(values).bit_length() - 1
    idle = values[np.arange(len(values)) & ~(1 << player)]
    shares = shapley(idle, needs)
    assert not any(part[player].any() for part in shares)


def test_shares_of_scores_sum_to_their_difference() -> None:
    values = np.random.default_rng(0).random((32, 100_000))
    shares = shapley(values)
    assert np.abs(shares.value.sum(0) - (values[-1] - values[0])).max() <= 1e-12


def test_a_game_by_hand() -> None:
    # Either of two is enough: half each, and nothing or all of it, as the order has it.
    shares = shapley(np.array([0.0, 1.0, 1.0, 1.0]))
    assert [part.tolist() for part in shares] == [[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]


def test_what_needs_another_has_all_that_it_does() -> None:
    # The second adds 1, but only to the first.
    values = np.array([0.0, 0.0, 0.0, 1.0])
    assert shapley(values).value.tolist() == [0.5, 0.5]
    assert [part.tolist() for part in shapley(values, {1: 0b01})] == [[0.0, 1.0]] * 3
