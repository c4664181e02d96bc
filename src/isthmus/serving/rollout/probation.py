"""The deployed model on probation: the model before it stands by, and answers what it cannot."""

import time

from isthmus.features.errors import IsthmusError
from isthmus.serving.deployment.record import Deployment, Probation
from isthmus.serving.predict.model import Model
from isthmus.serving.rollout.trial import Trial

_SHARE = 0.1
"""Of the time that is spent on timing the two models side by side, at most."""

_LEASE_SECONDS = 10.0

_CHI_SQUARED = 15.1
"""With one degree of freedom, chance alone is beyond it once in 10,000 times."""


class ProbationRun(Trial):
    """A deployed model on probation in a worker.

    Its seconds, and those of the former model, are not those of its answers, of which the former model gives none: now
    and then both are run for the same request after its answer, one after the other.

    Attributes:
        former: the model before it, or why it cannot be loaded.
        problem: why there is no way back to that; None if there is.
    """

    role = "deployed"
    standby_role = "former"
    in_force = True

    def __init__(self, deployment: Deployment, probation: Probation, former: Model | IsthmusError) -> None:
        super().__init__(deployment, probation.latency_objective_ms)
        self.probation = probation
        self.former = former
        self.problem = str(former) if isinstance(former, IsthmusError) else None
        self._next = 0.0

    def restored(self, deployment: Deployment) -> Model | None:
        """The former model, where a deployment puts that in force again."""
        if deployment.undone is None or not isinstance(self.former, Model):
            return None
        return self.former.again(deployment) if self.former.deployment.runs == deployment.runs else None

    def _slower(self, own: float, other: float) -> bool:
        """As of any trial, unless chance has it: a busy machine holds up a run of either model now and then.

        McNemar's test (Psychometrika 12, 1947) over the pairs of which one run alone was beyond the objective.
        """
        objective = self._objective_ms / 1000
        pairs = list(zip(self.counts.seconds, self.standby.seconds, strict=True))
        new = sum(after > objective >= before for after, before in pairs)
        old = sum(before > objective >= after for after, before in pairs)
        return super()._slower(own, other) and new > old and (new - old) ** 2 > _CHI_SQUARED * (new + old)

    def begin(self) -> bool:
        """Whether it is time to run both models for a request, which then is under way."""
        now = time.monotonic()
        if now < self._next:
            return False
        # Time to come about; a pair that never does is no reason to wait for ever.
        self._next = now + _LEASE_SECONDS
        return True

    def end(self, seconds: float) -> None:
        """Both models were run, and with all around it that took so many seconds."""
        self._next = time.monotonic() + seconds * (1 / _SHARE - 1)
