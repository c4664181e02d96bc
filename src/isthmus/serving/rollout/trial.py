"""Count requests and failures of a model on trial and of the model that stands by, and decide if the trial failed."""

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from isthmus.features.errors import IsthmusError
from isthmus.package.manifest import ROUNDING
from isthmus.serving.deployment.record import CandidateDeployment, Deployment, Probation
from isthmus.serving.predict.model import DeployedModel, Float32

LEAST = 200
"""Minimum number of timed single-row predictions of each model before their p99 is compared."""

FAILURES = 3
"""Minimum number of failed predictions before the failure rates of both models are compared."""

WINDOW = 1000
"""Requests in a window. At its end, failures are counted from 0, and timed runs too if both models have `LEAST`."""

_EVERY = 50
"""Requests between two checks of the p99."""

TOLERANCE = 1e-3
"""Largest difference between the answers of a shadow and of the deployed model, for the usual rounding."""

_CHANCE = 1e-4
"""Probability of giving up an equally fast model for its latency."""

_SHARE = 0.1
"""Largest fraction of time spent running both models for comparison."""

_LEASE_SECONDS = 10.0

_CHI_SQUARED = 15.1
"""Chi-squared with one degree of freedom: exceeded by chance once in 10,000 times."""


@dataclass(eq=False)
class Counts:
    """Requests and failures of a model, and seconds of its latest single-row runs.

    `runs` counts all single-row runs since the last `clear`; `slow` counts those slower than the objective.
    """

    objective_ms: float
    requests: int = 0
    failures: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    runs: int = 0
    slow: int = 0
    _from: tuple[int, int] = 0, 0

    def count(self, rows: int, seconds: float | None) -> None:
        self.requests += 1
        if seconds is None:
            self.failures += 1
        elif rows == 1:
            self.seconds.append(seconds)
            self.runs += 1
            self.slow += seconds * 1000 > self.objective_ms

    @property
    def window(self) -> tuple[int, int]:
        return self.requests - self._from[0], self.failures - self._from[1]

    def reopen(self) -> None:
        self._from = self.requests, self.failures

    def clear(self) -> None:
        self.seconds.clear()
        self.runs = self.slow = 0

    @property
    def p99_ms(self) -> float | None:
        ordered = sorted(self.seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] * 1000 if ordered else None


class Trial:
    """A model on trial in a worker. If the model fails, the standby model answers.

    Attributes:
        standby: counts of the standby model's requests.
        in_force: True if the model on trial is the deployed one. Its error is then returned if the standby fails too.
        dropped: number of comparison runs skipped because too many were waiting.
        refused: reason the model on trial gets no more requests; None while the trial goes on.
    """

    role: str
    standby_role: str
    in_force: bool

    def __init__(self, deployment: Deployment, objective_ms: float) -> None:
        self.deployment = deployment
        self.counts, self.standby = Counts(objective_ms), Counts(objective_ms)
        self.dropped = 0
        self.refused: str | None = None
        self._objective_ms = objective_ms

    def judge(self) -> None:
        """End the trial if the model on trial is worse than the other model: set `refused` to the reason.

        The model is worse if it fails at least `FAILURES` times and at a higher rate, or if its p99 latency exceeds the
        objective and the other model's does not. Latency is judged every `_EVERY` requests, once both models have
        enough timed runs. A canary is not ended for a latency that chance may explain. Call this after each
        counted request of a canary or of a deployment on probation. After `WINDOW` requests, requests and failures are
        counted from 0.
        """
        if self.refused is not None:
            return
        (requests, failures), (standby_requests, standby_failures) = self.counts.window, self.standby.window
        if failures >= FAILURES and failures * max(standby_requests, 1) > standby_failures * requests:
            self.refused = (
                f"{failures:,} of {requests:,} predictions failed, compared with {standby_failures:,} of "
                f"{standby_requests:,} for the {self.standby_role} model"
            )
        elif requests % _EVERY == 0 and self._timed:
            self._judge_latency()
        if requests >= WINDOW:
            # Small shares and multi-row requests give few timed runs: keep those until there are enough.
            timed = self._timed
            for counts in (self.standby, self.counts):
                counts.reopen()
                if timed:
                    counts.clear()

    @property
    def _timed(self) -> bool:
        return min(len(self.counts.seconds), len(self.standby.seconds)) >= LEAST

    def _judge_latency(self) -> None:
        own, other = self.counts.p99_ms, self.standby.p99_ms
        if own is not None and other is not None and self._slower(own, other):
            self.refused = (
                f"the p99 for one row is {own:.3g} ms, above the objective of {self._objective_ms:g} ms, while the "
                f"{self.standby_role} model has {other:.3g} ms"
            )

    def _slower(self, own: float, other: float) -> bool:
        return own > self._objective_ms >= other


