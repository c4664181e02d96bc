"""A candidate next to the deployed model: which requests it gets, what is counted, and when it is given up."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from isthmus.features.errors import IsthmusError
from isthmus.package.manifest import ROUNDING
from isthmus.serving.deployment.record import CandidateDeployment
from isthmus.serving.predict.model import DeployedModel, Float32
from isthmus.serving.rollout.trial import Trial

TOLERANCE = 1e-3
"""Largest difference between the answers of a shadow and of the deployed model, for the usual rounding."""

_CHANCE = 1e-4
"""Probability of giving up an equally fast model for its latency."""


class CandidateRun(Trial):
    """A candidate in a worker, next to the deployed model.

    Attributes:
        compared: number of shadow answers compared.
        differing: number of these that differ by more than `tolerance`.
    """

    standby_role = "deployed"
    in_force = False

    def __init__(self, candidate: CandidateDeployment, model: DeployedModel | IsthmusError) -> None:
        super().__init__(candidate.deployment, candidate.latency_objective_ms)
        self.candidate = candidate
        self.model = model
        rounding = ROUNDING if isinstance(model, IsthmusError) else model.rounding
        self.tolerance = TOLERANCE * (rounding / ROUNDING)
        self.compared = self.differing = 0
        self.worst = 0.0
        self.refused = str(model) if isinstance(model, IsthmusError) else None
        self._salt = candidate.deployment.digest.encode()

    @property
    def role(self) -> Literal["shadow", "canary"]:  # type: ignore[override]
        return "canary" if self.candidate.share else "shadow"

    def _slower(self, own: float, other: float) -> bool:
        """Return True if the candidate is too slow, with statistical significance.

        A busy machine delays either model at times.

        If both models were equally fast, the candidate's share of the slow runs would match its share of all runs.
        Hoeffding's inequality (J. Am. Stat. Assoc. 58, 1963, theorem 1) bounds the probability of a larger share.
        """
        slow = self.counts.slow + self.standby.slow
        if not super()._slower(own, other) or not slow:
            return False
        share, expected = self.counts.slow / slow, self.counts.runs / (self.counts.runs + self.standby.runs)
        return share > expected and slow * _divergence(share, expected) > -math.log(_CHANCE)

    def picks(self, names: Iterable[str], keys: Mapping[str, Sequence[Any]], body: bytes) -> bool:
        """Decide whether the candidate answers a request.

        The choice depends on the values of the join keys `names` in the first row, or on the body without join keys.
        """
        row = [(name, keys[name][0]) for name in sorted(names) if keys[name]]
        named = repr(row).encode() if row else body
        place = int.from_bytes(hashlib.blake2b(self._salt + named, digest_size=8).digest()) / 2**64
        return place < self.candidate.share

    def compare(self, deployed: Float32, candidate: Float32) -> bool:
        """Compare two answers to a request, shape (n,) or (n, classes). Return True if they agree within the tolerance.

        Answers of different shapes differ in all rows.
        """
        if deployed.shape != candidate.shape:
            deployed, candidate = np.zeros(len(deployed), np.float32), np.full(len(deployed), np.nan, np.float32)
        both = np.isnan(deployed) & np.isnan(candidate)
        with np.errstate(invalid="ignore"):
            gap = np.where(both, 0.0, np.abs(deployed.astype(np.float64) - candidate.astype(np.float64)))
        # If only one answer is a number, they differ.
        gap = np.where(np.isnan(gap) & (deployed != candidate), np.inf, np.nan_to_num(gap, nan=0.0, posinf=np.inf))
        gap = gap.max(axis=tuple(range(1, gap.ndim)), initial=0.0)
        worst = float(gap.max(initial=0.0))
        self.compared += len(gap)
        self.differing += int(np.count_nonzero(gap > self.tolerance))
        self.worst = max(self.worst, worst)
        return worst <= self.tolerance


def _divergence(share: float, expected: float) -> float:
    """Return the Kullback-Leibler divergence of `share` from `expected`, in nats; `share` is the larger."""
    remainder = 0.0 if share == 1 else (1 - share) * math.log((1 - share) / (1 - expected))
    return share * math.log(share / expected) + remainder
