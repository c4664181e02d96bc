"""A deployed model on probation: the previous model stands by and answers requests that the new one cannot."""

import time

from isthmus.features.errors import IsthmusError
from isthmus.serving.deployment.record import Deployment, Probation
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.rollout.trial import Trial

_SHARE = 0.1
"""Largest fraction of time spent running both models for comparison."""

_LEASE_SECONDS = 10.0

_CHI_SQUARED = 15.1
"""Chi-squared with one degree of freedom: exceeded by chance once in 10,000 times."""


class ProbationRun(Trial):
    """A deployed model on probation in a worker.

    The previous model answers no requests, so latency is not measured on answers: now and then, both models run on the
    same request after its answer, one after the other.

    Attributes:
        former: previous model, or the error of loading it.
        problem: reason the server cannot go back to it, or None.
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

    def restored(self, deployment: Deployment) -> DeployedModel | None:
        """Return the previous model if `deployment` restores it, else None."""
        if deployment.undone is None or not isinstance(self.former, DeployedModel):
            return None
        return self.former.again(deployment) if self.former.deployment.runs == deployment.runs else None

    def _slower(self, own: float, other: float) -> bool:
        """Return True if the model is too slow, with statistical significance.

        A busy machine delays either model at times.

        Uses McNemar's test (Psychometrika 12, 1947) on the pairs in which only one run exceeded the objective.
        """
        objective = self._objective_ms / 1000
        pairs = list(zip(self.counts.seconds, self.standby.seconds, strict=True))
        new = sum(after > objective >= before for after, before in pairs)
        old = sum(before > objective >= after for after, before in pairs)
        return super()._slower(own, other) and new > old and (new - old) ** 2 > _CHI_SQUARED * (new + old)

    def begin(self) -> bool:
        """Return True if it is time to run both models on a request, and start such a run."""
        now = time.monotonic()
        if now < self._next:
            return False
        # If the run never ends, allow another one after this time.
        self._next = now + _LEASE_SECONDS
        return True

    def end(self, seconds: float) -> None:
        """End the run started by `begin`, which took `seconds` in total."""
        self._next = time.monotonic() + seconds * (1 / _SHARE - 1)
