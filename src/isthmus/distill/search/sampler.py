"""What a search tries next. The only importer of optuna.

A proposal is a function of what was tried before, and of nothing else: whoever goes on with a search that was killed is
told the same again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna
from optuna.distributions import IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

RANDOM = 8
"""Students that are drawn at random before what they say decides."""

Place = tuple[int, ...]
"""One of the values of each name, by their number."""


@dataclass(frozen=True)
class Known:
    """What is known of a place.

    Attributes:
        place: which.
        values: what it was good for, less being better; None if it was not measured.
        over: by which share it is over each part of the budget that it does not keep to; empty if it keeps to all.
    """

    place: Place
    values: tuple[float, float, float] | None
    over: Mapping[str, float] = field(default_factory=dict)


def proposed(known: Sequence[Known], sizes: Mapping[str, int], seed: int) -> Place | None:
    """A place that was not tried; None if there is none left.

    At first they are random; then the tree-structured Parzen estimator of optuna draws where those that are better in
    several respects lie denser (Ozaki et al., 2020, doi:10.1145/3377930.3389817), places over the budget being the
    worse the farther they are over it.

    Args:
        known: all that was tried.
        sizes: how many values there are, by name.
        seed: of all draws.
    """
    tried = {one.place for one in known}
    if len(tried) >= math.prod(sizes.values()):
        return None
    random = np.random.default_rng((seed, len(known)))
    place = _estimated(known, sizes, int(random.integers(2**32))) if len(known) >= RANDOM else None
    while place is None or place in tried:
        place = tuple(int(random.integers(size)) for size in sizes.values())
    return place


def _estimated(known: Sequence[Known], sizes: Mapping[str, int], seed: int) -> Place | None:
    # What failed says nothing of what is beside it.
    telling = [one for one in known if one.values is not None or one.over]
    if not telling:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spread = {name: IntDistribution(0, size - 1) for name, size in sizes.items()}
    sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=0, constant_liar=False)
    study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
    for one in telling:
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if one.values is not None else TrialState.PRUNED,
                values=one.values,
                params=dict(zip(sizes, one.place, strict=True)),
                distributions=dict(spread),
                constraints=dict(one.over),
            )
        )
    found = study.ask(dict(spread)).params
    return tuple(found[name] for name in sizes)
