"""Exact Shapley values over all coalitions of a few players (Shapley, 1953, doi:10.1515/9781400881970-018)."""

from math import comb
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Shares(NamedTuple):
    """The share of each player, (players, ...), and the least and the most that it adds in any order of the players.

    Shares sum to the value of all players less that of none. Least and most differ where players interact.
    """

    value: Numbers
    low: Numbers
    high: Numbers


def shapley(values: Numbers) -> Shares:
    """The shares of n players from the values of their coalitions, float64 (2**n, ...).

    Player i is in a coalition if bit i of its number is set. What i adds to a coalition of s others counts
    s! (n - s - 1)! / n! times: the share of the orders in which just these come before it.
    """
    players = len(values).bit_length() - 1
    coalitions = np.arange(len(values))
    sizes = sum(coalitions >> player & 1 for player in range(players)) + np.zeros_like(coalitions)
    shares = Shares(*(np.empty((players, *values.shape[1:])) for _ in Shares._fields))
    for player in range(players):
        without = coalitions[(coalitions >> player & 1) == 0]
        added = values[without | 1 << player] - values[without]
        weights = [1 / (players * comb(players - 1, size)) for size in sizes[without].tolist()]
        shares.value[player] = np.tensordot(weights, added, 1)
        shares.low[player], shares.high[player] = added.min(0), added.max(0)
    return shares