class CandidateRun(Trial):
    """A candidate (new model on trial) in a worker, next to the deployed model.

    Without a loaded `model`, `refused` is set from the start. `compared` and `differing` count the rows of a shadow,
    whose answers are only compared. `worst` is the largest difference, infinite if only one of the models had a number.
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
        """Return True if only the candidate misses the objective, and chance is not a likely cause.

        A busy machine delays either model at times. If both models were equally fast, the candidate's share of the slow
        runs would match its share of all runs. Hoeffding's inequality (J. Am. Stat. Assoc. 58, 1963, theorem 1) bounds
        the probability of a larger share.
        """
        slow = self.counts.slow + self.standby.slow
        if not super()._slower(own, other) or not slow:
            return False
        share, expected = self.counts.slow / slow, self.counts.runs / (self.counts.runs + self.standby.runs)
        return share > expected and slow * _divergence(share, expected) > -math.log(_CHANCE)

    def picks(self, names: Iterable[str], keys: Mapping[str, Sequence[Any]], body: bytes) -> bool:
        """Return True if the candidate should answer a request, which is so for a fraction `share` of all keys.

        `names` are the join keys of the model, and `keys` has their values in the request. Hashes the keys of the first
        row, or the bytes `body` of a request without keys. The same keys thus always get the same model.
        """
        row = [(name, keys[name][0]) for name in sorted(names) if keys[name]]
        named = repr(row).encode() if row else body
        place = int.from_bytes(hashlib.blake2b(self._salt + named, digest_size=8).digest()) / 2**64
        return place < self.candidate.share

    def compare(self, deployed: Float32, candidate: Float32) -> bool:
        """Compare the outputs of the deployed model and of a shadow for one request. Return True if all rows agree.

        Outputs have shape (n,) or (n, classes). A row differs if an output differs by more than `tolerance`, or only
        one of the two is NaN. If the shapes differ, all rows do. Adds to `compared` and `differing`, and updates
        `worst`.
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


class ProbationRun(Trial):
    """A deployed model on probation in a worker. If it fails, the server restores the previous deployment.

    `former` is the previous model, or the error of loading it. It answers only if the new model fails, so latency is
    compared in the background: both models sometimes run on the same request. `problem` is the reason the server cannot
    go back, or None.
    """

    role = "deployed"
    standby_role = "former"
    in_force = True

    def __init__(self, deployment: Deployment, probation: Probation, former: DeployedModel | IsthmusError) -> None:
        super().__init__(deployment, probation.latency_objective_ms)
        self.probation = probation
        self.former = former
        self.problem = str(former) if isinstance(former, IsthmusError) else None
        self._next = 0.0

    def reuse_former(self, deployment: Deployment) -> DeployedModel | None:
        if deployment.undone is None or not isinstance(self.former, DeployedModel):
            return None
        return (
            self.former.for_deployment(deployment)
            if self.former.deployment.runtime_key == deployment.runtime_key
            else None
        )

    def _slower(self, own: float, other: float) -> bool:
        """Return True if only the new model misses the objective, and chance is not a likely cause.

        A busy machine delays either model at times. Uses McNemar's test (Psychometrika 12, 1947) on the pairs in which
        only one run exceeded the objective.
        """
        objective = self._objective_ms / 1000
        pairs = list(zip(self.counts.seconds, self.standby.seconds, strict=True))
        new = sum(after > objective >= before for after, before in pairs)
        old = sum(before > objective >= after for after, before in pairs)
        return super()._slower(own, other) and new > old and (new - old) ** 2 > _CHI_SQUARED * (new + old)

    def begin(self) -> bool:
        """Return True if the caller should time both models on this request, and call `end` afterwards.

        Returns False while another comparison runs, and after it for nine times its duration. If `end` is never called,
        the next comparison is allowed after 10 seconds.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        # If the run never ends, allow another one after this time.
        self._next = now + _LEASE_SECONDS
        return True

    def end(self, seconds: float) -> None:
        self._next = time.monotonic() + seconds * (1 / _SHARE - 1)
