"""Exact Shapley values of a few players, some of which need others (Faigle and Kern, 1992, doi:10.1007/BF01258278).

A player comes after the players that it needs; other orders do not count. Otherwise the student would get half of the
effect of its precision.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Shares(NamedTuple):
    """Shapley value of each player, shape (players, ...), and its smallest and largest effect in any order."""

    value: Numbers
    low: Numbers
    high: Numbers


def shapley(values: Numbers, needs: Mapping[int, int] | None = None) -> Shares:
    """Split the difference between the values of all players and of no player among n players, by Shapley values.

    `values`, float64 (2**n, ...), has the value of each coalition (set of players); bit i of its index means that
    player i is in it. `needs` maps a player to the bits of the players that must join before it. A player's share is
    the mean of what it adds to the value when it joins, over all allowed orders. `low` and `high` of the result are the
    least and the most that it adds.
    """
    needs, everyone = needs or {}, len(values) - 1
    players = range(everyone.bit_length())

    def may_join(player: int, coalition: int) -> bool:
        needed = needs.get(player, 0)
        return not coalition >> player & 1 and coalition & needed == needed

    # Number of orders that lead to a coalition, and from there to all players. Supersets have larger numbers.
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
