"""Exact Shapley values over all coalitions of a few players, some of which may need others (Faigle and Kern, 1992).

A precision without a student is nothing: if all orders counted, half of what it does would be the student's. Of the
orders only those count in which nobody comes before a player that it needs (doi:10.1007/BF01258278).
"""

from collections.abc import Mapping
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


def shapley(values: Numbers, needs: Mapping[int, int] | None = None) -> Shares:
    """The shares of n players from the values of their coalitions, float64 (2**n, ...).

    Player i is in a coalition if bit i of its number is set; `needs` has of a player those that come before it, as
    such a number. What i adds to a coalition counts by the share of the orders in which just these come before it.
    """
    needs, everyone = needs or {}, len(values) - 1
    players = range(everyone.bit_length())

    def may_join(player: int, coalition: int) -> bool:
        needed = needs.get(player, 0)
        return not coalition >> player & 1 and coalition & needed == needed

    # Orders that lead to a coalition, and from there to all players. A larger coalition has a larger number.
    before, after = [1, *[0] * everyone], [*[0] * everyone, 1]
    for coalition in range(everyone + 1):
        for player in players:
            if may_join(player, coalition):
                before[coalition | 1 << player] += before[coalition]
    for coalition in range(everyone, -1, -1):
        joined = [coalition | 1 << player for player in players if may_join(player, coalition)]
        after[coalition] += sum(after[larger] for larger in joined)
    shares = Shares(*(np.empty((len(players), *values.shape[1:])) for _ in Shares._fields))
    for player in players:
        reached = [c for c in range(everyone + 1) if before[c] and may_join(player, c)]
        larger = [coalition | 1 << player for coalition in reached]
        weights = [before[c] * after[to] / before[everyone] for c, to in zip(reached, larger, strict=True)]
        added = values[larger] - values[reached]
        shares.value[player] = np.tensordot(weights, added, 1)
        shares.low[player], shares.high[player] = added.min(0), added.max(0)
    return shares
