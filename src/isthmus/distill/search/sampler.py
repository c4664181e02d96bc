"""Proposes the next student of a search from nothing but the earlier trials, so that a killed search can continue."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna
from optuna.distributions import IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

RANDOM = 8
"""Number of random students before the estimator proposes."""

Place = tuple[int, ...]
"""A point of the search space: for each name, the index of one of its values."""


@dataclass(frozen=True)
class StudentTrial:
    """The outcome of a trial: the measurements of the student at a point of the search space.

    `values` has quality, median latency and bytes, where lower is better in each; None if they were not measured.
    `over` has the relative excess of each exceeded limit, by the limit's name.
    """

    place: Place
    values: tuple[float, float, float] | None
    over: Mapping[str, float] = field(default_factory=dict)


def propose(known: Sequence[StudentTrial], sizes: Mapping[str, int], seed: int) -> Place | None:
    """Choose the student to measure next in a search; return None if all students have been tried.

    A student is a point of the search space: for each option, the index of its value. `known` has the outcomes of the
    trials so far. `sizes` has the number of values of each option. The first 8 points are random. Then optuna's
    tree-structured Parzen estimator (Ozaki et al., 2020, doi:10.1145/3377930.3389817) prefers points near those with
    good quality, latency or size, and avoids points near those that exceeded the budget. The same arguments give the
    same point.
    """
    visited = {outcome.place for outcome in known}
    if len(visited) >= math.prod(sizes.values()):
        return None
    random = np.random.default_rng((seed, len(known)))
    place = _estimated(known, sizes, int(random.integers(2**32))) if len(known) >= RANDOM else None
    while place is None or place in visited:
        place = tuple(int(random.integers(size)) for size in sizes.values())
    return place


def _estimated(known: Sequence[StudentTrial], sizes: Mapping[str, int], seed: int) -> Place | None:
    # A failed trial says nothing about its neighbors.
    outcomes = [outcome for outcome in known if outcome.values is not None or outcome.over]
    if not outcomes:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: IntDistribution(0, size - 1) for name, size in sizes.items()}
    sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=0, constant_liar=False)
    study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
    for outcome in outcomes:
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if outcome.values is not None else TrialState.PRUNED,
                values=outcome.values,
                params=dict(zip(sizes, outcome.place, strict=True)),
                distributions=dict(distributions),
                constraints=dict(outcome.over),
            )
        )
    params = study.ask(dict(distributions)).params
    return tuple(params[name] for name in sizes)
